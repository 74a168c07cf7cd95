"""Fine-tuning runs: learning, frozen weights, resuming, packing and errors."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetuning import Tuning
from redline.errors import RecipeError, UserError
from redline.jobs.objective import Term, job_runtime
from redline.models.pretrained import adapted_linears, open_base
from redline.runs.events import read_events

METHODS = ("qlora", "lora", "full")


@pytest.fixture
def tuning(world: Any, tiny_base: Path, answers: Path, tmp_path: Path) -> Tuning:
    return Tuning(world, tiny_base, answers, tmp_path)


def losses(run: Path, kind: str = "step") -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["type"] == kind]


@pytest.mark.parametrize("method", METHODS)
def test_finetuning_learns_the_answers(tuning: Tuning, tmp_path: Path, method: str) -> None:
    tuning.run(tmp_path / "run", f"finetune.method={method}", "train.steps=30", "train.lr=5e-3")
    before, after = losses(tmp_path / "run", "eval")[0], losses(tmp_path / "run", "eval")[-1]
    assert after < before - (2.0 if method == "full" else 0.5)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_is_the_same_to_the_bit(tuning: Tuning, tmp_path: Path, tensors_of: Any, method: str) -> None:
    keys = (f"finetune.method={method}", "train.steps=8")
    tuning.run(tmp_path / "whole", *keys)
    tuning.run(tmp_path / "parts", *keys, stop_at=5)
    tuning.run(tmp_path / "parts", *keys, resume=True)
    expected, got = (tensors_of(tmp_path / name / "checkpoints/step-00000008") for name in ("whole", "parts"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("method", ["qlora", "lora"])
def test_the_base_stays_and_the_adapters_are_what_is_saved(
    tuning: Tuning, tmp_path: Path, tensors_of: Any, method: str
) -> None:
    fresh = tuning.objective(f"finetune.method={method}").model
    trainer = tuning.run(tmp_path / "run", f"finetune.method={method}")
    model = trainer.objective.model
    saved = {name for name in tensors_of(tmp_path / "run/checkpoints/step-00000006") if name.startswith("model/")}
    assert saved == {f"model/{name}" for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in saved)
    for path, linear in adapted_linears(model).items():
        before = adapted_linears(fresh)[path]
        assert torch.equal(linear.base.dense(torch.float32), before.base.dense(torch.float32))
        assert all(b.any() for b in linear.lora_B.values()), "every adapter has moved"
    assert torch.equal(model.embedding.weight, fresh.embedding.weight)


def test_without_quantisation_it_begins_as_the_base(tuning: Tuning) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tuning.base, dtype=torch.float32).eval()
    ours = tuning.objective("finetune.method=lora")
    tokens = torch.randint(0, 320, (2, 30), generator=torch.Generator().manual_seed(1))
    ours.model.eval()
    with torch.no_grad():
        found = ours.model.logits(ours.model(tokens, ours.attention.bind(30, torch.zeros_like(tokens))))
        torch.testing.assert_close(found, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("learn", ["answers", "all"])
def test_packed_samples_have_the_loss_of_samples_alone(tuning: Tuning, learn: str) -> None:
    """Every sample occurs once, so the sums over all of them must agree."""
    sums = {}
    for pack in ("true", "false"):
        objective = tuning.objective(f"data.pack={pack}", "data.val_fraction=0", f"finetune.learn={learn}")
        split = objective.data.answers.train
        batch = objective._packed(split.rows(np.arange(len(split))))
        objective.model.eval()
        with torch.no_grad():
            total = float(objective.loss(batch)["cross_entropy"].sum)
        sums[pack] = total / objective.weights(batch)["tokens"], objective.weights(batch)["tokens"], len(split)
    (packed, learnt, sequences), (alone, expected, samples) = sums["true"], sums["false"]
    assert learnt == expected
    assert sequences < samples == 40
    assert packed == pytest.approx(alone, abs=1e-5)


def test_only_answers_count(tuning: Tuning) -> None:
    answers, everything = (tuning.objective(f"finetune.learn={learn}") for learn in ("answers", "all"))
    few, all_tokens = (o.weights(o.batch(np.arange(2)))["tokens"] for o in (answers, everything))
    assert 0 < few < 0.5 * all_tokens


def test_the_split_of_a_batch_changes_nothing(tuning: Tuning, tmp_path: Path) -> None:
    for micro in (4, 1):
        tuning.run(tmp_path / str(micro), f"train.micro_batch={micro}", "model.lora.dropout=0")
    whole, parts = losses(tmp_path / "4"), losses(tmp_path / "1")
    assert whole == pytest.approx(parts, abs=1e-5)


def test_a_bad_step_changes_nothing(tuning: Tuning, tmp_path: Path) -> None:
    from redline.training.control import RunDirectory

    with RunDirectory(tmp_path / "run") as run:
        trainer = tuning.world.trainer(run, "train.steps=4")
        real, now, after = trainer.objective.loss, [0], []

        def broken(batch: Any) -> dict[str, Term]:
            found = real(batch)
            total = found["cross_entropy"].sum * (float("nan") if now[0] == 2 else 1.0)
            return {"cross_entropy": Term(total, "tokens")}

        def note(step: int) -> None:
            after.append({name: p.detach().clone() for name, p in trainer.parameters.items()})
            now[0] = step + 1

        trainer.objective.loss = broken
        tuning.world.around(trainer, after=note)
        trainer.run()
        trainer.monitor.log.close()
    assert trainer.step_log.skipped == 1
    same = [all(torch.equal(before[name], then[name]) for name in before) for before, then in pairwise(after)]
    assert same == [False, True, False], "the third step alone changed nothing"


def test_another_base_is_refused_on_resume(tuning: Tuning, tmp_path: Path) -> None:
    mine = tmp_path / "base"
    shutil.copytree(tuning.base, mine)
    keys = (f"model.base={mine}", "train.steps=6")
    tuning.run(tmp_path / "run", *keys, stop_at=3)
    from safetensors.torch import load_file, save_file

    tensors = load_file(mine / "model.safetensors")
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, mine / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="base"):
        tuning.run(tmp_path / "run", *keys, resume=True)


def test_options_that_do_not_fit_the_base_are_refused(tuning: Tuning) -> None:
    complete = job_runtime("finetune").complete
    with pytest.raises(RecipeError, match=r"model\.layers: 7 is not the base's 2"):
        complete(tuning.recipe("model.layers=7"), print)
    with pytest.raises(RecipeError, match="1024 is longer than the 256"):
        complete(tuning.recipe("data.seq_len=1024"), print)
    filled = complete(tuning.recipe("model.layers=2"), print).model
    assert (filled.d_model, filled.kv_heads, filled.vocab, filled.tied) == (64, 2, 320, False)
    assert open_base(str(tuning.base)).shape.layers == filled.layers


def test_a_model_on_random_weights_is_of_the_same_kind(tuning: Tuning) -> None:
    """Timed steps use random weights and do not read the base."""
    real = tuning.objective()
    runtime = job_runtime("finetune")
    timed = runtime.create(real.resolved, runtime.random_data(real.data.facts))
    timed.build(torch.device("cpu"))
    shapes = {name: p.shape for name, p in real.model.named_parameters()}
    assert {name: p.shape for name, p in timed.model.named_parameters()} == shapes
    timed.loss(timed.worst_batch(2))["cross_entropy"].sum.backward()
    assert all(p.grad is not None for p in timed.model.parameters() if p.requires_grad)


# --- rows of plain text


def test_rows_of_text_are_learnt_like_answers(world: Any, tiny_base: Path, tmp_path: Path) -> None:
    """The loss of a step is that of a plain loop over whole texts, and a run on texts has no question to answer."""
    from redline.evaluate.questions import score_answers

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"The stone number {n} is red."}) + "\n" for n in range(40)))
    tuning = Tuning(world, tiny_base, rows, tmp_path)
    trainer = tuning.run(tmp_path / "run", "finetune.method=full", "train.steps=20", "train.lr=5e-3")
    assert losses(tmp_path / "run", "eval")[-1] < losses(tmp_path / "run", "eval")[0] - 2.0
    objective = tuning.objective("finetune.method=full")
    batch = objective.batch(np.arange(4))
    texts = [
        objective.data.answers.train.samples[place][0] for place in range(len(objective.data.answers.train.samples))
    ]
    model = objective.model
    with torch.no_grad():
        got = float(objective.loss(batch)["cross_entropy"].sum) / objective.weights(batch)["tokens"]
        alone = []
        for row in objective.data.answers.index.sequences(np.arange(4)):
            first, end = objective.data.answers.train.sequence_starts[row : row + 2]
            for text in texts[first:end]:
                tokens = torch.tensor(np.array(text), dtype=torch.int64)[None]
                logits = model.logits(
                    model(
                        tokens[:, :-1], objective.attention.bind(tokens.shape[1] - 1, torch.zeros_like(tokens[:, :-1]))
                    )
                )
                alone += torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="none").tolist()
    assert got == pytest.approx(np.mean(alone), abs=1e-4)
    assert trainer.objective.first_prompt() == ""
    with pytest.raises(UserError, match="no question is held out"):
        score_answers(trainer.objective, "match", micro=4, count=None, tokens=4, where="run")
