import io
import os
import pty
import re
import select
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redline.runs.console import Console

PLAN = {
    "type": "plan",
    "parameters": {"total": 350_444_544, "trainable": 350_444_544, "matmul": 303e6},
    "flops_per_token": {"useful": 2.28e9, "causal": 2.1e9, "formula": "6N + 12LHQT"},
    "memory_gib": {"weights": 1.3, "optimizer": 2.6, "activations": 48.2, "peak": 62.1, "available": 139.8},
    "batch": {"micro": 32, "accumulation": 4, "global": 128, "tokens_per_step": 131_072},
    "choices": [{"key": "train.precision", "value": "bf16", "reason": "fp8 was slower [measured]"}],
    "warnings": ["little validation data"],
    "horizon": {"steps": 300, "tokens": 39e6, "seconds": 120},
}
STEP = {
    "type": "step",
    "step": 120,
    "loss": 3.21456,
    "lr": 3e-4,
    "grad_norm": 0.5,
    "tokens_per_s": 412_000.0,
    "mfu": 0.481,
    "memory_gib": 61.8,
    "progress": 0.4,
    "eta_s": 90,
    "cost_usd": None,
}


def plain(*events, total=300):
    file = io.StringIO()
    console = Console(file, total=total)
    for event in events:
        console.event(event)
    console.close()
    return file.getvalue()


def rich(*events, ticks=()):
    file = io.StringIO()
    console = Console(file, interactive=True, total=300)
    for event in events:
        console.event(event)
    for tick in ticks:
        console.tick(*tick)
    console.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_a_pipe_is_not_interactive():
    assert not Console(io.StringIO()).interactive


def test_a_step_is_one_plain_line_with_the_known_figures():
    (line,) = plain(STEP).splitlines()
    for part in ("step 120/300", "40%", "loss 3.2146", "412k tok/s", "MFU 48.1%", "61.8 GiB", "ETA 1m30s"):
        assert part in line
    assert "$" not in line


def test_cost_is_shown_only_when_there_is_a_price():
    assert "$1.20" in plain(STEP | {"cost_usd": 1.2})


def test_unknown_mfu_is_not_shown():
    assert "MFU" not in plain(STEP | {"mfu": None})


def test_a_loss_that_is_not_finite_and_skipped_updates_are_shown():
    line = plain(STEP | {"loss": None, "skipped": 2})
    assert "loss not finite" in line
    assert "2 skipped" in line


@pytest.mark.parametrize("show", [plain, rich])
def test_the_plan_shows_every_choice_with_its_reason(show):
    text = show(PLAN)
    for part in ("350.4M parameters", "6N + 12LHQT", "micro 32 × 4", "62.1 of 139.8 GiB (44%)", "activations 48.20"):
        assert part in text
    for part in ("train.precision", "bf16", "fp8 was slower [measured]", "little validation data", "300 steps"):
        assert part in text


def test_a_run_of_unknown_speed_takes_at_most_its_train_hours():
    assert "at most 2m00s" in plain(PLAN | {"hours": 1 / 30, "throughput": {"tokens_per_s": None}})
    assert "about 2m00s" in plain(PLAN | {"hours": 1 / 30, "throughput": {"tokens_per_s": 5000}})


def test_an_evaluation_shows_its_change_and_every_metric():
    first = {"type": "eval", "step": 50, "loss": 3.5, "perplexity": 33.1, "bits_per_byte": 1.25, "exact_match": 0.5}
    one, two = plain(first, first | {"step": 100, "loss": 3.25}).splitlines()
    for part in ("val loss 3.5000", "ppl 33.10", "bits/byte 1.2500", "exact_match 0.5"):
        assert part in one
    assert "(-0.2500)" in two
    assert "(" not in one


def test_every_other_type_of_event_is_shown():
    text = plain(
        {"type": "start", "run_dir": "runs/a", "recipe": "quickstart", "device": "NVIDIA H200", "resumed_from": 100},
        {"type": "warmup", "message": "compiling…"},
        {"type": "checkpoint", "step": 100, "path": "checkpoints/step-100", "seconds": 0.4, "bytes": 3 << 30},
        {"type": "recovery", "message": "out of memory: micro-batch 32 → 16"},
        {"type": "sample", "label": "after", "prompt": "Once", "text": "upon\na time"},
        {"type": "stop", "reason": "reached 300 steps", "step": 300, "hours": 1.5},
    )
    for part in ("runs/a", "quickstart", "NVIDIA H200", "resumed from step 100", "compiling…", "3.0 GiB"):
        assert part in text
    for part in ("recovery  out of memory", "    > Once\n    upon\n    a time\n", "300 steps · 1h30m"):
        assert part in text


