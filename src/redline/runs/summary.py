"""The runs on disk: a summary of each, and what a name like `latest@best` on the command line stands for."""

from __future__ import annotations

import fcntl
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from redline.cache import open_regular
from redline.errors import UsageError, UserError, did_you_mean
from redline.runs.events import (
    Event,
    History,
    computed_flops,
    number,
    numbers,
    one_line,
    read_events,
    read_last_events,
    section,
    throttling,
)
from redline.runs.roofline import (
    BEST_KERNELS,
    CPU_SHARE_LIMIT,
    DATA_WAIT_LIMIT,
    DENSE_PEAK,
    MATMUL_RATE,
    Limit,
    LimitKind,
    Roofline,
    data_wait_share,
    largest_gap,
)
from redline.units import format_bytes, format_count, format_seconds, format_usd
from redline.vocabulary import (
    EVENTS_FILE,
    LATEST_LINK,
    PROCESS_LOCK_FILE,
    RECIPE_LOCK_FILE,
    RUNS,
    STOP_REQUEST_FILE,
    SWEEP_FILE,
    Status,
    StopReason,
    parse_stop_reason,
    status_of_stop,
)

if TYPE_CHECKING:
    from redline.runs.state import RunState

Selector = int | Literal["best"]


@dataclass(frozen=True)
class RunSummary:
    """One line of `redline runs`. Figures that the log does not hold are None."""

    name: str
    path: Path
    status: Status
    step: int | None
    loss: float | None
    val_loss: float | None
    tokens: int | None
    hours: float | None
    cost_usd: float | None
    disk_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def find_runs(root: Path) -> list[RunSummary]:
    """Return every run under `root`, including members of sweeps, newest first."""
    return [replace(summarise(path), name=_name(path, root)) for path in run_paths(root)]


def summarise(run: Path, history: History | None = None) -> RunSummary:
    """Return the newest figures of a run. Pass its history if it was read already."""
    run = Path(run)
    history = read_events(run / EVENTS_FILE) if history is None else history
    # The cost belongs to the newest hours: an older one must not stand in if the newest is unknown.
    newest = History(history.of_type("step", "stop")[-1:])
    return RunSummary(
        name=run.name or run.resolve().name,
        path=run,
        status=run_status(run, history),
        step=_integer(history.last_number("step", "step", "stop")),
        loss=history.last_number("loss", "step"),
        val_loss=history.last_number("loss", "eval"),
        tokens=_integer(history.last_number("tokens", "step", "stop")),
        hours=history.last_number("hours", "step", "stop"),
        cost_usd=newest.last_number("cost_usd", "step", "stop"),
        disk_bytes=disk_bytes(run),
    )


def run_status(run: Path, history: History | None = None) -> Status:
    """Return `running` while a process holds the lock; otherwise how the newest attempt ended."""
    if is_locked(run):
        return Status.RUNNING
    stop = (read_events(run / EVENTS_FILE) if history is None else history).stop
    return Status.CRASHED if stop is None else status_of_stop(stop)


