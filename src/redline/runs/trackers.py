"""Trackers, fed from the events: TensorBoard for every run, Weights & Biases if `monitor.wandb` is set."""

from __future__ import annotations

import html
import io
import os
import socket
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from redline.errors import Problem, RecipeError, install_hint
from redline.recipe.schema import MonitorSection
from redline.runs.console import Console
from redline.runs.events import Event, clean, finite, number
from redline.runs.monitor import Sink

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
