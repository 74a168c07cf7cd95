"""The arithmetic in docs/claims.md is right, and docs/seeds.md has every flag and key of the guides."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from redline.hardware.specs import SPECS
from redline.planning.flops import decoder_flops
from redline.planning.memory import moment_bytes
from redline.planning.schedule import sqrt_scaled_lr
from redline.planning.shapes import SIZES, DecoderShape, padded_vocab
from redline.recipe.aliases import ALIASES
from redline.recipe.load import known_keys
from redline.recipe.schema import Recipe

ROOT = Path(__file__).parents[1]
CLAIMS = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
SEEDS = (ROOT / "docs/seeds.md").read_text(encoding="utf-8")
BENCHMARK = json.loads((ROOT / "benchmarks/results/pretrain-350m-h200-20261115.json").read_text(encoding="utf-8"))
GIB = 1 << 30


def shape(d_ff: int = 2688) -> DecoderShape:
    layers, d_model, heads, _ = SIZES["350m"]
    return DecoderShape(layers, d_model, heads, heads, d_model // heads, d_ff, padded_vocab(50257))


def row(promised: str) -> str:
    """Return the line of the table whose first cell contains `promised`."""
    (line,) = [line for line in CLAIMS.splitlines() if line.startswith("|") and promised in line.split(" | ")[0]]
    return line


def test_speed() -> None:
    model, card = shape(), SPECS["h100"]
    flops = decoder_flops(model, 1024)
    matmul, attention = 6 * model.matmul_parameters, flops.causal - 6 * model.matmul_parameters
    bf16, fp8 = card.bf16, card.fp8
    assert fp8 is not None
    assert (bf16, fp8) == (SPECS["h200"].bf16, SPECS["h200"].fp8)
    limit, mixed, all_fp8 = bf16 / flops.causal, 1 / (matmul / fp8 + attention / bf16), fp8 / flops.causal
    for figure in (
        f"N = {model.matmul_parameters:,}",
        f"{flops.useful / 1e9:.3f} GFLOP per token",
        f"{flops.causal / 1e9:.3f} in\ncausal form",
        f"bf16 {bf16 / 1e12:.0f} TFLOP/s",
        f"fp8\n{fp8 / 1e12:.0f} TFLOP/s",
    ):
        assert figure in CLAIMS
    expected = {
        "500K+ tokens/s (": [
            f"{500e3 * flops.causal / 1e12:,.0f} TFLOP/s",
            f"{500e3 / limit:.0%}".replace("%", " %"),
            f"= {limit / 1e3:.0f}k tokens/s",
        ],
        "~700K": [f"{700e3 / limit:.0%}".replace("%", " %")],
        "~900K": [
            f"1 ÷ ({matmul / 1e9:.3f} ÷ {fp8 / 1e12:.0f} + {attention / 1e9:.3f} ÷ {bf16 / 1e12:.0f})",
            f"= {mixed / 1e3:.0f}k",
            f"{all_fp8 / 1e3:.0f}k",
        ],
        "5B tokens in 1.5 h": [f"{5400 * mixed / 1e9:.2f}B and {5400 * limit / 1e9:.2f}B"],
        "MFU 70–80 %": [
            f"{0.7 * bf16 / flops.useful / 1e3:.0f}k to {0.8 * bf16 / flops.useful / 1e3:.0f}k",
            f"{500e3 * flops.useful / bf16:.0%}".replace("%", " %"),
        ],
        "29–32 % MFU": [f"{65e3 * flops.useful / bf16:.1%}".replace("%", " %")],
        '"7x"': [f"{limit / 1e3:.0f} ÷ 65 = {limit / 65e3:.1f}x"],
        '"2x" or': [f"{mixed / 1e3:.0f} ÷ {limit / 1e3:.0f} = {mixed / limit:.2f}x"],
        "~1979 TFLOPS": [f"dense is {bf16 / 1e12:.0f}"],
        "BF16 2–3x": [f"{bf16 / 1e12:.0f} ÷ {card.fp32 / 1e12:.0f} = {bf16 / card.fp32:.1f}x"],
        "gradient checkpointing by default": [f"{decoder_flops(model, 1024, 'full').computed / flops.executed:.2f}x"],
    }
    for promised, figures in expected.items():
        assert [figure for figure in figures if figure not in row(promised)] == [], promised
    assert min(500e3, 700e3) > limit
    assert all_fp8 < 900e3


def test_cards_and_money() -> None:
    h100, h200, a100 = SPECS["h100"], SPECS["h200"], SPECS["a100-80gb"]
    assert f"{h100.bf16 / a100.bf16:.2f}x" in row("faster than A100 |".rstrip(" |"))
    assert f"{h100.bandwidth / a100.bandwidth:.2f}x" in row("H100 2–3x")
    assert f"{h200.bf16 / 4 / a100.bf16:.2f}x" in row("faster than 4 A100s")
    assert f"{h200.bandwidth / 4 / a100.bandwidth:.2f}x" in row("faster than 4 A100s")
    saved = 1 - (4.5 / h200.bf16) / (11 / (4 * a100.bf16))
    assert f"{1 - 4.5 / 11:.0%} (at".replace("%", " %") in row("saves 50–60 %")
    assert f"per dense FLOP {saved:.0%}".replace("%", " %") in row("saves 50–60 %")
    assert f"{2 * 3 / 4 * 4 * shape().parameters / 1e9:.2f} GB" in row("DDP on 4")
    low, high = 1.2 * 2 * 1.2 * 3.8 * 1.1 * 1.3, 1.5 * 3 * 1.3 * 3.8 * 1.2 * 1.5
    assert f"{low:.1f}x–{high:.1f}x" in row("combined 8–12x")


def test_sizes() -> None:
    model = shape()
    exactly = row("354,823,681")
    assert f"{model.parameters:,}" in exactly
    assert f"{shape(4096).parameters:,}" in exactly
    assert f"leaves {354_823_681 % 1024}" in exactly
    assert model.parameters % 1024 == shape(4096).parameters % 1024 == 0
    rates = [sqrt_scaled_lr(3e-4, batch, 128) for batch in (256, 512, 1024)]
    assert ", ".join(f"{rate * 1e4:.2f}e-4" for rate in rates) in row("√ rule")
    low_bit = row("8-bit AdamW")
    assert f"8 → {moment_bytes(model, 'paged_adamw_8bit') / model.parameters:.2f} bytes" in low_bit
    old, new = (moment_bytes(model, name) / GIB for name in ("adamw", "paged_adamw_8bit"))
    assert f"{old:.2f} → {new:.2f} GiB" in low_bit
    assert f"{32 * 2 * 1024:,} to {64 * 4 * 1024:,}" in row("tokens/step")
    assert f"{8 * 16 * 1024:,}" in row("tokens/step")


def test_what_was_measured_is_what_the_benchmark_holds() -> None:
    assert f"{BENCHMARK['tokens_per_s']:,.0f} tokens/s" in row("500K+ tokens/s (")
    mfu = f"{BENCHMARK['mfu']:.1%} (PaLM), {BENCHMARK['mfu_causal']:.1%} (causal)".replace("%", " %")
    assert mfu in row("MFU 70–80 %")
    assert f"{5400 * BENCHMARK['tokens_per_s'] / 1e9:.2f}B" in row("5B tokens")
    assert f"{BENCHMARK['data_wait_ms']:.2f} ms of {BENCHMARK['step_ms']:.1f} ms" in row("DataLoader")
    assert f"{BENCHMARK['power_w']:.1f} W" in row("> 90 %")
    assert f"{BENCHMARK['memory_gib']:.1f} GiB at 128 × 1024, planned {BENCHMARK['memory_plan_gib']:.1f}" in CLAIMS


def test_canonical_keys_in_the_guides_page_exist() -> None:
    here = [line.split(" | ")[1] for line in SEEDS.splitlines() if line.startswith("| ") and " | " in line]
    known = {*known_keys(Recipe), *ALIASES}
    sections = {key.split(".")[0] for key in known if "." in key}
    words = {word for cell in here for word in re.findall(r"`(\w+\.\w+)(?:[=:][^`]*)?`", cell)}
    named = {word for word in words if word.split(".")[0] in sections}
    assert len(named) > 20
    assert named <= known


def test_every_alias_of_a_guide_is_on_the_page() -> None:
    """One spelling of each; spellings that differ only by a prefix or a suffix count as the same."""
    words = set(re.findall(r"[\w.]+", SEEDS))
    families = {alias.split(".")[-1].removesuffix("_steps") for alias in ALIASES}
    assert {f for f in families if not any(w.split(".")[-1].startswith(f) for w in words)} == {"learning_rate"} - words


def test_no_flag_or_key_of_the_guides_is_missing() -> None:
    folder = os.environ.get("REDLINE_GUIDES")
    if not folder:
        pytest.skip("REDLINE_GUIDES names no folder with the five guides")
    guides = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.txt")))
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", guides))
    assert {flag for flag in flags if flag.lstrip("-") not in SEEDS and flag != "--help"} == set()
    scripts = set(re.findall(r"(?:python|bash|sbatch) (?:[\w/]+/)?(\w+\.(?:py|sh))", guides))
    assert {name for name in scripts if name not in SEEDS} == set()
    dotted = set(re.findall(r"\b((?:model|trainer|loader)\.\w+)=", guides))
    assert {key for key in dotted if key not in SEEDS} == set()


def test_memory_of_the_presets() -> None:
    from typer.testing import CliRunner

    from redline.cli.main import app

    line, peaks, fixed = row("64, 128, 192, 256 (H200 guide)"), [], 0.0
    for preset in ("conservative", "recommended", "aggressive", "extreme"):
        words = ["plan", "gsm8k-hdp", f"train.preset={preset}", "--gpu", "h200", "--json"]
        memory = json.loads(CliRunner().invoke(app, words).stdout)["memory_gib"]
        peaks.append(f"{memory['peak']:.1f}")
        fixed = sum(memory[part] for part in ("weights", "gradients", "optimizer"))
    assert f"{', '.join(peaks[:3])} and {peaks[3]} GiB" in line
    assert f"are {fixed:.1f} GiB" in line
    assert f"{128 * 1024 * padded_vocab(50_262) * 4 / GIB:.1f} GiB" in line