def is_locked(run: Path) -> bool:
    """Return whether a live process trains this run.

    The check takes a shared lock for a moment, so that two commands that check at once do not take each other for it.
    """
    try:
        descriptor = open_regular(Path(run) / PROCESS_LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: assume that no process trains the run
        return False
    finally:
        os.close(descriptor)
    return False


def request_stop(run: Path) -> None:
    """Ask a run to finish its step, save and stop. This works from any machine that shares the directory."""
    if not is_locked(run):
        raise UserError("the run is not running.", where=str(run), fix="`redline runs` shows the status of every run.")
    try:
        (run / STOP_REQUEST_FILE).touch()
    except OSError as error:
        what = f"the folder cannot be written ({error.strerror})."
        raise UserError(what, where=str(run), fix="Ask the owner of the run to stop it.") from None


def resolve_run(name: str, root: Path) -> tuple[Path, Selector | None]:
    """Return the run and the checkpoint that RUN on the command line stands for.

    RUN is a path, the name of a run or `latest`, optionally followed by `@STEP` or `@best`.
    """
    run = _find(name, root)  # first with the @: the name of a directory may contain one
    if run is not None:
        return refuse_links(run), None
    bare, at, tail = name.rpartition("@")
    if not at:
        raise _unknown(name, root)
    if not bare:
        raise UsageError(f"no run is named before @{tail}.", where=name, fix=f"Write, for example, latest@{tail}.")
    run = _find(bare, root)
    if run is None:
        raise _unknown(bare, root)
    return refuse_links(run), _selector(tail, name)


def refuse_links(run: Path) -> Path:
    """Refuse a run that holds a symbolic link to outside of it.

    redline writes to a run, and the run may come from somebody else: a link could make it overwrite other files.
    """
    resolved = run.resolve()
    for entry in run.iterdir():
        if entry.is_symlink() and not entry.resolve().is_relative_to(resolved):
            fix = "Replace the link by a copy of the file, or remove it."
            raise UserError(f"{entry.name} is a link to outside of the run.", where=str(run), fix=fix)
    return run


def _find(name: str, root: Path) -> Path | None:
    if name == LATEST_LINK:
        return _latest(root)
    return next((path for path in (Path(name), root / name) if name and _is_run(path)), None)


def _latest(root: Path) -> Path | None:
    link = root / LATEST_LINK
    if _is_run(link):
        target = link.resolve()
        return root / target.name if target.parent == root.resolve() else target
    return next(iter(run_paths(root)), None)


def _selector(text: str, name: str) -> Selector:
    if text == "best":
        return "best"
    if text.isascii() and text.isdigit():
        return int(text)
    raise UsageError(f"{text!r} is not a checkpoint.", where=name, fix="Write @best, or @ and a step, such as @300.")


def _unknown(name: str, root: Path) -> UsageError:
    if not name:
        fix = "Write its path, its name or `latest`; `redline runs` lists the runs."
        return UsageError("no run is named.", where="RUN", fix=fix)
    if sweep := next((path for path in (Path(name), root / name) if is_sweep(path)), None):
        runs = [shlex.quote(str(path)) for path in run_paths(sweep)] or [f"{sweep}/RUN, once it has started one"]
        return UsageError("this is a sweep, not a run.", where=name, fix=f"Name one of its runs: {runs[0]}.")
    known = [_name(path, root) for path in run_paths(root)]
    if not known:
        fix = f"{root}/ holds no runs yet; `redline train` starts one."
    else:
        fix = did_you_mean(name, known) or f"The newest in {root}/ is {known[0]!r}; `redline runs` lists them."
    return UsageError("There is no such run.", where=name, fix=fix)


def is_sweep(path: Path) -> bool:
    try:
        return (path / SWEEP_FILE).is_file()
    except OSError:  # a name that is too long, or a folder without permission
        return False


def _is_run(path: Path) -> bool:
    try:
        return path.is_dir() and ((path / RECIPE_LOCK_FILE).is_file() or (path / EVENTS_FILE).is_file())
    except OSError:
        return False


def run_paths(root: Path) -> list[Path]:
    """Return the runs under `root`, newest first."""
    if not root.is_dir():
        return []
    paths = [path for path in root.iterdir() if not path.is_symlink()]
    paths += [member for path in paths if is_sweep(path) for member in path.iterdir()]
    runs = [path for path in paths if not path.is_symlink() and _is_run(path)]
    return sorted(runs, key=lambda path: (_start_time(path), path.name), reverse=True)


@dataclass(frozen=True)
class NewestRun:
    """The newest run, and how many runs there are."""

    name: str
    status: Status
    count: int


def newest_run(root: Path) -> NewestRun | None:
    """Return the newest run under `root`, or None if there is none. It reads only the end of the run's log."""
    paths = run_paths(root)
    if not paths:
        return None
    status = run_status(paths[0], read_last_events(paths[0] / EVENTS_FILE))
    return NewestRun(one_line(_name(paths[0], root)), status, len(paths))


def _name(run: Path, root: Path) -> str:
    """Return the name that `resolve_run` finds under `root`; for a member of a sweep, SWEEP/MEMBER."""
    return run.relative_to(root).as_posix()


def _start_time(run: Path) -> float:
    """Return when the run started. lock.json is written once, at the start; the log changes with every event."""
    source = run / RECIPE_LOCK_FILE if (run / RECIPE_LOCK_FILE).is_file() else run / EVENTS_FILE
    try:
        return source.stat().st_mtime
    except OSError:
        return 0.0


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)


