"""The console: events of a run as text while it trains. A live bar on a terminal, plain lines anywhere else.

Nothing here may disturb training: any field may be missing, the terminal may be gone, and samples of a model may hold
brackets, escape codes or half characters.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from redline.runs.events import Event, clean, finite, number, one_line, section
from redline.runs.summary import ending, totals
from redline.units import format_bytes, format_count, format_gib, format_seconds, format_usd
from redline.vocabulary import status_of_stop

if TYPE_CHECKING:
    from rich.table import Table

    from redline.runs.screen import Screen

# Fields of an evaluation that have a place of their own in its line; every other number is a metric of the job.
_EVAL_FIELDS = frozenset({"type", "time", "step", "tokens", "loss", "perplexity", "bits_per_byte", "seconds", "hours"})


class Console:
    """Show events. `interactive=None` asks the file whether it is a terminal; `total` is the number of steps."""

    def __init__(self, file: TextIO | None = None, interactive: bool | None = None, total: int | None = None) -> None:
        self._file = file if file is not None else sys.stderr
        self.interactive = _is_terminal(self._file) if interactive is None else interactive
        self._total = total
        self._last_loss: float | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._screen = _open_screen(self._file) if self.interactive else None

    def event(self, event: Event) -> None:
        """Show one event. Never raise: an event that cannot be shown is replaced by one line that says so."""
        with self._lock:
            try:
                self._show(event)
            except Exception as error:
                self._write(f"({clean(event.get('type'))} could not be shown: {type(error).__name__})", "yellow")

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        """Move the bar between logged steps. This only stores values; the screen draws them 8 times a second."""
        if self._screen is not None and not self._closed:
            self._screen.move(finite(progress), self._step_label(step), _duration("ETA", eta_s))

    def progress(self, share: float | None, label: str, facts: list[str]) -> None:
        """Show a bar for work before the run, such as reading data; nothing without a terminal."""
        if self._screen is not None and not self._closed:
            self._screen.facts = [one_line(fact) for fact in facts]
            self._screen.move(finite(share), one_line(label), "")

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._closed = True
            if self._screen is not None:
                self._screen.close()

    def _show(self, event: Event) -> None:
        kind = event.get("type")
        if kind == "start":
            self._write(_start_line(event), "bold")
        elif kind == "plan":
            self._plan(event)
        elif kind == "warmup":
            self._warmup(one_line(event.get("message")) or "warming up…")
        elif kind == "step":
            self._step(event)
        elif kind == "eval":
            self._eval(event)
        elif kind == "checkpoint":
            self._write(_checkpoint_line(event), "dim")
        elif kind == "mirror":
            self._write(_mirror_line(event), "dim")
        elif kind == "sample":
            self._sample(event)
        elif kind in ("warning", "replan", "recovery"):
            self._write(f"{kind}  {one_line(event.get('message'))}", "yellow")
        elif kind == "stop":
            self._stop(event)

    def _plan(self, event: Event) -> None:
        rows, choices = list(plan_rows(event)), _choices(event)
        if self._screen is not None:
            self._screen.plan(rows, choices)
        else:
            for label, text in rows:
                self._write(f"  {label:<11}{text}")
            width = max((len(key) + len(value) + 3 for key, value, _ in choices), default=0)
            for key, value, reason in choices:
                self._write(f"  {f'{key} = {value}':<{min(width, 48)}}  {reason}".rstrip())
        warnings = event.get("warnings")
        for warning in warnings if isinstance(warnings, list) else []:
            self._write(f"warning  {one_line(warning)}", "yellow")

    def _warmup(self, message: str) -> None:
        if self._screen is not None:
            self._screen.wait(message)
        else:
            self._write(message)

    def _step(self, event: Event) -> None:
        step, facts = self._step_label(event.get("step")), step_facts(event)
        if self._screen is None:
            percent = _number(event, "progress", "{:4.0%}")
            self._write("  ".join(filter(None, [step, percent, *facts, _duration("ETA", event.get("eta_s"))])))
        else:
            self._screen.facts = facts
            self._screen.move(number(event, "progress"), step, _duration("ETA", event.get("eta_s")))

    def _eval(self, event: Event) -> None:
        loss = number(event, "loss")
        change = None if loss is None or self._last_loss is None else loss - self._last_loss
        self._last_loss = loss if loss is not None else self._last_loss
        worse = change is not None and change >= 0
        metrics = [_number(event, key, f"{one_line(key)} {{:.4g}}") for key in event if key not in _EVAL_FIELDS]
        parts = [
            self._step_label(event.get("step")),
            _number(event, "loss", "val loss {:.4f}") + ("" if change is None else f" ({change:+.4f})"),
            _number(event, "perplexity", "ppl {:.2f}"),
            _number(event, "bits_per_byte", "bits/byte {:.4f}"),
            *metrics,
        ]
        self._write("eval  " + "  ".join(filter(None, parts)), "yellow" if worse else "green")

    def _sample(self, event: Event) -> None:
        title = one_line(f"sample {clean(event.get('label'))} {self._step_label(event.get('step'))}")
        prompt, text = clean(event.get("prompt")), clean(event.get("text"))
        if self._screen is not None:
            self._screen.sample(title, prompt, text)
        else:
            body = (f"> {prompt}\n" if prompt else "") + text
            self._write("\n".join([title, *(f"    {line}" for line in body.split("\n"))]))

    def _stop(self, event: Event) -> None:
        lines = _stop_lines(event)
        if self._screen is not None:
            self._screen.finish(lines)
        else:
            for line in lines:
                self._write(line)

    def _step_label(self, step: object) -> str:
        step = finite(step)
        if step is None:
            return ""
        if not self._total:
            return f"step {step:,}"
        return f"step {step:>{len(f'{self._total:,}')},}/{self._total:,}"

    def _write(self, text: str, style: str = "") -> None:
        # A closed pipe or terminal must not stop training; the log has the event.
        with contextlib.suppress(OSError, ValueError):
            if self._screen is not None:
                self._screen.line(text, style)
            else:
                encoding = getattr(self._file, "encoding", None) or "utf-8"
                self._file.write(text.encode(encoding, "replace").decode(encoding) + "\n")
                self._file.flush()


def step_facts(event: Event) -> list[str]:
    """Return the figures of a step that are known, each as a few characters."""
    not_finite = "loss not finite" if "loss" in event and event["loss"] is None else ""
    facts = [
        _number(event, "loss", "loss {:.4f}") or not_finite,
        _number(event, "skipped", "{:.0f} skipped") if event.get("skipped") else "",
        _number(event, "tokens_per_s", "{} tok/s", format_count),
        _number(event, "samples_per_s", "{} samples/s", format_count),
        _number(event, "mfu", "MFU {:.1%}"),
        _number(event, "memory_gib", "{}", format_gib),
        _number(event, "cost_usd", "{}", format_usd),
        _number(event, "lr", "lr {:.2e}"),
        _number(event, "grad_norm", "grad {:.2f}"),
    ]
    return [fact for fact in facts if fact]


def plan_rows(event: Event) -> Iterator[tuple[str, str]]:
    """Return the plan as (label, text). A row without a label continues the one above."""
    parameters, flops = section(event, "parameters"), section(event, "flops_per_token")
    yield from _row(
        "model",
        [
            _number(parameters, "total", "{} parameters", format_count),
            _number(parameters, "trainable", "{} trainable", format_count),
        ],
    )
    recomputed = [_flops(flops, "recomputed", "formula_recomputed")] if number(flops, "recomputed") else []
    yield from _row(
        "compute", [_flops(flops, "useful", "formula"), _flops(flops, "executed", "formula_executed"), *recomputed]
    )
    yield from _row("", [f"assuming {one_line(flops['assumed'])}" if flops.get("assumed") else ""])
    batch = section(event, "batch")
    yield from _row(
        "batch",
        [
            _number(batch, "global", "{:,} sequences"),
            _number(batch, "micro", "micro {:,}") + _number(batch, "accumulation", " × {:,}"),
            _number(batch, "tokens_per_step", "{} tokens/step", format_count),
        ],
    )
    memory = section(event, "memory_gib")
    yield from _row("memory", [_memory_total(memory)])
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
    yield from _row("", [_number(memory, part, part + " {}", partial(_gib, decimals=2)) for part in parts])
    yield from _speed_rows(event)
    yield from _horizon_rows(event)


def _horizon_rows(event: Event) -> Iterator[tuple[str, str]]:
    """Return the length of the run and, for a resumed run, what remains.

    If train.hours ends the run before its steps do, the expected length by then is shown instead.
    """
    horizon = section(event, "horizon")
    length = [
        _number(horizon, "steps", "{:,} steps"),
        _number(horizon, "tokens", "{} tokens", format_count),
        _number(horizon, "epochs", "{} epochs", _epochs),
    ]
    ends_by_hours = number(horizon, "expected_tokens") is not None
    note = ""
    if ends_by_hours:
        before = ", ".join(filter(None, length))
        length = [
            _number(horizon, "expected_steps", "about {:,} steps"),
            _number(horizon, "expected_tokens", "{} tokens", format_count),
            _number(horizon, "expected_epochs", "{} epochs", _epochs),
        ]
        note = "train.hours ends it" + (f" before {before}" if before else "")
    # Without an estimate of the speed, train.hours is all that is known of the time.
    speed_known = number(section(event, "throughput"), "tokens_per_s") is not None
    time = "{}" if ends_by_hours else "about {}" if speed_known else "at most {}"
    cost = _number(event, "cost_usd", "{}", format_usd)
    hours = _number(event, "hours", time, lambda hours: format_seconds(3600 * hours))
    yield from _row("horizon", [*length, hours, cost, note])
    remaining = section(horizon, "remaining")
    total = _number(horizon, "steps", " of {:,}")
    yield from _row(
        "remaining",
        [
            _number(remaining, "steps", "{:,}") + (f"{total} steps" if number(remaining, "steps") is not None else ""),
            _number(remaining, "tokens", "{} tokens", format_count),
            _number(remaining, "epochs", "{} epochs", _epochs),
            _number(remaining, "seconds", "about {}" if speed_known else "at most {}", format_seconds),
        ],
    )


def _epochs(epochs: float) -> str:
    return f"{epochs:.3g}" if epochs < 1000 else f"{epochs:,.0f}"


def _speed_rows(event: Event) -> Iterator[tuple[str, str]]:
    """Return the expected speed, and what the hardware would allow."""
    speed, ceiling, measured = section(event, "throughput"), section(event, "ceiling"), section(event, "measured")
    source = one_line(speed.get("source"))
    unknown = "unknown on this machine; --probe measures it" if source == "unknown" else ""
    yield from _row(
        "speed",
        [
            _number(speed, "tokens_per_s", "{} tokens/s", format_count) or unknown or ("unknown" if source else ""),
            _number(speed, "mfu", "MFU {:.1%}") + _number(speed, "mfu_causal", " ({:.1%} causal)"),
            "" if unknown else source,
        ],
    )
    yield from _row(
        "",
        [
            _number(measured, "memory_gib", "{} at the peak", format_gib),
            _number(measured, "step_ms", "{:.0f} ms a step"),
            _number(measured, "compile_s", "first step after {:.0f} s"),
        ],
    )
    yield from _row(
        "ceiling",
        [
            _number(ceiling, "tokens_per_s", "{} tokens/s at the dense peak", format_count),
            _number(ceiling, "best_kernels_tokens_per_s", "{} at the best kernels' rates", format_count),
            _number(ceiling, "matmul_rate_tokens_per_s", "{} tokens/s at the measured matmul rate", format_count),
        ],
    )
    limits = ceiling.get("limits")
    parts = [part for part in limits if isinstance(part, Mapping)] if isinstance(limits, list) else []
    times = [f"{one_line(part.get('part'))} {_limit_ms(part)}" for part in parts]
    yield from _row("", [f"a step needs {' + '.join(times)}" if times else ""])


def _flops(flops: Mapping[str, Any], key: str, formula: str) -> str:
    amount = _number(flops, key, "{:.4g} GFLOP/token", lambda flop: flop / 1e9)
    return f"{amount} {key}" + (f" ({one_line(flops[formula])})" if flops.get(formula) else "") if amount else ""


def _limit_ms(part: Mapping[str, Any]) -> str:
    at_peak = _number(part, "ms_at_peak", " ({:,.0f} at peak)")
    return _number(part, "ms_per_step", "{:,.0f} ms") + at_peak


def _row(label: str, parts: list[str]) -> Iterator[tuple[str, str]]:
    if any(parts):
        yield label, " · ".join(filter(None, parts))


def _memory_total(memory: Mapping[str, Any]) -> str:
    peak, available = number(memory, "peak"), number(memory, "available")
    if peak is None or not available or available < 0:
        return _number(memory, "peak", "{} at the peak", format_gib)
    filled = round(24 * min(max(peak / available, 0.0), 1.0))
    return f"{'━' * filled}{'┈' * (24 - filled)} {_gib(peak, 1)} of {available:.1f} GiB ({peak / available:.0%})"


def _gib(gib: float, decimals: int) -> str:
    """Return an amount in GiB without the unit, which the row names, or in MiB with it if that is more readable."""
    return format_gib(gib) if 0 < gib < 0.1 else f"{gib:.{decimals}f}"


def _choices(event: Event) -> list[tuple[str, str, str]]:
    choices = event.get("choices")
    rows = [choice for choice in choices if isinstance(choice, Mapping)] if isinstance(choices, list) else []
    return [(one_line(c.get("key")), one_line(c.get("value")), one_line(c.get("reason"))) for c in rows]


def _start_line(event: Event) -> str:
    resumed = _number(event, "resumed_from", "resumed from step {:,}")
    parts = [*(one_line(event.get(key)) for key in ("run_dir", "recipe", "device")), resumed]
    return "redline  " + " · ".join(filter(None, parts))


def _checkpoint_line(event: Event) -> str:
    parts = [
        one_line(event.get("path")) or _number(event, "step", "step {:,}"),
        _number(event, "bytes", "{}", format_bytes),
        _duration("in", event.get("seconds")),
    ]
    return "saved  " + "  ".join(filter(None, parts))


def _mirror_line(event: Event) -> str:
    parts = [
        _number(event, "step", "step {:,}"),
        "to",
        one_line(event.get("url")),
        _duration("in", event.get("seconds")),
    ]
    return "copied  " + " ".join(filter(None, parts))


def _stop_lines(event: Event) -> list[str]:
    lines = [ending(status_of_stop(event), event), totals(event), one_line(event.get("message"))]
    return [line for line in lines if line]


def _number(fields: Mapping[str, Any], key: str, form: str, show: Callable[[float], Any] = lambda value: value) -> str:
    value = number(fields, key)
    return "" if value is None else form.format(show(value))


def _duration(label: str, seconds: object) -> str:
    value = finite(seconds)
    return "" if value is None else f"{label} {format_seconds(value)}"


def _open_screen(file: TextIO) -> Screen:
    # Imported here: rich takes a tenth of a second, and only a terminal needs it.
    from redline.runs.screen import Screen

    return Screen(file)


def _is_terminal(file: TextIO) -> bool:
    """Return whether the file is a terminal that can draw the bar: with control codes and more than ASCII."""
    encoding = getattr(file, "encoding", None) or ""
    try:
        return file.isatty() and os.environ.get("TERM") != "dumb" and encoding.lower().startswith("utf")
    except (AttributeError, ValueError):
        return False


_MAX_WIDTH = 1000


def print_table(table: Table) -> None:
    """Print every column of a table. On a narrower terminal lines wrap; rich would cut columns off instead."""
    from rich.console import Console as RichConsole

    width = RichConsole(width=_MAX_WIDTH).measure(table).maximum
    RichConsole(width=max(width, RichConsole().width)).print(table)
