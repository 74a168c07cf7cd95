"""A step as one launch. Recording needs a GPU (tests/gpu); what surrounds it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.runs.events import read_events
from redline.training import cuda_graph as graph
from redline.training.cuda_graph import GraphedBackward, not_recorded, unless_slower, use_graph
from redline.training.step import StepBatch


class Again:
    """In place of a CUDA graph: does the work again, on what lies in the recorded places."""

    def __init__(self, work: Callable[[], tuple[Tensor, dict[str, Tensor]]]) -> None:
        self.work, self.result = work, work()

    def replay(self) -> None:
        loss, terms = self.work()
        self.result[0].copy_(loss)
        for name, term in terms.items():
            self.result[1][name].copy_(term)


def again(work: Any) -> Any:
    found = Again(work)
    return found, found.result


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
def test_other_batches_other_weights_same_places(micros: int) -> None:
    work = Sum()
    graphed = GraphedBackward(work, [work.parameter], batch_of(1.0, micros=micros), record=again)
    for value, weight in ((4.0, 2.0), (5.0, 8.0)):
        batch = batch_of(value, weight, micros)
        loss, terms = graphed(1, batch)
        expected = Sum()
        wanted, _ = expected(1, batch)
        assert torch.equal(loss, wanted)
        assert torch.equal(terms["sum"], wanted)


def test_a_result_outlives_the_next_replay() -> None:
    work = Sum()
    graphed = GraphedBackward(work, [work.parameter], batch_of(1.0), record=again)
    first, terms = graphed(0, batch_of(2.0))
    before = first.clone(), terms["sum"].clone()
    graphed(1, batch_of(7.0))
    assert torch.equal(first, before[0])
    assert torch.equal(terms["sum"], before[1])


def test_a_batch_is_not_changed_by_the_next() -> None:
    work = Sum()
    recorded = batch_of(1.0)
    graphed = GraphedBackward(work, [work.parameter], recorded, record=again)
    graphed(0, batch_of(9.0))
    assert torch.equal(recorded.micros[0]["x"], torch.full((3,), 1.0))


def test_gradients_come_back_after_they_were_cleared() -> None:
    work = Sum()
    graphed = GraphedBackward(work, [work.parameter], batch_of(1.0), record=again)
    recorded = graphed.gradients[0]
    work.parameter.grad = None
    graphed(0, batch_of(2.0))
    assert work.parameter.grad is recorded


def test_a_batch_of_another_size_is_not_replayed() -> None:
    """As where more documents came than there was room for."""
    work = Sum()
    graphed = GraphedBackward(work, [work.parameter], batch_of(1.0), record=again)
    larger = StepBatch([{"x": torch.full((1,), 4.0)}], {"tokens": 2.0})
    loss, _ = graphed(1, larger)
    assert torch.equal(loss, Sum()(1, larger)[0])
    assert torch.equal(graphed(2, batch_of(5.0))[0], Sum()(2, batch_of(5.0))[0])


@pytest.mark.parametrize(
    ("plain_s", "graph_s", "found"),
    [
        (0.02, 0.01, "forward and backward are one launch: 20.0 → 10.0 ms"),
        (0.06, 0.06, "forward and backward are one launch: 60.0 → 60.0 ms"),
        # of a host that is held up: the kernels are as short as ever
        (0.11, 0.06, "forward and backward are one launch: 110.0 → 60.0 ms"),
        (0.06, 0.07, "forward and backward stay many launches: as one they take 70.0 ms, not 60.0"),
    ],
)
def test_it_is_taken_unless_it_is_slower(
    monkeypatch: pytest.MonkeyPatch, plain_s: float, graph_s: float, found: str
) -> None:
    plain, graphed = Sum(), Sum()
    monkeypatch.setattr(graph, "_seconds", lambda work, _: plain_s if work is plain else graph_s)
    assert unless_slower(lambda: graphed, plain, batch_of(1.0)) == (graphed if "one launch" in found else None, found)


def test_the_log_says_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    work, said = Sum(), Said()
    step = SimpleNamespace(backward=work, graph=None, parameters=[work.parameter])
    monkeypatch.setattr(graph, "GraphedBackward", lambda *_: work)
    monkeypatch.setattr(graph, "_seconds", lambda *_: 0.01)
    use_graph(step, batch_of(1.0), said)  # type: ignore[arg-type]
    assert step.graph is work
    assert said.events == [("warmup", "forward and backward are one launch: 10.0 → 10.0 ms")]


class Said:
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.events: list[tuple[str, str]] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def emit(self, kind: str, *, message: str) -> None:
        self.events.append((kind, message))


def test_a_graph_that_fails_costs_nothing_but_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    work = Sum()
    step = SimpleNamespace(backward=work, graph=None, parameters=[work.parameter])
    monkeypatch.setattr(graph, "GraphedBackward", fail)
    said = Said()
    use_graph(step, batch_of(1.0), said)  # type: ignore[arg-type]
    assert step.graph is None
    assert said.warnings == [
        "a CUDA graph could not be recorded (operation not permitted when stream is capturing); "
        "going on without, which is slower"
    ]


def test_where_there_can_be_none_it_says_so(world: Any, tmp_path: Path) -> None:
    world.run(tmp_path / "run", "train.graph=true", "train.steps=1")
    said = [event["message"] for event in read_events(tmp_path / "run/events.jsonl") if event["type"] == "warning"]
    assert said == ["train.graph is off: it needs a GPU"]


@pytest.mark.parametrize(
    ("device", "replayable", "alone", "recorded"),
    [
        ("cuda", True, True, True),
        ("cpu", True, True, False),
        ("cuda", False, True, False),
        ("cuda", True, False, False),
    ],
)
def test_who_gets_a_graph(device: str, replayable: bool, alone: bool, recorded: bool) -> None:
    reason = not_recorded(torch.device(device), replayable=replayable, alone=alone)
    assert (reason == "") == recorded