def disk_bytes(run: Path) -> int:
    """Return the bytes of all files in a folder. Links are not followed, and a hard-linked file counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(run):
        for name in names:
            try:
                status = os.lstat(Path(folder) / name)
            except OSError:  # the trainer of a running run has just removed an old checkpoint
                continue
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


# Limits of Linux: bytes of a name in a folder, and of a path in a system call.
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
# Room for files inside a run directory, such as checkpoints/step-00000000/model-00000.safetensors.
_RESERVED_PATH_BYTES = 128


def run_without_checkpoint(name: str) -> Path:
    """Return the run that RUN stands for, in commands that take no checkpoint of it."""
    path, selector = resolve_run(name, RUNS)
    if selector is not None:
        raise UsageError("this command takes a run, not a checkpoint.", where=name, fix=f"Leave out @{selector}.")
    return path


def refuse_too_long(path: Path) -> None:
    """Refuse a run directory whose path the file system cannot hold, before any other check accesses it."""
    name_bytes = max((len(os.fsencode(part)) for part in path.parts), default=0)
    path_bytes = len(os.fsencode(path.absolute())) + _RESERVED_PATH_BYTES
    if name_bytes <= _MAX_NAME_BYTES and path_bytes <= _MAX_PATH_BYTES:
        return
    shown = str(path)[:60] + "…"
    if name_bytes > _MAX_NAME_BYTES:
        what = f"the path has a name of {name_bytes:,} bytes; the limit is {_MAX_NAME_BYTES:,}."
    else:
        what = f"the path would have {path_bytes:,} bytes; the limit is {_MAX_PATH_BYTES:,}."
    raise UsageError(what, where=shown, fix="Choose a shorter --run.")


def refuse_unreadable(path: Path) -> None:
    """Refuse a path that is not UTF-8: safetensors cannot open it, so nobody could load the checkpoints again."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "replace")
        fix = "Choose another --run, or rename the folder."
        raise UsageError("the path is not UTF-8, so checkpoints could not be read.", where=shown, fix=fix) from None


# ----------------------------------------------------------------------------------------------------
# Every sentence about a run, made from facts.


def dollars(cost: float) -> str:
    """Return a cost as text; one that rounds to $0.00 is "less than a cent"."""
    return format_usd(cost) if cost >= 0.005 or cost <= 0 else "less than a cent"


def resume_command(run: str) -> str:
    return f"redline train --resume {shlex.quote(one_line(run))}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


# ----------------------------------------------------------------------------------------------------
# How a run ended.


NO_STOP_EVENT = "the log ends without a stop event"


def ending_reason(status: Status, stop: Event | None) -> str:
    """Return why the run has this status; empty for a run that is running or whose stop event has no reason."""
    if status is Status.RUNNING:
        return ""
    if stop is None:
        return NO_STOP_EVENT
    known = parse_stop_reason(stop.get("reason"))
    # Logs of older versions and of other programs hold a text instead of a StopReason; it is shown as it is.
    reason = known.description if known is not None else one_line(stop.get("reason"))
    unsaved = stop.get("saved") is False and (known is None or known.status is not Status.FAILED)
    if unsaved:  # then this is why the run failed
        return f"the last state was not saved ({reason})" if reason else "the last state was not saved"
    return reason


def ending(status: Status, stop: Event | None) -> str:
    """Return for example "finished: reached train.hours"."""
    reason = ending_reason(status, stop)
    return f"{status}: {reason}" if reason and reason != status else str(status)


def totals(fields: Mapping[str, Any]) -> str:
    """Return what a run took, for example "628 steps · 1.29M tokens · 1m59s · $2.00". Unknown figures are left out."""
    step, tokens, hours, cost = (number(fields, key) for key in ("step", "tokens", "hours", "cost_usd"))
    parts = [
        "" if step is None else f"{step:,.0f} steps",
        "" if tokens is None else f"{format_count(tokens)} tokens",
        "" if hours is None else format_seconds(3600 * hours),
        "" if cost is None else dollars(cost),
    ]
    return " · ".join(filter(None, parts))


