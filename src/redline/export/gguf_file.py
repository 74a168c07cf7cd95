"""GGUF files: a model of the Llama form as llama.cpp, Ollama and LM Studio load it, written one tensor at a time.

The numbers and names come from the same config.json and published tensor names that the export for transformers
writes. What differs here: llama.cpp's `llama` models rotate neighbouring pairs of a head instead of its two halves, so
the rows of their query and key matrices are reordered; and rows that only pad the vocabulary are left out, because
llama.cpp would sample them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from redline.errors import UserError, install_hint
from redline.export.gguf_vocabulary import Vocabulary
from redline.export.llama_cpp import Quantise, quantiser
from redline.export.tensors import Named
from redline.models.families import BaseConfig, parse_config

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_EXTRA = "gguf"


@dataclass(frozen=True)
class Quantisation:
    """The types of a file's matrices. `more` is for tensors that lose most: their rows in some layers, and the head."""

    file_type: int  # general.file_type, llama.cpp's LLAMA_FTYPE_*
    main: str
    more: str | None = None


QUANTISATIONS = {
    "f32": Quantisation(0, "F32"),
    "f16": Quantisation(1, "F16"),
    "bf16": Quantisation(32, "BF16"),
    "q8_0": Quantisation(7, "Q8_0"),
    "q4_k_m": Quantisation(15, "Q4_K", "Q6_K"),
    "q5_k_m": Quantisation(17, "Q5_K", "Q6_K"),
    "q6_k": Quantisation(18, "Q6_K"),
}
# llama.cpp's replacement for rows that are no multiple of 256 values, then for those that are none of 32.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_BLOCKS = {"Q4_K": 256, "Q5_K": 256, "Q6_K": 256, "Q8_0": 32, "Q5_0": 32, "Q5_1": 32}
_MOST_F16 = 65504.0


def check_package() -> None:
    """Raise a UserError without the package that writes the files."""
    if find_spec("gguf") is None:
        raise UserError("writing a GGUF file needs the package gguf.", fix=f"Install it: {install_hint(_EXTRA)}.")


def described(config: Mapping[str, Any], where: str) -> BaseConfig:
    """Return the model of a config.json; refuse one that llama.cpp does not compute, by the part that it lacks."""
    found = parse_config(dict(config), where)
    if found.family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"llama.cpp's form of {found.family} is not known.", where=where, fix=f"There are {known}.")
    scaling = found.model["rope_scaling"]
    if scaling and scaling["rope_type"] == "llama3" and ARCHITECTURES[found.family] != "llama":
        what = f"model.rope_scaling: llama.cpp has llama3's scaling for Llama only, not for {found.family}."
        raise UserError(what, where=where, fix="Export it for transformers: leave out --format.")
    return found


