"""Published configs: what they become in a recipe, and the refusal of each that the decoder does not compute."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from redline.errors import RecipeError, UserError
from redline.jobs.base import export_problems
from redline.kernels.attention import Attention, MaskSpec
from redline.models import pretrained as packed
from redline.models.decoder import Decoder, inverse_frequencies
from redline.models.families import FAMILIES, architecture, from_llama, parse_config, to_config, to_llama
from redline.models.pretrained import open_base
from redline.planning.shapes import DecoderShape
from redline.recipe.load import load, validate
from redline.recipe.schema import Model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}
SHAPE = DecoderShape(layers=2, d_model=16, heads=4, kv_heads=2, head_dim=4, d_ff=24, vocab=32, tied=False)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama as it would be published."""
    model = Decoder(SHAPE, attention=Attention("dense", MaskSpec()))
    model.initialise(torch.Generator().manual_seed(0))
    save_file(to_llama(dict(model.state_dict()), SHAPE), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def message(spec: Any) -> str:
    with pytest.raises(UserError) as caught:
        open_base(str(spec))
    return caught.value.message()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["GPT2LMHeadModel"]}, "is a GPT2LMHeadModel, which redline's decoder"),
    "another type": ({"architectures": None, "model_type": "gemma"}, "is a model of type 'gemma', which redline's"),
    "a classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "is a LlamaForSequenceClassification"),
    "output bias": ({"attention_bias": True}, "attention_bias is on"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is on"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is gelu"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "Its weights are quantised (gptq)"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "its rotary positions are scaled by 'yarn'"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "its rotary positions are scaled by 'dynamic'"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "its rotary positions are scaled by 'longrope'"),
    "by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ from layer to layer"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "half a scaling": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    "layers of another kind": ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has linear_att"),
    "no width": ({"hidden_size": None}, "hidden_size: is missing."),
    "no number": ({"num_hidden_layers": "two"}, "num_hidden_layers: 'two' is not a whole number above 0."),
    "no epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps: 0 is not a number above 0."),
    "odd groups": ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide the 4 heads."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_decoder_does_not_compute_is_refused_by_name(folder: Path, name: str) -> None:
    changes, says = REFUSED[name]
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    error = message(folder)
    assert error.startswith(str(folder / "config.json"))
    assert says in error


def test_the_error_lists_the_supported_families(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["GPT2LMHeadModel"]}))
    assert all(name in message(folder) for name in FAMILIES)


def test_all_unsupported_options_are_named_at_once() -> None:
    with pytest.raises(UserError, match=r"attention_bias .* mlp_bias .* hidden_act"):
        parse_config({**CONFIG, "attention_bias": True, "mlp_bias": True, "hidden_act": "relu"}, "here")


