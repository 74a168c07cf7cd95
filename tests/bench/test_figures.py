"""The figures of README, docs and benchmarks/README agree with the result files that they name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from figures import RESULTS, ROOT, Figure, Quote, content, figures, numbers, quotes, unsupported

from benchmarks.studies.plan_table import H200, table_line, with_new_plan
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, resolve

GENERATED = "figures.md"  # every figure of it is computed from the files, which test_measured_page.py checks
DOCS = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if page.name != GENERATED)
PAGES = ["README.md", *DOCS, "benchmarks/README.md"]
BF16_PEAK = 989e12
FP8 = "curves-fp8-warmup-200-350m-h200-20261115.json"
RACE = "race-h200-20261118.json"
THROUGHPUT = "throughput-350m-h200-20261116.json"
HDP = "throughput-hdp-h200-20261116.json"
LATENT = "latent-h200-20261116.json"
BOUNDS = "bounds-h200-20261116.json"
T_OF_95 = 4.302653  # Student's t for 95 % with three seeds
HEAD_WHERE_IT_RUNS = 1.127  # how much the `mfu` of HDP's file counted too much; docs/diffusion.md explains it


def rows(name: str) -> dict[str, Any]:
    return {row["name"]: row for row in content(name)["rows"]}


def ratio(name: str, key: str, one: str, other: str) -> float:
    return float(rows(name)[one][key] / rows(name)[other][key])


def curve(way: str) -> float:
    """Return the mean speed of both seeds."""
    return fmean(content(FP8)[f"{way}-seed-{seed}"]["tokens_per_s"] for seed in (1337, 1))


def later_loss(seed: int) -> float:
    """Return by how much fp8 ends above bf16."""
    fp8, bf16 = (content(FP8)[f"{way}-seed-{seed}"]["evaluations"][-1]["loss"] for way in ("fp8", "bf16"))
    return float(fp8 - bf16)


def palm(tokens_per_s: float) -> float:
    useful = content(FP8)["bf16-seed-1"]["lock"]["flops_per_token"]["useful"]
    return float(tokens_per_s * useful / BF16_PEAK)


def fp8_share() -> float:
    return curve("fp8") / float(rows(THROUGHPUT)["redline-fp8"]["ceiling_tokens_per_s"])


@cache
def race() -> tuple[float, float]:
    """Return how many times fewer tokens `pretrain-350m` needs than the baseline, and how many times faster it is."""
    table = content(RACE)["comparison"][0]
    baseline = table["baseline"]
    (ours,) = [entry for entry in table["entries"] if entry["arm"] == "pretrain-350m" and entry["budget_s"] == 24]
    tokens = ours["passes_s"] * ours["tokens_per_s"]
    return baseline["seconds"] * baseline["tokens_per_s"] / tokens, ours["tokens_per_s"] / baseline["tokens_per_s"]


def bf16_lead() -> float:
    fastest = max(row["tokens_per_s"] for row in content(RACE)["rows"] if row["lock"]["batch"]["global"] == 64)
    return float(rows(THROUGHPUT)["redline"]["tokens_per_s"] / fastest)


def latent_lead(epochs: float) -> float:
    """Return redline's lead over the textbook with one pass, the teacher's pass spread over the epochs."""
    ours, textbook = rows(LATENT)["redline"], rows(LATENT)["textbook, one pass"]
    return float(textbook["step_ms"] / (ours["step_ms"] + ours["teacher_ms"] / epochs))


def bound(arm: str) -> tuple[float, float]:
    """Return the mean of an arm's seeds, and half of its 95 % interval."""
    values = [row["bound"] for row in content(BOUNDS) if row["arm"] == arm]
    assert len(values) == 3
    return fmean(values), T_OF_95 * stdev(values) / 3**0.5


