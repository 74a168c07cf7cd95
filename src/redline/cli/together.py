"""One run by several processes: who speaks, who prepares first, and what all of them take from the first."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, UserError, without_secrets
from redline.monitor.events import Event, number, read_events
from redline.monitor.monitor import Monitor
from redline.monitor.runs import EVENTS
from redline.recipe.load import validate
from redline.recipe.parallel import for_world
from redline.recipe.resolve import DataFacts, Resolved, resolve
from redline.recipe.schema import Recipe
from redline.train import trouble
from redline.train.pulse import PULSE
from redline.train.rundir import RunDirectory
from redline.train.supervise import REFUSED

if TYPE_CHECKING:
    from redline.hardware.machine import Machine
    from redline.train.ranks import Ranks

LEFT = (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED)
CONSOLE = "REDLINE_CONSOLE"  # set where standard output is the screen, and standard error is the ranks' log


def join_ranks(recipe: Recipe) -> Ranks:
    """What the environment says; the screen is the first rank's."""
    from redline.hardware.detect import detect
    from redline.train.ranks import ALONE, join, started_together

    if not started_together():
        PULSE.start(0)
        return ALONE
    if os.environ.get("RANK") == "0" and CONSOLE in os.environ:
        os.dup2(1, 2)
    PULSE.start(int(os.environ["RANK"]) if os.environ["RANK"].isdigit() else 0)
    return join(detect(recipe.train.device).device, recipe.parallel.timeout)


class Quiet:
    """Of a rank that is not the first: what it warns of goes to the log of the ranks."""

    def event(self, event: Event) -> None:
        if event["type"] == "warning":
            sys.stderr.write(without_secrets(f"rank {os.environ.get('RANK')}: {event['message']}\n"))

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        return

    def close(self) -> None:
        return


