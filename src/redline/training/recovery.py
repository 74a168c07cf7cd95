"""What went wrong in a run and changes how it goes on: too little memory, and batches whose loss is not finite.

Each rank notes it in the run's directory before it ends. Whoever resumes the run, a supervisor, a scheduler or a
person, then finds it, and the run goes on in another way: nothing has to be handed over between the two.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.cache import make_folder, read_text
from redline.errors import UserError
from redline.planning.batch import BatchPlan
from redline.training.run_directory import open_no_follow

FOLDER = "trouble"
MEMORY, NONFINITE = "memory", "nonfinite"
MOST_STORMS = 3  # of batches that are not finite; after that the data are not what is wrong


class OutOfMemoryError(UserError):
    why = "memory"


class NonFiniteError(UserError):
    """Many batches in a row that are not finite: the run is to go on from before them, without them."""

    why = "nonfinite"


@dataclass(frozen=True)
class RunFacts:
    """How the run was going."""

    rank: int
    step: int  # at which it ended
    micro: int
    world: int
    checkpointing: str


@dataclass(frozen=True)
class Failure(RunFacts):
    kind: str = MEMORY
    batches: tuple[int, ...] = ()  # that were not finite, by the step whose data they were
    first: int = 0  # step at which that began


def record_failure(run: Path, trouble: Failure) -> None:
    folder = run / FOLDER
    make_folder(folder)
    with open(folder / f"rank-{trouble.rank}.jsonl", "a", encoding="utf-8", opener=open_no_follow) as file:
        file.write(json.dumps(asdict(trouble)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def record_out_of_memory(run: Path, facts: RunFacts) -> UserError:
    """Noted; and what to say."""
    record_failure(run, Failure(**vars(facts)))
    what = f"out of memory at step {facts.step}, with a micro-batch of {facts.micro} (rank {facts.rank})."
    how = "with less at once" if facts.micro > 1 else "with grad_checkpointing=full"
    place = "from the last checkpoint" if facts.step else "from the beginning"
    return OutOfMemoryError(what, fix=f"`redline train --resume {shlex.quote(str(run))}` goes on {place} {how}.")


def record_nonfinite(run: Path, facts: RunFacts, first: int, batches: Sequence[int]) -> bool:
    """Whether the run may go on without these; not so when that was tried too often."""
    if len(nonfinite_failures(read_failures(run))) >= MOST_STORMS:
        return False
    record_failure(run, Failure(**vars(facts), kind=NONFINITE, batches=tuple(batches), first=first))
    return True


def read_failures(run: Path) -> list[Failure]:
    """Of all ranks; a line that was torn is passed over."""
    found = []
    for path in sorted((run / FOLDER).glob("rank-*.jsonl")):
        for line in read_text(path).splitlines():
            try:
                facts = json.loads(line)
                rank, step, micro, world = (int(facts[name]) for name in ("rank", "step", "micro", "world"))
                batches = tuple(int(batch) for batch in facts["batches"])
                words = (str(facts["checkpointing"]), str(facts["kind"]))
                found.append(Failure(rank, step, micro, world, *words, batches, int(facts["first"])))
            except (ValueError, TypeError, KeyError):
                continue
    return found


def reduce_memory(
    plan: BatchPlan, checkpointing: str, troubles: Iterable[Failure], *, sharded: bool
) -> tuple[BatchPlan, str]:
    """Micro-batch and checkpointing below all that did not fit; the global batch stays what it is.

    What is sharded over more ranks takes less of each: of those troubles only that of as many or more counts here.
    """
    failed = [t for t in troubles if t.kind == MEMORY and (t.world >= plan.world or not sharded)]
    while any(t.checkpointing == checkpointing and t.micro <= plan.micro for t in failed):
        half = plan.halved()
        if half is not None:
            plan = half
        elif checkpointing != "full":
            checkpointing = "full"
        else:
            what = (
                f"a micro-batch of {plan.micro} does not fit, even when everything is computed again in the backward."
            )
            fix = "Use a shorter data.seq_len, a smaller model, parallel.mode=fsdp on several GPUs, or a larger card."
            raise UserError(what, where="train.micro_batch", fix=fix)
    return plan, checkpointing


def describe_change(before: tuple[BatchPlan, str], after: tuple[BatchPlan, str]) -> str | None:
    """What `smaller` changed, in words."""
    (old, plain), (new, checkpointing) = before, after
    if before == after:
        return None
    parts = [f"micro-batch {old.micro} → {new.micro}"] if old.micro != new.micro else []
    parts += [f"grad_checkpointing {plain} → {checkpointing}"] if plain != checkpointing else []
    return f"out of memory: {', '.join(parts)}, the global batch stays {new.global_batch}"


def nonfinite_failures(troubles: Iterable[Failure]) -> list[Failure]:
    return [t for t in troubles if t.kind == NONFINITE and t.rank == 0]


def predates_failures(state: dict[str, Any], found: Sequence[Failure]) -> bool:
    """Whether a checkpoint is of before those batches, or of a run that left them out."""
    gone = {*state["decisions"].get("skipped", ())}
    return all(state["step"] <= storm.first or gone.issuperset(storm.batches) for storm in found)


def steps_to_skip(state: dict[str, Any] | None, found: Sequence[Failure], place: int) -> list[int]:
    """Data steps to leave out from here on: those decided before, and those that were not finite since; what lies
    before `place`, the next step's data, is past."""
    known = [] if state is None else [int(step) for step in state["decisions"].get("skipped", ())]
    return sorted({*known, *(batch for storm in found for batch in storm.batches if batch >= place)})


# ----------------------------------------------------------------------------------------------------
# Before the first step: compile, allocate, and meet an out-of-memory here instead of in hour three.