@cache
def planned_gib(*words: str) -> float:
    """Return the memory that today's plan expects on an H200."""
    recipe = load(words[0], list(words[1:])).recipe
    facts = DataFacts(50257, 10**10, 10**6, "", recipe.data.tokenizer, "")
    return float(resolve(recipe, H200, facts).plan_event()["memory_gib"]["peak"])


BD3LM, GSM8K = ("owt-bd3lm", "train.global_batch=128"), ("gsm8k-hdp", "train.global_batch=128")
PLAN = "plan-h200-20261115.json"
COMPILED, FUSED = "pretrain-350m-h200-20261115.json", "pretrain-350m-fused-h200-20261115.json"
# Figures that follow from numbers of a file: the file, the figure as it is written, and how it follows.
DECLARED: list[tuple[str, str, Callable[[], float]]] = [
    (FP8, "70.8%", lambda: palm(curve("fp8"))),
    (FP8, "35%", fp8_share),
    (FP8, "291,000", partial(curve, "fp8")),
    (FP8, "0.008", partial(later_loss, 1337)),
    (FP8, "0.003", partial(later_loss, 1)),
    (COMPILED, "1.10B", lambda: 1.5 * 3600 * content(COMPILED)["tokens_per_s"]),
    (RACE, "4.51×", lambda: race()[0]),
    (RACE, "1.20×", lambda: race()[1]),
    (RACE, "1.10×", bf16_lead),
    (LATENT, "3.0×", partial(latent_lead, float("inf"))),
    (LATENT, "2.1×", partial(latent_lead, 4)),
    (LATENT, "1.1×", partial(latent_lead, 1)),
    (LATENT, "3.0", partial(latent_lead, float("inf"))),
    (LATENT, "2.1", partial(latent_lead, 4)),
    (LATENT, "1.1", partial(latent_lead, 1)),
    (LATENT, "0.48", lambda: ratio(LATENT, "texts_per_s", "textbook", "textbook, one pass")),
    (HDP, "1.49×", lambda: ratio(HDP, "tokens_per_s", "redline", "masked")),
    (HDP, "1.49", lambda: ratio(HDP, "tokens_per_s", "redline", "masked")),
    (HDP, "1.37", lambda: ratio(HDP, "tokens_per_s", "redline, compiled blocks", "masked")),
    (HDP, "1.82", lambda: ratio(HDP, "tokens_per_s", "redline-fp8", "masked")),
    (HDP, "0.28", lambda: ratio(HDP, "tokens_per_s", "textbook", "masked")),
    *(
        (HDP, figure, lambda row=row: rows(HDP)[row]["mfu"] / HEAD_WHERE_IT_RUNS)  # type: ignore[misc]
        for row, figure in {
            "masked": "25.1%",
            "redline, compiled blocks": "34.3%",
            "redline": "37.4%",
            "redline-fp8": "45.7%",
            "textbook": "7.1%",
        }.items()
    ),
    (HDP, "43.4", partial(planned_gib, *GSM8K, "model.kernels=torch")),
    (HDP, "36.4", partial(planned_gib, *GSM8K)),
    (HDP, "34.1", partial(planned_gib, *GSM8K, "train.precision=fp8")),
    ("throughput-bd3lm-h200-20261116.json", "80.3", partial(planned_gib, *BD3LM)),
    ("throughput-bd3lm-fp8-h200-20261116.json", "75.1", partial(planned_gib, *BD3LM, "train.precision=fp8")),
    *(
        (BOUNDS, figure, lambda arm=arm, part=part: bound(arm)[part])  # type: ignore[misc]
        for arm, both in {
            "ar": ("4.367", "0.006"),
            "4": ("5.404", "0.151"),
            "8": ("5.541", "0.030"),
            "16": ("5.542", "0.020"),
            "mdlm": ("5.609", "0.043"),
        }.items()
        for part, figure in enumerate(both)
    ),
]
# Texts with numbers that are no measurements: sizes of models and data, bounds that tests hold, settings.
IGNORED = (
    *("700 W", "40M", "1.3B", "124M", "125M", "350M", "1B, 1.5B", "8B", "2.6M", "torch 2.11", "7,473", "of about 512"),
    *("1024 tokens", "512 tokens", "120 steps", "floors from 1.7 to 3.15", "within 5 %", "within 10 %"),
)
# The arithmetic in the other columns of this page is compared with the plan by tests/test_claims.py.
LAST_CELL_ONLY = "docs/claims.md"
CLAIMS_ARITHMETIC = ("fp8 limit of 823k", "over 400 steps", "0.02 above", "1.1–1.2x", "291k ÷ 218k", "0.3 MB")


