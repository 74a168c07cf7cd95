"""Diffusion that starts from a pretrained base: the shift, the causal warm-up, new tokens, resuming and sampling."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from redline.errors import RecipeError, UserError
from redline.evaluate.opened_run import open_run
from redline.hardware.machine import Machine
from redline.jobs.diffusion.denoise import SamplerOptions, denoise
from redline.jobs.objective import Sampling, job_runtime
from redline.launch.plan import plan_recipe
from redline.models.pretrained import open_base
from redline.planning.layout import Layout, Segment, growing_layouts, uniform
from redline.recipe.load import load
from redline.recipe.lock import make_lock, write_lock
from redline.recipe.resolve import resolve
from redline.runs.events import read_events

transformers = pytest.importorskip("transformers")

CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)


class Diffusing:
    """The fixture `world` for diffusion from a base."""

    def __init__(self, world: Any, base: Path, text: Path, folder: Path) -> None:
        self.world, self.folder, self.file = world, folder, folder / "diffuse.yaml"
        recipe = {
            "objective": "block_diffusion",
            "block_diffusion": {"block_size": 8},
            "model": {"base": str(base)},
            "data": {"source": str(text), "seq_len": 32, "val_fraction": 0.1, "workers": 1},
            "train": {
                "device": "cpu",
                "precision": "fp32",
                "compile": False,
                "global_batch": 4,
                "steps": 8,
                "lr": 2e-3,
                "schedule": "constant",
                "warmup_steps": 0,
            },
            "eval": {"every": 1000, "samples": 0, "sequences": 16},
            "checkpoint": {"every": 1000},
            "monitor": {"log_every": 1},
        }
        self.file.write_text(yaml.safe_dump(recipe))
        world.recipe = self.recipe

    def recipe(self, *overrides: str) -> Any:
        return load(str(self.file), list(overrides)).recipe

    def objective(self, *overrides: str) -> Any:
        recipe = self.recipe(*overrides)
        runtime = job_runtime(recipe.objective)
        recipe = runtime.complete(recipe, lambda text: None)
        data = runtime.load_data(recipe)
        objective = runtime.create(resolve(recipe, CPU, data.facts), data)
        objective.build(torch.device("cpu"))
        return objective

    def run(self, name: str, *overrides: str, **options: Any) -> Any:
        return self.world.run(self.folder / name, *overrides, **options)

    def losses(self, name: str, kind: str = "step") -> list[float]:
        return [event["loss"] for event in read_events(self.folder / name / "events.jsonl") if event["type"] == kind]


@pytest.fixture
def diffusing(world: Any, tiny_base: Path, corpus: Path, tmp_path: Path) -> Diffusing:
    return Diffusing(world, tiny_base, corpus, tmp_path)


def step_loss(objective: Any, step: int) -> float:
    batch = objective.batch(np.arange(4 * step, 4 * step + 4))
    with torch.no_grad():
        return float(objective.loss(batch)["bound"].sum) / objective.weights(batch)["tokens"]


# --- what the first step computes


def test_the_first_stage_with_the_shift_has_the_loss_of_the_base(diffusing: Diffusing, tiny_base: Path) -> None:
    """With blocks of one position the model reads exactly what an autoregressive model reads."""
    objective = diffusing.objective("block_diffusion.causal_warmup=4")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    rows = torch.from_numpy(objective.data.training(np.arange(4)).tokens)
    with torch.no_grad():
        # the tokenizer has 284 ids, and the mask is the next one: the classes end before it
        logits = model(input_ids=rows).logits[:, :-1, :284]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert step_loss(objective, 0) == pytest.approx(expected, abs=1e-4)
    at_its_own_position = diffusing.objective("block_diffusion.causal_warmup=4", "block_diffusion.shift=false")
    assert step_loss(at_its_own_position, 0) != pytest.approx(expected, abs=1e-3)


def test_no_scored_state_sees_its_own_token(diffusing: Diffusing) -> None:
    """In every stage: changing a masked token changes nothing that predicts it, or any earlier token."""
    objective = diffusing.objective("block_diffusion.causal_warmup=8")
    for step, size in ((0, 1), (3, 2), (6, 4), (8, 8)):
        batch = objective.batch(np.arange(4 * step, 4 * step + 4))
        stage = objective.stages[int(batch["stage"])]
        assert stage.layout.segments[0].block == size
        scored = batch["targets"] != -100
        row, read = np.divmod(batch["positions"][scored].numpy(), objective.layout.read)
        columns = stage.predicts[read]
        place = len(columns) // 2
        changed = {name: tensor.clone() for name, tensor in batch.items()}
        first = columns[place] // size * size  # of the block of this token
        changed["inputs"][row[place], 32 + columns[place]] ^= 1  # the clean copy
        with torch.no_grad():
            before, after = (objective._token_losses(one) for one in (batch, changed))
        same = (before == after)[scored].numpy()
        mine = (row == row[place]) & (columns < first + size)
        assert same[mine].all()
        assert same[row != row[place]].all()


def test_the_first_token_is_given(diffusing: Diffusing) -> None:
    objective = diffusing.objective("block_diffusion.causal_warmup=0")
    batch = objective.batch(np.arange(400))
    clean, noisy = batch["inputs"][:, 32:], batch["inputs"][:, :32]
    assert (noisy != clean)[:, 1:].any(0).all()
    assert (noisy == clean)[:, 0].all()
    assert objective.weights(batch)["tokens"] == 400 * 31


# --- the warm-up


@pytest.mark.parametrize(
    ("final", "sizes"),
    [
        (uniform(64, 16), [(1,), (2,), (4,), (8,), (16,)]),
        (uniform(64, 1), [(1,)]),
        (uniform(36, 6), [(1,), (2,), (3,), (6,)]),
        (
            Layout((Segment("question", 8, 8, given=True), Segment("plan", 128, 128), Segment("execution", 64, 16))),
            [(8, 1, 1), (8, 2, 2), (8, 8, 4), (8, 16, 4), (8, 64, 8), (8, 128, 16)],
        ),
    ],
)
def test_blocks_grow_by_about_the_same_factor(final: Layout, sizes: list[tuple[int, ...]]) -> None:
    layouts = growing_layouts(final)
    assert layouts[-1] == final
    assert [tuple(segment.block for segment in layout.segments) for layout in layouts] == sizes
    assert {layout.read for layout in layouts} == {final.read} or len(final.sizes) == final.length


def test_the_stage_follows_from_the_step(diffusing: Diffusing) -> None:
    objective = diffusing.objective("block_diffusion.causal_warmup=6")
    stages = [int(objective.batch(np.arange(4 * step, 4 * step + 4))["stage"]) for step in range(8)]
    assert stages == [0, 0, 1, 1, 2, 2, 3, 3]
    shapes = {
        tuple((name, tuple(t.shape)) for name, t in objective.batch(np.arange(4 * s, 4 * s + 4)).items() if t.dim() > 1)
        for s in range(8)
    }
    assert len(shapes) == 1, "a compiled step sees one shape of inputs"
    assert int(objective._evaluation_batches(4, 4, objective.clip).__next__()["stage"]) == -1


def test_a_resumed_run_is_the_same_to_the_bit(diffusing: Diffusing, tensors_of: Any) -> None:
    keys = ("block_diffusion.causal_warmup=6", "train.steps=8")
    diffusing.run("whole", *keys)
    diffusing.run("parts", *keys, stop_at=4)
    diffusing.run("parts", *keys, resume=True)
    expected, got = (tensors_of(diffusing.folder / name / "checkpoints/step-00000008") for name in ("whole", "parts"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def test_the_split_of_a_batch_changes_nothing(diffusing: Diffusing) -> None:
    for micro in (1, 4):
        diffusing.run(f"micro-{micro}", f"train.micro_batch={micro}", "block_diffusion.causal_warmup=6")
    assert diffusing.losses("micro-1") == pytest.approx(diffusing.losses("micro-4"), abs=1e-5)


@pytest.mark.parametrize("backend", ["dense", "split"])
def test_every_backend_computes_the_same_stages(diffusing: Diffusing, backend: str) -> None:
    keys = ("block_diffusion.causal_warmup=8",)
    usual, other = diffusing.objective(*keys), diffusing.objective(*keys, f"model.attention={backend}")
    for step in (0, 3, 8):
        assert step_loss(other, step) == pytest.approx(step_loss(usual, step), abs=1e-4)


# --- starting from the base pays


def test_a_run_from_the_base_starts_and_stays_below_one_from_random_weights(
    diffusing: Diffusing, world: Any, corpus: Path, tmp_path: Path
) -> None:
    """The base here has learnt the text for 40 steps as an autoregressive model."""
    from redline.export.folder import export_run

    keys = ("objective=causal_lm", "block_diffusion=null", "train.steps=40", "train.lr=5e-3")
    recipe = {**yaml.safe_load(diffusing.file.read_text())}
    recipe.pop("block_diffusion")
    diffusing.file.with_name("ar.yaml").write_text(yaml.safe_dump(recipe))
    world.recipe = lambda *words: load(str(diffusing.file.with_name("ar.yaml")), [*keys[:1], *keys[2:], *words]).recipe
    trainer = world.run(tmp_path / "ar")
    write_lock(tmp_path / "ar", make_lock("ar", "0", trainer.resolved, trainer.objective.data.facts))
    trainer.objective.save_tokenizer(tmp_path / "ar")
    export_run(tmp_path / "ar", None, tmp_path / "learnt")
    world.recipe = diffusing.recipe
    base = open_base(str(tmp_path / "learnt"))
    shape = [f"model.{key}={base.model[key]}" for key in ("layers", "d_model", "heads", "kv_heads", "d_ff", "tied")]
    scratch = ["model.base=null", *shape, f"data.tokenizer={tmp_path / 'learnt'}", "train.steps=30"]
    diffusing.run("scratch", *scratch)
    diffusing.run("base", f"model.base={tmp_path / 'learnt'}", "train.steps=30")
    from_scratch, from_base = (diffusing.losses(name, "eval") for name in ("scratch", "base"))
    assert from_base[0] < from_scratch[0] - 0.1
    assert from_base[-1] < from_scratch[-1] - 0.3


# --- new tokens, evaluation and sampling


def test_the_vocabulary_grows_by_the_mask(diffusing: Diffusing, tiny_base: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"  # a base without spare rows
    shutil.copytree(tiny_base, full)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    model.resize_token_embeddings(284)
    model.save_pretrained(full)
    objective = diffusing.objective(f"model.base={full}")
    assert (objective.resolved.recipe.model.vocab, objective.data.vocabulary.mask) == (320, 284)
    reason = next(c.reason for c in objective.resolved.choices if c.key == "model.vocab")
    assert reason == "the base's 284 rows and 1 new token, rounded up to a multiple of 64"
    stored = dict(open_base(str(full)).tensors())
    assert torch.equal(objective.model.embedding.weight[:284], stored["embedding.weight"])
    assert torch.equal(objective.model.head.weight[:284], stored["head.weight"])
    assert torch.equal(objective.model.blocks[1].mlp.down.weight, stored["blocks.1.mlp.down.weight"])


def test_the_mask_takes_a_spare_row_of_the_base(diffusing: Diffusing, tiny_base: Path) -> None:
    objective = diffusing.objective()
    assert (objective.resolved.recipe.model.vocab, objective.data.vocabulary.mask) == (320, 284)
    stored, rows = dict(open_base(str(tiny_base)).tensors())["embedding.weight"], objective.model.embedding.weight
    assert torch.equal(rows[:284], stored[:284])
    known = stored[:284]
    assert ((rows[284] - known.mean(0)) / known.std(0)).abs().mean() < 0.2, "not what the spare row held"


def test_sampling_agrees_with_and_without_the_cache(diffusing: Diffusing) -> None:
    objective = diffusing.objective()
    vocabulary = objective.data.vocabulary
    rows = torch.tensor([[1, 40, 41, *[vocabulary.mask] * 29]] * 2)
    options = SamplerOptions(temperature=0.0)
    found = [
        denoise(
            objective.model.eval(), rows, uniform(32, 8), vocabulary, [0, 1], options, shift=True, cached=cached
        ).rows
        for cached in (True, False)
    ]
    assert torch.equal(*found)
    assert not torch.equal(found[0], denoise(objective.model, rows, uniform(32, 8), vocabulary, [0, 1], options).rows)


@pytest.mark.parametrize("cached", [True, False])
def test_the_sampler_predicts_from_the_states_that_training_scores(diffusing: Diffusing, cached: bool) -> None:
    objective = diffusing.objective("block_diffusion.causal_warmup=0")
    model, vocabulary = objective.model.eval(), objective.data.vocabulary
    row = torch.tensor([[1, *range(40, 47), *[vocabulary.mask] * 24]])  # the first block is known
    inputs = torch.cat((row, row), 1)  # the clean copy of the second block is not seen by its noisy one
    stage = objective.stages[-1]
    with torch.no_grad():
        states = model(inputs, objective.attention.bind(64), positions_T=objective.positions)[0]
        expected = model.logits(states[stage.predicted_from[8:16]])[:, : vocabulary.classes].argmax(-1)
    once = SamplerOptions("ancestral", steps=1, temperature=0.0)  # a block from one forward pass
    written = denoise(model, row, uniform(32, 8), vocabulary, [0], once, shift=True, cached=cached).rows
    assert torch.equal(written[0, 8:16], expected)
    assert len(set(stage.predicted_from[8:16].tolist())) == 8


def test_sampling_in_blocks_of_one_writes_what_the_base_writes(diffusing: Diffusing, tiny_base: Path) -> None:
    objective = diffusing.objective()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    start, mask = [1, 40, 41], objective.data.vocabulary.mask
    expected = list(start)
    with torch.no_grad():
        for _ in range(8):
            expected.append(int(model(input_ids=torch.tensor([expected])).logits[0, -1].argmax()))
    vocabulary = objective.data.vocabulary
    rows = torch.tensor([[*start, *[mask] * 8]])
    layout, options = uniform(11, 1), SamplerOptions(temperature=0.0)
    written = denoise(objective.model.eval(), rows, layout, vocabulary, [0], options, shift=True).rows[0].tolist()
    assert written == expected


def test_a_trained_run_is_evaluated_and_sampled_without_the_base(
    diffusing: Diffusing, tiny_base: Path, tmp_path: Path
) -> None:
    trainer = diffusing.run("run", "train.steps=4")
    run = diffusing.folder / "run"
    trainer.objective.save_tokenizer(run)
    write_lock(run, make_lock("diffuse", "0", trainer.resolved, trainer.objective.data.facts))
    opened = open_run(run)
    assert opened.objective.evaluate(4)["loss"] == pytest.approx(diffusing.losses("run", "eval")[-1], abs=1e-5)
    alone = open_run(run, writes_only=True)
    assert alone.objective.base is None
    how = Sampling(tokens=8, seed=3)
    assert alone.objective.sample("red", how)[0].text == opened.objective.sample("red", how)[0].text


def test_a_second_phase_is_told_of_options_that_were_others(diffusing: Diffusing, tmp_path: Path) -> None:
    from redline.evaluate.init_from import open_initial

    trainer = diffusing.run("run", "train.steps=1")
    write_lock(diffusing.folder / "run", make_lock("diffuse", "0", trainer.resolved, trainer.objective.data.facts))
    initial, tokenizer = open_initial(str(diffusing.folder / "run"), tmp_path), trainer.identity["tokenizer"]
    assert initial.check(trainer.resolved.recipe, tokenizer) == []
    other = diffusing.objective("block_diffusion.shift=false", "block_diffusion.block_size=4").resolved.recipe
    notes = initial.check(other, tokenizer)
    assert [note.split(" when ")[0] for note in notes] == [
        "model.init_from: block_diffusion.block_size was 8",
        "model.init_from: block_diffusion.shift was True",
    ]


@pytest.mark.parametrize("job", ["block_diffusion", "hierarchical_diffusion"])
def test_records_start_from_a_base_too(diffusing: Diffusing, job: str) -> None:
    segments = {
        "block_diffusion": ["block_diffusion.question=32", "data.seq_len=96"],
        "hierarchical_diffusion": [f"hierarchical_diffusion.{name}=32" for name in ("question", "plan", "execution")],
    }[job]
    file = diffusing.folder / "records.yaml"
    recipe = yaml.safe_load(diffusing.file.read_text())
    recipe = {**recipe, "objective": job, "data": {"source": "problems:easy:60", "val_fraction": 0.1}}
    recipe.pop("block_diffusion")
    file.write_text(yaml.safe_dump(recipe))
    diffusing.world.recipe = lambda *words: load(str(file), [*segments, *words]).recipe
    trainer = diffusing.run("run", "train.steps=6", f"{job}.causal_warmup=4")
    objective = trainer.objective
    assert (objective.known_tokens, objective.data.tokenizer.mask) == (284, 288)
    assert objective.answer(objective.questions()[:2], 8)
    assert diffusing.losses("run", "eval")[-1] < diffusing.losses("run", "eval")[0]


# --- the plan, and what is refused


def test_the_plan_says_how_long_the_warmup_is(diffusing: Diffusing) -> None:
    from redline.recipe.load import Loaded

    plan = plan_recipe(Loaded("diffuse", diffusing.recipe("train.steps=1000")), gpu="h100")
    choices = {choice["key"]: choice for choice in plan.event["choices"]}
    assert choices["block_diffusion.causal_warmup"]["value"] == 200
    assert choices["block_diffusion.causal_warmup"]["reason"] == "20% of 1,000 steps: blocks of 1, 2, 4, then 8"
    assert choices["block_diffusion.shift"]["value"] is True
    assert "model.vocab" not in choices, "the base has spare rows for the mask"


@pytest.mark.parametrize("overrides", [["model.init_from=runs/first"], ["block_diffusion.block_size=32"]])
def test_there_is_no_warmup_after_a_first_phase_or_without_smaller_blocks(
    diffusing: Diffusing, overrides: list[str]
) -> None:
    recipe = diffusing.recipe(*overrides)
    from redline.jobs.base import job

    chosen = {key: value for key, value, _ in job(recipe.objective).choices(recipe, 1000)}
    assert chosen == {"shift": True, "causal_warmup": 0}


def test_a_warmup_of_a_single_block_is_refused(diffusing: Diffusing) -> None:
    with pytest.raises(RecipeError, match="sequence is one block") as refused:
        diffusing.recipe("block_diffusion.block_size=32", "block_diffusion.causal_warmup=10")
    assert [problem.key for problem in refused.value.problems] == ["block_diffusion.causal_warmup"]


def test_a_recipe_without_a_base_is_as_before() -> None:
    from redline.recipe.resolve import DataFacts

    facts = DataFacts(257, 100_000, 5_000, "data", "bytes", "tokenizer")
    resolved = resolve(load("owt-bd3lm").recipe, CPU, facts)
    options = resolved.recipe.block_diffusion
    assert (options.shift, options.causal_warmup) == (False, 0)
    assert not [choice for choice in resolved.choices if choice.key.startswith("block_diffusion")]


def test_rows_of_another_vocabulary_are_refused(diffusing: Diffusing) -> None:
    keys = ["block_diffusion.question=16", "data.source=problems:easy:60", "data.tokenizer=bytes"]
    with pytest.raises(UserError, match="reads another vocabulary"):
        diffusing.objective(*keys)