# ----------------------------------------------------------------------------------------------------
# Single events, for the timeline and the notes of the live page.


def describe_event(event: Event) -> str:
    """Return one line about an event; empty if there is nothing to show."""
    kind = event["type"]
    if kind == "start":
        step = number(event, "resumed_from")
        if step is None:
            return "started"
        return (
            f"resumed from the checkpoint of step {step:,.0f}" if step else "restarted at step 0 without a checkpoint"
        )
    if kind == "step":
        skipped = number(event, "skipped")
        noun = "update" if skipped == 1 else "updates"
        return f"{skipped:.0f} {noun} skipped: a loss or gradient was not finite" if skipped else ""
    if kind == "eval":
        loss = number(event, "loss")
        return "" if loss is None else f"validation loss {loss:.4f}"
    if kind == "checkpoint":
        size, seconds = number(event, "bytes"), number(event, "seconds")
        parts = ["" if size is None else format_bytes(size), "" if seconds is None else f"in {format_seconds(seconds)}"]
        return " ".join(filter(None, parts))
    if kind == "sample":
        return one_line(event.get("label"))
    if kind == "stop":
        known = parse_stop_reason(event.get("reason"))
        return known.description if known is not None else one_line(event.get("reason"))
    return one_line(event.get("message"))


# ----------------------------------------------------------------------------------------------------
# What limits a step.


# How ceilings are called in a sentence.
CEILING_NAMES = {
    DENSE_PEAK: "the dense peak",
    BEST_KERNELS: "the best known kernels",
    MATMUL_RATE: "this CPU's matmul rate",
}
_CEILING_DETAILS = {
    **CEILING_NAMES,
    BEST_KERNELS: "the rates of the best known kernels, with memory-bound work overlapped",
}
_SPEED_AT = {
    DENSE_PEAK: "the speed at the dense peak",
    BEST_KERNELS: "the speed with the best known kernels",
    MATMUL_RATE: "the speed at this CPU's matmul rate",
}
_LIMIT_NAMES = {
    LimitKind.DATA_LOADING: "data loading",
    LimitKind.CPU_TIME: "a lack of CPU time",
    LimitKind.HEAT: "heat or the power supply",
    LimitKind.POWER: "the GPU's power limit",
}


def limit_sentences(roofline: Roofline) -> list[str]:
    """Return how far a step is from its ceilings and what limits it; empty if no step was measured."""
    if roofline.step_ms is None or roofline.limit is None:
        return []
    return [*_distance(roofline, roofline.step_ms), _limit_sentence(roofline.limit, roofline.step_ms, roofline)]


def _distance(roofline: Roofline, step_ms: float) -> list[str]:
    name, bars = roofline.machine, roofline.bars
    if not roofline.has_ceilings:
        return ["The log holds no plan, so there is no ceiling to compare with."]
    if not bars:
        return [f"The peak of {name} is unknown and its rates were not measured: there is no ceiling to compare with."]
    parts = [
        f"{step_ms / bar.total:.2f} times the {_milliseconds(bar.total)} at {_CEILING_DETAILS[bar.name]}"
        for bar in bars
        if bar.total
    ]
    sentences = [f"A step takes {_milliseconds(step_ms)}: {' and '.join(parts)}."] if parts else []
    if bars[0].name == MATMUL_RATE:
        sentences.append(f"The peak of {name} is unknown; its matmul rate was measured.")
    elif bars[0].name != DENSE_PEAK:
        sentences.append(f"The peak of {name} is unknown; the rates of its kernels were measured.")
    return sentences