def quotes_of(page: str) -> list[Quote]:
    found = list(quotes(page, (ROOT / page).read_text(encoding="utf-8")))
    if page != LAST_CELL_ONLY:
        return found
    cells = [(quote, quote.text.strip("|").split(" | ")[-1]) for quote in found if quote.text.startswith("|")]
    return [Quote(quote.where, cell, (*quote.files, COMPILED, FUSED, FP8, PLAN)) for quote, cell in cells]


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_that_names_a_result_file_is_in_it(page: str) -> None:
    ignored = (*IGNORED, *CLAIMS_ARITHMETIC) if page == LAST_CELL_ONLY else IGNORED
    missing = {quote.where: unsupported(quote, DECLARED, ignored) for quote in quotes_of(page)}
    assert not {where: found for where, found in missing.items() if found}


def test_the_pages_that_matter_name_their_files() -> None:
    counted = {page: len(quotes_of(page)) for page in PAGES}
    assert counted["README.md"] >= 10
    assert counted["benchmarks/README.md"] >= 20
    least = {"docs/plan.md": 9, "docs/diffusion.md": 9, "docs/finetune.md": 5, "docs/latentwire.md": 5}
    assert all(counted[page] >= count for page, count in least.items()), counted
    named = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    files = set(re.findall(r"results/([\w.-]+\.json)", named))
    assert {name for name in files if not (RESULTS / name).exists() and name != "RESULT.json"} == set()


def test_every_declared_figure_is_quoted() -> None:
    """A derivation that no page uses any more would be forgotten here."""
    all_quotes = [quote for page in PAGES for quote in quotes_of(page)]
    written = {(name, figure.text) for quote in all_quotes for name in quote.files for figure in figures(quote.text)}
    assert {(name, figure) for name, figure, _ in DECLARED} <= written


@pytest.mark.parametrize(
    ("written", "value", "rounding"),
    [
        ("220,037 tok/s", 220_037, 0.5),
        ("218,700 tok/s", 218_700, 50),
        ("291,000 tok/s", 291_000, 500),
        ("49.2 % MFU", 0.492, 0.0005),
        ("36 %", 0.36, 0.005),
        ("1.10×", 1.10, 0.005),
        ("52M tokens", 52e6, 0.5e6),
        ("+94.0 %", 0.94, 0.0005),
    ],
)
def test_a_figure_is_read_with_its_rounding(written: str, value: float, rounding: float) -> None:
    (figure,) = figures(written)
    assert (figure.value, figure.rounding) == (pytest.approx(value), pytest.approx(rounding))


def test_code_names_dates_and_counts_are_no_figures() -> None:
    text = "`train.steps=400` of [a page](x-2100.md), GPT-2 on an H200, 15 November 2026, 16 × 1024, three of 30"
    assert [figure.text for figure in figures(text)] == []


def test_a_changed_figure_is_noticed() -> None:
    """Change each figure of both READMEs in turn by more than its rounding: nearly all of them must be missed."""
    noticed = changed = 0
    for quote in [*quotes_of("README.md"), *quotes_of("benchmarks/README.md")]:
        assert unsupported(quote, DECLARED, IGNORED) == []
        for figure in {figure.text: figure for figure in figures(quote.text)}.values():
            wrong = _changed(figure)
            if wrong is None or f" {figure.text}" not in f" {quote.text}":
                continue
            changed += 1
            text = quote.text.replace(figure.text, wrong, 1)
            noticed += bool(unsupported(Quote(quote.where, text, quote.files), DECLARED, IGNORED))
    assert changed > 60
    assert noticed / changed > 0.8, f"{noticed} of {changed}"


