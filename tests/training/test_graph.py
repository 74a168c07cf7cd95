"""Steps as CUDA graphs. Recording one needs a GPU (tests/gpu); these tests replace the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.runs.events import read_events
from redline.training import step as training_step
from redline.training.step import GraphedBackward, StepBatch, graph_if_faster, not_graphable, use_graph


class FakeGraph:
    """Replaces a CUDA graph: a replay calls the work again, on the recorded tensors."""

    def __init__(self, work: Callable[[], tuple[Tensor, dict[str, Tensor]]]) -> None:
        self.work, self.result = work, work()

    def replay(self) -> None:
        loss, terms = self.work()
        self.result[0].copy_(loss)
        for name, term in terms.items():
            self.result[1][name].copy_(term)


def fake_record(work: Any) -> Any:
    graph = FakeGraph(work)
    return graph, graph.result


def batch_of(value: float, weight: float = 2.0, micros: int = 1) -> StepBatch:
    return StepBatch([{"x": torch.full((3,), value + i)} for i in range(micros)], {"tokens": weight})


class Sum:
    """Σ p·x / weight over the micro-batches, and its gradient."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.ones(3))

    def __call__(self, step: int, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
        self.parameter.grad = None
        parts = [(self.parameter * micro["x"]).sum() / batch.weights["tokens"] for micro in batch.micros]
        loss = torch.stack(parts).sum()
        loss.backward()
        return loss.detach(), {"sum": loss.detach().clone()}


@pytest.mark.parametrize("micros", [1, 3])
def test_a_replay_computes_the_new_batch(micros: int) -> None:
    work = Sum()
    graphed = GraphedBackward(work, [work.parameter], batch_of(1.0, micros=micros), record=fake_record)
    for value, weight in ((4.0, 2.0), (5.0, 8.0)):
        batch = batch_of(value, weight, micros)
        loss, terms = graphed(1, batch)
        expected = Sum()
        wanted, _ = expected(1, batch)
        assert torch.equal(loss, wanted)
        assert torch.equal(terms["sum"], wanted)


def test_a_result_outlives_the_next_replay() -> None:
    work = Sum()
    graphed = GraphedBackward(work, [work.parameter], batch_of(1.0), record=fake_record)
    first, terms = graphed(0, batch_of(2.0))
    before = first.clone(), terms["sum"].clone()
    graphed(1, batch_of(7.0))
    assert torch.equal(first, before[0])
    assert torch.equal(terms["sum"], before[1])


def test_a_batch_is_not_changed_by_the_next() -> None:
    work = Sum()
    recorded = batch_of(1.0)
    graphed = GraphedBackward(work, [work.parameter], recorded, record=fake_record)
    graphed(0, batch_of(9.0))
    assert torch.equal(recorded.micros[0]["x"], torch.full((3,), 1.0))


def test_gradients_come_back_after_they_were_cleared() -> None:
    work = Sum()
    graphed = GraphedBackward(work, [work.parameter], batch_of(1.0), record=fake_record)
    recorded = graphed.gradients[0]
    work.parameter.grad = None
    graphed(0, batch_of(2.0))
    assert work.parameter.grad is recorded


def test_a_batch_of_another_size_is_not_replayed() -> None:
    """A packed batch may have more documents than the recorded one has room for."""
    work = Sum()
    graphed = GraphedBackward(work, [work.parameter], batch_of(1.0), record=fake_record)
    larger = StepBatch([{"x": torch.full((1,), 4.0)}], {"tokens": 2.0})
    loss, _ = graphed(1, larger)
    assert torch.equal(loss, Sum()(1, larger)[0])
    assert torch.equal(graphed(2, batch_of(5.0))[0], Sum()(2, batch_of(5.0))[0])


@pytest.mark.parametrize(
    ("plain_s", "graph_s", "used"),
    [
        (0.02, 0.01, True),
        (0.06, 0.06, True),
        (0.11, 0.06, True),  # the host was busy: the kernels take as long as ever
        (0.06, 0.07, False),
    ],
)
def test_a_graph_is_used_unless_it_is_slower(
    monkeypatch: pytest.MonkeyPatch, plain_s: float, graph_s: float, used: bool
) -> None:
    plain, graphed = Sum(), Sum()
    monkeypatch.setattr(training_step, "_seconds", lambda work, _: plain_s if work is plain else graph_s)
    graph, message = graph_if_faster(lambda: graphed, plain, batch_of(1.0))
    assert graph is (graphed if used else None)
    assert f"{1e3 * plain_s:.1f}" in message
    assert f"{1e3 * graph_s:.1f}" in message


class FakeMonitor:
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.events: list[tuple[str, str]] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def emit(self, kind: str, *, message: str) -> None:
        self.events.append((kind, message))


def test_both_times_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    work, monitor = Sum(), FakeMonitor()
    step = SimpleNamespace(backward=work, graph=None, parameters=[work.parameter])
    monkeypatch.setattr(training_step, "GraphedBackward", lambda *_: work)
    monkeypatch.setattr(training_step, "_seconds", lambda *_: 0.01)
    use_graph(step, batch_of(1.0), monitor)  # type: ignore[arg-type]
    assert step.graph is work
    ((kind, message),) = monitor.events
    assert (kind, "10.0 ms" in message) == ("warmup", True)


def test_a_graph_that_cannot_be_recorded_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\ndetails")

    work = Sum()
    step = SimpleNamespace(backward=work, graph=None, parameters=[work.parameter])
    monkeypatch.setattr(training_step, "GraphedBackward", fail)
    monitor = FakeMonitor()
    use_graph(step, batch_of(1.0), monitor)  # type: ignore[arg-type]
    assert step.graph is None
    (warning,) = monitor.warnings
    assert "operation not permitted when stream is capturing" in warning
    assert "details" not in warning, "only the first line of the error is shown"


def test_a_run_that_cannot_record_a_graph_warns(world: Any, tmp_path: Path) -> None:
    world.run(tmp_path / "run", "train.graph=true", "train.steps=1")
    warnings = [event["message"] for event in read_events(tmp_path / "run/events.jsonl") if event["type"] == "warning"]
    assert ["train.graph" in warning for warning in warnings] == [True]


@pytest.mark.parametrize(
    ("device", "replayable", "single_process", "recorded"),
    [
        ("cuda", True, True, True),
        ("cpu", True, True, False),
        ("cuda", False, True, False),
        ("cuda", True, False, False),
    ],
)
def test_which_steps_can_be_recorded(device: str, replayable: bool, single_process: bool, recorded: bool) -> None:
    reason = not_graphable(torch.device(device), replayable=replayable, single_process=single_process)
    assert (reason == "") == recorded
