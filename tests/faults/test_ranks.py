"""R9, R17: ranks that are killed, stopped or run out of memory, and the supervisor that restarts them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE
from redline.runs.events import read_events
from redline.training import supervisor as watching
from redline.training.checkpoint import committed_steps, newest_valid, read_state, verify
from redline.training.control import FOLDER_VARIABLE, RECOVERY, read_heartbeats
from redline.training.distributed import join
from redline.training.supervisor import SUPERVISED, supervise
from several import Fork, free_port, rank_environment

OPTIONS = (
    "train.steps=12",
    "checkpoint.every=3",
    "train.micro_batch=2",
    "checkpoint.best=false",
    "parallel.timeout=2.5",
)


class Forks:
    """One attempt of `redline train` with forks instead of torchrun's processes."""

    def __init__(
        self, words: Sequence[str], size: int, folder: Path, prepare: Callable[[int], None], more: Any
    ) -> None:
        self.folder, port = folder, free_port()
        folder.mkdir()

        def train(rank: int) -> int:
            from redline.cli.main import app

            prepare(rank)
            return int(app([*words], standalone_mode=False) or 0)

        several = (lambda rank: rank_environment(rank, size, port)) if size > 1 else (lambda rank: {})
        self.forks = [
            Fork(
                lambda r=rank: train(r),
                {FOLDER_VARIABLE: str(folder), **several(rank), **more},
                folder.parent / "ranks.log",
            )
            for rank in range(size)
        ]

    def poll(self) -> int | None:
        codes = [fork.poll() for fork in self.forks]
        return None if None in codes else max(codes, key=lambda code: code != 0)

    def end(self, pids: Sequence[int]) -> None:
        for fork in self.forks:
            fork.end()


class Supervised:
    """A tiny run of two ranks under `supervise`."""

    def __init__(self, world: Any, folder: Path) -> None:
        self.world, self.folder, self.attempts = world, folder, 0
        self.run, self.messages = folder / "run", list[str]()
        self.prepare: Callable[[int], None] = lambda rank: None
        self.started: Callable[[Forks], None] = lambda job: None

    def __call__(self, *options: str, size: int = 2, again: bool = True, timeout: float = 2.5) -> int:
        words = [*self.world.tiny, f"data.source={self.world.corpus}", *OPTIONS, *options]

        def start(recovery: str | None) -> Forks:
            self.attempts += 1
            started = (self.run / "lock.json").is_file()
            chosen = ["--resume", str(self.run)] if started else ["quickstart", *words, "--run", str(self.run)]
            more = {**({SUPERVISED: "1"} if again else {}), **({RECOVERY: recovery} if recovery else {})}
            job = Forks(["train", *chosen], size, self.folder / f"heartbeat-{self.attempts}", self.prepare, more)
            self.started(job)
            return job

        def progress() -> int | None:
            return max(committed_steps(self.run / "checkpoints"), default=None)

        log = self.messages.append
        return supervise(start, timeout=timeout, restart=again, progress=progress, log=log, pause=0.05).code

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run / "events.jsonl") if e["type"] == kind]

    def losses(self) -> list[float]:
        return [e["loss"] for e in self.events("step")]

    @property
    def log(self) -> str:
        return (self.folder / "ranks.log").read_text()