def write_gguf(
    path: Path,
    *,
    name: str,
    model: BaseConfig,
    vocabulary: Vocabulary,
    tensors: Callable[[], Named],
    shapes: Mapping[str, tuple[int, ...]],
    quant: str,
) -> None:
    """Write the file. `tensors` are the published ones, in the order of `shapes`, in any floating type."""
    import gguf

    architecture = ARCHITECTURES[model.family]
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _write_metadata(writer, name, model, vocabulary, quant)
        _write_vocabulary(writer, vocabulary)
        names = gguf.get_tensor_name_map(
            next(kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture), model.model["layers"]
        )
        rename = {own: str(names.get_name(own, try_suffixes=(".weight", ".bias"))) for own in shapes}
        rows = len(vocabulary.tokens)
        stored = {own: _without_padding(rename[own], shape, rows) for own, shape in shapes.items()}
        layers, tied = model.model["layers"], model.model["tied"]
        kinds = {own: _kind(rename[own], shape, quant, layers, tied=tied) for own, shape in stored.items()}
        quantise = quantiser(set(kinds.values()))
        factors = _rope_factors(model)
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        for own, shape in stored.items():
            kind = gguf.GGMLQuantizationType[kinds[own]]
            size = gguf.quant_shape_to_byte_shape(shape, kind)
            count = int(np.prod(size))
            writer.add_tensor_info(rename[own], size, np.dtype(np.uint8), count, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for (own, tensor), expected in zip(tensors(), shapes, strict=True):
            assert own == expected
            kept = tensor[: stored[own][0]].float()
            if architecture == "llama":
                kept = _neighbouring_pairs(rename[own], kept, model.model["head_dim"])
            writer.write_tensor_data(_encoded(kept, kinds[own], rename[own], quantise))
    finally:
        writer.close()


def _write_metadata(writer: Any, name: str, model: BaseConfig, vocabulary: Vocabulary, quant: str) -> None:
    shape = model.model
    writer.add_name(name)
    writer.add_file_type(QUANTISATIONS[quant].file_type)
    writer.add_quantization_version(2)
    writer.add_vocab_size(len(vocabulary.tokens))
    writer.add_context_length(model.context)
    writer.add_embedding_length(shape["d_model"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["d_ff"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["norm_eps"])
    scaling = shape["rope_scaling"]
    if scaling and scaling["rope_type"] == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])


def _write_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.prefixes_space)
    adders = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "eot": writer.add_eot_token_id,
        "eom": writer.add_eom_token_id,
        "unknown": writer.add_unk_token_id,
        "padding": writer.add_pad_token_id,
    }
    for kind, number in vocabulary.special.items():
        adders[kind](number)
    writer.add_add_bos_token(vocabulary.begins)
    writer.add_add_eos_token(False)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _without_padding(name: str, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    return (rows, *shape[1:]) if name in ("token_embd.weight", "output.weight") else shape


def _kind(name: str, shape: tuple[int, ...], quant: str, layers: int, *, tied: bool) -> str:
    """Return the type of a tensor, chosen as llama.cpp's own quantiser does."""
    chosen = QUANTISATIONS[quant]
    if len(shape) == 1:
        return "F32"  # norms and biases: llama.cpp computes with nothing else
    kind = chosen.main
    if chosen.more is not None:
        part = name.split(".")
        layer = int(part[1]) if part[0] == "blk" else -1
        first, last = layers // 8, 7 * layers // 8
        precise = layer < first or layer >= last or (layer - first) % 3 == 2
        is_head = name == ("token_embd.weight" if tied else "output.weight")
        if is_head or (precise and any(f".{matrix}." in name for matrix in ("attn_v", "ffn_down"))):
            kind = chosen.more
    if shape[-1] % _BLOCKS.get(kind, 1):
        kind = _NARROW.get(kind, "F16")
    return "F16" if shape[-1] % _BLOCKS.get(kind, 1) else kind


def _neighbouring_pairs(name: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of a query or key matrix: rotary pairs (i, i + K/2) become (2i, 2i + 1)."""
    if not name.startswith("blk.") or name.split(".")[2] not in ("attn_q", "attn_k"):
        return tensor
    halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _rope_factors(model: BaseConfig) -> npt.NDArray[np.float32] | None:
    """Return what llama.cpp divides each rotary frequency by, for llama3's scaling (Llama 3.1)."""
    scaling = model.model["rope_scaling"]
    if not scaling or scaling["rope_type"] != "llama3":
        return None
    head_dim, theta = model.model["head_dim"], model.model["rope_theta"]
    frequency = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1 - blend) / factor + blend)).astype(np.float32)


def _encoded(tensor: Tensor, kind: str, name: str, quantise: Quantise) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor in the type of the file."""
    if not bool(torch.isfinite(tensor).all()):
        raise UserError(f"{name} is not finite.", fix="Export an earlier checkpoint (RUN@STEP).")
    if kind == "F16" and float(tensor.abs().max()) > _MOST_F16:
        raise UserError(f"{name} has values beyond the range of f16.", fix="Use --quant bf16 or f32.")
    return quantise(np.ascontiguousarray(tensor.cpu().numpy(), dtype=np.float32), kind)
