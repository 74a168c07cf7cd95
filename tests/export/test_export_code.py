"""Diffusion and LatentWire models in transformers, by the code that is exported with them: equal logits and samples."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from latents import other_base, write_rows
from redline.errors import UserError
from redline.evaluate.opened_run import open_run
from redline.export import folder as exporting
from redline.export.folder import export_run
from redline.jobs.objective import Sampling
from redline.kernels.attention import Bound

transformers = pytest.importorskip("transformers")

TEXT = ("objective=block_diffusion", "block_diffusion.block_size=8", "data.pack=false")
RECORDS = ("data.source=problems:easy:60", "data.pack=false", "data.val_fraction=0.2", "train.global_batch=4")
HDP = (
    "objective=hierarchical_diffusion",
    "hierarchical_diffusion.question=160",
    "hierarchical_diffusion.plan=96",
    "hierarchical_diffusion.execution=128",
    "hierarchical_diffusion.execution_block=64",
    "data.seq_len=384",
    *RECORDS,
)
SHAPES = {
    "text": TEXT,
    "text, shifted, ancestral": (
        *TEXT,
        "block_diffusion.shift=true",
        "block_diffusion.sampler=ancestral",
        "block_diffusion.sampler_steps=3",
        "model.heads=4",
        "model.kv_heads=2",
    ),
    "one block": (*TEXT, "block_diffusion.block_size=32", "model.mlp=relu2", "model.softcap=20", "model.tied=false"),
    "hierarchical": (*HDP, "model.qk_norm=false"),
}


def stir(trainer: Any) -> None:
    """Perturb all weights, so that a missing norm shows and samples vary."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.objective.model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def stirred(trained: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    from redline.training import trainer as training

    plain = training.Trainer.finish

    def finish(self: Any, reason: str) -> Any:
        stir(self)
        return plain(self, reason)

    monkeypatch.setattr(training.Trainer, "finish", finish)
    return trained


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Load as a user does who trusts the folder; the copies that transformers makes go to the test's folder."""
    from transformers import dynamic_module_utils
    from transformers.utils import hub

    for module in (dynamic_module_utils, hub):
        if hasattr(module, "HF_MODULES_CACHE"):
            monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return transformers.AutoModel.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_diffusion(
    stirred: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    run, trainer = stirred(*options)
    done = export_run(run, None, tmp_path / "out")
    assert done.architecture == "RedlineDiffusion"
    assert done.files.keys() >= {"modeling_redline_diffusion.py", "config.json", "model.safetensors", "tokenizer.json"}
    theirs, objective = load(tmp_path / "out", monkeypatch, tmp_path), trainer.objective
    ours, vocabulary = objective.model.eval(), objective.data.vocabulary

    generator = torch.Generator().manual_seed(3)
    segment = objective.layout.segments[-1]
    begin = objective.layout.length - segment.size
    row = torch.randint(0, vocabulary.classes, (2, objective.layout.length), generator=generator)
    noisy = row[:, begin:].clone()
    noisy[:, ::2] = vocabulary.mask
    with torch.no_grad():
        cache, at, before = ours.new_cache(), 0, None
        for size in objective.layout.sizes:
            if at < begin:
                before = ours(row[:, at : at + size], Bound(), cache, at, bidirectional=True)[:, -1:]
            at += size
        states = ours(noisy, Bound(), cache, begin, bidirectional=True, update_cache=False)
        if objective.options.shift:
            states = torch.cat((states[:, :1] if before is None else before, states[:, :-1]), 1)
        expected = ours.logits(states)[..., : vocabulary.classes]
        got = theirs(noisy, context_ids=row[:, :begin] if begin else None)
    assert expected.std() > 0.5
    assert (got - expected).abs().max() < 1e-4

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    how = Sampling(tokens=20, count=2, temperature=0.9, top_k=None, top_p=0.95, seed=5)
    prompt = objective.first_prompt()
    if objective.data.__class__.__name__ == "TextSequences":
        ids = tokenizer(prompt).input_ids
        written = theirs.write(ids, count=2, tokens=20, temperature=0.9, top_p=0.95, seed=5)
        assert [objective.tokenizer.decode(one) for one in written] == [
            one.text for one in objective.sample(prompt, how)
        ]
    else:
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        written = theirs.write(ids, count=2, temperature=0.9, top_p=0.95, seed=5)
        question = objective._question_length
        texts = [objective._text([0] * question + one) for one in written]
        assert texts == [one.text for one in objective.sample(prompt, how)]
        assert tokenizer.convert_tokens_to_ids("<|mask|>") == vocabulary.mask
    assert len({tuple(one) for one in written}) == 2


def test_latent_prefix(world: Any, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from latents import Latents
    from redline.recipe.lock import make_lock, write_lock

    other = other_base(tmp_path / "other", spread=0.2)
    latents = Latents(world, [tiny_base, other], write_rows(tmp_path / "rows.jsonl"), tmp_path)
    trainer = latents.run(tmp_path / "run", "train.steps=3", "latent_prefix.private_slots=2")
    write_lock(tmp_path / "run", make_lock("latent", "0123", trainer.resolved, trainer.objective.data.facts))
    done = export_run(tmp_path / "run", None, tmp_path / "out")
    assert done.architecture == "RedlineLatent"
    wire, objective = load(tmp_path / "out", monkeypatch, tmp_path), open_run(tmp_path / "run").objective
    text = "The stone number 3 is red. Which colour?\n"
    ours, theirs = objective.encode([text, "Another, shorter text.\n"]), wire.encode([text, "Another, shorter text.\n"])
    assert ours.keys() == theirs.keys() == {"0", "1"}
    for name, place in {"0": tiny_base, "1": other}.items():
        assert (ours[name] - theirs[name]).abs().max() < 1e-5
        frozen = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
        start = wire.start(name, frozen, theirs[name])
        expected = objective.frozen[name].start(objective.model.prefix(name, ours[name]))
        assert (start - expected).abs().max() < 1e-5
        from redline.jobs.latent_prefix.objective import answer_from_latents
        from redline.models.generate import sampler

        for temperature in (0.0, 0.9):
            how = {"temperature": temperature, "top_k": None, "top_p": None}
            pick = sampler(objective.device, seed=4, **how)
            said = answer_from_latents(objective, name, ours[name], 8, pick)
            written = wire.answer(name, frozen, theirs[name], tokens=8, seed=4, **how)
            tokenizer = objective.frozen[name].tokenizer
            assert [tokenizer.decode(one) for one in written] == [one.text for one in said]
            asked = "Question: Which?\n"
            again, question = sampler(objective.device, seed=4, **how), tokenizer.question(asked)
            said = answer_from_latents(objective, name, ours[name], 8, again, [asked] * 2)
            written = wire.answer(name, frozen, theirs[name], question=question, tokens=8, seed=4, **how)
            assert [tokenizer.decode(one) for one in written] == [one.text for one in said]
    usage = (tmp_path / "out/README.md").read_text().split("```python\n")[1].split("```")[0]
    assert len(usage.strip().splitlines()) <= 10


def test_the_code_stands_alone_and_redline_never_runs_a_copy(stirred: Callable[..., Any], tmp_path: Path) -> None:
    """Nothing in the exported file imports redline, and a folder whose code was changed is never run."""
    from redline.evaluate.opened_run import open_pretrained

    for name in ("modeling_redline_diffusion", "modeling_redline_latent"):
        tree = ast.parse(exporting._code_file(name).read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {one.partition(".")[0] for one in imported} <= {
            *("__future__", "math", "typing", "numpy", "torch", "transformers")
        }
    run, _ = stirred(*TEXT)
    export_run(run, None, tmp_path / "out", dtype="bf16")
    marker = tmp_path / "ran"
    (tmp_path / "out/modeling_redline_diffusion.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(UserError):
        open_pretrained(str(tmp_path / "out"))
    assert not marker.exists()
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "how", "says"),
    [
        (("model.value_embeddings=1",), {}, r"model\.value_embeddings=1"),
        ((), {"quant": "f16"}, "llama.cpp has no model"),
        ((), {"merged": True}, "no adapters"),
    ],
    ids=["value embeddings", "gguf", "merged"],
)
def test_what_is_refused(
    trained: Callable[..., Any], tmp_path: Path, options: tuple[str, ...], how: dict[str, Any], says: str
) -> None:
    run, _ = trained(*TEXT, *options)
    with pytest.raises(UserError, match=says):
        export_run(run, None, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()