@pytest.fixture
def supervised(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervised:
    world.run(tmp_path / "first-run", "train.steps=1")  # makes torch import its lazy modules before the fork
    monkeypatch.setattr(watching, "GRACE_S", 2.0)
    monkeypatch.setattr(watching, "MAX_FAILURES", 2)
    return Supervised(world, tmp_path)


@pytest.fixture
def undisturbed(world: Any, tmp_path: Path) -> list[float]:
    """The losses of an undisturbed run of one process."""
    world.run(tmp_path / "undisturbed", *OPTIONS)
    return [e["loss"] for e in read_events(tmp_path / "undisturbed/events.jsonl") if e["type"] == "step"]


def at_step(number: int, act: Callable[[], Any], *, once: Path | None = None) -> None:
    """Call `act` in this process when the trainer reaches step `number`; with `once`, in one attempt only."""
    from redline.training.step import Step

    original = Step.__call__

    def step(self: Any, count: int, *rest: Any) -> Any:
        if count == number and not (once and once.exists()):
            if once:
                once.touch()
            act()
        return original(self, count, *rest)

    Step.__call__ = step  # type: ignore[method-assign]


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job_within_seconds(
    supervised: Supervised, undisturbed: list[float], victim: int
) -> None:
    supervised.prepare = lambda rank: at_step(7, send(signal.SIGKILL)) if rank == victim else None
    begin = time.monotonic()
    assert supervised(again=False) == EXIT_FAILED
    assert time.monotonic() - begin < 15
    assert f"lost rank {victim} in " in supervised.messages[0]
    checkpoints = supervised.run / "checkpoints"
    assert committed_steps(checkpoints)[0] == 3
    assert all(verify(checkpoints / f"step-{step:08d}") for step in committed_steps(checkpoints)), "all are complete"
    supervised.prepare = lambda rank: None
    assert supervised(again=False) == EXIT_DONE
    assert not list(checkpoints.glob(".writing*"))
    assert supervised.losses() == pytest.approx(undisturbed, abs=1e-5)


def test_a_killed_rank_is_restarted(supervised: Supervised, undisturbed: list[float], tmp_path: Path) -> None:
    supervised.prepare = lambda r: at_step(7, send(signal.SIGKILL), once=tmp_path / "met") if r == 1 else None
    assert supervised() == EXIT_DONE
    assert supervised.attempts == 2
    assert [e["resumed_from"] for e in supervised.events("start")] in (
        [None, 6],
        [None, 3],
    )  # the save of step 6 may still have been running
    assert ["lost rank 1" in e["message"] for e in supervised.events("recovery")] == [True]
    assert supervised.losses() == pytest.approx(undisturbed, abs=1e-5)


@pytest.mark.parametrize(("doing", "hung"), [("step", [0]), ("saving", [0]), ("starting", [0]), ("preparing data", [])])
def test_preparing_data_has_no_time_limit(doing: str, hung: list[int]) -> None:
    watch = watching.Watcher(Mock(), Mock(), timeout=1.0)
    now = time.monotonic()
    watch.heartbeats = {0: {"pid": os.getpid(), "doing": doing, "time": now, "since": now - 3600, "waiting": False}}
    assert watch._hung_ranks() == hung
    watch.heartbeats[0]["time"] -= 60
    assert watch._hung_ranks() == [0], "its heartbeat has stopped"


def test_a_pause_of_the_whole_machine_is_no_hang() -> None:
    watch = watching.Watcher(Mock(), Mock(), timeout=1.0)
    now = time.monotonic()
    watch.heartbeats = {0: {"pid": os.getpid(), "doing": "step", "time": now - 60, "since": now - 60, "waiting": False}}
    assert watch._hung_ranks() == [0]
    watch.polled_at = now - 59
    watch._note_pause()
    assert watch._hung_ranks() == []
    watch.awake_since -= 30
    watch._note_pause()
    assert watch._hung_ranks() == [0], "later it counts again"


@pytest.mark.parametrize(("size", "here", "nodes"), [(4, 2, 2), (5, 2, 1), (6, 3, 2), (2, 0, 1)])
def test_uneven_nodes_count_as_one_node(size: int, here: int, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks beyond nodes × ranks per node would train on the data of other ranks."""
    monkeypatch.setattr("torch.distributed.init_process_group", lambda **_: None)
    monkeypatch.setattr("torch.distributed.new_group", lambda **_: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # otherwise `join` sets it for all later tests
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in {"RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": here, **master}.items():
        monkeypatch.setenv(name, str(value))
    ranks = join("cpu", 10.0)
    assert (ranks.nodes, ranks.size % ranks.nodes) == (nodes, 0)


def test_a_stopped_rank_is_noticed_and_its_stack_logged(
    supervised: Supervised, undisturbed: Any, tmp_path: Path
) -> None:
    supervised.prepare = lambda r: at_step(7, send(signal.SIGSTOP), once=tmp_path / "met") if r == 1 else None
    delays: list[float] = []
    stopped = tmp_path / "met"
    original = watching.Watcher._dump_stacks

    def show(self: Any, hung: list[int]) -> Any:
        delays.append(time.time() - stopped.stat().st_mtime)
        assert hung == [1]
        return original(self, hung)

    watching.Watcher._dump_stacks = show  # type: ignore[method-assign]
    try:
        assert supervised() == EXIT_DONE
    finally:
        watching.Watcher._dump_stacks = original  # type: ignore[method-assign]
    assert 2.0 <= delays[0] < 2.5 + 1.5  # the last heartbeat may be half a second old
    assert "2.5 s: rank 1 in " in supervised.messages[0]
    assert "most recent call first" in supervised.log
    assert "in _loop" in supervised.log
    assert supervised.losses() == pytest.approx(undisturbed, abs=1e-5)


def out_of_memory(above: int, *, recomputed: bool = False) -> None:
    """From step 5 on, make micro-batches larger than this run out of memory in this process, unless recomputed."""
    from redline.training.step import Step

    original = Step.backward

    def backward(self: Any, step: int, batch: Any) -> Any:
        fits = len(batch.micros[0]["inputs"]) <= above
        if step >= 5 and not fits and not (recomputed and self.objective.recipe.train.grad_checkpointing == "full"):
            raise torch.OutOfMemoryError("injected")
        return original(self, step, batch)

    Step.backward = backward  # type: ignore[method-assign]


@pytest.mark.parametrize(("size", "micro", "above", "attempts"), [(1, 8, 2, 3), (2, 4, 2, 2)])
def test_out_of_memory_at_a_step(
    supervised: Supervised, undisturbed: list[float], size: int, micro: int, above: int, attempts: int
) -> None:
    """One rank runs out of memory: the micro-batch is halved until it fits, and the losses stay the same."""
    supervised.prepare = lambda rank: out_of_memory(above) if rank == size - 1 else None
    assert supervised(f"train.micro_batch={micro}", size=size) == EXIT_DONE
    assert supervised.attempts == attempts
    recoveries = [e["message"] for e in supervised.events("recovery")]
    assert any("→ 2, the global batch stays 8" in text for text in recoveries)
    assert supervised.losses() == pytest.approx(undisturbed, abs=1e-5)
    state = read_state(newest_valid(supervised.run / "checkpoints"))  # type: ignore[arg-type]
    assert state["decisions"]["batch"] == [above, 8 // (above * size), size]


def test_at_a_micro_batch_of_one_blocks_are_recomputed_and_then_it_stops(
    supervised: Supervised, undisturbed: Any
) -> None:
    supervised.prepare = lambda rank: out_of_memory(0, recomputed=True)
    assert supervised("train.micro_batch=1", size=1) == EXIT_DONE
    assert any("grad_checkpointing none → full" in e["message"] for e in supervised.events("recovery"))
    assert supervised.losses() == pytest.approx(undisturbed, abs=1e-5)
    supervised.run = supervised.folder / "hopeless"
    supervised.prepare = lambda rank: out_of_memory(0)
    assert supervised("train.micro_batch=1", size=1) == EXIT_FAILED
    assert "does not fit, even" in supervised.log


def too_large_to_dry_run() -> None:
    """Make the warm-up run out of memory in this process, unless activations are recomputed."""
    from redline.training.step import Step

    original = Step.dry_run

    def dry_run(self: Any, batch: Any) -> None:
        if self.objective.recipe.train.grad_checkpointing != "full":
            raise torch.OutOfMemoryError("injected")
        original(self, batch)

    Step.dry_run = dry_run  # type: ignore[method-assign]


def test_a_warm_up_that_does_not_fit_restarts_with_recomputation(supervised: Supervised, undisturbed: Any) -> None:
    supervised.prepare = lambda rank: too_large_to_dry_run()
    assert supervised("train.micro_batch=4", size=1) == EXIT_DONE
    assert supervised.attempts == 2
    assert any("grad_checkpointing none → full" in e["message"] for e in supervised.events("recovery"))
    assert supervised.losses() == pytest.approx(undisturbed, abs=1e-5)


def poison(data_steps: set[int]) -> None:
    """Make the loss of these data steps not finite in this process, whichever step reads them."""
    from redline.training import step as training_step
    from redline.training.step import Step

    original, make = Step.backward, training_step.BatchLoader._make

    def make_marked(self: Any, step: int) -> Any:
        batch = make(self, step)
        bad = training_step.data_step(step, self.skipped) in data_steps
        for micro in batch.micros:
            micro["poison"] = torch.tensor(float("nan") if bad else 0.0)
        return batch

    def backward(self: Any, step: int, batch: Any) -> Any:
        loss = self.objective.loss

        def poisoned_loss(micro: Any) -> Any:
            value = micro.get("poison", torch.tensor(0.0))
            return {n: type(t)(t.sum + value * t.sum, t.weight, t.coefficient) for n, t in loss(micro).items()}

        self.objective.loss = poisoned_loss
        try:
            return original(self, step, batch)
        finally:
            del self.objective.loss

    training_step.BatchLoader._make, Step.backward = make_marked, backward  # type: ignore[method-assign]


@pytest.mark.parametrize("size", [1, 2])
def test_a_streak_of_bad_batches_is_left_out(supervised: Supervised, size: int) -> None:
    supervised.prepare = lambda rank: poison({7, 8, 9, 10})
    assert supervised("train.max_nonfinite=4", size=size) == EXIT_DONE
    assert supervised.attempts == 2
    assert [e["resumed_from"] for e in supervised.events("start")] == [None, 6]
    assert any("steps 7 to 10 were not finite" in e["message"] for e in supervised.events("recovery"))
    state = read_state(newest_valid(supervised.run / "checkpoints"))  # type: ignore[arg-type]
    assert (state["step"], state["skipped"], state["decisions"]["skipped"]) == (12, 0, [7, 8, 9, 10])


def test_rollbacks_are_limited(supervised: Supervised) -> None:
    supervised.prepare = lambda rank: poison(set(range(5, 1000)))
    assert supervised("train.max_nonfinite=3", size=1) == EXIT_FAILED
    assert len((supervised.run / "trouble/rank-0.jsonl").read_text().splitlines()) == 3


def test_a_signal_to_one_rank_stops_all(supervised: Supervised, undisturbed: list[float]) -> None:
    supervised.prepare = lambda rank: at_step(4, send(signal.SIGTERM)) if rank == 1 else None
    assert supervised() == EXIT_PREEMPTED
    assert supervised.attempts == 1
    assert committed_steps(supervised.run / "checkpoints") == [3, 5]
    assert [e["reason"] for e in supervised.events("stop")] == ["preempted"]
    supervised.prepare = lambda rank: None
    assert supervised() == EXIT_DONE
    assert supervised.losses() == pytest.approx(undisturbed, abs=1e-5)


def test_a_refused_run_is_not_restarted(supervised: Supervised) -> None:
    assert supervised("train.global_batch=9", "train.micro_batch=1", size=2) == EXIT_USAGE
    assert supervised.attempts == 1
    assert "train.global_batch=8 or 10, or 1 or 3 GPUs" in supervised.log
    assert not (supervised.run / "lock.json").exists()


def test_the_supervisor_gives_up_without_progress(supervised: Supervised) -> None:
    def die() -> None:
        # A save runs in the background, and a kill during it would make the next attempt one that got further.
        while 3 not in committed_steps(supervised.run / "checkpoints"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    supervised.prepare = lambda rank: at_step(4, die)
    assert supervised(size=1, timeout=60) == EXIT_FAILED
    assert supervised.attempts == 1 + watching.MAX_FAILURES
    assert "attempts from the same checkpoint" in supervised.messages[-1]


def test_signals_reach_the_ranks(supervised: Supervised) -> None:
    """Signals to the supervisor are forwarded."""

    def interrupt(job: Forks) -> None:
        supervisor = os.getpid()
        Fork(lambda: _terminate_when_stepping(job.folder, supervisor), {}, job.folder.parent / "interrupting.log")

    supervised.started = interrupt
    assert supervised("train.steps=100000", "checkpoint.every=100000", "monitor.log_every=100000") == EXIT_PREEMPTED
    assert supervised.attempts == 1
    newest = newest_valid(supervised.run / "checkpoints")
    assert newest is not None


def _terminate_when_stepping(folder: Path, target: int) -> None:
    for _ in range(600):
        heartbeats = read_heartbeats(folder).values()
        if len(heartbeats) == 2 and all(facts["doing"] == "step" for facts in heartbeats):
            os.kill(target, signal.SIGTERM)
            return
        time.sleep(0.05)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ranks_killed_and_stopped_at_random(supervised: Supervised, undisturbed: list[float], tmp_path: Path) -> None:
    """50 runs that each lose a rank at a random time all finish."""
    rng = random.Random(9)
    for trial in range(50):
        victim, step, met = rng.randrange(2), rng.randrange(12), tmp_path / f"met-{trial}"
        number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
        supervised.run = tmp_path / f"run-{trial}"

        def prepare(rank: int, v: int = victim, s: int = step, n: int = number, once: Path = met) -> None:
            if rank == v:
                at_step(s, send(n), once=once)

        supervised.prepare = prepare
        assert supervised() == EXIT_DONE, supervised.messages
        assert supervised.losses() == pytest.approx(undisturbed, abs=1e-5), (victim, step, number)
