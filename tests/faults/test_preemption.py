"""R6: after SIGTERM, SIGUSR1 or Ctrl-C in any phase the run saves, exits and resumes bit for bit."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from redline.runs.events import read_events
from redline.training import checkpoint as saving
from redline.training.checkpoint import commit, newest_valid, step_name, verify
from redline.training.control import Signals, StopRequested

OPTIONS = ("train.steps=10", "checkpoint.every=2", "eval.every=3", "train.ema=0.9")


def curve(run: Path) -> list[tuple[Any, ...]]:
    events = [e for e in read_events(run / "events.jsonl") if e["type"] == "step"]
    return [(e["step"], e["tokens"], e["loss"], e["lr"], e["grad_norm"]) for e in events]


def evaluations(run: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_events(run / "events.jsonl") if e["type"] == "eval"}


def stop_reasons(run: Path) -> list[str]:
    return [e["reason"] for e in read_events(run / "events.jsonl") if e["type"] == "stop"]


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


class Once:
    """Calls `function`, with an action before its n-th call."""

    def __init__(self, function: Callable[..., Any], action: Callable[[], None], nth: int = 1) -> None:
        self.function, self.action, self.left = function, action, nth

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.action()
        return self.function(*args, **options)


def hook(place: str, nth: int = 1) -> Callable[[Any, Callable[[], None]], None]:
    """Act before the n-th call of a part of the trainer, like `step.dry_run`."""
    owner, _, name = place.partition(".")

    def arm(trainer: Any, action: Callable[[], None]) -> None:
        part = getattr(trainer, owner)
        setattr(part, name, Once(getattr(part, name), action, nth))

    return arm


PHASES = {  # where the signal comes, and the step that must be saved then
    "warm-up": (hook("train_step.dry_run"), 0),
    "first evaluation": (hook("objective.evaluate"), 0),
    "first step": (hook("train_step.backward", 2), 1),  # the warm-up's is the first
    "middle step": (hook("train_step.backward", 6), 5),
    "step to be evaluated": (hook("train_step.backward", 4), 3),
    "evaluation": (hook("objective.evaluate", 2), 3),
    "snapshot": (hook("checkpoints.save"), 2),
}
SIGNALS = [(signal.SIGTERM,), (signal.SIGUSR1,), (signal.SIGHUP,), (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM)]


@pytest.fixture(autouse=True)
def _no_nohup() -> Iterator[None]:
    """These tests may run under nohup; the processes that they start do not."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def curves() -> dict[str, Any]:
    return {}


