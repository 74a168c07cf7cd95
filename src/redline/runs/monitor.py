"""The monitor of a training run, which sends each event to the log, the console and the trackers; and the trackers."""

from __future__ import annotations

import html
import io
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from redline.errors import Problem, RecipeError, install_hint
from redline.recipe.schema import MonitorSection
from redline.runs.console import Console
from redline.runs.events import Event, EventLog, clean, finite, number
from redline.units import price_problem


class View(Protocol):
    """What shows events to people: the console, or nothing on ranks other than rank 0."""

    def event(self, event: Event) -> None: ...
    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None: ...
    def close(self) -> None: ...


class SilentView:
    """A view that shows nothing."""

    def event(self, event: Event) -> None:
        return

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        return

    def close(self) -> None:
        return


class Sink(Protocol):
    """A tracker. If it raises an error, the run continues without it."""

    def event(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Monitor:
    def __init__(
        self, log: EventLog, view: View, *, price_per_hour: float | None = None, sinks: Sequence[Sink] = ()
    ) -> None:
        self.log, self.view = log, view
        self._sinks = list(sinks)
        self.price = price_of(price_per_hour)
        # Hours and dollars before a resume. They were paid for other cards or at another price, maybe, so the price
        # of today counts only from there on.
        self.paid = (0.0, 0.0)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in list(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)
        self.view.close()
        self.log.close()

    def emit(self, type: str, **fields: Any) -> None:
        event = self.log.emit(type, **fields)
        self.view.event(event)
        for sink in list(self._sinks):
            try:
                sink.event(event)
            except Exception as error:  # a full disk, a missing package, a service that is down
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        """Remove a tracker that failed, with one warning. The text of the error is left out: a service may repeat an
        API key in it."""
        self._sinks.remove(sink)
        with suppress(Exception):
            sink.close()
        reason = {OSError: getattr(error, "strerror", None), ImportError: f"no module {getattr(error, 'name', None)}"}
        detail = next((text for kind, text in reason.items() if isinstance(error, kind) and text), "")
        name = f"{type(error).__name__}{': ' if detail else ''}{detail}"
        self.warn(
            f"{type(sink).__name__} is switched off: it failed ({name}). Training continues; events.jsonl is complete"
        )

    def warn(self, message: str) -> None:
        self.emit("warning", message=message)

    def status(self, message: str) -> None:
        """Show what the run is doing now on the console; the log does not record it."""
        self.view.event({"type": "warmup", "message": message})

    def tick(self, step: int, progress: float, eta_s: float | None) -> None:
        self.view.tick(step, progress, eta_s)

    def cost(self, hours: float) -> float | None:
        """Return the dollars spent until now; None without a price."""
        paid_hours, paid_dollars = self.paid
        return None if self.price is None else paid_dollars + self.price * (hours - paid_hours)


def paid_until(events: Sequence[Event], hours: float) -> tuple[float, float]:
    """Return the last time before `hours` at which the log states a cost, and that cost."""
    known = [(number(event, "hours"), number(event, "cost_usd")) for event in events]
    return max(
        ((at, cost) for at, cost in known if at is not None and cost is not None and at <= hours), default=(0, 0)
    )


def price_notes(configured: float | None) -> list[str]:
    """Return a note if $REDLINE_PRICE is used and is no price."""
    value = os.environ.get("REDLINE_PRICE", "")
    problem = price_problem(value) if value and configured is None else ""
    return [f"REDLINE_PRICE={value!r} is {problem}, so no cost is shown; set dollars per hour"] if problem else []


def price_of(configured: float | None) -> float | None:
    """Return the dollars per hour of one card: the configured price, else $REDLINE_PRICE.

    Return None for anything that is not a price, including the empty string.
    """
    if configured is not None:
        return configured
    try:
        price = float(os.environ["REDLINE_PRICE"])
    except (KeyError, ValueError):
        return None
    return price if 0 < price < math.inf else None


# ----------------------------------------------------------------------------------------------------
# Trackers, fed from the events: TensorBoard for every run, Weights & Biases if `monitor.wandb` is set.


DEFAULT_PROJECT = "redline"


def require_packages(options: MonitorSection) -> None:
    """Refuse a recipe whose tracker is not installed. Call it before data are prepared, which may take hours."""
    if options.wandb is not False and find_spec("wandb") is None:
        fix = f"Install it: {install_hint('wandb')}. Or switch it off: monitor.wandb=false."
        raise RecipeError("recipe", [Problem("monitor.wandb", "needs the package wandb, which is not installed.", fix)])


def sinks_for(
    options: MonitorSection, run: Path, config: dict[str, Any], log: Callable[[str], None] = lambda _: None
) -> list[Sink]:
    """Return the trackers of a run. They open their files and connections at the start event."""
    sinks: list[Sink] = [TensorBoard(run / "tensorboard")]
    if options.wandb is not False:
        project = DEFAULT_PROJECT if options.wandb is True else str(options.wandb)
        sinks.append(WeightsAndBiases(project, run, config, log))
    return sinks


# ----------------------------------------------------------------------------------------------------
# What trackers get, under the names that the H100 and H200 guides use.


STEP = {
    "loss": "train/loss",
    "tokens_per_s": "train/throughput",
    "samples_per_s": "train/samples_per_s",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "mfu": "train/mfu",
    "mfu_causal": "train/mfu_causal",
    "step_ms": "train/step_ms",
    "data_wait_ms": "train/data_wait_ms",
    "memory_gib": "system/gpu_memory_allocated",  # the peak so far in GiB; on a CPU, that of the process
    "gpu_util": "system/gpu_util",
    "power_w": "system/power_w",
    "cost_usd": "cost/usd",
}
_NOT_METRICS = frozenset({"type", "time", "step", "tokens", "seconds", "hours"})


def scalars(event: Event) -> dict[str, float]:
    """Return the known numbers of a step or an evaluation by tag."""
    if event["type"] == "step":
        terms = {key: f"train/{key}" for key in event if key.startswith("loss_")}
        tags = STEP | terms
    elif event["type"] == "eval":
        tags = {key: f"eval/{key}" for key in event if key not in _NOT_METRICS}
    else:
        return {}
    values = {tag: number(event, key) for key, tag in tags.items()}
    return {tag: value for tag, value in values.items() if value is not None}


def texts(event: Event) -> dict[str, str]:
    """Return the plan, as the console prints it, and samples by tag."""
    if event["type"] == "plan":
        page = io.StringIO()
        Console(page, interactive=False).event(event)
        return {"plan": page.getvalue().rstrip("\n")}
    if event["type"] == "sample":
        return {f"sample/{clean(event.get('label')) or 'text'}": clean(event.get("prompt")) + clean(event.get("text"))}
    return {}


def step_of(event: Event) -> int:
    return int(finite(event.get("step")) or 0)


# ----------------------------------------------------------------------------------------------------
# TensorBoard: RUN/tensorboard, read by `tensorboard --logdir runs`.


_PREFIX = "events.out.tfevents."
_FILE_VERSION = "brain.Event:2"


class TensorBoard:
    """Write one event file for each attempt of the run, with TensorBoard's own record writer and no TensorFlow.

    The file of a resumed run begins with the step it continues at, so that TensorBoard drops the steps that an earlier
    file holds from there on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: BinaryIO | None = None
        self._writer: Any = None

    def event(self, event: Event) -> None:
        if event["type"] == "start":
            self._open(event)
        if self._writer is None:
            return
        values = [_scalar(tag, value) for tag, value in scalars(event).items()]
        values += [_text(tag, text) for tag, text in texts(event).items()]
        if values:
            self._write(event, summary=_summary(values))
            self._writer.flush()

    def close(self) -> None:
        self._writer = None
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _open(self, event: Event) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self.folder / self._name(number(event, "time") or 0.0), "xb")  # noqa: SIM115 — for the run
        self._writer = RecordWriter(self._file)
        self._write(event, file_version=_FILE_VERSION)
        resumed_from = number(event, "resumed_from")
        if resumed_from is not None:
            self._write({**event, "step": resumed_from + 1}, session_log=SessionLog(status=SessionLog.START))
        self._writer.flush()

    def _name(self, now: float) -> str:
        """Return a name that sorts after all others, even within one second: TensorBoard reads files in that order."""
        seconds = int(now)
        for path in self.folder.glob(f"{_PREFIX}*"):
            stamp = path.name.removeprefix(_PREFIX).split(".")[0]
            if stamp.isdigit():
                seconds = max(seconds, int(stamp) + 1)
        return f"{_PREFIX}{seconds:010d}.{socket.gethostname()}.{os.getpid()}"

    def _write(self, event: Event, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        record = Record(wall_time=number(event, "time") or 0.0, step=step_of(event), **content)
        self._writer.write(record.SerializeToString())


def _summary(values: list[Any]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=values)


def _scalar(tag: str, value: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary.Value(tag=tag, simple_value=value)


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    block = "\n".join(f"    {line}" for line in text.split("\n"))  # indented, Markdown shows it as it is
    return Summary.Value(
        tag=tag,
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(dtype=DT_STRING, string_val=[block.encode()]),
    )


# ----------------------------------------------------------------------------------------------------
# Weights & Biases: install the extra, then set `monitor.wandb=PROJECT`.


class WeightsAndBiases:
    """One W&B run per run_id: a resumed run continues it. W&B keeps the first value of a step that is logged twice.

    W&B's own variables (WANDB_MODE, WANDB_ENTITY, …) apply. Without a login the run is recorded offline, because W&B
    would otherwise ask for a key in the middle of the run. redline sends the recipe, the numbers and the texts; W&B
    adds host, command and packages by itself.
    """

    def __init__(
        self, project: str, run: Path, config: dict[str, Any], log: Callable[[str], None] = lambda _: None
    ) -> None:
        self.project, self.run, self.config, self._log = project, run, config, log
        self._texts: Counter[tuple[str, int]] = Counter()  # by tag and step
        self._wandb: Any = None
        self._run: Any = None

    def event(self, event: Event) -> None:
        if event["type"] == "start":
            self._open(event)
        if self._run is None:
            return
        values: dict[str, Any] = dict(scalars(event))
        for tag, text in texts(event).items():
            values[self._unique_name(tag, step_of(event))] = self._wandb.Html(
                f"<pre>{html.escape(text)}</pre>", inject=False
            )
        if values:
            self._run.log(values, step=step_of(event))
        if event["type"] == "stop":
            self._run.summary["stop"] = event.get("reason")

    def _unique_name(self, tag: str, step: int) -> str:
        """Number the samples of one step: W&B keeps one value per name and step."""
        self._texts[tag, step] += 1
        return tag if self._texts[tag, step] == 1 else f"{tag} {self._texts[tag, step]}"

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def _open(self, event: Event) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=self.project,
            id=str(event["run_id"]),
            resume="allow",
            name=self.run.resolve().name,
            dir=str(self.run),
            config=self.config,
            mode=self._mode(wandb),
            save_code=False,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def _mode(self, wandb: Any) -> str | None:
        """Return "offline" without a login; None lets W&B decide."""
        if os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False):
            return None
        self._log(
            f"not logged in to W&B: recording offline; upload later with `wandb sync {self.run}/wandb/offline-run-*`"
        )
        return "offline"
