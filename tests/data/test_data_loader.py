from __future__ import annotations

import threading
import time

import pytest
import torch

from redline.data.loader import Prefetcher, pin
from redline.errors import UserError


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("redline-loader")]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_come_in_order_from_any_start(workers: int) -> None:
    def make(step: int) -> int:
        time.sleep(0.002 * (step % 3))  # later steps are often ready first
        return step * step

    with Prefetcher(make, 7, workers=workers) as loader:
        assert [loader.next(step) for step in range(7, 57)] == [step * step for step in range(7, 57)]
    assert not loader_threads()


def test_makes_ahead_but_not_further_than_depth() -> None:
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        return step

    with Prefetcher(make, 0, workers=2, depth=3) as loader:
        wait_until(lambda: len(made) == 3)
        time.sleep(0.05)
        assert sorted(made) == [0, 1, 2]
        loader.next(0)
        wait_until(lambda: len(made) == 4)
        time.sleep(0.05)
        assert sorted(made) == [0, 1, 2, 3]


def test_a_waiting_worker_starts_as_soon_as_there_is_room() -> None:
    with Prefetcher(lambda step: step, 0, workers=1, depth=1) as loader:
        begun = time.monotonic()
        for step in range(50):
            loader.next(step)
        assert time.monotonic() - begun < 2.0


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_failure_is_raised_at_its_step_as_itself(workers: int) -> None:
    error = KeyError("bad row")

    def make(step: int) -> int:
        if step == 2:
            raise error
        return step

    with Prefetcher(make, 0, workers=workers) as loader:
        assert [loader.next(0), loader.next(1)] == [0, 1]
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(KeyError) as raised:
                loader.next(2)
            assert raised.value is error
        assert time.monotonic() - begun < 1.0


@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_that_was_ended_is_replaced(workers: int) -> None:
    """A thread that a library ends, in the middle of its step: another makes it."""
    ended: set[int] = set()

    def make(step: int) -> int:
        if step % 2 and step not in ended:
            ended.add(step)
            raise SystemExit
        return step

    with Prefetcher(make, 0, workers=workers, depth=workers) as loader:
        for step in range(8):
            begun = time.monotonic()
            assert loader.next(step) == step
            assert time.monotonic() - begun < 5.0
    assert ended >= {1, 3, 5, 7}


def test_a_step_that_ends_every_thread_is_a_failure() -> None:
    def make(step: int) -> int:
        if step == 1:
            raise SystemExit(3)
        return step

    with Prefetcher(make, 0, workers=2) as loader:
        assert loader.next(0) == 0
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="SystemExit"):
            loader.next(1)
        assert time.monotonic() - begun < 5.0


def test_hanging_worker_ends_in_an_error_that_names_the_step() -> None:
    release = threading.Event()
    loader = Prefetcher(lambda step: release.wait(30), 4, workers=1, timeout=0.2)
    with pytest.raises(UserError, match=r"step 4 .*0\.2 s"):
        loader.next(4)
    release.set()
    loader.close()
    assert not loader_threads()


def test_close_is_idempotent_and_final() -> None:
    loader = Prefetcher(lambda step: step, 0, workers=2)
    loader.next(0)
    loader.close()
    loader.close()
    assert not loader_threads()
    with pytest.raises(RuntimeError, match="closed"):
        loader.next(1)


def test_steps_must_follow_each_other() -> None:
    with Prefetcher(lambda step: step, 3, workers=0) as loader, pytest.raises(ValueError, match="3 is next"):
        loader.next(4)


def test_pin_keeps_the_values() -> None:
    batch = {"tokens": torch.arange(6).reshape(2, 3)}
    pinned = pin(batch)
    assert torch.equal(pinned["tokens"], batch["tokens"])
    assert pinned["tokens"].is_pinned() == torch.cuda.is_available()


def wait_until(condition, seconds: float = 5.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this should have happened by now"
        time.sleep(0.005)