def _limit_sentence(limit: Limit, step_ms: float, roofline: Roofline) -> str:
    lines = f"{limit.slowed_lines} of {limit.reported_lines} log lines"
    if limit.kind is LimitKind.DATA_LOADING:
        return f"Data loading limits the speed: {limit.data_wait:.0%} of a step is waiting for data."
    if limit.kind is LimitKind.CPU_TIME:
        return (
            f"CPU time limits the speed: {_cpu_share(limit)}. Other processes use the CPU, a quota limits it, or the "
            "model is too small for so many threads (OMP_NUM_THREADS)."
        )
    if limit.kind is LimitKind.HEAT:
        return f"Heat or the power supply limits the speed: it slowed the GPU in {lines}{_gpu_reading(limit)}."
    if limit.kind is LimitKind.POWER:
        return (
            f"The power limit of the GPU limits the speed: it was reached in {lines}{_gpu_reading(limit)}. "
            "Faster kernels shorten a step only if they also use less energy."
        )
    not_slowed = f"Neither power nor heat slowed the GPU in most log lines{_gpu_reading(limit)}. "
    return (not_slowed if limit.reported_lines else "") + _kernel_sentence(step_ms, roofline)


def _kernel_sentence(step_ms: float, roofline: Roofline) -> str:
    best = next((bar for bar in roofline.bars if bar.name == BEST_KERNELS), None)
    if (best is None or not best.ms) and roofline.limit is not None and roofline.limit.cpu_share is not None:
        return f"The CPU's cores limit the speed: {_cpu_share(roofline.limit)}."
    if best is None or not best.ms:
        return "Neither data loading, heat nor power limits the speed; the best rates of its kernels are unknown."
    part, ms = max(best.ms.items(), key=lambda item: item[1])
    beyond = max(0.0, step_ms - best.total)
    if beyond < 0.1 * step_ms:
        return f"The kernels limit the speed, above all {part} ({_milliseconds(ms)} of the step at best)."
    hidden = sum(best.may_hide.values())
    explained = f", of which memory-bound work explains at least {_milliseconds(hidden)}" if hidden else ""
    return (
        f"The kernels limit the speed: {part} needs {_milliseconds(ms)} at best, and {_milliseconds(beyond)} of the "
        f"step is beyond the time of the best known kernels{explained}."
    )


def _cpu_share(limit: Limit) -> str:
    return f"the run's threads got {limit.cpu_share:.0%} of the CPU time that they could use"


def _gpu_reading(limit: Limit) -> str:
    watts = f"{limit.power_w:.0f} W" if limit.power_w else ""
    clock = f"{limit.sm_clock_mhz:,.0f} MHz" if limit.sm_clock_mhz else ""
    return f" (median {' at '.join(filter(None, [watts, clock]))})" if watts or clock else ""


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


# ----------------------------------------------------------------------------------------------------
# The summary at the top of the report: one paragraph.


_WORSE_THAN_BEST = 1.002  # times the best loss; below it the last loss counts as the best
_OVERALL_DIFFERS = 0.1  # between the median speed and that of the whole run
_SMALL_GAP = 0.05  # of a step
_NOW_DIFFERS = 0.1  # between the speed of the run and that of its last log lines


def summary_paragraph(data: Mapping[str, Any], history: History, roofline: Roofline) -> str:
    """Return what the run reached, at what speed and price, and what was left to gain. `data` is the report's."""
    status, headline, plan = Status(data["status"]), data["headline"], history.plan
    reached = _reached(headline)
    end = _early_end(status, history.stop, headline["step"], plan, measured=reached is not None)
    if reached is None:
        return _sentence(end or "ended before anything was measured")
    sentences = [
        end,
        f"it had {reached}" if end else reached,
        _speed(headline, plan, roofline),
        _data_wait(history.of_type("step")),
        _outside_limit(roofline),
        gap_sentence(roofline),
        _incident_counts(data),
    ]
    return " ".join(_sentence(text) for text in sentences if text)


def _early_end(status: Status, stop: Event | None, step: int | None, plan: Event, *, measured: bool) -> str:
    """Return how a run that did not finish ended; empty for a finished run."""
    if status is Status.FINISHED:
        return ""
    steps = number(section(plan, "horizon"), "steps")
    at = "" if step is None else f" at step {step:,}" + (f" of {steps:,.0f}" if steps and steps > step else "")
    reason = ending_reason(status, stop)
    name = "still running" if status is Status.RUNNING else str(status)
    before = "" if measured else " before anything was measured"
    return f"{name}{at}{before}" + (f": {reason}" if reason and reason != status else "")