@pytest.mark.parametrize(("reason", "word"), [("reached 300 steps", "finished"), ("failed: disk full", "failed")])
def test_the_last_lines_state_how_the_run_ended(reason, word):
    assert plain({"type": "stop", "reason": reason}).startswith(word)


@pytest.mark.parametrize("show", [plain, rich])
def test_a_sample_cannot_write_to_the_terminal(show):
    text = show({"type": "sample", "prompt": "[bold]x[/nope]", "text": "\x1b]0;owned\x07 \x1b[2J \u202e \ud800 [red]"})
    assert "[bold]x[/nope]" in text
    assert "[red]" in text
    assert not re.search("[\x07\x1b\u202e\ud800]", text)


def test_plain_output_has_no_control_codes_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = plain({"type": "start", "run_dir": "a"}, PLAN, STEP, {"type": "warning", "message": "careful"})
    assert not re.search("[\x00-\x09\x0b-\x1f]", text)


def test_every_plain_line_is_flushed_at_once(tmp_path):
    with open(tmp_path / "log", "w") as file:
        Console(file).event(STEP)
        assert "loss" in (tmp_path / "log").read_text()


def test_an_ascii_terminal_gets_replacement_characters():
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, encoding="ascii"))
    console.event({"type": "warning", "message": "√ rule"})
    assert raw.getvalue() == b"warning  ? rule\n"


class ClosedPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("interactive", [False, True])
def test_a_closed_pipe_does_not_end_the_run(interactive):
    console = Console(ClosedPipe(), interactive=interactive)
    console.event({"type": "start", "run_dir": "a"})
    console.event(PLAN)
    console.event({"type": "sample", "text": "a"})
    console.close()
    assert console._closed


def test_the_live_bar_shows_the_newest_tick_and_the_last_facts():
    file = io.StringIO()
    console = Console(file, interactive=True, total=300)
    console.event(STEP)
    console.tick(150, 0.5, 75)
    console._screen._live.refresh()
    console.close()
    assert "step 150/300" in file.getvalue()
    assert "50%" in file.getvalue()
    assert "loss 3.2146" in file.getvalue()


def test_ticks_after_the_end_are_ignored():
    file = io.StringIO()
    console = Console(file, interactive=True)
    console.close()
    console.tick(1, 0.5, 1)
    assert file.getvalue() == ""


def test_ticks_are_cheap():
    console = Console(io.StringIO(), interactive=True, total=10**6)
    began = time.perf_counter()
    for step in range(5000):
        console.tick(step, step / 5000, 1.0)
    console.close()
    assert (time.perf_counter() - began) / 5000 < 1e-3


def test_a_real_terminal_gets_the_bar_and_its_cursor_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal:
        console = Console(terminal)
        assert console.interactive
        console.event(STEP)
        console.close()
        raw = b""
        while select.select([ours], [], [], 0.5)[0]:  # a terminal hands over what it has, not all at once
            raw += os.read(ours, 65536)
        seen = raw.decode()
    os.close(ours)
    assert "\x1b[?25l" in seen
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


odd = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400)
nested = st.recursive(
    odd, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
FIELDS = sorted({*PLAN, *STEP, "message", "text", "prompt", "label", "path", "seconds", "bytes", "reason", "skipped"})
KINDS = ["start", "plan", "warmup", "step", "eval", "checkpoint", "sample", "warning", "stop", "new-kind"]
plan_parts = st.fixed_dictionaries(
    {}, optional={k: st.dictionaries(st.sampled_from([*v]), odd) for k, v in PLAN.items() if isinstance(v, dict)}
)
events = st.builds(
    lambda kind, fields, plan: {**fields, **plan, "type": kind},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(FIELDS), nested, max_size=8),
    plan_parts,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(event=events, tick=st.tuples(odd, odd, odd))
def test_odd_events_are_shown_without_an_error(event, tick):
    assert "could not be shown" not in plain(event)
    assert "could not be shown" not in rich(event, ticks=[tick])


def test_an_event_that_cannot_be_shown_does_not_end_the_run(monkeypatch):
    def broken(self, event):
        raise ZeroDivisionError

    monkeypatch.setattr(Console, "_step", broken)
    assert plain(STEP, {"type": "warning", "message": "next"}) == (
        "(step could not be shown: ZeroDivisionError)\nwarning  next\n"
    )