@pytest.fixture
def undisturbed(attempt: Any, tmp_path: Path, curves: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The losses of an uninterrupted run."""
    if not curves:
        attempt(tmp_path / "undisturbed", *OPTIONS)
        curves["undisturbed"] = curve(tmp_path / "undisturbed")
    return list(curves["undisturbed"])


def assert_resumes_identically(attempt: Any, run: Path, undisturbed: list[tuple[Any, ...]]) -> None:
    resumed = attempt(run, *OPTIONS)
    assert (resumed.outcome.reason, resumed.outcome.exit_code) == ("steps", EXIT_DONE)
    assert curve(run) == undisturbed


@pytest.mark.parametrize("numbers", SIGNALS, ids=["TERM", "USR1", "HUP", "thrice"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_preempted_run_resumes(
    attempt: Any, undisturbed: Any, tmp_path: Path, phase: str, numbers: tuple[int, ...]
) -> None:
    run = tmp_path / "run"
    arm, step = PHASES[phase]
    trainer = attempt(run, *OPTIONS, prepare=lambda t: arm(t, lambda: send(*numbers)))
    assert (trainer.outcome.reason, trainer.outcome.exit_code) == ("preempted", EXIT_PREEMPTED)
    assert trainer.state.step == step
    assert newest_valid(run / "checkpoints") == run / "checkpoints" / step_name(step)
    assert_resumes_identically(attempt, run, undisturbed)
    assert stop_reasons(run) == ["preempted", "steps"]
    assert [*evaluations(run)] == [0, 3, 6, 9, 10], "an evaluation that was due at the stop is done after the resume"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_preempted_while_saving_resumes(
    attempt: Any, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The save in progress and the step are finished, and the step is saved too."""
    run = tmp_path / "run"
    monkeypatch.setattr(saving, "commit", Once(commit, lambda: (send(number), time.sleep(0.1))[0]))
    trainer = attempt(run, *OPTIONS)
    assert trainer.outcome.exit_code == EXIT_PREEMPTED
    assert newest_valid(run / "checkpoints") == run / "checkpoints" / step_name(trainer.state.step)
    assert verify(run / "checkpoints" / step_name(2))
    assert_resumes_identically(attempt, run, undisturbed)


def test_runs_preempted_at_random_instants_resume(
    fork: Any, attempt: Any, undisturbed: Any, tmp_path: Path, say: Any
) -> None:
    chance, codes = random.Random(6), []
    for trial in range(30):
        run = tmp_path / str(trial)

        def train(child: Any, run: Path = run) -> int:
            trainer = attempt(run, *OPTIONS, "data.workers=2", prepare=lambda t: _ready_within(t, child))
            return int(trainer.outcome.exit_code)

        child = fork(train)
        child.await_ready()
        for _ in range(chance.choice((1, 1, 2))):
            time.sleep(chance.uniform(0, 0.1))
            child.send(chance.choice((signal.SIGTERM, signal.SIGUSR1)))
        codes.append(child.wait())
        assert codes[-1] in (EXIT_DONE, EXIT_PREEMPTED, -signal.SIGTERM, -signal.SIGUSR1)
        if codes[-1] < 0:  # it came when the run had ended, and its handlers with it
            assert stop_reasons(run)
        newest = newest_valid(run / "checkpoints")
        stop = [e for e in read_events(run / "events.jsonl") if e["type"] == "stop"][-1]
        assert newest is not None
        assert newest.name == step_name(stop["step"])
        assert_resumes_identically(attempt, run, undisturbed)
    say(f"R6: 30 random instants, {codes.count(EXIT_PREEMPTED)} preempted, the others had ended; all went on")
    assert codes.count(EXIT_PREEMPTED) > 10


def _ready_within(trainer: Any, child: Any) -> None:
    """Signal when the handlers are installed."""
    trainer.warm_up = Once(trainer.warm_up, child.say_ready)


def test_ctrl_c_finishes_the_step_saves_and_reports(attempt: Any, undisturbed: Any, tmp_path: Path, capfd: Any) -> None:
    run = tmp_path / "run"
    trainer = attempt(run, *OPTIONS, prepare=lambda t: hook("train_step.backward", 5)(t, lambda: send(signal.SIGINT)))
    assert (trainer.outcome.reason, trainer.outcome.exit_code) == ("interrupted", EXIT_INTERRUPTED)
    assert newest_valid(run / "checkpoints") == run / "checkpoints" / step_name(4)
    assert read_events(run / "events.jsonl")[-1]["type"] == "stop"
    assert "Ctrl-C again" in capfd.readouterr().err
    assert_resumes_identically(attempt, run, undisturbed)


@pytest.mark.parametrize("phase", ["train_step.backward", "objective.evaluate", "checkpoints.save", "commit"])
def test_a_second_ctrl_c_exits_at_once(fork: Any, attempt: Any, undisturbed: Any, tmp_path: Path, phase: str) -> None:
    """The signal arrives within a step, the final evaluation, or a save that would take a minute."""
    run = tmp_path / "run"
    assert fork(lambda _: attempt(run, *OPTIONS, "train.steps=4").outcome.exit_code).wait() == EXIT_DONE

    def twice() -> None:
        send(signal.SIGINT)
        time.sleep(0.2)  # two signals that arrive together would count as one
        send(signal.SIGINT)
        time.sleep(60)

    def prepare(trainer: Any) -> None:
        if phase == "commit":
            saving.commit = Once(commit, twice)  # type: ignore[assignment]
        else:
            hook(phase, 2 if phase != "checkpoints.save" else 1)(trainer, twice)

    begin = time.monotonic()
    assert fork(lambda _: attempt(run, *OPTIONS, prepare=prepare).outcome.exit_code).wait() == EXIT_INTERRUPTED
    assert time.monotonic() - begin < 30
    newest = newest_valid(run / "checkpoints")
    assert newest is not None
    assert int(newest.name[5:]) >= 4
    resumed = attempt(run, *OPTIONS)
    assert resumed.outcome.exit_code == EXIT_DONE


def test_ctrl_c_saves_before_it_evaluates(fork: Any, attempt: Any, tmp_path: Path) -> None:
    """The second Ctrl-C, which the message offers, then loses nothing."""
    run = tmp_path / "run"

    def prepare(trainer: Any) -> None:
        hook("train_step.backward", 5)(trainer, lambda: send(signal.SIGINT))
        hook("objective.evaluate", 3)(trainer, lambda: send(signal.SIGINT))  # after those at 0 and 3

    assert fork(lambda _: attempt(run, *OPTIONS, prepare=prepare).outcome.exit_code).wait() == EXIT_INTERRUPTED
    assert stop_reasons(run) == [], "it exited during the evaluation"
    assert newest_valid(run / "checkpoints") == run / "checkpoints" / step_name(4)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), RuntimeError("a defect of ours")])
