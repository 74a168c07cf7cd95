"""Exports of fine-tuned models: peft and transformers compute from them what the run trained."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from redline.errors import UsageError, UserError
from redline.export.folder import export_run
from redline.kernels.nf4 import dequantise_nf4, quantise_nf4
from redline.models.pretrained import open_base
from redline.planning.shapes import TARGETS

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="adapters are loaded with peft")

CLOSE = 1e-4
TOKENIZER = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
OTHERS = ("model.lora.target_modules=[k_proj, up_proj]", "model.lora.rslora=true", "model.lora.alpha=2.5")


def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def dequantised(folder: Path, *, double: bool = True) -> Any:
    """Return the base as the adapters of a QLoRA run were trained beside it."""
    model = plain(folder)
    for name, parameter in model.named_parameters():
        if name.split(".")[-2] in TARGETS and name.endswith(".weight"):
            rounded = dequantise_nf4(quantise_nf4(parameter.data, double=double), torch.float32)
            assert not torch.equal(rounded, parameter.data)
            parameter.data.copy_(rounded)
    return model


def assert_alike(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.5, "logits that are nearly alike would prove nothing"
    assert (got - expected).abs().max() < CLOSE


@pytest.mark.parametrize("family", ["llama", "llama tied", "mistral", "qwen2", "qwen3"])
def test_peft_on_the_plain_base(
    base_of: Callable[..., Path],
    tuned: Any,
    logits: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    base = base_of(family)
    run, trainer = tuned(base, "finetune.method=lora")
    done = export_run(run, None, tmp_path / "out")
    weights = ["adapter_config.json", "adapter_model.safetensors", "generation_config.json"]
    files = ["README.md", *weights, *TOKENIZER, "redline.json"]
    assert sorted(done.files) == sorted(files)
    assert (done.form, done.parameters) == ("adapter", sum(p.numel() for p in trainer.parameters.values()))
    before = logits(plain(base))
    model = peft.PeftModel.from_pretrained(plain(base), tmp_path / "out")
    assert_alike(logits(model), logits(trainer))
    assert (logits(model) - before).abs().max() > 0.01, "the adapters do something"
    monkeypatch.chdir(tmp_path)  # adapter_config.json names a local base relative to the working directory
    by_itself = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_alike(logits(by_itself), logits(trainer))


@pytest.mark.parametrize("options", [(), OTHERS], ids=["as usual", "others"])
@pytest.mark.parametrize("double", [True, False], ids=["doubly", "once"])
def test_peft_on_the_dequantised_base(
    base_of: Callable[..., Path], tuned: Any, logits: Any, tmp_path: Path, options: tuple[str, ...], double: bool
) -> None:
    base = base_of("llama")
    run, trainer = tuned(base, f"model.quant_double={str(double).lower()}", *options)
    export_run(run, None, tmp_path / "out")
    model = peft.PeftModel.from_pretrained(dequantised(base, double=double), tmp_path / "out")
    assert_alike(logits(model), logits(trainer))
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    lora = trainer.recipe.model.lora
    settings = (config["r"], config["lora_alpha"], config["lora_dropout"], config["use_rslora"])
    assert settings == (lora.r, lora.alpha, lora.dropout, lora.rslora)
    assert config["target_modules"] == list(lora.target_modules)
    assert config["base_model_name_or_path"] == "./base"


@pytest.mark.parametrize("method", ["qlora", "lora", "full"])
@pytest.mark.parametrize("family", ["llama", "llama tied", "mistral", "qwen2", "qwen3"])
def test_the_whole_model(
    base_of: Callable[..., Path], tuned: Any, logits: Any, tmp_path: Path, family: str, method: str
) -> None:
    base = base_of(family)
    run, trainer = tuned(base, f"finetune.method={method}", "train.lr=1e-3")
    done = export_run(run, None, tmp_path / "out", merged=True)
    assert (done.form, done.quantisation_difference) == ("model" if method == "full" else "merged", None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (type(model).__name__, model.dtype) == (done.architecture, torch.float32)
    assert type(model) is type(plain(base))
    assert_alike(logits(model), logits(trainer))
    assert (logits(model) - logits(plain(base))).abs().max() > 0.01
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained(base).chat_template


def test_where_all_learnt_it_is_the_same_to_the_bit(tiny_base: Path, tuned: Any, tmp_path: Path) -> None:
    run, trainer = tuned(tiny_base, "finetune.method=full")
    export_run(run, None, tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    qkv = trainer.objective.model.blocks[1].attention.qkv.weight
    parts = [written[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(torch.cat(parts), qkv)
    assert torch.equal(written["lm_head.weight"], trainer.objective.model.head.weight)


@pytest.mark.parametrize("method", ["qlora", "lora"])
def test_what_was_merged_is_a_base_again(
    base_of: Callable[..., Path], tuned: Any, logits: Any, tmp_path: Path, method: str
) -> None:
    run, trainer = tuned(base_of("qwen2"), f"finetune.method={method}")
    export_run(run, None, tmp_path / "out", merged=True)
    expected = logits(trainer)
    assert open_base(str(tmp_path / "out")).family == "qwen2"
    _, again = tuned(tmp_path / "out", "finetune.method=full", "train.lr=1e-30", name="again")
    assert_alike(logits(again), expected)


def test_a_base_in_half_precision(base_of: Callable[..., Path], tuned: Any, logits: Any, tmp_path: Path) -> None:
    """The merge is computed in fp32: in bf16, rounding would drop most of the adapter's update."""
    run, trainer = tuned(base_of("llama", dtype=torch.bfloat16))
    export_run(run, None, tmp_path / "out", merged=True)
    assert_alike(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(trainer))
    export_run(run, None, tmp_path / "half", merged=True, dtype="bf16")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    assert {tensor.dtype for tensor in load_file(tmp_path / "half/model.safetensors").values()} == {torch.bfloat16}


