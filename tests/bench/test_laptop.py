"""`python -m benchmarks laptop`: the comparison of its rows, and each arm for a few steps of a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import laptop, pages, pictures
from benchmarks.peers.laptop import measure
from benchmarks.studies.legibility import is_python
from redline.errors import UsageError
from redline.recipe.load import load

Row = dict[str, Any]


def row(arm: str, curve: list[tuple[float, int, float]], seed: int = 1337) -> Row:
    points = [
        {"step": tokens // 10, "tokens": tokens, "seconds": seconds, "loss": loss} for seconds, tokens, loss in curve
    ]
    last = points[-1]
    return {
        "name": f"{arm} · seed {seed}",
        "arm": arm,
        "seed": seed,
        "budget_s": 100.0,
        "evaluations": points,
        "final_loss": last["loss"],
        "bits_per_byte": 1.0,
        "tokens_per_s": last["tokens"] / last["seconds"],
        "warmup_s": 0.0,
    }


OURS = row("redline", [(0, 0, 8.0), (50, 1000, 4.0), (100, 2000, 3.0)])
PEER = row("nanogpt", [(0, 0, 8.0), (100, 1500, 5.0)])


def test_the_gain_is_speed_times_learning() -> None:
    _, entry = laptop.compare([OURS, PEER])
    assert entry["passes_s"] == pytest.approx(37.5)  # between the points at 0 and 50 s
    assert entry["by_learning"] == pytest.approx(1500 / 750)
    assert entry["by_speed"] == pytest.approx((750 / 37.5) / 15)
    assert 1 / entry["of_its_time"] == pytest.approx(entry["by_learning"] * entry["by_speed"])


def test_a_peer_that_is_never_passed_and_one_that_failed() -> None:
    better = row("adamw", [(0, 0, 8.0), (100, 1500, 2.0)])
    failed = {"name": "trainer · seed 1337", "arm": "trainer", "seed": 1337, "error": "no transformers"}
    entries = laptop.compare([OURS, better, failed])
    assert [entry["arm"] for entry in entries] == ["redline", "adamw"]
    assert "passes_s" not in entries[1]


def test_the_page_and_the_picture_show_every_arm() -> None:
    rows = [OURS, PEER]
    result = {
        "benchmark": "laptop",
        "date": "2026-11-19",
        "machine": {"name": "a CPU", "device": "cpu", "memory_gib": 8, "cores": 2},
        "versions": {},
        "git": {"commit": None},
        "rows": rows,
        "comparison": laptop.compare(rows),
    }
    page = pages.markdown(result)
    assert "| nanogpt | 15 |" in page
    assert (pictures.draw(result) or "").count("<path") > 2
    assert laptop.lines(result)[1].startswith("redline")


def test_unknown_arms_are_refused() -> None:
    with pytest.raises(UsageError, match="nanogp'"):
        laptop.choose_arms("nanogp")
    assert laptop.choose_arms("trainer") == ["redline", "trainer"]


def test_our_step_with_adamw_has_the_shape_of_the_run_that_it_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"layers": 3, "d_model": 192, "heads": 3, "d_ff": 512}
    words: list[list[str]] = []

    def trained(seed: int, seconds: float, more: Sequence[str] = ()) -> Row:
        words.append(list(more))
        return {"recipe": {"model": shape}}

    monkeypatch.setattr(laptop, "_redline", trained)
    monkeypatch.setattr(laptop, "busy_share", lambda: 0.9)
    rows = list(laptop.run_laptop(["redline", "redline-adamw"], [1], 9.0, []))
    assert "busy (90%" in rows[1]["warnings"][0]
    assert words[0] == []
    chosen = load("quickstart", words[1]).recipe
    assert {key: getattr(chosen.model, key) for key in shape} == shape
    assert chosen.train.optimizer == "adamw"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")
def test_a_busy_machine_is_noticed() -> None:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        assert laptop.busy_share(0.5) > 0.9
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize("arm", ["nanogpt", "adamw", "trainer"])
def test_an_arm_trains_and_is_scored_on_all_held_out_text(arm: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words to learn from, again and again. " * 400, encoding="utf-8")
    words = [
        *(f"data.source={tmp_path / 'text.txt'}", "data.tokenizer=bytes", "data.seq_len=32", "model.layers=1"),
        *("model.d_model=32", "model.heads=2", "model.d_ff=64", "train.global_batch=4", "train.micro_batch=4"),
        *("train.device=cpu", "train.precision=fp32", "train.compile=false", "eval.sequences=2", "train.lr=1e-2"),
    ]
    found = measure(arm, words, 1.0, str(tmp_path / "trainer"))
    curve = found["evaluations"]
    assert curve[-1]["tokens"] == found["tokens"] == found["steps"] * 4 * 32
    assert curve[-1]["seconds"] >= found["warmup_s"]
    assert 0 < found["final_loss"] < 8


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("def f():\n    return 1\n\ndef g(", True),  # cut before the statement that is not complete
        ("def f(:\n    return 1\n\nx = 2\n", False),
        ("import os\n", False),  # a single line shows nothing
        ("# a comment\n# another\nx = 1", False),  # comments alone are no statement
    ],
)
def test_is_python(text: str, accepted: bool) -> None:
    assert is_python(text) is accepted