def _reached(headline: Mapping[str, Any]) -> str | None:
    """Return the loss and what it took; None if no loss was measured."""
    last, best, train = headline["val_loss"], headline["best_val_loss"], headline["train_loss"]
    if last is not None:
        loss = f"reached validation loss {last:.4g}"
    elif train is not None:
        loss = f"reached training loss {train:.4g} (no validation data)"
    else:
        return None
    hours, tokens, cost = headline["hours"], headline["tokens"], headline["cost_usd"]
    took = [
        f"in {format_seconds(3600 * hours)}" if hours else "",
        f"on {format_count(tokens)} tokens" if tokens else "",
        f"for {dollars(cost)}" if cost is not None else "",
        f"at {100 * headline['mfu_median']:.1f} % MFU" if headline["mfu_median"] is not None else "",
    ]
    worse = last is not None and best is not None and last > _WORSE_THAN_BEST * best
    return " ".join(filter(None, [loss, *took])) + (f"; its best was {best:.4g}" if worse else "")


def _speed(headline: Mapping[str, Any], plan: Event, roofline: Roofline) -> str:
    """Return the speed as a share of the plan's and of the lowest ceiling."""
    rate, planned = headline["tokens_per_s_median"], number(section(plan, "throughput"), "tokens_per_s")
    if rate is None:
        return ""
    parts = [f"{100 * rate / planned:.0f} % of the planned speed{_overall(headline, rate, planned)}"] if planned else []
    ceiling = roofline.bars[-1] if roofline.bars else None
    if ceiling is not None and ceiling.total and roofline.step_ms:
        share = 100 * ceiling.total / roofline.step_ms
        parts.append(f"{share:.0f} % of {_SPEED_AT[ceiling.name]}")
    return f"its speed of {format_count(rate)} tokens/s is {' and '.join(parts)}" if parts else ""


def _overall(headline: Mapping[str, Any], rate: float, planned: float) -> str:
    """Return the share over the whole run where it differs from that of the median step."""
    hours, tokens = headline["hours"], headline["tokens"]
    overall = tokens / (3600 * hours) if hours and tokens else rate
    return (
        f" ({100 * overall / planned:.0f} % over the whole run)" if abs(overall / rate - 1) > _OVERALL_DIFFERS else ""
    )


def _data_wait(steps: Sequence[Event]) -> str:
    share = data_wait_share(steps)
    return "" if share is None else f"waiting for data took {100 * share:.1f} % of the time"


def _outside_limit(roofline: Roofline) -> str:
    """Return what limits the speed if it is not the kernels; the roofline's sentences have the details."""
    name = _LIMIT_NAMES.get(roofline.limit.kind) if roofline.limit else None
    return f"the speed is limited by {name}" if name else ""


def gap_sentence(roofline: Roofline) -> str:
    """Return where the most time above the dense peak is: in slow kernels, or outside the kernels."""
    gap = largest_gap(roofline)
    if gap is None:
        return ""
    part, share = gap
    if share < _SMALL_GAP:
        return "each part of a step is near the dense peak"
    return f"the largest gap to the dense peak is in {part} ({100 * share:.0f} % of a step)"


def _incident_counts(data: Mapping[str, Any]) -> str:
    kinds = [incident["kind"] for incident in data["incidents"]]
    parts = [
        _count(kinds.count("recovery"), "recovery", "recoveries"),
        _count(kinds.count("resumed"), "resume", "resumes"),
        _count(data["skipped_steps"], "skipped update", "skipped updates"),
        _count(kinds.count("warning"), "warning", "warnings"),
    ]
    counted = ", ".join(filter(None, parts))
    return f"incidents: {counted}" if counted else ""


def _count(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}" if count else ""


# ----------------------------------------------------------------------------------------------------
# The live page's answers: how far the run is, how fast, whether it is well, and what it costs.


Mood = Literal["good", "careful", "bad", "over"]

