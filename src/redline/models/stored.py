"""Weights as they lie in safetensors files: which there are, a fingerprint of them, and reading one at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from redline.cache import check_regular, read_text, regular
from redline.errors import UserError

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
        with open(path, "rb", opener=regular) as file:
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
        with open(entry.path, "rb", opener=regular) as file:
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