def _changed(figure: Figure) -> str | None:
    """Return a figure of a thousand or more, or with decimals, raised by 3 %; None for others."""
    digits = figure.text.rstrip("kMB×%")
    unit = figure.text.removeprefix(digits)
    if "," in digits:
        return f"{round(float(digits.replace(',', '')) * 1.03):,}{unit}"
    places = len(digits.partition(".")[2])
    return f"{float(digits) * 1.03 + 2 * 10**-places:.{places}f}{unit}" if places else None


def test_a_wrong_figure_is_named() -> None:
    quote = partial(Quote, "a page", files=(THROUGHPUT,))
    assert unsupported(quote("fp8 296,529 and bf16 220,037"), [], []) == []
    assert unsupported(quote("fp8 297,400 and bf16 220,037"), [], []) == ["297,400"]
    assert unsupported(quote("fp8 296,529 is 35 % of its ceiling"), [], []) == ["35%"], "36 %"
    assert unsupported(quote("1.60×"), [(THROUGHPUT, "1.60×", lambda: 1.6049)], []) == []
    assert unsupported(quote("1.60×"), [(THROUGHPUT, "1.60×", lambda: 1.6051)], []) == ["1.60×"]


def test_a_row_a_sentence_and_a_table_belong_to_the_file_they_name() -> None:
    page = f"""# Title

Speeds (`results/{THROUGHPUT}`):

| a | b |
|---|---|
| x | 1.11 |

Other words with 2.22.

| a | b | file |
|---|---|---|
| x | 3.33 | `{RACE}` |
| y | 4.44 | the same |
| z | 5.55 | |

First 6.66 is of no file. Then 7.77 is of `results/{HDP}`. And 8.88 is not.
"""
    found = {figure.text: quote.files for quote in quotes("page", page) for figure in figures(quote.text)}
    assert found == {"1.11": (THROUGHPUT,), "3.33": (RACE,), "4.44": (RACE,), "7.77": (HDP,)}


def test_curves_in_a_file_support_no_figure_but_their_ends() -> None:
    """Thousands of losses would contain nearly every number."""
    first, *between, last = content(FP8)["bf16-seed-1"]["losses"]
    assert {first, last} <= set(numbers(FP8))
    assert len(set(between) & set(numbers(FP8))) < 5


def test_the_tables_of_plan_accuracy_are_what_the_script_prints() -> None:
    """They hold today's plan, which is in no result file, and the errors of the plan before fitting, which are."""
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    sources = {PLAN: ["model.kernels=torch"], "plan-fused-h200-20261115.json": [], "plan-fused-h200-20261116.json": []}
    measured = [(row, more) for name, more in sources.items() for row in content(name)["rows"] if "measured" in row]
    expected = [table_line(with_new_plan(row, more)) for row, more in measured]
    assert [line for line in expected if line not in text] == []
    tables = re.findall(r"^\| case \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert sum(table.count("\n") for table in tables) == len(expected) == 34


def test_every_script_of_the_benchmarks_exists() -> None:
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    modules = re.findall(r"python -m (benchmarks(?:\.\w+)*)", text)
    scripts = re.findall(r"`(\w+\.(?:py|sh))", text)
    assert len(modules) > 20
    paths = [Path(*module.split(".")) for module in modules]
    assert [path for path in paths if not ((ROOT / path).with_suffix(".py").exists() or (ROOT / path).is_dir())] == []
    assert [name for name in scripts if not (ROOT / "benchmarks" / name).exists()] == []
    studies = {path.stem for path in (ROOT / "benchmarks/studies").glob("*.py")} - {"__init__", "runs"}
    assert {name for name in studies if f"benchmarks.studies.{name}" not in text} == set()