def test_a_failed_final_evaluation_loses_nothing(attempt: Any, tmp_path: Path, error: Exception) -> None:
    run = tmp_path / "run"

    def fail() -> None:
        raise error

    options = (*OPTIONS, "train.steps=7", "eval.samples=2")
    arm = hook("objective.sample", 2)
    if isinstance(error, torch.OutOfMemoryError):
        trainer = attempt(run, *options, prepare=lambda t: arm(t, fail))
        assert trainer.outcome.exit_code == EXIT_DONE
        assert any("eval.samples" in e["message"] for e in read_events(run / "events.jsonl") if e["type"] == "warning")
    else:
        with pytest.raises(RuntimeError, match="defect"):
            attempt(run, *options, prepare=lambda t: arm(t, fail))
    assert newest_valid(run / "checkpoints") == run / "checkpoints" / step_name(7)


def test_a_signal_within_a_write_to_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python cannot enter a buffered stream twice; the signal handler must not fail because of that."""

    class Interrupted(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            send(signal.SIGINT)
            return len(data)

    stream = io.TextIOWrapper(io.BufferedWriter(Interrupted()))
    with Signals() as signals:
        monkeypatch.setattr(sys, "stderr", stream)
        stream.write("a line of the console\n")
        stream.flush()
        monkeypatch.undo()
    assert signals.reason == "interrupted"


def test_abandonable_work_is_interrupted_once() -> None:
    tidied = []

    def work(signals: Signals) -> None:
        with signals.abandonable():
            try:
                send(signal.SIGTERM)
            finally:
                send(signal.SIGTERM)
                tidied.append(True)

    with Signals() as signals, pytest.raises(StopRequested):
        work(signals)
    assert tidied
    assert signals.reason == "preempted"


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    with Signals():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before


def test_exiting_at_once_promises_no_checkpoint() -> None:
    """There may be no checkpoint yet."""
    twice = (
        "import os, signal\nfrom redline.training.control import Signals\n"
        "with Signals():\n  for _ in range(2): os.kill(os.getpid(), signal.SIGINT)\n"
    )
    left = subprocess.run([sys.executable, "-c", twice], capture_output=True, text=True, timeout=60)
    assert left.returncode == EXIT_INTERRUPTED
    assert left.stderr.count("at once") == 2
