"""Callbacks and metrics: what they receive, and that they can stop a run but neither change nor lose it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import redline
from redline.vocabulary import Status, StopReason

SHORT = ("train.steps=4", "eval.every=2", "checkpoint.every=2")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def train(corpus: Path, tiny: tuple[str, ...]) -> Callable[..., redline.Run]:
    def run(*words: str, **options: Any) -> redline.Run:
        return redline.train("quickstart", *tiny, *SHORT, f"data.source={corpus}", *words, show=False, **options)

    return run


class Recorder(redline.Callback):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_step(self, event: redline.StepEvent) -> None:
        self.events.append(event)

    def on_eval(self, event: redline.EvalEvent) -> None:
        self.events.append(event)

    def on_checkpoint(self, event: redline.CheckpointEvent) -> None:
        self.events.append(event)

    def on_stop(self, event: redline.StopEvent) -> None:
        self.events.append(event)


def logged(run: redline.Run) -> list[dict[str, Any]]:
    lines = (run.path / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["type"] in ("step", "eval", "checkpoint", "stop")]


def weights(run: redline.Run) -> dict[str, Any]:
    return load_file(run.path / "checkpoints/step-00000004/model.safetensors")


def test_callbacks_get_the_events_of_the_log(train: Callable[..., redline.Run]) -> None:
    recorder = Recorder()
    run = train(callbacks=[recorder])
    assert [json.loads(json.dumps(dict(event.fields), default=str)) for event in recorder.events] == logged(run)
    kinds = [event.type for event in recorder.events]
    assert kinds[0] == "eval"
    assert kinds.count("step") == 4
    assert kinds[-1] == "stop"
    stop = recorder.events[-1]
    assert (stop.reason, stop.step) == ("steps", 4)


@pytest.mark.parametrize("gpus", [2])
def test_callbacks_of_several_ranks_get_those_of_rank_0(train: Callable[..., redline.Run], gpus: int) -> None:
    recorder = Recorder()
    run = train(callbacks=[recorder], gpus=gpus)
    assert run.status is Status.FINISHED
    assert [event.step for event in recorder.events if event.type == "step"] == [1, 2, 3, 4]
    assert [dict(event.fields) for event in recorder.events] == logged(run)
    with pytest.raises(redline.UserError, match="processes of their own"):
        train(metrics={"one": lambda model: 1.0}, gpus=gpus)


def test_nothing_that_a_callback_or_metric_does_changes_the_weights(train: Callable[..., redline.Run]) -> None:
    import torch

    class Vandal:
        def on_step(self, event: redline.StepEvent) -> None:
            event.fields["loss"] = 0.0  # type: ignore[index]
            torch.manual_seed(event.step)

        def on_eval(self, event: redline.EvalEvent) -> None:
            event.fields.clear()  # type: ignore[attr-defined]

    def metric(model: redline.Model) -> float:
        assert not model.module.training
        torch.rand(7)
        return float(len(model.sample("red", tokens=3, seed=5)[0]))

    plain, disturbed = train(), train(callbacks=[Vandal(), Recorder()], metrics={"written": metric})
    one, two = weights(plain), weights(disturbed)
    assert all(np.array_equal(one[key], two[key]) for key in one)
    assert [event["loss"] for event in plain.events("eval")] == [event["loss"] for event in disturbed.events("eval")]
    assert all(event["written"] > 0 for event in disturbed.events("eval"))


@pytest.mark.parametrize(("method", "step"), [("on_step", 1), ("on_eval", 0), ("on_checkpoint", 2), ("on_stop", 4)])
def test_a_callback_that_raises_stops_the_run_and_is_named(
    train: Callable[..., redline.Run], method: str, step: int
) -> None:
    def fail(self: object, event: Any) -> None:
        raise ValueError("no such luck")

    broken = type("Broken", (), {method: fail})()
    recorder = Recorder()
    with pytest.raises(redline.UserError, match=rf"Broken\.{method} raised ValueError: no such luck") as caught:
        train(callbacks=[broken, recorder])
    assert isinstance(caught.value.__cause__, ValueError)
    run = redline.open_run("latest")
    assert run.metrics["step"] in (step, step + 1), "it stops after the step"
    assert recorder.events[-1].type == "stop"
    assert run.stop_reason is (StopReason.STEPS if method == "on_stop" else StopReason.REQUESTED)
    assert run.resume(show=False).metrics["step"] == 4, "nothing is lost"


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda model: 1 / 0, "ZeroDivisionError"),
        (lambda model: "good", "not a number"),
        (lambda model: float("nan"), "nan"),
    ],
)
def test_a_metric_that_fails_stops_the_run_and_is_named(
    train: Callable[..., redline.Run], metric: Any, words: str
) -> None:
    with pytest.raises(redline.UserError, match=words) as caught:
        train(metrics={"quality": metric})
    assert "metrics['quality']" in caught.value.what
    assert redline.open_run("latest").stop_reason is StopReason.REQUESTED


def test_a_metric_may_not_take_a_figure_of_the_job(train: Callable[..., redline.Run]) -> None:
    with pytest.raises(redline.UserError, match="cannot be the name"):
        train(metrics={"loss": lambda model: 1.0})


def test_a_callback_can_stop_the_run(train: Callable[..., redline.Run]) -> None:
    class Enough:
        def on_step(self, event: redline.StepEvent) -> None:
            if event.step == 2:
                raise redline.StopTraining

    run = train(callbacks=[Enough()])
    assert (run.status, run.metrics["step"]) == (Status.STOPPED, 2)


class NoEvent:
    def on_step(self) -> None: ...


class TwoEvents:
    def on_eval(self, event: Any, more: Any) -> None: ...


class Misspelt:
    def on_evaluate(self, event: Any) -> None: ...


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (NoEvent(), "on_step"),
        (TwoEvents(), "on_eval"),
        (Misspelt(), "Did you mean 'on_eval'"),
        (Recorder, "is a class"),
        (object(), "none of the methods"),
        (print, "none of the methods"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused_at_once(
    train: Callable[..., redline.Run], callback: Any, words: str
) -> None:
    with pytest.raises(redline.UserError, match=words) as caught:
        train(callbacks=[callback])
    assert caught.value.fix
    assert not Path("runs").exists()


@pytest.mark.parametrize("metric", [3, lambda: 1.0, lambda model, more: 1.0])
def test_a_metric_that_cannot_be_called_is_refused_at_once(train: Callable[..., redline.Run], metric: Any) -> None:
    with pytest.raises(redline.UserError, match="metrics: quality"):
        train(metrics={"quality": metric})
    assert not Path("runs").exists()
