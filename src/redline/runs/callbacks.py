"""Callbacks and metrics of a Python program that trains: typed events, and the rules that keep a run safe from them.

Callbacks receive copies of the events that are written to events.jsonl. They are called by the training process, after
the event is on disk. An exception in one stops the run as `redline stop` does, so that nothing is lost.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redline.errors import UsageError, UserError, did_you_mean
from redline.runs.events import Event, number


@dataclass(frozen=True)
class RunEvent:
    """An event of a run. `fields` holds everything that events.jsonl has of it."""

    type: str
    time: float
    step: int
    fields: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class StepEvent(RunEvent):
    """A logged step: every `monitor.log_every` steps, and the last one."""

    tokens: int
    loss: float | None  # None if it was not finite
    lr: float | None
    grad_norm: float | None
    tokens_per_s: float | None
    mfu: float | None


@dataclass(frozen=True)
class EvalEvent(RunEvent):
    tokens: int
    loss: float | None
    metrics: Mapping[str, float]  # all other numbers of the evaluation: of the job, and of `metrics=`


@dataclass(frozen=True)
class CheckpointEvent(RunEvent):
    path: str | None


@dataclass(frozen=True)
class StopEvent(RunEvent):
    reason: str  # a value of `redline.vocabulary.StopReason`
    tokens: int
    hours: float | None
    cost_usd: float | None


class StopTraining(Exception):  # noqa: N818 - a request, not an error
    """Raise this in a callback to save and stop the run. `redline.train` then returns as after `redline stop`."""


class Callback:
    """Base class of callbacks. Override what is needed; a class of its own with some of these methods works as well."""

    def on_step(self, event: StepEvent) -> None: ...
    def on_eval(self, event: EvalEvent) -> None: ...
    def on_checkpoint(self, event: CheckpointEvent) -> None: ...
    def on_stop(self, event: StopEvent) -> None: ...


def typed_event(event: Event) -> RunEvent | None:
    """Return the event for callbacks; None for types that have no callback."""
    kind, step, tokens = str(event.get("type")), _whole(event, "step"), _whole(event, "tokens")
    common: dict[str, Any] = {"type": kind, "time": number(event, "time") or 0.0, "step": step}
    common["fields"] = copy.deepcopy(dict(event))
    if kind == "step":
        figures: dict[str, Any] = {
            key: number(event, key) for key in ("loss", "lr", "grad_norm", "tokens_per_s", "mfu")
        }
        return StepEvent(**common, tokens=tokens, **figures)
    if kind == "eval":
        known = ("type", "time", "step", "tokens", "loss")
        metrics = {key: value for key in event if key not in known and (value := number(event, key)) is not None}
        return EvalEvent(**common, tokens=tokens, loss=number(event, "loss"), metrics=metrics)
    if kind == "checkpoint":
        path = event.get("path")
        return CheckpointEvent(**common, path=None if path is None else str(path))
    if kind == "stop":
        costs: dict[str, Any] = {key: number(event, key) for key in ("hours", "cost_usd")}
        return StopEvent(**common, tokens=tokens, reason=str(event.get("reason")), **costs)
    return None


def _whole(event: Event, key: str) -> int:
    return int(number(event, key) or 0)


METHODS = {"step": "on_step", "eval": "on_eval", "checkpoint": "on_checkpoint", "stop": "on_stop"}


class Callbacks:
    """What a Python program adds to a run: callbacks and metrics.

    Nothing here raises while the run trains: an exception asks the run to stop, and is kept until it has been saved.
    """

    def __init__(
        self,
        callbacks: Sequence[object] = (),
        metrics: Mapping[str, Metric] | None = None,
        model_of: Callable[[Any], Any] = lambda objective: objective,
    ) -> None:
        """`model_of` returns what metrics receive, from the objective that is trained."""
        self._callbacks, self.metrics, self._model_of = list(callbacks), dict(metrics or {}), model_of
        for callback in self._callbacks:
            _check(callback)
        _check_metrics(self.metrics)
        self.request_stop: Callable[[], None] = lambda: None  # set by what trains
        self.failure: tuple[str, BaseException] | None = None  # the callback or metric, and what it raised

    def measure(self, objective: Any, taken: Iterable[str]) -> dict[str, float]:
        """Return the values of the metrics. `taken` are the names that the job's own evaluation has."""
        found: dict[str, float] = {}
        for name, metric in self.metrics.items():
            try:
                if name in set(taken):
                    raise ValueError("the job's evaluation has a figure of this name; choose another")
                found[name] = _as_number(metric(self._model_of(objective)))
            except Exception as error:
                self.fail(f"metrics[{name!r}]", error)
        return found

    def event(self, event: Event) -> None:
        method = METHODS.get(str(event.get("type")))
        if method is None:
            return
        for callback in self._callbacks:
            handler = getattr(callback, method, None)
            if handler is None:
                continue
            typed = typed_event(event)  # each gets its own, so that none can change what the next one sees
            try:
                handler(typed)
            except StopTraining:
                self.request_stop()
            except Exception as error:
                self.fail(f"{_name(callback)}.{method}", error)

    def fail(self, name: str, error: BaseException) -> None:
        """Keep the first failure, and ask the run to stop."""
        self.failure = self.failure or (name, error)
        self.request_stop()

    def close(self) -> None:
        return

    def raise_failure(self, where: str) -> None:
        """Raise an error if a callback or a metric has failed. The run has been saved by then."""
        if self.failure is None:
            return
        name, error = self.failure
        fix = f"Fix it, and go on with redline.train(resume={where!r}, …)."
        what = f"{name} raised {type(error).__name__}: {error}. The run was saved and stopped."
        raise UserError(what, where=where, fix=fix) from error


