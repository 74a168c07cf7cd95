"""The fine-tuning comparison: all contenders do the same work, and the figures are what their names say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks import finetune, finetune_steps
from benchmarks.__main__ import app
from benchmarks.finetune import CONTENDERS, PLAIN, add_ratios, choose, run_finetune
from benchmarks.finetune_steps import document_tokens, random_rows, time_steps
from benchmarks.pages import lines, markdown
from benchmarks.peers import hf_qlora
from redline.bench.child import ChildError
from redline.errors import UsageError, UserError
from redline.hardware.machine import named_gpu
from redline.recipe.resolve import DataFacts, resolve

CPU = "train.device=cpu"
EIGHTS = ["redline qlora fp8", "redline qlora fp8 packed"]
OURS = [one.name for one in CONTENDERS if one.peer is None and one.name not in EIGHTS]
FIGURES = {
    "tokens_per_s": 1000.0,
    "step_ms": 256.0,
    "memory_gib": 0.5,
    "first_loss": 6.2,
    "last_loss": 6.1,
    "micro_batch": 4,
    "document_tokens": 64.0,
    "precision": "fp32",
    "compiled": False,
    "recomputed": "none",
    "choices": {},
    "warnings": [],
}
missing = [name for name in ("transformers", "peft", "bitsandbytes") if find_spec(name) is None]
stack = pytest.mark.skipif(bool(missing), reason=f"the usual stack lacks {', '.join(missing)}")


def request_for(*overrides: str, **more: Any) -> dict[str, Any]:
    """Return the request that the process of a row gets."""
    setting = choose(None, [CPU, *overrides])
    facts = DataFacts(512, 10**9, 10**7, "", "base", "")
    recipe = resolve(setting.recipe, setting.machine, facts).recipe.model_dump(mode="json")
    peer = {"micro_batch": 4, "liger": False, "recompute": True}
    return {"recipe": recipe, "facts": asdict(facts), "steps": 1, "sample_tokens": None, **peer, **more}


# --- all of it, on a toy


@pytest.fixture(scope="module", params=[pytest.param("for real", marks=pytest.mark.soak)])
def result_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the files of one real call."""
    folder = tmp_path_factory.mktemp("finetune")
    command = [sys.executable, "-m", "benchmarks", "finetune", CPU, "--out", str(folder / "f.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "out.txt").write_text(done.stdout)
    return folder


@stack
def test_all_contenders_begin_with_the_same_loss_and_are_timed_equally(result_folder: Path) -> None:
    result = json.loads((result_folder / "f.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [one.name for one in CONTENDERS]
    for name in EIGHTS:
        assert "not in fp8" in rows[name]["error"], "no CPU has units for it, and bf16 is not fp8"
    for name in (*OURS, PLAIN):
        row = rows[name]
        assert "error" not in row, row
        assert row["tokens_per_s"] == pytest.approx(4 * 64 * 1000 / row["step_ms"])
        assert (row["steps"], row["tokens_per_step"]) == (3, 256)
        assert row["first_loss"] == pytest.approx(math.log(512), abs=0.1), "nothing is known of random tokens"
        assert row["last_loss"] < row["first_loss"], "the same tokens again and again"
        assert row["times_plain"] == pytest.approx(row["tokens_per_s"] / rows[PLAIN]["tokens_per_s"])
        assert row["versions"]["torch"] == torch.__version__
        assert row["mfu"] is None, "a CPU's peak is not known"
    unpacked, packed, unquantised = (rows[name] for name in OURS)
    assert unpacked["first_loss"] == pytest.approx(rows[PLAIN]["first_loss"], abs=1e-5), "the same base in the same NF4"
    assert abs(unquantised["first_loss"] - unpacked["first_loss"]) > 1e-4
    assert abs(packed["first_loss"] - unpacked["first_loss"]) > 1e-4, "its samples do not see each other"
    assert (unpacked["document_tokens"], rows[PLAIN]["document_tokens"]) == (64, 64)
    assert 8 < packed["document_tokens"] < 24
    assert {"transformers", "peft", "bitsandbytes"} <= set(rows[PLAIN]["versions"])
    for key in ("memory_gib", "tokens_per_s"):
        assert unpacked[f"{key}_error"] == pytest.approx(unpacked["planned"][key] / unpacked[key] - 1)


@stack
def test_the_page_has_the_reason_of_a_peer_that_cannot_run(result_folder: Path) -> None:
    rows = {row["name"]: row for row in json.loads((result_folder / "f.json").read_text())["rows"]}
    why = "package liger_kernel is not installed." if find_spec("liger_kernel") is None else "need a GPU"
    page, output = (result_folder / "f.md").read_text(), (result_folder / "out.txt").read_text()
    for name in (f"{PLAIN}+liger", f"{PLAIN}+liger, nothing recomputed", f"{PLAIN}+liger, row by row"):
        assert why in rows[name]["error"]
        assert f"- {name}: no figure. {rows[name]['error']}" in page
        assert f"failed: {rows[name]['error']}" in output
    assert "| redline qlora: NF4 base, each row one document | fp32, not compiled | none | 4 | 64 |" in page
    assert f"- {PLAIN}: the best of the usual stack." in page
    assert f"- {PLAIN}: with torch {torch.__version__}" in page
    assert "![tokens per second](f.svg)" in page
    assert output.count("\n") == 1 + len(CONTENDERS)
    ElementTree.parse(result_folder / "f.svg")


# --- the work of each


def test_every_row_is_asked_for_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, Any]] = []

    def ask(module: str, request: dict[str, Any]) -> dict[str, Any]:
        requests.append({"module": module, **request})
        return FIGURES

    monkeypatch.setattr(finetune, "ask", ask)
    list(run_finetune(choose(None, [CPU, "model.lora.r=8", "train.steps=7"])))
    assert [one["module"].rpartition(".")[2] for one in requests] == ["finetune_steps"] * 3 + ["hf_qlora"] * 4
    assert {one["recipe"]["finetune"]["method"] for one in requests[3:]} == {"qlora"}
    assert [one["recipe"]["finetune"]["method"] for one in requests[:3]] == ["qlora", "qlora", "lora"]
    assert [one["recipe"]["model"]["quant"] for one in requests[:3]] == ["nf4", "nf4", "none"]
    for one in requests:
        assert one["recipe"]["model"]["lora"] == requests[0]["recipe"]["model"]["lora"]
        assert one["recipe"]["model"]["lora"]["r"] == 8
        assert (one["steps"], one["recipe"]["train"]["global_batch"], one["recipe"]["data"]["seq_len"]) == (7, 4, 64)
    assert [one["sample_tokens"] for one in requests] == [None, 16, *[None] * 5]
    assert [(one["liger"], one["recompute"]) for one in requests[3:]] == [
        (False, True),
        (True, True),
        (True, False),
        (True, False),
    ]
    micros = [one["micro_batch"] for one in requests[3:]]
    assert micros == [4, 4, 4, 1], "all at once, unless another was asked for; the last one row by row"
    requests.clear()
    rows = list(run_finetune(choose(None, [CPU, "train.micro_batch=2", "data.pack=false"])))
    assert [one["micro_batch"] for one in requests if "micro_batch" in one] == [2, 2, 2, 1]
    assert "data.pack=false" in rows[1]["error"]
    assert [name["name"] for name in rows if "error" in name] == [OURS[1], *EIGHTS], "the others go on"


def test_mfu_is_one_formula_for_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """4·N_base + 6·N_lora + 12·L·d·T over the dense bf16 peak, at the shape of an 8B model."""
    requests: list[dict[str, Any]] = []

    def ask(module: str, request: dict[str, Any]) -> dict[str, Any]:
        requests.append(request)
        length = request["sample_tokens"] or request["recipe"]["data"]["seq_len"]
        precision = request["recipe"]["train"]["precision"]
        return FIGURES | {"tokens_per_s": 10_000.0, "document_tokens": length, "precision": precision}

    monkeypatch.setattr(finetune, "ask", ask)
    setting = replace(choose("qlora-8b", [CPU]), overrides=(*finetune.DEFAULTS["cuda"],), machine=named_gpu("h200"))
    rows = list(run_finetune(setting))
    assert not [row for row in rows if "error" in row]
    base = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    for row, length in zip(rows, (4096, 512, 4096, 512, 4096, 4096, 4096, 4096, 4096), strict=True):
        flops = 4 * base + 6 * adapters + 12 * 32 * 4096 * length
        assert row["mfu"] == pytest.approx(10_000 * flops / 989e12, rel=2e-3), row["name"]
    assert [one["micro_batch"] for one in requests[5:]] == [4, 4, 4, 1]
    assert {one["recipe"]["model"]["layers"] for one in requests} == {32}
    assert all(row["planned"]["memory_gib"] > 6 for row in rows[:5])
    assert rows[4]["planned"]["memory_gib"] > rows[0]["planned"]["memory_gib"] + 8, "bf16 takes more room than NF4"
    assert not any("planned" in row for row in rows[5:])


@given(st.integers(1, 4), st.integers(4, 200), st.integers(2, 64))
def test_samples_fill_their_rows_and_have_about_the_length_asked_for(rows: int, length: int, sample: int) -> None:
    inputs, targets, documents = random_rows(100, rows, length, sample)
    unpacked = random_rows(100, rows, length, None)
    assert (inputs == unpacked[0]).all()
    assert (targets == unpacked[1]).all(), "the same tokens, whatever the borders"
    assert document_tokens(unpacked[2]) == length
    assert inputs.shape == documents.shape == (rows, length)
    for row in documents:
        _, counts = np.unique(row, return_counts=True)
        assert (np.diff(row) >= 0).all()
        assert (counts <= sample * 3 // 2).all()
        assert (counts[:-1] >= sample // 2).all(), "all but the last, which the row's end may cut"


@stack
def test_only_the_adapters_of_the_peer_learn_and_its_blocks_are_in_nf4() -> None:
    import peft
    from bitsandbytes.nn import Linear4bit

    setting = choose(None, [CPU, "model.lora.target_modules=[q_proj,down_proj]"])
    resolved = resolve(setting.recipe, setting.machine, DataFacts(512, 10**9, 10**7, "", "base", ""))
    peer = hf_qlora.Peer(resolved.recipe, liger=False, recompute=False)
    quantised = [module for module in peer.model.modules() if isinstance(module, Linear4bit)]
    assert len(quantised) == 2 * 7
    assert all(
        module.weight.quant_state.quant_type == "nf4" and module.weight.quant_state.nested for module in quantised
    )
    adapted = [module for module in peer.model.modules() if isinstance(module, peft.tuners.lora.Linear4bit)]
    assert len(adapted) == 2 * 2, "PEFT's own for bitsandbytes, not the one for any linear"
    learning = sum(parameter.numel() for parameter in peer.parameters)
    assert learning == resolved.parameters()["trainable"] == 2 * 16 * ((64 + 64) + (128 + 64))


@stack
@pytest.mark.parametrize(("recompute", "passes"), [(True, 2), (False, 1)])
def test_the_peer_recomputes_its_blocks_only_if_asked(recompute: bool, passes: int) -> None:
    setting = choose(None, [CPU])
    resolved = resolve(setting.recipe, setting.machine, DataFacts(512, 10**9, 10**7, "", "base", ""))
    peer = hf_qlora.Peer(resolved.recipe, liger=False, recompute=recompute)
    calls: list[str] = []
    for name, module in peer.model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    peer.step([(tokens, tokens)])
    assert len(calls) == passes * len(set(calls)) == passes * 2


@stack
def test_a_batch_without_room_is_split_and_is_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = hf_qlora.measure(request_for("model.lora.dropout=0"))
    monkeypatch.setattr(hf_qlora.Peer, "fits", lambda _, micros: len(micros[0][0]) == 1)
    split = hf_qlora.measure(request_for("model.lora.dropout=0"))
    assert (unpacked["micro_batch"], split["micro_batch"]) == (4, 1)
    for key in ("first_loss", "last_loss", "tokens_per_step"):
        assert split[key] == pytest.approx(unpacked[key], abs=1e-4)
    monkeypatch.setattr(hf_qlora.Peer, "fits", lambda *_: False)
    with pytest.raises(UserError, match="smallest micro-batch"):
        hf_qlora.measure(request_for())


@stack
@pytest.mark.parametrize("words", [("train.precision=bf16",), ("model.tied=true", "model.qkv_bias=true")])
def test_it_agrees_with_ours_in_other_models_too(words: tuple[str, ...]) -> None:
    request = request_for(*words)
    ours, theirs = finetune_steps.measure(request), hf_qlora.measure(request)
    assert ours["first_loss"] == pytest.approx(theirs["first_loss"], abs=1e-3 if "bf16" in words[0] else 1e-5)


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        (("train.optimizer=muon",), {}, "muon"),
        (("model.softcap=30",), {}, "softcap"),
        ((), {"sample_tokens": 16}, "samples of a row"),
        ((), {"liger": True}, "liger_kernel is not installed|need a GPU"),
    ],
)
def test_the_peer_refuses_unsupported_settings(words: tuple[str, ...], more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        hf_qlora.measure(request_for(*words, **more))


# --- the clock, the ratios, the errors


def test_the_figure_is_the_median_of_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, taken = iter((10.0, 11.0, 13.0, 14.0)), []
    monkeypatch.setattr(finetune_steps.time, "perf_counter", lambda: next(clock))

    def step(number: int) -> torch.Tensor:
        taken.append(number)
        return torch.tensor(5.0 - number)

    figures = time_steps(step, steps=3, tokens=256, device=torch.device("cpu"))
    assert taken == list(range(finetune_steps.SETTLE_STEPS + 3))
    assert (figures["step_ms"], figures["tokens_per_s"]) == (1000.0, 256.0)
    assert (figures["first_loss"], figures["last_loss"]) == (5.0, 5.0 - taken[-1])


def test_a_loss_that_is_not_finite_is_no_figure() -> None:
    with pytest.raises(UserError, match="not finite"):
        time_steps(lambda _: torch.tensor(math.nan), steps=1, tokens=1, device=torch.device("cpu"))


rates = st.lists(st.none() | st.floats(1.0, 1e6), min_size=len(CONTENDERS), max_size=len(CONTENDERS))


@given(rates)
def test_ratios_are_to_the_plain_peer_and_to_the_best_of_those_that_ran(rates_: list[float | None]) -> None:
    rows: list[Any] = [
        {"name": one.name, "error": "no"} if rate is None else {"name": one.name, "tokens_per_s": rate}
        for one, rate in zip(CONTENDERS, rates_, strict=True)
    ]
    theirs = [rate for rate in rates_[5:] if rate is not None]
    for before, after, rate in zip(rows, add_ratios(rows), rates_, strict=True):
        if rate is None:
            assert after == before
            continue
        assert after["times_plain"] == (None if rates_[5] is None else rate / rates_[5])
        assert after["times_best"] == (rate / max(theirs) if theirs else None)
        assert not after["best_of_theirs"] or rate == max(theirs)
    assert sum(row.get("best_of_theirs", False) for row in add_ratios(rows)) == bool(theirs)


@pytest.mark.parametrize(("failing", "code"), [("finetune_steps", 1), ("hf_qlora", 0)])
def test_a_failed_contender_has_its_reason_and_the_others_run(
    failing: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(module: str, request: dict[str, Any]) -> dict[str, Any]:
        if module.endswith(failing):
            raise ChildError("CUDA out of memory.")
        return FIGURES

    monkeypatch.setattr(finetune, "ask", ask)
    answer = CliRunner().invoke(app, ["finetune", CPU])
    assert answer.exit_code == code, "a peer may be missing, redline itself may not"
    ours, theirs = len(OURS), len(CONTENDERS) - len(OURS) - len(EIGHTS)  # a CPU has no fp8, and is not asked
    failed = ours if failing == "finetune_steps" else theirs
    assert answer.stdout.count("failed: CUDA out of memory.") == failed
    assert answer.stdout.count("1,000") == ours + theirs - failed


def test_the_table_stands_in_columns() -> None:
    rows = [{"name": "redline qlora", "what": "x", **FIGURES, "planned": {"memory_gib": 0.4, "tokens_per_s": None}}]
    rows += [{"name": PLAIN, "what": "y", "error": "no\nroom"}]
    output = lines({"benchmark": "finetune", "rows": rows})
    assert output[0].index("tok/s") + len("tok/s") == output[1].index("1,000") + len("1,000")
    assert output[2] == f"{PLAIN}  failed: no room"
    machine = {"name": "a CPU", "memory_gib": 8, "cores": 2}
    result = {"benchmark": "finetune", "date": "", "machine": machine, "versions": {}, "git": {}, "rows": rows}
    assert "| 1,000 | – | 256.0 | 0.5 | 0.4 | – | – | – | 6.2000 |" in markdown(result)


def test_other_jobs_are_refused_and_a_recipe_that_is_named_stays_as_it_is() -> None:
    with pytest.raises(UsageError, match="a recipe for causal_lm"):
        choose("quickstart", [CPU])
    named = choose("qlora-8b", [CPU])
    assert (named.recipe.model.layers, named.recipe.train.steps) == (32, 3)
    assert choose(None, [CPU, "model.layers=3"]).recipe.model.layers == 3