_QUIET_S, _LONG_WARMUP_S = 180.0, 900.0  # without an event, before a run is said to hang
_QUIET_LINES = 10  # log lines that are overdue


@dataclass(frozen=True)
class Answers:
    """Sentences about a run at this moment. `mood` gives the colour of `health`."""

    far: str
    fast: str
    health: str
    cost: str
    mood: Mood

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def answers(state: RunState, status: Status, now: float, lock: Mapping[str, Any], path: str = "RUN") -> Answers:
    mood, health = _health(state, status, now, path)
    return Answers(_progress(state, status, now), _current_speed(state, lock), health, _cost(state, status, now), mood)


def _progress(state: RunState, status: Status, now: float) -> str:
    if status is not Status.RUNNING and state.stop is not None:
        end = ending(status, state.stop)
        return " · ".join(filter(None, [f"{end[0].upper()}{end[1:]}", totals({**state.stop, "cost_usd": None})]))
    step, progress = number(state.step, "step"), number(state.step, "progress")
    if step is None:
        return "Not started: " + (state.activity or "nothing is logged yet")
    of = f" of about {state.end_step:,.0f}" if state.end_step and state.end_step >= step else ""
    done = f"{100 * progress:.0f} % done: " if progress is not None else ""
    left = remaining_s(state, status, now)
    return f"{done}step {step:,.0f}{of}" + (f", {format_seconds(left)} left" if left is not None else "")


def remaining_s(state: RunState, status: Status, now: float) -> float | None:
    """Return the remaining seconds: the last step's estimate less the time since."""
    eta, logged_at = number(state.step, "eta_s"), number(state.step, "time")
    if eta is None or status is not Status.RUNNING:
        return None
    return max(0.0, eta - max(0.0, now - logged_at)) if logged_at is not None else eta


def _current_speed(state: RunState, lock: Mapping[str, Any]) -> str:
    """Return the speed of the run, as in its report, and that of the last log lines if it differs."""
    rate = state.speed.median("tokens_per_s")
    if rate is None:
        return "Unknown before the first logged step"
    shares = [f"{100 * rate / level:.0f} % of {name}" for name, level in speed_levels(state, lock).items()]
    mfu = state.speed.median("mfu")
    parts = [f"{100 * mfu:.1f} % MFU" if mfu is not None else "", *shares]
    sequences = state.speed.median("samples_per_s")
    samples = "" if sequences is None else f" ({format_count(sequences)} samples/s)"
    speed = f"{format_count(rate)} tokens/s{samples}" + (": " if any(parts) else "") + ", ".join(filter(None, parts))
    now = recent(state, "tokens_per_s") if state.stop is None else None
    differs = now is not None and abs(now / rate - 1) > _NOW_DIFFERS
    return f"{speed}; {format_count(now)} in the last log lines" if differs and now is not None else speed


def speed_levels(state: RunState, lock: Mapping[str, Any]) -> dict[str, float]:
    """Return the known tokens/s to compare with, by name: the plan and the ceilings."""
    plan, ceiling = section(state.plan, "throughput"), section(state.plan, "ceiling")
    flops, matmul = computed_flops(state.plan), number(section(lock, "machine"), "cpu_flops")
    peak = number(ceiling, "tokens_per_s")
    levels = {
        "the plan": number(plan, "tokens_per_s"),
        CEILING_NAMES[BEST_KERNELS]: number(ceiling, "best_kernels_tokens_per_s"),
        CEILING_NAMES[DENSE_PEAK]: peak,
        CEILING_NAMES[MATMUL_RATE]: matmul / flops if peak is None and matmul and flops else None,
    }
    return {name: level for name, level in levels.items() if level and level > 0}


def recent(state: RunState, key: str) -> float | None:
    """Return the median of the last log lines. The first line of a run, which compiles, counts only if it is alone."""
    values = numbers(list(state.recent)[-20:], key)
    steady = values[1:] if len(values) > 1 and len(state.recent) < 20 else values
    return statistics.median(steady) if steady else number(state.step, key)