def test_onto_the_original(tiny_base: Path, tuned: Any, tmp_path: Path) -> None:
    run, _ = tuned(tiny_base)
    export_run(run, None, tmp_path / "trained", merged=True)
    done = export_run(run, None, tmp_path / "original", merged=True, onto="original")
    original, rounded = (model.state_dict() for model in (plain(tiny_base), dequantised(tiny_base)))
    matrices = [name for name in original if name.split(".")[-2] in TARGETS]
    flat = [torch.cat([state[name].flatten() for name in matrices]) for state in (original, rounded)]
    expected = float((flat[1] - flat[0]).norm() / flat[0].norm())
    assert done.quantisation_difference == pytest.approx(expected, rel=1e-5)
    assert 0.05 < expected < 0.15, "four bits"
    written = [load_file(tmp_path / name / "model.safetensors") for name in ("trained", "original")]
    for name in matrices:  # the same is added to both
        added = written[1][name] - original[name]
        torch.testing.assert_close(written[0][name] - rounded[name], added, rtol=0, atol=1e-6)
    about = json.loads((tmp_path / "original/redline.json").read_text())
    assert (about["onto"], about["quantisation_difference"]) == ("original", done.quantisation_difference)
    assert f"differs from them by {expected:.2%}" in (tmp_path / "original/README.md").read_text()
    assert "dequantised from NF4" in (tmp_path / "trained/README.md").read_text()
    assert "quantisation_difference" not in json.loads((tmp_path / "trained/redline.json").read_text())


def test_it_says_where_it_comes_from(tiny_base: Path, tuned: Any, tmp_path: Path) -> None:
    run, trainer = tuned(tiny_base, "train.ema=0.5")
    done = export_run(run, None, tmp_path / "out")
    about = json.loads((tmp_path / "out/redline.json").read_text())
    base = {
        "source": str(tiny_base),
        "name": f"./{tiny_base.name}",
        "hub_id": None,
        "loads_from": str(tiny_base),
        "revision": None,
    }
    assert about["base"] == {**base, "fingerprint": open_base(str(tiny_base)).fingerprint}
    assert (about["run_id"], about["step"], about["method"], about["form"]) == ("0123", 3, "qlora", "adapter")
    assert about["quantisation"] == {"type": "nf4", "double": True}
    assert done.weights == "ema"
    mean = trainer.ema.average["blocks.0.mlp.down.lora_B.down"]
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
    assert torch.equal(load_file(tmp_path / "out/adapter_model.safetensors")[name], mean)