def resolved_alike(recipe: Recipe, machine: Machine, facts: DataFacts, ranks: Ranks, *, resumed: bool) -> Resolved:
    """The first rank decides, and the others have its recipe: their cards may be a little smaller, or busy."""
    several = {"gpus": ranks.size // ranks.nodes, "nodes": ranks.nodes}
    first = resolve(for_world(recipe, ranks.size) if resumed else recipe, machine, facts, **several)
    tree = ranks.from_first(first.recipe.model_dump(mode="json"))
    return first if ranks.first else resolve(validate(tree, where="the first rank"), machine, facts, **several)


def after_trouble(resolved: Resolved, facts: DataFacts, run: Path, ranks: Ranks) -> tuple[Resolved, str | None]:
    """With less at once, where that did not fit; and what was changed."""
    before = (resolved.batch, resolved.recipe.train.grad_checkpointing)
    sharded = resolved.recipe.parallel.mode == "fsdp"
    found = trouble.smaller(*before, trouble.noted(run), sharded=sharded) if ranks.first else None
    taken = ranks.from_first(found and [found[0].micro, found[0].accumulation, found[1]])
    micro, accumulation, checkpointing = taken
    after = (replace(resolved.batch, micro=micro, accumulation=accumulation), checkpointing)
    if (text := trouble.change(before, after)) is None:
        return resolved, None
    update: dict[str, Any] = {"micro_batch": micro, "accumulation": accumulation, "grad_checkpointing": checkpointing}
    recipe = resolved.recipe.model_copy(update={"train": resolved.recipe.train.model_copy(update=update)})
    if checkpointing != before[1]:  # which blocks there are depends on it
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"kernels": "auto"})})
    several = {"gpus": ranks.size // ranks.nodes, "nodes": ranks.nodes}
    return resolve(recipe, resolved.machine, facts, **several), text


@contextmanager
def held(path: Path, ranks: Ranks) -> Iterator[RunDirectory]:
    """The run's directory; the first rank has its lock."""
    directory = RunDirectory(path)
    if not ranks.first:
        yield directory
        return
    with directory:
        yield directory


@dataclass(frozen=True)
class Beginning:
    checkpoint: Path | None
    skipped: list[int]  # steps whose data are left out
    changed: str | None  # in words
    seconds: float = 0.0  # that the run had taken when it ended, where that was after this checkpoint's last step


def where_to_begin(run: RunDirectory, ranks: Ranks, monitor: Monitor, *, resumed: bool) -> Beginning:
    """The newest checkpoint that is valid, and of before the batches that were not finite; newer ones are left behind,
    for the run takes another way from here."""
    found: dict[str, Any] = {}
    if ranks.first:
        from redline.train.checkpoint import clean

        clean(run.checkpoints)
        found = _look_back(run, monitor) if resumed else {"name": None, "skipped": [], "changed": None}
    found = ranks.from_first(found)
    checkpoint = None if found["name"] is None else run.checkpoints / found["name"]
    return Beginning(checkpoint, found["skipped"], found["changed"], found.get("seconds", 0.0))


def _look_back(run: RunDirectory, monitor: Monitor) -> dict[str, Any]:
    from redline.train.checkpoint import committed_steps, discard, newest_valid, read_state
    from redline.train.feed import unskipped

    storms = trouble.storms(trouble.noted(run.path))
    newest = newest_valid(run.checkpoints, monitor.warn)
    if newest is None:
        saved = any(event["type"] == "checkpoint" for event in read_events(run.path / EVENTS))
        if committed_steps(run.checkpoints) or saved:
            none = "is valid" if committed_steps(run.checkpoints) else "is left"
            monitor.warn(f"no checkpoint of this run {none}: it begins again at step 0")
    checkpoint, left = newest, []
    while checkpoint is not None and not trouble.belongs(read_state(checkpoint), storms):
        left.append(checkpoint)
        checkpoint = newest_valid(run.checkpoints, monitor.warn, below=read_state(checkpoint)["step"])
    if checkpoint is None and newest is not None:  # all that is kept is of after them: they are past
        checkpoint, left = newest, []
    for path in left:
        discard(path)
    state = None if checkpoint is None else read_state(checkpoint)
    known = [] if state is None else state["decisions"].get("skipped", [])
    skipped = trouble.skipped(state, storms, unskipped(0 if state is None else state["step"], known))
    new = [step for step in skipped if step not in known]
    changed = f"the data of steps {new[0]} to {new[-1]} were not finite, and are left out" if new else None
    seconds = 0.0 if state is None else _ended_after(run.path, state["step"])
    return {"name": checkpoint and checkpoint.name, "skipped": skipped, "changed": changed, "seconds": seconds}


def _ended_after(run: Path, step: int) -> float:
    """Seconds. Texts are written after the last save, and were paid for, too: a clock that knows the save alone goes
    back."""
    stops = [event for event in read_events(run / EVENTS) if event["type"] == "stop" and event.get("step") == step]
    return 3600 * (number(stops[-1], "hours") or 0.0) if stops else 0.0


def _lost_another(error: Exception) -> str:
    """What a gradient says that was on its way to a rank which is gone; empty for any other error."""
    text = str(error)
    if "RANK" not in os.environ or not any(word in text for word in ("gloo", "NCCL", "ncclRemoteError", "TCPStore")):
        return ""
    return f"rank {os.environ['RANK']} lost another one ({text.strip().splitlines()[0][:200]})."


def ended(work: Callable[[], int]) -> int:
    """Its exit code. Last words for a watch, if there is one; and one of several leaves at once when it fails,
    whatever threads still wait for the others."""
    if "RANK" not in os.environ and "REDLINE_PULSE" not in os.environ:
        return work()
    why = ""
    try:
        code = work()
        why = "" if code in LEFT else REFUSED  # it ended by itself
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else EXIT_FAILED
    except UserError as error:
        code, why = error.exit_code, getattr(error, "why", REFUSED)
        sys.stderr.write(without_secrets(f"redline: {error.message()}\n"))
    except Exception as error:
        lost = _lost_another(error)
        code, why = EXIT_FAILED, "lost" if lost else type(error).__name__
        sys.stderr.write(without_secrets(f"redline: {lost}\n" if lost else traceback.format_exc()))
    PULSE.end(code, why)
    if code not in LEFT and "RANK" in os.environ:
        sys.stderr.flush()
        os._exit(code)
    return code
