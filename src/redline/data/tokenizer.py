"""Tokenizers: raw bytes, a BPE trained on the spot, GPT-2's, or any `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.cache import read_text
from redline.data.time_limit import TookTooLongError, within_seconds
from redline.errors import UserError
from redline.units import parse_count

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
from functools import cache

if TYPE_CHECKING:
    import tiktoken
import base64
import binascii
import contextlib
import itertools
import os
import threading
from collections.abc import Iterator

from redline.cache import cache_dir, write_atomically

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>")

_BYTES_VOCABULARY = (257, 256, hashlib.sha256(b"redline bytes: ids 0-255, end of text 256").hexdigest()[:16])
# The fingerprint of GPT-2's published vocabulary and merges. It is written down so that token files made
# elsewhere can be trained on without the tokenizer's files; whatever is loaded as `gpt2` must match it.
# Learning takes the square of a word's length, and DNA, base64 or a script without spaces is one word.
_LONG_WORD = re.compile(r"(\S{256})(?=\S)")
_LONG_GAP = re.compile(r"(\s{256})\s+")  # so is a run of spaces, of which more teaches nothing
_VAST_GAP = 100_000  # characters: tiktoken's pattern recurses there, and overflows from a million on
_GPT2_VOCABULARY = (50257, 50256, "f6d629a518c01312")
# The limit on encoding a batch: ordinary tokenizers take about a second for a million characters.
_LIMIT_S, _LIMIT_S_PER_CHARACTER = 30.0, 6e-5


class Tokenizer(ABC):
    """Text to ids and back. Text never encodes to `eot`: only redline places it, before each document."""

    name: str
    vocab_size: int
    eot: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        """The same ids, as numbers of four bytes."""
        import numpy as np

        return np.array(self.encode(text), dtype=np.uint32)

    def encode_arrays(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        return [self.encode_array(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text; `eot` is written as its name, and ids that stand for nothing are left out."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the definition to the file `path`; a tokenizer without one (bytes) writes nothing."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are the ids."""

    def __init__(self) -> None:
        self.name = "bytes"
        self.vocab_size, self.eot, self.fingerprint = _BYTES_VOCABULARY

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        import numpy as np

        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        parts = (END_OF_TEXT.encode() if i == self.eot else bytes((i,)) for i in ids if 0 <= i <= self.eot)
        return b"".join(parts).decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        return None


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, name: str, backend: Any) -> None:
        backend.no_truncation()  # a setting of some published files that would silently drop text
        backend.no_padding()
        backend.encode_special_tokens = True  # "<|endoftext|>" inside a document is text, not a control token
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.name = name
        self.vocab_size = max(vocabulary.values()) + 1  # some vocabularies have holes
        self.eot = _end_of_text(name, vocabulary)
        end = backend.id_to_token(self.eot)
        if not any(token.special for token in backend.get_added_tokens_decoder().values() if token.content == end):
            backend.add_special_tokens([end])  # not marked as one: the library would find it in text
        self.fingerprint = backend_fingerprint(backend)
        self._backend = backend
        if self.eot in encodings(backend, [end], name)[0].ids:  # a whole word of its vocabulary
            fix = "Take a tokenizer that splits it, or one whose end-of-text token is no word."
            raise UserError(f"text that holds {end} would be cut there.", where=name, fix=fix)

    @cached_property
    def _encoder(self) -> Any:
        """tiktoken's, when it gives the same ids; None leaves it to the library."""

        return byte_level_encoder(self.name, self._backend)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._encoder is not None and not any(map(_has_vast_gap, texts)):
            return [self._encoder.encode_ordinary(text) for text in texts]
        return [coded.ids for coded in encodings(self._backend, texts, self.name)]

    def encode_arrays(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Encode all texts under one time limit: a thread for each of many short texts would cost more than they do."""
        import numpy as np

        return [np.array(ids, dtype=np.uint32) for ids in self.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def save(self, path: Path) -> None:
        path.write_text(self._backend.to_str(pretty=True), encoding="utf-8")  # its own `save` raises no OSError

    def definition(self) -> str:
        """What a tokenizer.json holds."""
        return str(self._backend.to_str())


def encodings(backend: Any, texts: Sequence[str], name: str, *, offsets: bool = False) -> list[Any]:
    """Return what the library makes of the texts, within a time limit.

    The regular expressions of a tokenizer.json can backtrack: on some texts the library panics, on others it would
    compute for days.
    """
    encode = backend.encode_batch if offsets else backend.encode_batch_fast
    characters = sum(map(len, texts))
    most = _LIMIT_S + _LIMIT_S_PER_CHARACTER * characters
    try:
        found: list[Any] = within_seconds(lambda: encode(list(texts), add_special_tokens=False), most)
    except TookTooLongError:
        raise _backtracks(name, f"{characters:,} characters were not split within {most:.0f} s") from None
    except BaseException as error:  # a panic of the library is no Exception
        if type(error).__name__ != "PanicException":
            raise
        reason = next(iter(str(error).splitlines()), "")
        raise _backtracks(name, f"the tokenizers library stopped with {reason!r}") from None
    return found


def _backtracks(name: str, what: str) -> UserError:
    return UserError(
        f"a regular expression of the tokenizer cannot split this text: {what}.",
        where=name,
        fix="Simplify the pattern of pre_tokenizer or normalizer in its tokenizer.json, or use another tokenizer.",
    )


def _has_vast_gap(text: str) -> bool:
    """Whether there may be one: it would cover a whole half of its length somewhere, and only those are looked at."""
    half = _VAST_GAP // 2
    return any(text[start : start + half].isspace() for start in range(0, len(text) - half + 1, half))


def load_tokenizer(spec: str, texts: Callable[[], Iterable[str]] | None = None) -> Tokenizer:
    """The tokenizer that `spec` names: bytes, train:N (from `texts`), gpt2, or the path of a tokenizer.json."""
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "gpt2":
        backend, origin = gpt2_backend()
        return _checked_gpt2(LibraryTokenizer("gpt2", backend), origin)
    if (size := trained_size(spec)) is not None:
        if texts is None:
            raise UserError(
                f"the tokenizer {spec} is trained on text, and here is none.",
                fix="Name a tokenizer that exists already: bytes, gpt2 or the path of a tokenizer.json.",
            )
        return _train(spec, size, texts())
    path = Path(spec).expanduser()
    try:
        definition = read_definition(path / "tokenizer.json" if path.is_dir() else path)
    except OSError as error:
        fix = "Name bytes, gpt2, train:N or the path of a tokenizer.json."
        raise UserError(f"cannot be read ({error.strerror}).", where=spec, fix=fix) from None
    return LibraryTokenizer(spec, definition)


def named_vocabulary(spec: str) -> tuple[int, int, str] | None:
    """(vocab_size, eot, fingerprint) of a tokenizer that is known without its files, else None."""
    return {"bytes": _BYTES_VOCABULARY, "gpt2": _GPT2_VOCABULARY}.get(spec)


def trained_size(spec: str) -> int | None:
    """N of train:N; None when the spec is of another kind."""
    if not spec.startswith("train:"):
        return None
    try:
        size = parse_count(spec.removeprefix("train:"))
    except ValueError:
        size = 0
    if size < 257:
        raise UserError(
            f"{spec!r} is not a tokenizer.", fix="Write train:N with N of at least 257 (256 bytes and the end of text)."
        )
    return size


def _train(name: str, size: int, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE as GPT-2's (Radford et al. 2019): any text can be written, and comes back exactly."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((_LONG_GAP.sub(r"\1", _LONG_WORD.sub(r"\1\n", text)) for text in texts), trainer)
    return LibraryTokenizer(name, backend)


def _checked_gpt2(tokenizer: Tokenizer, origin: str) -> Tokenizer:
    if (tokenizer.vocab_size, tokenizer.eot, tokenizer.fingerprint) != _GPT2_VOCABULARY:
        raise UserError(
            "this is another tokenizer than GPT-2's.", where=origin, fix="Name it by its path instead of `gpt2`."
        )
    return tokenizer


def tokenizer_from(name: str, definition: str | None) -> Tokenizer:
    """A tokenizer as another process described it; bytes have no definition."""
    if definition is None:
        return ByteTokenizer()
    from tokenizers import Tokenizer as Backend

    return LibraryTokenizer(name, Backend.from_str(definition))


def read_definition(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    if not path.is_file():
        raise UserError(
            "no such tokenizer.", where=str(path), fix="Name bytes, gpt2, train:N or the path of a tokenizer.json."
        )
    try:
        return Backend.from_str(read_text(path))
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
        raise UserError(
            f"not a tokenizer.json that can be read ({error}).", where=str(path), fix="Save it again with `tokenizers`."
        ) from None


def _end_of_text(name: str, vocabulary: dict[str, int]) -> int:
    for token in _END_NAMES:
        if token in vocabulary:
            return vocabulary[token]
    raise UserError(
        "the tokenizer has no end-of-text token.", where=name, fix=f"Add one of {', '.join(_END_NAMES)} to it."
    )


def backend_fingerprint(backend: Any) -> str:
    """What decides the ids of a text, and no more, in a form that releases of the library agree on."""
    definition = json.loads(backend.to_str())
    model = {key: value for key, value in definition["model"].items() if value}  # unset, null and false are one
    if "merges" in model:  # older releases write "a b", newer ones ["a", "b"]
        model["merges"] = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    canonical = {
        "model": model,
        "vocabulary": backend.get_vocab(with_added_tokens=True),
        "added": [token for token in definition["added_tokens"] if not token["special"]],
        "normalizer": definition["normalizer"],
        "pre_tokenizer": _without_offsets(definition["pre_tokenizer"]),
    }
    text = json.dumps(canonical, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_offsets(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _without_offsets(value) for key, value in part.items() if key != "trim_offsets"}
    return [_without_offsets(item) for item in part] if isinstance(part, list) else part


# ----------------------------------------------------------------------------------------------------
# Byte-level BPE by tiktoken, four times as fast as the `tokenizers` library — where the ids are provably the same.
#
# The library merges listed pairs; tiktoken merges any neighbours whose join is a token, the token with the lowest id
# first. Both agree when (1) the i-th merge makes a token of its own, with ids that rise with i, and (2) every token,
# merged on its own, becomes itself. For then, when a token is the next to be made, all merges below it are done, no
# merge has crossed its borders, and so its inside is the very pair that the list names for it.


# GPT-2's words (Radford et al. 2019), as the library's ByteLevel splits them; possessive, so that nothing backtracks.
_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


@cache
def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte: itself where it prints, else one from 256 on in order."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_level_encoder(name: str, backend: Any) -> tiktoken.Encoding | None:
    """An encoder with the same ids as the library's tokenizer; None when that cannot be shown."""
    definition = json.loads(backend.to_str())
    if not _is_plain_byte_level(definition):
        return None
    added = {token["content"] for token in definition["added_tokens"]}
    vocabulary = {token: i for token, i in definition["model"]["vocab"].items() if token not in added}
    alphabet = byte_alphabet()
    if not all(character in alphabet for token in vocabulary for character in token):
        return None
    if not _merges_rise(definition["model"]["merges"], vocabulary) or not alphabet.keys() <= vocabulary.keys():
        return None
    merge = backend.model.tokenize
    if any([part.id for part in merge(token)] != [i] for token, i in vocabulary.items()):
        return None
    import tiktoken

    ranks = {bytes(alphabet[character] for character in token): i for token, i in vocabulary.items()}
    return tiktoken.Encoding(name, pat_str=_WORDS, mergeable_ranks=ranks, special_tokens={})


def _is_plain_byte_level(definition: dict[str, Any]) -> bool:
    model, words = definition["model"], definition["pre_tokenizer"] or {}
    plain_model = model["type"] == "BPE" and not any(
        model.get(option) for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    plain_words = words.get("type") == "ByteLevel" and words.get("use_regex", True) and not words["add_prefix_space"]
    controls = all(token["special"] for token in definition["added_tokens"])
    return bool(plain_model and plain_words and controls and definition["normalizer"] is None)


def _merges_rise(merges: list[Any], vocabulary: dict[str, int]) -> bool:
    made = [vocabulary.get("".join(pair.split(" ") if isinstance(pair, str) else pair), -1) for pair in merges]
    rising = all(before < after for before, after in zip([-1, *made], made, strict=False))
    return rising and len(made) == sum(len(token) > 1 for token in vocabulary)


# ----------------------------------------------------------------------------------------------------
# GPT-2's tokenizer from whatever form of its files is at hand; all give the same ids and fingerprint.


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