def _check(callback: object) -> None:
    """Refuse an object that would never be called, or that cannot be called with one event."""
    name = _name(callback)
    if isinstance(callback, type):
        what = "is a class, not an object."
        raise UsageError(what, where=f"callbacks: {name}", fix=f"Write {name}(), with what it needs.")
    handlers = [attribute for attribute in dir(callback) if attribute.startswith("on_")]
    if unknown := [handler for handler in handlers if handler not in METHODS.values()]:
        hint = did_you_mean(unknown[0], METHODS.values())
        raise UsageError(f"{unknown[0]} is never called.", where=f"callbacks: {name}", fix=hint or _methods_hint())
    if not handlers:
        what = "has none of the methods that are called."
        raise UsageError(what, where=f"callbacks: {name}", fix=_methods_hint())
    for handler in handlers:
        fix = f"Define it as {handler}(self, event)."
        _check_parameters(getattr(callback, handler), handler, f"callbacks: {name}", fix)


def _methods_hint() -> str:
    return f"Define some of {', '.join(METHODS.values())}, each with one parameter: the event."


def _name(callback: object) -> str:
    return callback.__name__ if isinstance(callback, type) else type(callback).__name__


# ----------------------------------------------------------------------------------------------------
# Metrics: functions of the model, computed at every evaluation and written into its event.


Metric = Callable[[Any], float]
Measure = Callable[[Any, Iterable[str]], dict[str, float]]
_TAKEN = frozenset({"type", "time", "step", "tokens", "loss", "perplexity", "bits_per_byte", "seconds", "hours"})


def _check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Refuse names that an evaluation has already, and what cannot be called with the model."""
    for name, metric in metrics.items():
        where = f"metrics: {name}"
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            fix = f"Use letters, digits and _, and none of {', '.join(sorted(_TAKEN))}."
            raise UsageError(f"{name!r} cannot be the name of a metric.", where="metrics", fix=fix)
        if not callable(metric):
            raise UsageError(f"{metric!r} is not a function.", where=where, fix="Give a function of the model.")
        _check_parameters(metric, "", where, "Define it with one parameter: the model.")


def _check_parameters(function: Callable[..., Any], name: str, where: str, fix: str) -> None:
    """Refuse a function that cannot be called with one argument."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(object())
    except TypeError:
        raise UsageError(f"{name}{signature} cannot be called with one argument.", where=where, fix=fix) from None


def _as_number(value: Any) -> float:
    try:
        figure = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"it returned {type(value).__name__}, not a number") from None
    if not math.isfinite(figure):
        raise ValueError(f"it returned {figure}")
    return figure
