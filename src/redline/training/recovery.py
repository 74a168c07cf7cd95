"""Failures that change how a run continues: out of memory, and batches whose loss or gradient is not finite.

A rank that fails writes a record into the run directory before it exits. The next process that resumes the run, started
by a supervisor, a scheduler or a person, reads the records and continues with less memory or without those batches. The
two processes need no other connection.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from redline.cache import make_folder, read_text
from redline.errors import UserError
from redline.planning.batch import BatchPlan
from redline.training.control import open_no_follow

FOLDER = "trouble"
MEMORY, NONFINITE = "memory", "nonfinite"
MAX_NONFINITE_RECOVERIES = 3  # after so many, leaving out batches does not help


class OutOfMemoryError(UserError):
    """A step ran out of memory. The record of it makes the resumed run use less."""

    why = MEMORY


class NonFiniteError(UserError):
    """Too many batches in a row were not finite. The resumed run goes back to before them and leaves them out."""

    why = NONFINITE


@dataclass(frozen=True)
class RunFacts:
    """The state of a run when it failed."""

    rank: int
    step: int
    micro: int
    world: int
    checkpointing: str
    context: int = field(default=1, kw_only=True)  # ranks that shared each sequence


@dataclass(frozen=True)
class Failure(RunFacts):
    kind: str = MEMORY
    batches: tuple[int, ...] = ()  # batches that were not finite, as steps of the data
    first: int = 0  # the first training step that was not finite


def record_failure(run: Path, failure: Failure) -> None:
    """Append a failure to the file of its rank, and sync it to disk."""
    folder = run / FOLDER
    make_folder(folder)
    with open(folder / f"rank-{failure.rank}.jsonl", "a", encoding="utf-8", opener=open_no_follow) as file:
        file.write(json.dumps(asdict(failure)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def record_out_of_memory(run: Path, facts: RunFacts) -> UserError:
    """Record the failure and return the error to raise."""
    record_failure(run, Failure(**vars(facts)))
    what = f"out of memory at step {facts.step}, with a micro-batch of {facts.micro} (rank {facts.rank})."
    how = "with a smaller micro-batch" if facts.micro > 1 else "with grad_checkpointing=full"
    start = "from the last checkpoint" if facts.step else "from the beginning"
    return OutOfMemoryError(what, fix=f"`redline train --resume {shlex.quote(str(run))}` continues {start} {how}.")


def record_nonfinite(run: Path, facts: RunFacts, first: int, batches: Sequence[int]) -> bool:
    """Record the failure. Return False, without a record, if the run has been recovered too often already."""
    if len(nonfinite_failures(read_failures(run))) >= MAX_NONFINITE_RECOVERIES:
        return False
    record_failure(run, Failure(**vars(facts), kind=NONFINITE, batches=tuple(batches), first=first))
    return True


def read_failures(run: Path) -> list[Failure]:
    """Read the failures of all ranks. A line that was only partly written is ignored."""
    failures = []
    for path in sorted((run / FOLDER).glob("rank-*.jsonl")):
        for line in read_text(path).splitlines():
            try:
                facts = json.loads(line)
                rank, step, micro, world = (int(facts[name]) for name in ("rank", "step", "micro", "world"))
                batches = tuple(int(batch) for batch in facts["batches"])
                checkpointing, kind = str(facts["checkpointing"]), str(facts["kind"])
                more = {"first": int(facts["first"]), "context": int(facts.get("context", 1))}
                failures.append(Failure(rank, step, micro, world, checkpointing, kind, batches, **more))
            except (ValueError, TypeError, KeyError):
                continue
    return failures


def reduce_memory(
    plan: BatchPlan, checkpointing: str, failures: Iterable[Failure], *, sharded: bool
) -> tuple[BatchPlan, str]:
    """Return a micro-batch and checkpointing that have not run out of memory yet. The global batch stays the same.

    With a sharded model, fewer ranks need more memory each, so a failure on fewer ranks says nothing about more ranks.
    The same holds for the ranks that share each sequence.
    """
    failed = [
        f for f in failures if f.kind == MEMORY and (f.world >= plan.world or not sharded) and f.context >= plan.context
    ]
    while any(f.checkpointing == checkpointing and f.micro <= plan.micro for f in failed):
        smaller = plan.halved()
        if smaller is not None:
            plan = smaller
        elif checkpointing != "full":
            checkpointing = "full"
        else:
            what = f"a micro-batch of {plan.micro} does not fit, even with grad_checkpointing=full."
            fix = "Use a shorter data.seq_len, a smaller model, parallel.mode=fsdp on several GPUs, or a larger card."
            raise UserError(what, where="train.micro_batch", fix=fix)
    return plan, checkpointing


def describe_change(before: tuple[BatchPlan, str], after: tuple[BatchPlan, str]) -> str | None:
    """Return a message about what `reduce_memory` changed, or None if it changed nothing."""
    (old, old_checkpointing), (new, checkpointing) = before, after
    if before == after:
        return None
    parts = [f"micro-batch {old.micro} → {new.micro}"] if old.micro != new.micro else []
    parts += [f"grad_checkpointing {old_checkpointing} → {checkpointing}"] if old_checkpointing != checkpointing else []
    return f"out of memory: {', '.join(parts)}, the global batch stays {new.global_batch}"


def nonfinite_failures(failures: Iterable[Failure]) -> list[Failure]:
    return [f for f in failures if f.kind == NONFINITE and f.rank == 0]


def predates_failures(state: dict[str, Any], failures: Sequence[Failure]) -> bool:
    """Return whether a checkpoint is from before these failures, or from a run that left their batches out."""
    skipped = {*state["decisions"].get("skipped", ())}
    return all(state["step"] <= failure.first or skipped.issuperset(failure.batches) for failure in failures)


def steps_to_skip(state: dict[str, Any] | None, failures: Sequence[Failure], next_step: int) -> list[int]:
    """Return the steps of the data to leave out: those that the checkpoint left out, and the failed ones still to come.

    `next_step` is the step of the data that comes next; failed batches before it are in the past.
    """
    known = [] if state is None else [int(step) for step in state["decisions"].get("skipped", ())]
    return sorted({*known, *(batch for failure in failures for batch in failure.batches if batch >= next_step)})
