"""Runs of latent_prefix: learning, bitwise resume, micro-batches, and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from latents import Latents, other_base, write_rows
from redline.errors import RecipeError, UserError
from redline.jobs.objective import job_runtime
from redline.runs.events import read_events

pytest.importorskip("transformers", reason="bases are made by transformers")


@pytest.fixture(scope="module")
def second_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_base(tmp_path_factory.mktemp("second"))


@pytest.fixture
def two(world: Any, tiny_base: Path, second_base: Path, tmp_path: Path) -> Latents:
    return Latents(world, [tiny_base, second_base], write_rows(tmp_path / "rows.jsonl"), tmp_path)


@pytest.fixture
def one(world: Any, tiny_base: Path, tmp_path: Path) -> Latents:
    return Latents(world, [tiny_base], write_rows(tmp_path / "rows.jsonl", 200), tmp_path)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event["type"] == kind]


def test_two_models_learn_together_and_answer_through_latents(world: Any, tmp_path: Path) -> None:
    bases = [other_base(tmp_path / str(n), seed=n, spread=0.2, vocab=280 + 20 * n) for n in (1, 2)]
    two = Latents(world, bases, write_rows(tmp_path / "rows.jsonl", 160), tmp_path)
    two.run(tmp_path / "run", "train.steps=50", "train.lr=1e-2", "latent_prefix.kd_weight=0", "train.micro_batch=8")
    before, *_, after = events(tmp_path / "run", "eval")
    for name in ("0", "1"):
        assert after[f"nll_{name}"] < before[f"nll_{name}"] - 1.0
        assert after[f"other_nll_{name}"] > after[f"nll_{name}"] + 0.1, "another text's latents say something else"
    assert after["loss"] == pytest.approx((after["nll_0"] + after["nll_1"]) / 2)
    assert all(-1 <= event["latent_cosine"] <= 1 for event in events(tmp_path / "run", "eval"))


def test_a_resumed_run_is_the_same_to_the_bit(two: Latents, tmp_path: Path, tensors_of: Any) -> None:
    keys = ("train.steps=8", "latent_prefix.fade_steps=6", "latent_prefix.private_slots=1")
    two.run(tmp_path / "whole", *keys)
    two.run(tmp_path / "parts", *keys, stop_at=5)
    two.run(tmp_path / "parts", *keys, resume=True)
    expected, got = (tensors_of(tmp_path / name / "checkpoints/step-00000008") for name in ("whole", "parts"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    model = two.objective(*keys, teach=False).model
    assert {name for name in expected if name.startswith("model/")} == {
        f"model/{n}" for n, _ in model.named_parameters()
    }


def test_reading_of_the_teacher_is_logged(two: Latents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each teacher is logged once, with the progress if reading takes long."""
    from redline.jobs.latent_prefix import teacher as latent_teacher

    monkeypatch.setattr(latent_teacher, "_FILE_ROWS", 4)
    monkeypatch.setattr(latent_teacher, "_PROGRESS_S", 0.0)
    heard: list[str] = []
    view = SimpleNamespace(event=lambda event: heard.append(str(event.get("message"))), tick=lambda *_: None)
    keys = ("latent_prefix.anchor='It is: '", "train.steps=1", "train.global_batch=8")
    two.run(tmp_path / "first", *keys, view=view)
    reading = [line for line in heard if "text" in line]
    assert [line for line in reading if "reads 8 texts" in line] == reading[::2]
    assert reading[1::2] == [line for line in reading if "4 of 8 texts" in line]
    assert len(reading) == 4
    heard.clear()
    two.run(tmp_path / "second", *keys, view=view)
    assert not [line for line in heard if "text" in line], "all of it is there"


def test_the_split_of_a_batch_changes_nothing(two: Latents, tmp_path: Path) -> None:
    for micro in (8, 1):
        two.run(tmp_path / str(micro), f"train.micro_batch={micro}", "train.lr=1e-3")
    whole, parts = ([event["loss"] for event in events(tmp_path / name, "step")] for name in ("8", "1"))
    assert whole == pytest.approx(parts, rel=1e-5)
    norms = [[event["grad_norm"] for event in events(tmp_path / name, "step")] for name in ("8", "1")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_another_model_is_refused_on_resume(one: Latents, tmp_path: Path) -> None:
    mine = tmp_path / "base"
    shutil.copytree(one.bases[0], mine)
    keys = (f"model.base={mine}", "train.steps=6")
    one.run(tmp_path / "run", *keys, stop_at=3)
    from safetensors.torch import load_file, save_file

    tensors = load_file(mine / "model.safetensors")
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, mine / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="base 0"):
        one.run(tmp_path / "run", *keys, resume=True)


def test_states_of_another_teacher_are_refused(one: Latents) -> None:
    objective = one.objective("latent_prefix.anchor='Said: '")
    folder = objective.teachers["0"].folder
    about = json.loads((folder / "about.json").read_text())
    (folder / "about.json").write_text(json.dumps({**about, "model": "somebody else's"}))
    with pytest.raises(UserError, match=r"another model.*Delete .*teachers"):
        one.objective("latent_prefix.anchor='Said: '")
    shutil.rmtree(folder)
    again = one.objective("latent_prefix.anchor='Said: '")
    rows = np.arange(4)
    torch.testing.assert_close(again.batch(rows)["teacher.0"], objective.batch(rows)["teacher.0"])
    states = next(folder.glob("*.states.npy"))
    states.write_bytes(states.read_bytes()[:-100])
    with pytest.raises(UserError, match="Delete"):
        one.objective("latent_prefix.anchor='Said: '")


