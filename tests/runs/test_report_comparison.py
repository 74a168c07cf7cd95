"""Comparison of several runs: what differs, which run won and by how much, and curves over the same axes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.errors import UserError
from redline.runs.events import EventLog
from redline.runs.report.compare import (
    Measure,
    aligned_views,
    comparison_data,
    legend_of,
    measure,
    read_runs,
    recipe_differences,
    winner,
    write_comparison,
)


def make(
    folder: Path,
    name: str,
    *,
    lr: float = 1e-3,
    loss: float = 2.0,
    rate: float = 1000.0,
    count: int = 40,
    price: float | None = 1.0,
    evals: bool = True,
    lock: dict[str, Any] | None = None,
) -> Path:
    """Write a run whose validation loss falls linearly from 10 to `loss`, one step per second."""
    run = folder / name
    run.mkdir(parents=True)
    known = {
        "recipe_name": "toy",
        "recipe": {"objective": "causal_lm", "description": name, "train": {"lr": lr, "betas": [0.9, 0.95]}},
        "data": {"fingerprint": "d", "tokenizer_fingerprint": "t"},
        "machine": {"name": "a card"},
    }
    (run / "lock.json").write_text(json.dumps(known | (lock or {})))
    log = EventLog(run / "events.jsonl", clock=lambda: 1.0)
    log.emit("start", resumed_from=None)
    for step in range(1, count + 1):
        hours = step / 3600
        cost = None if price is None else price * hours
        log.emit(
            "step", step=step, tokens=100 * step, loss=9.0 - step / 10, hours=hours, cost_usd=cost, tokens_per_s=rate
        )
        if evals and step % 10 == 0:
            value = 10 + (loss - 10) * step / count
            log.emit("eval", step=step, loss=value, bits_per_byte=value / 2)
    log.emit("stop", reason="steps", step=count, hours=count / 3600)
    log.close()
    return run


def test_only_different_recipe_keys_are_listed(tmp_path: Path) -> None:
    extra = {"recipe": {"objective": "causal_lm", "train": {"lr": 1e-3, "betas": [0.9, 0.99], "new_key": 1}}}
    runs = [make(tmp_path, "a"), make(tmp_path, "b", lr=2e-3), make(tmp_path, "c", lock=extra)]
    rows = {row.key: row.values for row in recipe_differences(read_runs(runs))}
    assert rows == {
        "train.lr": ["0.001", "0.002", "0.001"],
        "train.betas": ["[0.9, 0.95]", "[0.9, 0.95]", "[0.9, 0.99]"],
    }
    assert comparison_data(runs[:2])["other_differences"] == []
    other = make(tmp_path, "d", lock={"machine": {"name": "another card"}})
    found = comparison_data([runs[0], other])
    assert found["other_differences"] == [{"key": "machine", "values": ["a card", "another card"]}]
    assert found["recipe_differences"] == []


def test_the_winner_its_lead_and_the_time_it_saved(tmp_path: Path) -> None:
    runs = [make(tmp_path, "slow", loss=4.0, rate=500.0), make(tmp_path, "fast", loss=2.0, price=0.5)]
    first, sooner, speed = winner(read_runs(runs))
    assert first == "fast won: best validation loss 2, 2 (50.0 %) lower than slow."
    # 10 − 8·s/40 ≤ 4 first at step 30; `slow` is there at its end, step 40
    assert sooner == "It reached slow's 4 after 30s instead of 40s and $0.0042 instead of $0.011."
    assert "2.00 times the tokens/s of slow" in speed


def test_even_runs_have_no_winner(tmp_path: Path) -> None:
    runs = [make(tmp_path, "a", loss=2.0), make(tmp_path, "b", loss=2.001)]
    assert winner(read_runs(runs)) == ["a and b are even: best validation loss 2 and 2.001."]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("lock", "words"),
    [
        ({"recipe": {"objective": "block_diffusion"}}, "different objectives (block_diffusion, causal_lm)"),
        ({"data": {"tokenizer_fingerprint": "u"}}, "bits per byte are compared, not losses"),
        ({"data": {"tokenizer_fingerprint": "t", "fingerprint": "e"}}, "different data"),
    ],
)
def test_runs_that_do_not_compare_are_refused_a_winner(tmp_path: Path, lock: dict[str, Any], words: str) -> None:
    runs = [make(tmp_path, "a", loss=2.0), make(tmp_path, "b", loss=3.0, lock=lock)]
    sentences = " ".join(winner(read_runs(runs)))
    assert words in sentences
    assert ("won: bits per byte 1," in sentences) == ("bits" in words)
    page = write_comparison(runs).read_text()
    assert 'class="best">2.0000' not in page, "no star for a loss that cannot be compared"
    assert "where the shortest run ends" not in page
    assert comparison_data(runs)["winner"] == ("a" if "bits" in words else None)


def test_data_that_differ_have_no_winner(tmp_path: Path) -> None:
    same, other = lock_with(), lock_with(fingerprint="e")
    first = make(tmp_path, "a", loss=2.0, lock=same)
    assert comparison_data([first, make(tmp_path, "b", loss=3.0, lock=same)])["winner"] == "a"
    assert comparison_data([first, make(tmp_path, "c", loss=3.0, lock=other)])["winner"] is None
    tokens = lock_with("u", source="b", fingerprint="e")
    assert comparison_data([first, make(tmp_path, "d", loss=3.0, lock=tokens)])["winner"] is None
    assert comparison_data([first, make(tmp_path, "f", loss=2.0, lock=same)])["winner"] is None, "even"


def test_texts_of_different_sizes_have_no_winner_with_any_tokenizer(tmp_path: Path) -> None:
    """`train:N` learns another tokenizer from edited text, so only the size of the text shows that it was edited."""
    runs = []
    for name, tokenizer, val in (("a", "t", 10), ("b", "u", 10), ("c", "v", 12)):
        lock = lock_with(tokenizer, fingerprint=name)
        lock["data"]["text_bytes"] = [100, val]
        runs.append(make(tmp_path, name, loss=2.0, lock=lock))
    assert isinstance(measure(read_runs(runs[:2])), Measure)
    assert isinstance(measure(read_runs(runs[1:])), str)


def test_losses_averaged_over_different_tokens_have_no_winner(tmp_path: Path) -> None:
    """Locks written before `loss_per` existed counted padding among the tokens."""
    locks = [lock_with() for _ in range(3)]
    for lock, options in zip(locks, ({}, {"loss_per": "learnt"}, {"loss_per": "content"}), strict=True):
        lock["recipe"] |= {"objective": "hierarchical_diffusion", "hierarchical_diffusion": options}
    runs = [make(tmp_path, name, loss=2.0 + ord(name), lock=lock) for name, lock in zip("abc", locks, strict=True)]
    assert comparison_data(runs[:2])["winner"] == "a"
    assert comparison_data(runs[1:])["winner"] is None


def test_the_same_rows_in_another_order_or_split_compare(tmp_path: Path) -> None:
    """Fingerprints of rows cover the seed and the sequence length; `content` covers the rows alone."""
    locks = [lock_with(fingerprint=mark, content="rows") for mark in "de"]
    runs = [
        make(tmp_path, name, loss=loss, lock=lock) for name, loss, lock in zip("ab", (2.0, 3.0), locks, strict=True)
    ]
    found = measure(read_runs(runs))
    assert isinstance(found, Measure)
    assert any("validation rows" in caution for caution in found.cautions)
    assert comparison_data(runs)["winner"] == "a"


def lock_with(
    tokenizer: str = "t",
    *,
    source: str = "a",
    length: int = 64,
    sequences: int = 8,
    fingerprint: str = "d",
    content: str = "",
) -> dict[str, Any]:
    recipe = {"objective": "causal_lm", "data": {"source": source, "seq_len": length}, "eval": {"sequences": sequences}}
    data = {"fingerprint": fingerprint, "tokenizer_fingerprint": tokenizer, "val_tokens": 1000, "content": content}
    return {"recipe": recipe, "data": data}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (lock_with(), []),
        (lock_with(length=128), ["data.seq_len"]),
        (lock_with(sequences=99), ["eval.sequences"]),
        (lock_with("u", length=128), ["tokenizers", "first sequences of the validation set", "data.seq_len"]),
    ],
)
def test_settings_that_lower_a_loss_by_themselves_are_cautions(tmp_path: Path, other: Any, expected: list[str]) -> None:
    runs = [make(tmp_path, "a", loss=2.0, lock=lock_with()), make(tmp_path, "b", loss=3.0, lock=other)]
    found = measure(read_runs(runs))
    assert isinstance(found, Measure)
    assert found.ranked[0][1] == 0
    cautions = found.cautions
    assert all(words in caution for words, caution in zip(expected, cautions, strict=True)), cautions


def test_different_tokenizers_without_bits_per_byte_have_no_winner(tmp_path: Path) -> None:
    other = make(tmp_path, "b", evals=False, lock={"data": {"tokenizer_fingerprint": "u"}})
    assert "do not compare" in winner(read_runs([make(tmp_path, "a"), other]))[0]


def test_training_losses_are_compared_without_validation_data(tmp_path: Path) -> None:
    runs = [make(tmp_path, "a", evals=False), make(tmp_path, "b", evals=False, count=20)]
    sentences = winner(read_runs(runs))
    assert sentences[0] == "a won: training loss 5, 2 (28.6 %) lower than b."
    assert any("training losses are compared" in sentence for sentence in sentences)


def test_runs_without_a_loss_and_crashed_ones_still_have_a_page(tmp_path: Path) -> None:
    for name, content in (("torn", b'{"type":"start"}\n{"type":"st'), ("empty", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_bytes(content)
    runs = [tmp_path / "torn", make(tmp_path, "a"), tmp_path / "empty"]
    text = write_comparison(runs).read_text()
    assert "nothing to compare yet" in text
    assert text.count("crashed") >= 2
    assert "torn, empty." in text
    json.dumps(comparison_data(runs), allow_nan=False)


# --- curves


def test_there_is_a_view_for_each_axis_that_is_known(tmp_path: Path) -> None:
    priced = [make(tmp_path, "a"), make(tmp_path, "b", price=None)]
    views = aligned_views(read_runs(priced))
    assert [view.name for view in views] == ["steps", "tokens", "time", "dollars"]
    assert views[-1].without == ["b"]
    free = [make(tmp_path, "c", price=None), priced[1]]
    assert [view.name for view in aligned_views(read_runs(free))] == ["steps", "tokens", "time"]


@pytest.mark.usefixtures("no_pictures")
def test_losses_are_compared_where_the_shortest_ends(tmp_path: Path) -> None:
    runs = [make(tmp_path, "long", loss=2.0, count=40), make(tmp_path, "short", loss=5.0, count=20)]
    step, tokens, time, cost = aligned_views(read_runs(runs))
    assert step.at_the_end == "At 20 steps, where the shortest run ends: short 5, long 6."
    assert tokens.at_the_end == "At 2k tokens, where the shortest run ends: short 5, long 6."
    assert time.at_the_end == "At 20 seconds of training, where the shortest run ends: short 5, long 6."
    assert cost.at_the_end.startswith("At $0.0056, where")


def test_every_figure_is_well_formed_and_differs_by_more_than_colour(tmp_path: Path) -> None:
    sides = read_runs([make(tmp_path, f"run-{n}", loss=2 + n) for n in range(8)])
    for view in aligned_views(sides):
        for figure in view.figures:
            ElementTree.fromstring(figure.svg)
            assert "#0102" not in figure.svg
            assert all(f"var(--run-{n})" in figure.svg for n in range(6))
    drawn = [(key["ink"], key["dash"]) for key in legend_of(30)]
    assert len(set(drawn)) == 30
    assert len({dash for _, dash in drawn[:3]}) == 3


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "$\\frac{", "_hidden", "a & b", "x" * 90])
def test_any_name_of_a_run_is_shown_as_text(tmp_path: Path, name: str) -> None:
    name = name.replace("/", "\u2044")
    sides = [make(tmp_path, name), make(tmp_path, "plain", loss=3.0)]
    text = write_comparison(sides, tmp_path / "out.html").read_text()
    assert "<script" not in text
    assert "plain" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    assert name[-20:].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text


def test_runs_of_the_same_name_are_shown_with_their_paths(tmp_path: Path) -> None:
    runs = [make(tmp_path / "x", "run"), make(tmp_path / "y", "run")]
    assert [side.name for side in read_runs(runs)] == [str(run) for run in runs]


# --- the page


def test_the_page_works_without_scripts_and_loads_nothing(tmp_path: Path) -> None:
    text = write_comparison([make(tmp_path, "a"), make(tmp_path, "b", loss=3.0)]).read_text()
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<img|<iframe", text)
    assert re.findall(r"url\((?!#)", text) == []
    assert text.count('type="radio"') == 4
    assert re.findall(r'id="(by-\d)" checked', text) == ["by-1"], "the first view is shown before a click"
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


@pytest.mark.usefixtures("no_pictures")
def test_the_page_is_written_beside_the_first_run_or_to_out(tmp_path: Path) -> None:
    runs = [make(tmp_path, "a"), make(tmp_path, "b")]
    assert write_comparison(runs) == tmp_path / "comparison.html"
    assert write_comparison(runs, tmp_path / "deep" / "x.html") == tmp_path / "deep" / "x.html"
    with pytest.raises(UserError, match="cannot be written"):
        write_comparison(runs, tmp_path / "a")


def test_many_long_runs_make_a_page_that_can_be_mailed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in "abc":
        (tmp_path / name).mkdir()
        lines = [
            json.dumps({"type": "step", "step": n, "tokens": n, "hours": n / 9e3, "loss": float(loss)})
            for n, loss in enumerate(rng.normal(3, 1, 5_000))
        ]
        (tmp_path / name / "events.jsonl").write_text("\n".join(lines))
    assert write_comparison([tmp_path / name for name in "abc"]).stat().st_size < 600_000
