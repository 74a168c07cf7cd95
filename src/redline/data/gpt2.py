"""GPT-2's tokenizer from whatever form of its files is at hand; all give the same ids and fingerprint."""

from __future__ import annotations

import base64
import binascii
import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from redline.cache import cache_dir, write_atomically
from redline.data.byte_bpe import byte_alphabet
from redline.data.tokenizer import END_OF_TEXT, read_definition
from redline.errors import UserError

DEFINITION, VOCABULARY, MERGES, RANKS = "tokenizer.json", "encoder.json", "vocab.bpe", "r50k_base.tiktoken"
_FORMS = (DEFINITION, VOCABULARY, RANKS)
_DOWNLOAD_S = 60.0


def gpt2_backend() -> tuple[Any, str]:
    """The library's tokenizer, and where it is from: $REDLINE_GPT2, the caches of redline and the hub, or the net."""
    if chosen := os.environ.get("REDLINE_GPT2"):
        path = Path(chosen).expanduser()
        found = _form_in(path) if path.is_dir() else path
        if found is None or not found.is_file():
            fix = f"It is a folder with {', '.join(_FORMS)} or the path of one of them."
            raise UserError("REDLINE_GPT2 names no tokenizer.", where=chosen, fix=fix)
        return _read(found), str(found)
    for folder in _folders():
        if found := _form_in(folder):
            return _read(found), str(found)
    return _download(), "tiktoken"


def _folders() -> Iterator[Path]:
    yield cache_dir() / "gpt2"
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    for model in ("models--gpt2", "models--openai-community--gpt2"):
        yield from sorted((home / "hub" / model / "snapshots").glob("*"))


def _form_in(folder: Path) -> Path | None:
    return next((folder / name for name in _FORMS if (folder / name).is_file()), None)


def _read(path: Path) -> Any:
    if path.name == MERGES:
        path = path.with_name(VOCABULARY)
    if path.suffix == ".tiktoken":
        return _from_ranks(_parsed(path, _parse_ranks))
    if path.name == VOCABULARY:
        vocabulary, merges = _parsed(path, _parse_vocabulary), _parsed(path.with_name(MERGES), _parse_merges)
        return _backend(vocabulary, merges)
    return read_definition(path)


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        fix = f"{VOCABULARY} and {MERGES} belong together: put it there."
        raise UserError("a file of GPT-2's tokenizer is missing.", where=str(path), fix=fix) from None
    except (OSError, ValueError, KeyError, binascii.Error):
        raise UserError("not a file of GPT-2's tokenizer.", where=str(path), fix="Copy it again.") from None


def _parse_vocabulary(text: str) -> dict[str, int]:
    return {str(token): int(i) for token, i in json.loads(text).items()}


def _parse_merges(text: str) -> list[tuple[str, str]]:
    pairs = [tuple(line.split(" ")) for line in text.splitlines() if line and not line.startswith("#version")]
    return [(first, second) for first, second in pairs]


def _parse_ranks(text: str) -> dict[bytes, int]:
    lines = [line.split() for line in text.splitlines() if line]
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _backend(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return backend


def _from_ranks(ranks: dict[bytes, int]) -> Any:
    """Ranks say which tokens there are, in the order they were made; from what pair follows from those before."""
    characters = {byte: character for character, byte in byte_alphabet().items()}
    spelt = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            first, second = _pair_of(token, rank, ranks)
            merges.append((spelt[first], spelt[second]))
    vocabulary = {spelt[token]: rank for token, rank in ranks.items()}
    return _backend(vocabulary | {END_OF_TEXT: len(vocabulary)}, merges)


def _pair_of(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that are left when everything of a lower rank has been merged."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(first + second, rank) for first, second in itertools.pairwise(parts)]
        best = min(range(len(joined)), key=joined.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def _download() -> Any:
    """tiktoken fetches the ranks, and what came of them is kept in redline's cache."""
    ranks = _fetched_ranks()
    if ranks is None:
        raise UserError(
            "the GPT-2 tokenizer's files are not on this machine.",
            fix=f"Put its {DEFINITION} at {cache_dir() / 'gpt2' / DEFINITION}, "
            "or set REDLINE_GPT2 to the folder that holds it; a new run can do with data.tokenizer=train:16384.",
        )
    backend = _from_ranks(ranks)
    with contextlib.suppress(OSError):  # a cache that cannot be written is no reason to stop
        write_atomically(cache_dir() / "gpt2" / DEFINITION, backend.to_str())
    return backend


def _fetched_ranks() -> dict[bytes, int] | None:
    """None when there is no way to the net. In a thread, because tiktoken would wait for ever behind a firewall."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return None
    fetched: list[dict[bytes, int]] = []

    def fetch() -> None:
        try:
            import tiktoken

            fetched.append(dict(tiktoken.get_encoding("r50k_base")._mergeable_ranks))
        except Exception:  # whatever the network raises: the caller knows what to say
            return

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(_DOWNLOAD_S)
    return fetched[0] if fetched else None