def test_a_model_without_an_end_of_text_is_refused(world: Any, tmp_path: Path) -> None:
    base = other_base(tmp_path / "endless", eos=False)
    rows = write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="end-of-text token"):
        Latents(world, [base], rows, tmp_path).objective(teach=False)


def test_long_texts_and_answers(one: Latents, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in one.rows.read_text().splitlines()]
    rows[3]["source"] = "long " * 100
    rows[5]["answer"] = "very " * 100
    one.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cut = one.objective(teach=False).data
    assert any("1 texts cut" in line for line in cut.messages)
    assert any("1 rows left out" in line for line in cut.messages)
    dropped = one.objective("data.overlong=drop", teach=False).data
    assert any("1 texts left out" in line for line in dropped.messages)
    with pytest.raises(UserError, match=r"too long .*data\.overlong is error.*latent_prefix\.bytes"):
        one.objective("data.overlong=error", teach=False)
    one.rows.write_text("".join(json.dumps(row) + "\n" for row in (*rows[:3], *rows[5:])))
    with pytest.raises(UserError, match=r"answer is too long.*data\.seq_len"):
        one.objective("data.overlong=error", teach=False)


def test_options_that_do_not_fit_the_models_are_refused(two: Latents) -> None:
    complete = job_runtime("latent_prefix").complete
    with pytest.raises(RecipeError, match=r"model\.layers: 7 .* 2\."):
        complete(two.recipe("model.layers=7"), print)
    with pytest.raises(RecipeError, match=r"200 is longer .* 128"):
        complete(two.recipe("data.seq_len=200"), print)
    shape = "{layers: 3, d_model: 48, heads: 4, d_ff: 96, vocab: 300}"
    with pytest.raises(RecipeError, match=r"others\.0.*another layers"):
        complete(two.recipe(f"latent_prefix.others=[{{base: {two.bases[1]}, shape: {shape}}}]"), print)
    filled = complete(two.recipe(), print)
    assert (filled.model.d_model, filled.latent_prefix.others[0].shape["d_model"]) == (64, 48)


def test_random_models_are_of_the_same_kind(two: Latents) -> None:
    """Timed steps use random weights and read no base."""
    real = two.objective("latent_prefix.patch=2", teach=False)
    runtime = job_runtime("latent_prefix")
    timed = runtime.create(real.resolved, runtime.random_data(real.data.facts))
    timed.build(torch.device("cpu"))
    shapes = {name: p.shape for name, p in real.model.named_parameters()}
    assert {name: p.shape for name, p in timed.model.named_parameters()} == shapes
    batch = timed.worst_batch(2)
    weights = timed.weights(batch)
    torch.stack([t.coefficient * t.sum / weights[t.weight] for t in timed.loss(batch).values()]).sum().backward()
    assert all(p.grad is not None for p in timed.model.parameters())
    every = sum(p.numel() for p in real.model.parameters())
    assert real.resolved.parameters()["trainable"] == every, "the plan counts what is built"


def test_every_length_of_every_model_is_compiled(two: Latents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length compiles to one graph, without falling back to eager mode."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: plain(module, backend="eager", **how))
    objective = two.objective("latent_prefix.kd_weight=0", "latent_prefix.match_weight=0", teach=False)
    with torch._dynamo.config.patch(recompile_limit=8):  # whatever it becomes, only for this test
        objective.compile()
        batch = objective.worst_batch(2)
        for length in (2, 4, 8, 16, 32):
            rows = {k: v[:, :1].repeat(1, length) if k.startswith("targets") else v for k, v in batch.items()}
            sum(term.sum for term in objective.loss(rows).values()).backward()
    assert counters["stats"]["unique_graphs"] == 1 + 5 * 2, "of the encoder, and of both models"
    assert counters["frames"]["ok"] == counters["frames"]["total"]
    torch._dynamo.reset()


def test_the_warm_up_covers_the_shapes_of_the_first_step(two: Latents) -> None:
    """A compilation in the first step would count as training time."""
    objective = two.objective("train.compile=true", teach=False)
    (_, worst), (rows, usual) = objective.warmup_batches(4)
    assert rows == 4
    first = objective.batch(np.arange(4))
    assert {name: tensor.shape for name, tensor in usual.items()} == {name: t.shape for name, t in first.items()}
    assert all(worst[name].shape >= tensor.shape for name, tensor in usual.items())


def test_the_worst_batch_can_occur(two: Latents) -> None:
    objective = two.objective(teach=False)
    pairs = objective.data.pairs
    worst = objective.worst_batch(2)
    for number, longest in enumerate(pairs.train.lengths.answers):
        assert worst[f"targets.{number}"].shape[1] == longest
        assert longest == max(len(one) for rows in (pairs.train, pairs.val) for one in rows.answers[number])


def test_the_teacher_reads_only_the_rows_that_are_used(one: Latents) -> None:
    """A run that skips two bad batches reads two more, for which the teacher's states are needed too."""
    objective = one.objective("train.steps=2", "train.global_batch=4", teach=False)
    objective.skipped_steps = 2
    with objective.dry_run():
        pass
    assert objective.batch(np.arange(12, 16))["teacher.0"].shape[0] == 4
    assert len(objective.data.pairs.index) > 16, "not all of the data"
    with pytest.raises(AssertionError):
        objective.batch(np.arange(16, len(objective.data.pairs.index)))


def test_latent_prefix_cannot_be_exported(one: Latents, tmp_path: Path) -> None:
    from redline.export.folder import ExportOptions, Source, model_contents
    from redline.training.saved_run import SavedRun

    weights: Any = None
    source = Source(SavedRun(tmp_path, {"data": {}}, one.recipe()), weights)
    with pytest.raises(UserError, match="objective=latent_prefix"):
        model_contents(source, ExportOptions(), print)