def test_old_and_new_configs_are_read_alike() -> None:
    old = {**CONFIG, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}, "torch_dtype": "bfloat16"}
    new = {**CONFIG, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "dtype": "bfloat16"}
    assert parse_config(old, "") == parse_config(new, "")
    assert parse_config(new, "").model["rope_scaling"] == LLAMA3
    assert parse_config({**CONFIG, "architectures": None}, "") == parse_config(CONFIG, "")
    plain = parse_config({**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "")
    assert (plain.model["rope_theta"], plain.model["rope_scaling"]) == (5e5, None)


def test_windows_count_only_where_they_are_used() -> None:
    sizes = {**CONFIG, "max_position_embeddings": 32768, "sliding_window": 4096}
    mistral = {**sizes, "architectures": ["MistralForCausalLM"]}
    qwen = {**sizes, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    assert parse_config(mistral, "").context == 4096
    assert parse_config({**mistral, "sliding_window": None}, "").context == 32768
    assert parse_config({**mistral, "max_position_embeddings": 2048}, "").context == 2048
    assert parse_config(qwen, "").context == 32768
    assert parse_config({**qwen, "use_sliding_window": True}, "").context == 4096


# --- damaged and strange folders


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert "config.json" in message(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: cannot be read" in message(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert "config.json: is not a JSON object" in message(tmp_path)


def test_pickled_weights_are_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights" in message(folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    assert "has pickled weights only" in message(folder)
    assert "save_pretrained" in message(folder)


def test_a_file_cut_short_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert message(folder).startswith(f"{path}: is damaged or incomplete")


def test_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    assert "model.safetensors.index.json" in message(folder)
    index = folder / "model.safetensors.index.json"
    places = {name: file for file, own in parts.items() for name in own}
    index.write_text(json.dumps({"weight_map": places}))
    assert open_base(str(folder)).shape == SHAPE
    index.write_text(json.dumps({"weight_map": {**places, names[0]: "../model-1.safetensors"}}))
    assert "names '../model-1.safetensors'" in message(folder)
    index.write_text(json.dumps({"weight_map": {**places, "more": "model-2.safetensors"}}))
    assert "model-2.safetensors: lacks more" in message(folder)
    index.write_text("{}")
    assert message(folder).startswith(f"{index}: is damaged")
    index.write_text(json.dumps({"weight_map": places}))
    (folder / "model-2.safetensors").unlink()
    assert message(folder).startswith(f"{folder / 'model-2.safetensors'}: is missing")


def test_tensors_that_do_not_fit(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    up, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    save_file({**tensors, up: torch.zeros(16, 24)}, path)
    assert message(folder).startswith(f"{path}: {up} has shape [16, 24]; config.json asks for [24, 16]")
    save_file({name: tensor for name, tensor in tensors.items() if name != up}, path)
    assert f"lacks {up}." in message(folder)
    save_file({**tensors, "model.layers.0.self_attn.o_proj.bias": torch.zeros(16)}, path)
    assert "holds model.layers.0.self_attn.o_proj.bias, which a LlamaForCausalLM" in message(folder)
    save_file({**tensors, norm: torch.zeros(16, dtype=torch.int8)}, path)
    assert f"{norm} is stored as I8; redline reads float32, float16, bfloat16" in message(folder)
    save_file({**tensors, "lm_head.weight": torch.zeros(40, 16)}, path)
    assert "lm_head.weight has shape [40, 16]; config.json asks for [32, 16]" in message(folder)


def test_the_vocabulary_is_the_embeddings(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 31}))
    assert open_base(str(folder)).model["vocab"] == 32


# --- other places


def test_missing_paths(tmp_path: Path) -> None:
    assert "no such file or folder" in message(tmp_path / "nothing")
    (tmp_path / "model.txt").write_text("")
    assert "model.txt: is not a model" in message(tmp_path / "model.txt")


def test_an_unreachable_hub_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    error = message("owner/model")
    assert error.startswith("owner/model: ")
    assert "hub's cache" in error
    assert "unset HF_HUB_OFFLINE" in error


def test_hub_errors_are_explained_without_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    requests: list[Any] = []

    def answer(error: BaseException | None) -> None:
        def download(repo: str, allow_patterns: list[str]) -> str:
            requests.append((repo, allow_patterns))
            if error is not None:
                raise error
            return str(tmp_path)

        monkeypatch.setattr(hub, "snapshot_download", download)

    def hub_error(name: str) -> BaseException:
        kind = getattr(hub.errors, name)
        error: BaseException = kind.__new__(kind)  # some want the answer of a server
        error.args = ("hf_secret at https://x?sig=1",)
        return error

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    expected = {"GatedRepoError": "gated", "RepositoryNotFoundError": "no model of that name"}
    for name, says in {**expected, "LocalEntryNotFoundError": "the hub cannot be reached"}.items():
        answer(hub_error(name))
        error = message("owner/model")
        assert says in error
        assert "secret" not in error
        assert "sig" not in error
    answer(OSError(28, "No space left on device"))
    assert "cannot be written to the hub's cache" in message("owner/model")
    answer(None)
    assert "has no safetensors in the hub's cache" in message("owner/model")
    repo, patterns = requests[-1]
    assert repo == "owner/model"
    assert not [p for p in patterns if p.endswith((".bin", ".py")) or p == "*"]


def test_smollm2_needs_the_package_when_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("redline.models.pretrained.packaged_smollm2", lambda: None)
    assert "the hub cannot be reached" in message(packed.SMOLLM2)


def test_a_gguf_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "find_spec", lambda name: None if name == "gguf" else object())
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "a.gguf: reading a .gguf file needs gguf. Install it: `make setup EXTRAS=finetune`" in message(
        tmp_path / "a.gguf"
    )


# --- the recipe's keys, and the way back


@settings(max_examples=60, deadline=None)
@given(
    half=st.integers(1, 64),
    theta=st.floats(100.0, 1e7),
    factor=st.floats(1.0, 64.0),
    low=st.floats(0.5, 4.0),
    span=st.floats(0.5, 8.0),
    context=st.integers(16, 1 << 17),
)
def test_low_frequencies_are_stretched_and_high_ones_stay(
    half: int, theta: float, factor: float, low: float, span: float, context: int
) -> None:
    """By its definition, one frequency at a time and in double precision."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": low + span}
    frequencies = inverse_frequencies(2 * half, theta, {**scaling, "original_max_position_embeddings": context})
    for i, frequency in enumerate(frequencies.tolist()):
        plain = theta ** -(i / half)
        wave = 2 * math.pi / plain
        smooth = (context / wave - low) / span
        blended = (1 - smooth) * plain / factor + smooth * plain
        expected = plain / factor if wave > context / low else plain if wave < context / (low + span) else blended
        assert frequency == pytest.approx(expected, rel=1e-4)
    linear = inverse_frequencies(2 * half, theta, {"rope_type": "linear", "factor": factor})
    torch.testing.assert_close(linear * factor, inverse_frequencies(2 * half, theta))


def test_scaling_in_a_recipe() -> None:
    text = "{" + ", ".join(f"{key}: {value}" for key, value in LLAMA3.items()) + "}"
    recipe = load("quickstart", [f"model.rope_scaling={text}", "model.rope_scaling.factor=16", "model.qkv_bias=true"])
    assert recipe.recipe.model.rope_scaling == {**LLAMA3, "factor": 16.0}
    assert recipe.recipe.model.qkv_bias
    tree = json.loads(json.dumps(recipe.recipe.model_dump(mode="json")))
    assert validate(tree, where="lock.json").model == recipe.recipe.model
    for wrong, says in {
        "model.rope_scaling=2": "2 is not null or a mapping with a rope_type of linear, llama3",
        "model.rope_scaling={rope_type: yarn, factor: 2}": "is not null or a mapping with a rope_type",
        "model.rope_scaling={rope_type: linear}": "factor is missing",
        "model.rope_scaling={rope_type: linear, factor: 0}": "factor is 0, not a number above 0",
        "model.rope_scaling={rope_type: linear, factor: 2, beta: 1}": "beta is not one of them",
    }.items():
        with pytest.raises(RecipeError) as caught:
            load("quickstart", [wrong])
        assert says in caught.value.message()
    twisted = {**LLAMA3, "low_freq_factor": 4.0}
    with pytest.raises(ValueError, match="low_freq_factor must be below"):
        Model(rope_scaling=twisted)


def test_biases_and_scaling_are_exported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"layers": 2, "d_model": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "d_ff": 24, "vocab": 32}
    model = Model(**sizes, qkv_bias=True, rope_scaling={**LLAMA3, "original_max_position_embeddings": 16})
    assert not export_problems(model)
    assert architecture(model) == "Qwen2ForCausalLM"
    assert export_problems(model.model_copy(update={"qk_norm": True}))[0].key == "model.qkv_bias"
    shape = DecoderShape(**sizes, qkv_bias=True)
    ours = Decoder(shape, attention=Attention("dense", MaskSpec()), rope_scaling=model.rope_scaling)
    ours.initialise(torch.Generator().manual_seed(0))
    assert not any(block.attention.qkv.bias.any() for block in ours.blocks), "a bias begins at zero"  # type: ignore[union-attr]
    for parameter in ours.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    renamed = to_llama(dict(ours.state_dict()), shape)
    back = from_llama(renamed, shape)
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.state_dict().items())
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(to_config(model, seq_len=128, eot=0, dtype="float32")))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(0, 32, (2, 64), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = ours.logits(ours(tokens, ours.attention.bind(64)))
        assert (theirs(tokens).logits - expected).abs().max() < 1e-4