def _health(state: RunState, status: Status, now: float, path: str) -> tuple[Mood, str]:
    age = None if state.last_time is None else max(0.0, now - state.last_time)
    if status is Status.RUNNING:
        return _running_health(state, age)
    resume = f"Resume with: {resume_command(path)}"
    if state.stop is None:
        last = "" if age is None else f"; its last event was {format_seconds(age)} ago"
        return "bad", f"Crashed: {NO_STOP_EVENT}, and no process holds the run{last}. {resume}"
    skipped = f" {state.skipped} updates were skipped." if state.skipped else ""
    if status is Status.FINISHED:
        return "over", f"Finished as the recipe asks.{skipped}"
    if parse_stop_reason(state.stop.get("reason")) is StopReason.NONFINITE:
        return "bad", f"Failed.{skipped} Resumed, it would fail again: start a new run with a lower train.lr."
    mood: Mood = "bad" if status is Status.FAILED else "careful"
    return mood, f"{status.capitalize()}.{skipped} {resume}"


def _running_health(state: RunState, age: float | None) -> tuple[Mood, str]:
    if age is None:
        return "good", "Starting: a process holds the run, and nothing is logged yet"
    quiet = max(_QUIET_S, _QUIET_LINES * _seconds_per_line(state)) if state.recent else _LONG_WARMUP_S
    if age > quiet:
        return "careful", f"No event for {format_seconds(age)}: its process is alive but may hang"
    last = f"last event {format_seconds(age)} ago"
    if not state.recent:
        return "good", f"Warming up ({state.activity or 'compiling'}): {last}"
    if "loss" in state.step and number(state.step, "loss") is None:
        return "careful", f"The last loss is not finite: {last}"
    problems = _current_problems(state)
    return ("careful", f"{'; '.join(problems)}: {last}") if problems else ("good", f"Healthy: {last}")


def _current_problems(state: RunState) -> list[str]:
    """Return what is wrong in the last log lines."""
    lines = list(state.recent)
    skipped = int(sum(number(event, "skipped") or 0 for event in lines))
    wait, step_ms = recent(state, "data_wait_ms"), recent(state, "step_ms")
    share = wait / step_ms if wait is not None and step_ms else 0.0
    measured = recent(state, "cpu_share")
    cpu = 1.0 if measured is None else measured
    hot = sum(found.heat for event in lines if (found := throttling(event)) is not None)
    return [
        *([f"{_count(skipped, 'update', 'updates')} skipped recently"] if skipped else []),
        *([f"{100 * share:.0f} % of a step is waiting for data"] if share > DATA_WAIT_LIMIT else []),
        *([f"the run gets only {100 * cpu:.0f} % of its CPU time"] if cpu < CPU_SHARE_LIMIT else []),
        *(["heat or the power supply slows the GPU"] if 2 * hot > len(lines) else []),
    ]


def _seconds_per_line(state: RunState) -> float:
    """Return the usual time between log lines."""
    gaps = [later - earlier for earlier, later in pairwise(numbers(state.recent, "time")) if later > earlier]
    return statistics.median(gaps) if gaps else 0.0


def _cost(state: RunState, status: Status, now: float) -> str:
    source = state.stop if state.stop is not None and number(state.stop, "hours") is not None else state.step
    hours, cost = number(source, "hours"), number(source, "cost_usd")
    if hours is None:
        return "Nothing yet"
    time = f"{format_seconds(3600 * hours)} of training"
    if cost is None:
        return f"{time}; no price is known (set monitor.price_per_hour or REDLINE_PRICE)"
    total = expected_usd(state, status, now)
    in_total = f", about {dollars(total)} in total" if total is not None else ""
    so_far = " so far" if status is Status.RUNNING else ""
    spent = dollars(cost)
    return f"{spent[0].upper()}{spent[1:]}{so_far}{in_total}: {time}"


def expected_usd(state: RunState, status: Status, now: float) -> float | None:
    """Return what the whole run is expected to cost at the price so far."""
    hours, cost = number(state.step, "hours"), number(state.step, "cost_usd")
    left = remaining_s(state, status, now)
    if left is None or not hours or cost is None:
        return None
    return cost * (hours + left / 3600) / hours
