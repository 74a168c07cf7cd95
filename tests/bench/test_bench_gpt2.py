"""The baseline of time to loss: its model, its loop, and that it reads the same tokens as the other arms."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import nanogpt
from benchmarks.peers.anchor import time_anchor
from benchmarks.peers.gpt2 import MEDIUM, STD, Gpt2, Gpt2Job, Gpt2Shape, adamw
from benchmarks.peers.nanogpt import Baseline, measure, recipe_of
from benchmarks.time_to_loss import words_for
from redline.data.corpus import load_text
from redline.errors import RecipeError, UserError
from redline.hardware.machine import Machine
from redline.jobs.causal_lm.objective import CausalLM
from redline.kernels.cross_entropy import IGNORE
from redline.recipe.load import load
from redline.recipe.resolve import resolve
from redline.training.step import BatchLoader

CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
SMALL = Gpt2Shape(layers=2, heads=2, width=32, vocab=64, length=16)


@pytest.fixture
def words(corpus: Path) -> list[str]:
    overrides = [f"data.source={corpus}", "data.tokenizer=bytes", "train.device=cpu", "train.global_batch=8"]
    return words_for("nanogpt", [*overrides, "train.micro_batch=4"], "cpu")


def baseline(words: list[str], **options: Any) -> Baseline:
    recipe = recipe_of(words)
    data = load_text(recipe)
    resolved = resolve(recipe, CPU, data.facts)
    return Baseline(resolved, Gpt2Job(resolved, data), options.get("warmup_steps"))


def test_it_is_gpt2_medium_without_biases() -> None:
    with torch.device("meta"):
        model = Gpt2(MEDIUM)
    layer = 12 * 1024**2
    assert model.counts()["matmul"] == 24 * layer + 50304 * 1024
    assert model.counts()["total"] == 24 * (layer + 2 * 1024) + (50304 + 1024) * 1024 + 1024 == 354_599_936
    assert not [name for name, _ in model.named_parameters() if "bias" in name]


def test_it_computes_what_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers", reason="its GPT-2 is the reference")
    model = Gpt2(SMALL)
    model.initialise(torch.Generator().manual_seed(1))
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, activation_function="gelu", attn_pdrop=0.0
    )
    reference = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.zero_()  # biases stay so
        inner = reference.transformer
        inner.wte.weight.copy_(model.tokens.weight)
        inner.wpe.weight.copy_(model.positions.weight)
        inner.ln_f.weight.fill_(1)
        blocks: Any = zip(inner.h, model.blocks, strict=True)
        for block, ours in blocks:
            block.ln_1.weight.fill_(1)
            block.ln_2.weight.fill_(1)
            pairs = ((block.attn.c_attn, ours.qkv), (block.attn.c_proj, ours.out))
            for theirs, own in (*pairs, (block.mlp.c_fc, ours.up), (block.mlp.c_proj, ours.down)):
                theirs.weight.copy_(own.weight.T)
    rows = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(2))
    targets = rows[:, 1:].contiguous()
    targets[0, :3] = IGNORE
    logits = reference(rows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    assert model(rows[:, :-1], targets).item() / (3 * 16 - 3) == pytest.approx(expected.item(), abs=1e-5)


def test_the_residual_stream_does_not_grow_with_depth() -> None:
    model = Gpt2(Gpt2Shape(4, 2, 128, 512, 32))
    model.initialise(torch.Generator().manual_seed(3))
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            assert (weight == 1).all()
        else:
            added = name.endswith(("out.weight", "down.weight"))
            assert weight.std().item() == pytest.approx(STD / math.sqrt(8) if added else STD, rel=0.05), name


def test_only_matrices_decay() -> None:
    matrices, rest = adamw(Gpt2(SMALL), lr=1e-3, weight_decay=0.1).param_groups
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert matrices["betas"] == (0.9, 0.95)
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in rest["params"]} == {1}


def test_every_arm_sees_the_same_tokens(words: list[str], corpus: Path) -> None:
    """The global order of samples and the validation windows do not depend on the batch."""
    ours = [f"data.source={corpus}", "data.tokenizer=bytes", "train.device=cpu", "train.global_batch=6"]
    recipe = load("pretrain-350m", [*words_for("pretrain-350m", ours, "cpu"), "train.steps=4"]).recipe
    data = load_text(recipe)
    resolved = resolve(recipe, CPU, data.facts)
    other = CausalLM(resolved, data)
    other.build(torch.device("cpu"))
    theirs = baseline(words)
    seen = [_read(theirs.job, 3), _read(other, 4)]
    assert seen[0].shape == seen[1].shape == (24, 65), "three steps of eight, four of six"
    assert (seen[0] == seen[1]).all()
    assert len(np.unique(seen[0], axis=0)) > 12
    assert (_looked_at(theirs.job, 4) == _looked_at(other, 3)).all()
    another = baseline([*words, "train.seed=5"])
    assert (_read(another.job, 3) != seen[0]).any(), "another seed, another order"
    assert (_looked_at(another.job, 4) == _looked_at(other, 3)).all(), "but the same validation"


def _read(job: CausalLM, steps: int) -> np.ndarray:
    with BatchLoader(job, job.resolved.batch, torch.device("cpu"), 1, 0) as feed:
        micros = [micro for step in range(steps) for micro in feed.next(step).micros]
    return np.concatenate([np.c_[m["inputs"].numpy(), m["targets"][:, -1:].numpy()] for m in micros])


def _looked_at(job: CausalLM, micro: int) -> np.ndarray:
    seen, loss = [], job.loss

    def spy(batch: Any) -> Any:
        seen.append(torch.cat([batch["inputs"], batch["targets"]], 1).numpy())
        return loss(batch)

    job.loss = spy  # type: ignore[method-assign]
    job.evaluate(micro)
    return np.concatenate(seen)


def test_timing_a_step_changes_nothing(words: list[str]) -> None:
    plain, timed = baseline(words), baseline(words)
    timed.warm_up()
    before = {name: weight.clone() for name, weight in timed.job.model.named_parameters()}
    assert timed.step_ms(3) > 0
    assert all((weight == before[name]).all() for name, weight in timed.job.model.named_parameters())
    curves = [[point["loss"] for point in arm.train(20)] for arm in (plain, timed)]
    assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0] - 0.1, "and it learns"


def test_its_clock_stops_during_evaluations(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: Any, micro: int) -> dict[str, float]:
        time.sleep(0.15)
        return {"loss": 1.0}

    monkeypatch.setattr(Gpt2Job, "evaluate", slow)
    arm = baseline(words)
    step = arm.step

    def slow_step(*arguments: Any) -> None:
        time.sleep(0.02)
        step(*arguments)

    monkeypatch.setattr(arm, "step", slow_step)
    curve = arm.train(12)
    assert len(curve) == 13
    assert 12 * 0.02 <= curve[-1]["seconds"] < 12 * 0.15


def test_the_learning_rate_fits_the_budget(words: list[str]) -> None:
    arm = baseline(words)
    rates = [arm._lr_factor(step, 200) for step in range(200)]
    assert rates[9] == 1.0, "after five percent"
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert baseline(words, warmup_steps=50)._lr_factor(24, 200) == pytest.approx(0.5)


def test_a_row_says_what_was_run(words: list[str]) -> None:
    row = measure(words, 0.3, 30.0)
    assert (row["steps"], row["anchor_step_ms"]) == (10, 30.0)
    assert row["tokens"] == 10 * 8 * 64
    lock = row["lock"]
    assert (lock["recipe"]["train"]["steps"], lock["recipe"]["train"]["warmup_steps"]) == (10, 1)
    assert lock["recipe"]["train"]["lr"] == 6e-4
    assert lock["batch"] == {"micro": 4, "global": 8}
    assert lock["parameters"]["total"] > 0
    assert row["final_loss"] == row["evaluations"][-1]["loss"]


@pytest.mark.parametrize(("batch", "micro"), [(128, 32), (48, 24), (7, 7)])
def test_micro_batches_have_at_most_32_sequences(batch: int, micro: int) -> None:
    assert recipe_of([f"train.global_batch={batch}"]).train.micro_batch == micro


def test_unsupported_options_are_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nanogpt, "MAX_LOGITS", 1000)
    with pytest.raises(UserError, match="more logits"):
        measure(words, 0.3, 30.0)
    with pytest.raises(RecipeError, match="divisor"):
        recipe_of(["train.global_batch=8", "train.micro_batch=3"])


def test_the_anchor_is_a_time() -> None:
    assert 0 < time_anchor("cpu")["step_ms"] < 10_000