def run_snippet(folder: Path, base: Path) -> dict[str, Any]:
    """Run the loading code of a folder's card with the paths filled in. Return its variables."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    file = folder.with_suffix(".py")
    file.write_text(code.replace("PATH-OF-THIS-FOLDER", str(folder)).replace("PATH-OF-THE-BASE", str(base)))
    return runpy.run_path(str(file))


@pytest.mark.parametrize("merged", [False, True], ids=["adapter", "merged"])
def test_the_card(
    tiny_base: Path, tuned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], merged: bool
) -> None:
    run, trainer = tuned(tiny_base)
    export_run(run, None, tmp_path / "out", merged=merged)
    card = (tmp_path / "out/README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == ("transformers" if merged else "peft")
    assert "base_model" not in front, "model hubs accept only their own ids there"
    facts = trainer.objective.data.facts
    expected_texts = (
        trainer.objective.data.base.fingerprint,
        facts.fingerprint,
        "updates: 3",
        "rank 4, alpha 8",
        "NF4",
        "perplex",
    )
    assert [words for words in expected_texts if words not in card] == []
    run_snippet(tmp_path / "out", tiny_base)
    assert capsys.readouterr().out, "what the card tells people to type works"


def test_it_stops_where_answers_end(tiny_base: Path, tuned: Any, tmp_path: Path) -> None:
    """If the template's end mark is not the base's end of text, both end an answer."""
    shutil.copytree(tiny_base, tmp_path / "base")
    (tmp_path / "base/generation_config.json").write_text('{"eos_token_id": [9, 1], "temperature": 0.6}')
    run, _ = tuned(tmp_path / "base")
    export_run(run, None, tmp_path / "out", merged=True)
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {"eos_token_id": [1, 9], "temperature": 0.6, "pad_token_id": 1}


@pytest.fixture
def other_end(base_of: Callable[..., Path]) -> Path:
    """Return a base whose end of text, `<|endoftext|>`, is not its template's end mark, `<|im_end|>`."""
    base = base_of("llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    tokenizer.save_pretrained(base)
    for name in ("config.json", "generation_config.json"):
        content = {**json.loads((base / name).read_text()), "eos_token_id": tokenizer.eos_token_id}
        (base / name).write_text(json.dumps(content))
    return base


@pytest.mark.parametrize("merged", [False, True], ids=["adapter", "merged"])
def test_generation_stops_at_the_end_mark_of_the_template(
    other_end: Path, tuned: Any, tmp_path: Path, merged: bool
) -> None:
    run, _ = tuned(other_end, "finetune.method=lora", "train.steps=40")
    export_run(run, None, tmp_path / "out", merged=merged)
    mark, end = 1, transformers.AutoTokenizer.from_pretrained(other_end).eos_token_id
    assert mark != end
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["eos_token_id"] == [mark, end]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == mark
    answer = run_snippet(tmp_path / "out", other_end)["answer"].tolist()
    assert answer[-1] == mark
    assert mark not in answer[:-1]
    assert len(answer) < 100, "the limit of the snippet"


def test_a_template_that_writes_the_end_of_text_itself_keeps_it(other_end: Path, tuned: Any, tmp_path: Path) -> None:
    """A new eos_token would change what such a template writes; generation_config.json is enough to stop."""
    template = other_end / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ eos_token if not add_generation_prompt }}")
    run, _ = tuned(other_end, "finetune.method=lora")
    export_run(run, None, tmp_path / "out")
    written, own = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", other_end))
    assert written.eos_token_id == own.eos_token_id != 1
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"][0] == 1


def test_no_file_of_an_adapter_that_peft_reads_names_a_folder_of_this_machine(
    base_of: Callable[..., Path], tuned: Any, tmp_path: Path
) -> None:
    base = base_of("llama")
    run, _ = tuned(base, "finetune.method=lora")
    export_run(run, None, tmp_path / "out")
    assert str(tmp_path) not in (tmp_path / "out/adapter_config.json").read_text()
    assert str(tmp_path) not in (tmp_path / "out/README.md").read_text().split("## Training data")[0]
    snapshot = tmp_path / "hub/models--some-owner--Some-Model.v2/snapshots/0f1e2d"  # as the hub's cache lays them out
    shutil.copytree(base, snapshot)
    export_run(run, None, tmp_path / "hubbed", base=str(snapshot))
    config = json.loads((tmp_path / "hubbed/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("some-owner/Some-Model.v2", "0f1e2d")
    card = (tmp_path / "hubbed/README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "some-owner/Some-Model.v2"
    assert 'from_pretrained("some-owner/Some-Model.v2", revision="0f1e2d")' in card


def test_another_base_is_refused(base_of: Callable[..., Path], tuned: Any, tmp_path: Path) -> None:
    base, other = base_of("llama"), base_of("llama", "other", seed=2)
    run, _ = tuned(base)
    for merged in (True, False):
        with pytest.raises(UserError, match=r"other: is not the base of this run \(its fingerprint is \w{12}, the run"):
            export_run(run, None, tmp_path / "out", merged=merged, base=str(other))
    base.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"no such file or folder.*--base PATH"):
        export_run(run, None, tmp_path / "out", merged=True)
    assert export_run(run, None, tmp_path / "out", merged=True, base=str(tmp_path / "moved")).files
    shutil.copytree(other, base)
    with pytest.raises(UserError, match="is not the base of this run"):
        export_run(run, None, tmp_path / "no", merged=True)
    assert not (tmp_path / "no").exists()


def test_another_tokenizer_is_refused(base_of: Callable[..., Path], tuned: Any, tmp_path: Path) -> None:
    base = base_of("llama")
    run, _ = tuned(base)
    definition = json.loads((base / "tokenizer.json").read_text())
    definition["model"]["merges"] = definition["model"]["merges"][:-1]
    (base / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(UserError, match="this is not the tokenizer of the run"):
        export_run(run, None, tmp_path / "out")


def test_what_does_not_go_together(tiny_base: Path, tuned: Any, trained: Any, tmp_path: Path) -> None:
    run, _ = tuned(tiny_base)
    with pytest.raises(UsageError, match="--onto: goes with --merged"):
        export_run(run, None, tmp_path / "out", onto="original")
    run, _ = tuned(tiny_base, "finetune.method=full", name="full")
    with pytest.raises(UsageError, match="Leave out --onto"):
        export_run(run, None, tmp_path / "out", merged=True, onto="original")
    assert not (tmp_path / "out").exists()
