"""Which arms pass the baseline's loss, when, and how that is shown."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from benchmarks.pages import markdown, time_to_loss_lines
from benchmarks.pictures import draw
from benchmarks.time_to_loss import Trial, best_entries, compare, known_step_ms
from redline.hardware.machine import Machine

H200 = Machine("cuda", "NVIDIA H200", 150 << 30, 16, (9, 0), fast_bf16=True)


def row(arm: str, *overrides: str, losses: list[float], seed: int = 1, budget: float = 120.0, **fields: Any) -> Any:
    """Return a row that is evaluated at equal distances and ends exactly at its budget."""
    text, anchor = fields.pop("text", "abcdef"), fields.pop("anchor", 100.0)
    share = 1 / (len(losses) - 1)
    evaluations = [
        {"step": round(240 * n * share), "tokens": n, "seconds": budget * n * share, "loss": loss}
        for n, loss in enumerate(losses)
    ]
    data = {"fingerprint": text, "train_tokens": 57_100_000, "val_tokens": 730_000, "tokenizer": "gpt2"}
    recipe = {"data": {"seq_len": 1024}, "eval": {"sequences": 256}}
    return {
        "name": " ".join([arm, *overrides, f"· {budget:g} s · seed {seed}"]),
        "arm": arm,
        "overrides": list(overrides),
        "budget_s": budget,
        "seed": seed,
        "card_anchor_ms": anchor,
        "steps": 240,
        "seconds": budget,
        "tokens_per_s": 2e5,
        "step_ms": 500.0,
        "anchor_step_ms": 498.0,
        "final_loss": losses[-1],
        "evaluations": evaluations,
        "epochs": 0.5,
        "warmup_s": 40.0,
        "memory_gib": 60.0,
        "warnings": [],
        "lock": {"recipe": recipe, "data": data},
        **fields,
    }


ROWS = [
    row("nanogpt", "data.source=./a", "train.lr=6e-4", losses=[10.0, 6.0, 5.2]),
    row("nanogpt", "data.source=./a", "train.lr=1e-3", losses=[10.0, 5.8, 5.0], seed=1),
    row("nanogpt", "data.source=./a", "train.lr=1e-3", losses=[10.0, 5.8, 5.2], seed=2),
    row("pretrain-350m", "data.source=./a", losses=[10.0, 5.0, 4.6], seed=1),
    row("pretrain-350m", "data.source=./a", losses=[10.0, 5.2, 4.8], seed=2),
    row("pretrain-350m", "data.source=./a", "train.muon_lr=1", losses=[10.0, 8.0, 7.0]),
]


def test_the_baseline_is_the_best_trial_by_the_mean_of_its_seeds() -> None:
    (table,) = compare(ROWS)
    baseline = table["baseline"]
    assert (baseline["overrides"], baseline["seeds"]) == (["train.lr=1e-3"], [1, 2])
    assert baseline["final_loss"] == pytest.approx(5.1)
    assert baseline["final_loss_spread"] == pytest.approx(0.2)
    assert table["trials"] == {"nanogpt": {"120": 2}, "pretrain-350m": {"120": 2}}, "a seed more is no trial more"


def test_passing_is_counted_in_the_baselines_seconds() -> None:
    (table,) = compare(ROWS)
    ours, worse, loser = table["entries"]
    first, second = 60 * 4.9 / 5.0, 60 + 60 * 0.1 / 0.4
    assert ours["passes_s"] == pytest.approx((first + second) / 2)
    assert ours["passes_s_spread"] == pytest.approx(second - first)
    assert ours["ratio"] == pytest.approx((first + second) / 240)
    assert ours["ratio_corrected"] == pytest.approx(ours["ratio"]), "the card was the same"
    assert ours["loss_difference"] == pytest.approx(4.7 - 5.1)
    assert (worse["arm"], worse["passes_s"]) == ("nanogpt", None), "another trial of the baseline"
    assert (loser["overrides"], loser["ratio"], loser["ratio_corrected"]) == (["train.muon_lr=1"], None, None)
    assert [entry["arm"] for entry in best_entries(table)] == ["nanogpt", "pretrain-350m"]
    assert best_entries(table)[1] is ours


def test_a_slower_gpu_is_corrected_for_with_a_note() -> None:
    slow = row("speedrun-50m", losses=[10.0, 5.1, 4.0], anchor=110.0)
    (table,) = compare([*ROWS, slow])
    entry = next(entry for entry in table["entries"] if entry["arm"] == "speedrun-50m")
    assert entry["ratio"] == pytest.approx(0.5)
    assert entry["ratio_corrected"] == pytest.approx(0.5 / 1.1)
    page = markdown(result([*ROWS, slow]))
    assert "- speedrun-50m: the card's anchor step took +10.0% against the baseline's call" in page
    assert "anchor step took" not in markdown(result([*ROWS, slow | {"card_anchor_ms": 102.0}]))
    (table,) = compare([*ROWS, slow | {"card_anchor_ms": None}])
    assert table["entries"][0]["ratio_corrected"] is None, "nothing to correct by"


def test_only_what_is_comparable_is_compared() -> None:
    elsewhere = row("pretrain-350m", losses=[10.0, 2.0, 1.0], text="another")
    longer = row("pretrain-350m", losses=[10.0, 2.0, 1.0], budget=480.0)
    (table,) = compare([*ROWS, elsewhere, longer])
    assert len(table["entries"]) == 3
    assert compare([elsewhere, longer]) == []
    two = compare([*ROWS, elsewhere, row("nanogpt", losses=[10.0, 5.0, 4.0], text="another")])
    assert [table["data"]["fingerprint"] for table in two] == ["abcdef", "another"]


def test_a_schedule_fitted_to_less_time_may_win() -> None:
    short = row("pretrain-350m", losses=[10.0, 6.0, 4.9], budget=30.0)
    vain = row("pretrain-350m", losses=[10.0, 8.0, 7.0], budget=10.0)
    (table,) = compare([*ROWS, short, vain])
    assert table["entries"][0]["budget_s"] == 30
    assert table["entries"][0]["ratio"] < 0.25
    assert len(table["entries"]) == 4, "what does not pass within ten seconds says nothing"
    assert table["trials"]["pretrain-350m"] == {"120": 2, "30": 1, "10": 1}, "but it was tried"
    assert "pretrain-350m, fitted to 30 s" in markdown(result([*ROWS, short, vain]))


def test_a_diverged_trial_counts_as_a_trial() -> None:
    gone = row("nanogpt", "train.lr=1", losses=[10.0, 5.0], error="it diverged", diverged=True, final_loss=None)
    (table,) = compare(
        [
            *ROWS,
            gone,
            {"name": "x", "arm": "nanogpt", "overrides": [], "budget_s": 120.0, "seed": 1, "error": "no room"},
        ]
    )
    assert table["trials"]["nanogpt"] == {"120": 3}


def test_a_seed_without_a_curve_did_not_pass() -> None:
    good = [row("speedrun-50m", losses=[10.0, 5.0, 4.0], seed=seed) for seed in (1, 2)]
    diverged = {**good[0], "name": "c", "seed": 3, "error": "it diverged", "diverged": True}
    failed = {key: good[0][key] for key in ("arm", "overrides", "budget_s")} | {
        "name": "d",
        "seed": 4,
        "error": "no room",
    }
    for failures, count in (([diverged], 1), ([failed], 1), ([diverged, failed], 2)):
        (table,) = compare([*ROWS, *good, *failures])
        (entry,) = [entry for entry in table["entries"] if entry["arm"] == "speedrun-50m"]
        assert (entry["passes_s"], entry["lost_seeds"], entry["passed_seeds"]) == (None, count, 2)
        page = markdown(result([*ROWS, *good, *failures]))
        assert f"only 2 of {2 + count} seeds" in page
        assert f"- speedrun-50m: {count} of its seeds have no curve." in page
    (table,) = compare([*ROWS, failed, *good, {**good[0], "name": "e", "seed": 4}])
    assert table["entries"][0]["lost_seeds"] == 0, "it was made up for"


def test_a_baseline_that_diverged_with_one_seed_is_not_used() -> None:
    best = ROWS[1]
    gone = {**best, "name": "gone", "seed": 9, "error": "it diverged", "diverged": True}
    (table,) = compare([*ROWS, gone])
    assert table["baseline"]["overrides"] == ["train.lr=6e-4"]
    assert compare([best, gone]) == [], "and there may be no other"


def test_losses_that_are_masked_or_ordered_otherwise_are_not_compared() -> None:
    def learnt(**data: Any) -> Any:
        found = row("pretrain-350m", *(f"data.{key}={value}" for key, value in data.items()), losses=[10.0, 3.0, 2.0])
        found["lock"]["recipe"]["data"] |= data
        return found

    for data in ({"pack": True}, {"shuffle": False}):
        (table,) = compare([*ROWS, learnt(**data)])
        assert len(table["entries"]) == 3, data
    (table,) = compare([*ROWS, learnt(workers=0)])
    assert ["data.workers=0"] in [entry["overrides"] for entry in table["entries"]], "a trial of its own"


def test_of_two_rows_of_a_seed_the_last_counts() -> None:
    moved = row("pretrain-350m", "data.source=./b", losses=[10.0, 4.0, 3.0], seed=2)
    (table,) = compare([*ROWS, moved])
    (entry,) = [entry for entry in table["entries"] if entry["arm"] == "pretrain-350m" and not entry["overrides"]]
    assert entry["seeds"] == [1, 2]
    assert entry["final_loss"] == pytest.approx((4.6 + 3.0) / 2)


def test_a_shorter_baseline_that_passes_gets_a_note() -> None:
    quick = row("nanogpt", "train.global_batch=8", losses=[10.0, 6.0, 4.9], budget=60.0)
    tables = compare([*ROWS, quick])
    assert [table["budget_s"] for table in tables] == [60, 120]
    assert tables[1]["entries"][0]["arm"] == "nanogpt"
    assert "the baseline is not at its best at this budget" in markdown(result([*ROWS, quick]))
    assert "not at its best" not in markdown(result(ROWS))


def test_a_smaller_model_in_the_baselines_loop_is_a_control() -> None:
    small = row("nanogpt", "data.source=./a", "model.layers=8", losses=[10.0, 5.0, 4.0], budget=60)
    found = result([*ROWS, small, row("nanogpt", "model.layers=8", losses=[10.0, 4.0, 3.0])])
    (table,) = [table for table in found["comparison"] if table["budget_s"] == 120]
    assert table["baseline"]["overrides"] == ["train.lr=1e-3"]
    assert table["trials"]["nanogpt"] == {"120": 2}
    assert "not at its best" not in markdown(found)
    (line,) = [line for line in time_to_loss_lines(found) if line.endswith("model.layers=8") and "4.0000" in line]
    assert "passes that loss after 29.4 s, 0.245 of its time" in line
    assert compare([row("nanogpt", "model.layers=8", losses=[10.0, 4.0, 3.0])]), "alone it is the race's"


def test_a_run_off_its_budget_is_marked_in_the_table() -> None:
    late = row("speedrun-50m", losses=[10.0, 5.0, 4.0]) | {"seconds": 131.0}
    assert "| speedrun-50m, trained 131.0 s |" in markdown(result([*ROWS, late]))


def test_the_step_time_of_other_code_is_not_taken() -> None:
    same = Trial("nanogpt", ("data.source=./a", "train.lr=3e-3"), 480.0, 7)
    old = [one | {"from": {"git": {"commit": "another"}}} for one in ROWS]
    assert known_step_ms(same, old, 100.0) is None


def test_the_step_time_of_the_same_work_is_known_at_todays_speed() -> None:
    same = Trial("nanogpt", ("data.source=./a", "train.lr=3e-3"), 480.0, 7)
    assert known_step_ms(same, ROWS, 110.0) == pytest.approx(550)
    assert known_step_ms(same, ROWS, None) is None
    other = Trial("nanogpt", ("data.source=./a", "train.global_batch=64", "train.lr=1e-3"), 120.0, 1)
    assert known_step_ms(other, ROWS, 100.0) is None


def test_a_row_that_a_busy_host_slowed_sets_no_step_time() -> None:
    """A slow row, or a slow part of one, must not set the step time: later rows would get too few steps."""
    same = Trial("nanogpt", ("data.source=./a", "train.lr=3e-3"), 480.0, 7)
    slow = row("nanogpt", "data.source=./a", losses=[10.0, 6.0, 5.2], budget=170.0)
    assert known_step_ms(same, [*ROWS, slow], 100.0) == pytest.approx(500)
    stumbled = row("nanogpt", "data.source=./a", losses=[10.0, 7.0, 6.0, 5.2], budget=120.0)
    stumbled["evaluations"][3]["seconds"] += 60.0
    assert known_step_ms(same, [slow, stumbled], 100.0) == pytest.approx(500)


def result(rows: list[Any], **fields: Any) -> dict[str, Any]:
    common = {"benchmark": "time-to-loss", "date": "2026-11-15", "machine": H200.facts(), "versions": {}, "git": {}}
    return {**common, "rows": rows, "comparison": compare(rows), **fields}


def test_the_page_and_the_console_show_the_same_figures() -> None:
    warnings = ["its 57.1M tokens repeat: 1.40 epochs"]
    repeated = row("pretrain-350m", "train.lr=2", losses=[10.0, 9.0], epochs=1.4, warnings=warnings)
    failed = {"name": "speedrun-50m · 120 s · seed 1", "arm": "speedrun-50m", "overrides": [], "budget_s": 120.0}
    failed |= {"seed": 1, "error": "no room"}
    page = markdown(result([*ROWS, repeated, failed]), "l.svg")
    assert page.startswith("# bench time-to-loss: NVIDIA H200, 2026-11-15\n\n![validation loss over seconds")
    assert "same 256 sequences of 1,024 tokens" in page
    assert "Overrides tried: nanogpt 2 at 120 s; pretrain-350m 3 at 120 s." in page
    assert "| **nanogpt `train.lr=1e-3`** | 5.1000 ± 0.1000 |  | 120.0 s | 1 |  | 2 | 200,000 |" in page
    assert "| 4.7000 ± 0.1000 | -0.4000 | 66.9 ± 8.1 s | 0.558 | 0.558 | 2 |" in page
    assert "its 57.1M tokens repeat: 1.40 epochs." in page
    assert "- speedrun-50m · 120 s · seed 1: no figure. no room" in page
    for block in page.split("\n\n"):
        table = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in table}) <= 1, block
    console = "\n".join(time_to_loss_lines(result(ROWS)))
    assert "passes that loss after 66.9 ± 8.1 s, 0.558 of its time (corrected 0.558)" in console
    assert "in 120.0 s: the baseline  train.lr=1e-3" in console
    assert "warm-up 40.0 s is not counted" in console
    assert "no row of `nanogpt` yet" in markdown(result(ROWS[3:]))


def test_the_picture_is_complete_and_deterministic() -> None:
    pictures = [draw(result(rows)) for rows in (ROWS, ROWS[3:], [*ROWS, row("nanogpt", losses=[9.0, 3.0], text="b")])]
    for svg in pictures:
        assert svg is not None
        ElementTree.fromstring(svg)
    assert pictures[0] == draw(result(ROWS))
    assert draw(result([{"name": "x", "arm": "nanogpt", "error": "no"}])) is None
