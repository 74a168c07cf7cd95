"""Tokenizers: bytes, a BPE that is trained on the data (train:N), GPT-2's, or any `tokenizer.json`."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import itertools
import json
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.cache import cache_dir, read_text, write_atomically
from redline.data.time_limit import TookTooLongError, within_seconds
from redline.errors import UserError
from redline.units import parse_count

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>")

# vocab_size, eot and fingerprint of the tokenizers that are known without their files. GPT-2's fingerprint is that of
# its published vocabulary and merges. It is written down so that token files made elsewhere can be trained on without
# the tokenizer's files; whatever is loaded as `gpt2` must have it.
_BYTES_VOCABULARY = (257, 256, hashlib.sha256(b"redline bytes: ids 0-255, end of text 256").hexdigest()[:16])
_GPT2_VOCABULARY = (50257, 50256, "f6d629a518c01312")
# BPE training takes time quadratic in the length of a word, and DNA, base64 or a script without spaces is one word.
_LONG_WORD = re.compile(r"(\S{256})(?=\S)")
_LONG_GAP = re.compile(r"(\s{256})\s+")  # a run of white space is a word too; a longer one adds nothing to learn
_VAST_GAP = 100_000  # characters; tiktoken's pattern recurses in a gap, and overflows the stack at about a million
# Seconds for encoding a batch. Ordinary tokenizers take about a second for a million characters.
_LIMIT_S, _LIMIT_S_PER_CHARACTER = 30.0, 6e-5


class Tokenizer(ABC):
    """Encodes text and decodes ids. No text encodes to `eot`: redline itself writes it, before each document."""

    name: str
    vocab_size: int
    eot: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        """Encode the text as an array."""
        import numpy as np

        return np.array(self.encode(text), dtype=np.uint32)

    def encode_arrays(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        return [self.encode_array(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, with `eot` as its name and without ids that are not in the vocabulary."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the definition to the file `path`; the bytes tokenizer has none and writes nothing."""


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
        backend.no_truncation()  # some published files set a length at which text would be silently cut
        backend.no_padding()
        backend.encode_special_tokens = True  # "<|endoftext|>" inside a document is text, not a control token
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.name = name
        self.vocab_size = max(vocabulary.values()) + 1  # not the number of entries: some vocabularies have gaps
        self.eot = _end_of_text(name, vocabulary)
        end = backend.id_to_token(self.eot)
        if not any(token.special for token in backend.get_added_tokens_decoder().values() if token.content == end):
            backend.add_special_tokens([end])  # otherwise the library would find it inside of text
        self.fingerprint = backend_fingerprint(backend)
        self._backend = backend
        if self.eot in encodings(backend, [end], name)[0].ids:  # the vocabulary also has it as an ordinary word
            fix = "Use a tokenizer that splits this text, or one with another end-of-text token."
            raise UserError(f"the text {end} would encode to the end-of-text token.", where=name, fix=fix)

    @cached_property
    def _encoder(self) -> Any:
        """tiktoken's encoder if it is known to give the same ids, otherwise None."""
        return byte_level_encoder(self.name, self._backend)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._encoder is not None and not any(map(_has_vast_gap, texts)):
            return [self._encoder.encode_ordinary(text) for text in texts]
        return [coded.ids for coded in encodings(self._backend, texts, self.name)]

    def encode_arrays(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Encode all texts under one time limit: a thread for each short text would take longer than the text."""
        import numpy as np

        return [np.array(ids, dtype=np.uint32) for ids in self.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def save(self, path: Path) -> None:
        path.write_text(self._backend.to_str(pretty=True), encoding="utf-8")  # its own `save` raises no OSError

    def definition(self) -> str:
        """Return the content of a tokenizer.json."""
        return str(self._backend.to_str())

    def vocabulary(self) -> dict[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=True))


def encodings(backend: Any, texts: Sequence[str], name: str, *, offsets: bool = False) -> list[Any]:
    """Encode the texts with the tokenizers library, within a time limit.

    The regular expressions of a tokenizer.json may backtrack: on some texts the library panics, on others it would run
    for days.
    """
    encode = backend.encode_batch if offsets else backend.encode_batch_fast
    characters = sum(map(len, texts))
    limit = _LIMIT_S + _LIMIT_S_PER_CHARACTER * characters
    try:
        encoded: list[Any] = within_seconds(lambda: encode(list(texts), add_special_tokens=False), limit)
    except TookTooLongError:
        raise _backtracks(name, f"{characters:,} characters were not split within {limit:.0f} s") from None
    except BaseException as error:  # a panic of the library is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        reason = next(iter(str(error).splitlines()), "")
        raise _backtracks(name, f"the tokenizers library stopped with {reason!r}") from None
    return encoded


def _backtracks(name: str, what: str) -> UserError:
    return UserError(
        f"a regular expression of the tokenizer cannot split this text: {what}.",
        where=name,
        fix="Simplify the pattern of pre_tokenizer or normalizer in its tokenizer.json, or use another tokenizer.",
    )


def _has_vast_gap(text: str) -> bool:
    """Return whether the text may have a run of white space of `_VAST_GAP` characters.

    Such a run covers at least one of the blocks of half that length completely, so only these are checked.
    """
    half = _VAST_GAP // 2
    return any(text[start : start + half].isspace() for start in range(0, len(text) - half + 1, half))


def load_tokenizer(spec: str, texts: Callable[[], Iterable[str]] | None = None) -> Tokenizer:
    """Load the tokenizer `spec`: bytes, gpt2 or the path of a tokenizer.json; train:N is trained on `texts`."""
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "gpt2":
        backend, origin = gpt2_backend()
        return _checked_gpt2(LibraryTokenizer("gpt2", backend), origin)
    if (size := trained_size(spec)) is not None:
        if texts is None:
            raise UserError(
                f"the tokenizer {spec} has to be trained on text, and there is no text here.",
                fix="Use a tokenizer that exists: bytes, gpt2 or the path of a tokenizer.json.",
            )
        return _train(spec, size, texts())
    path = Path(spec).expanduser()
    try:
        definition = read_definition(path / "tokenizer.json" if path.is_dir() else path)
    except OSError as error:
        fix = "Use bytes, gpt2, train:N or the path of a tokenizer.json."
        raise UserError(f"the tokenizer cannot be read ({error.strerror}).", where=spec, fix=fix) from None
    return LibraryTokenizer(spec, definition)


def vocabulary_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return every token of the tokenizer with its id."""
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.vocabulary()
    return {f"byte {i}": i for i in range(tokenizer.eot)} | {END_OF_TEXT: tokenizer.eot}


def named_vocabulary(spec: str) -> tuple[int, int, str] | None:
    """Return (vocab_size, eot, fingerprint) of a tokenizer that is known without its files, otherwise None."""
    return {"bytes": _BYTES_VOCABULARY, "gpt2": _GPT2_VOCABULARY}.get(spec)


def trained_size(spec: str) -> int | None:
    """Return N of train:N; None for any other spec."""
    if not spec.startswith("train:"):
        return None
    try:
        size = parse_count(spec.removeprefix("train:"))
    except ValueError:
        size = 0
    if size < 257:
        raise UserError(
            f"{spec!r} is not a tokenizer.", fix="Write train:N with N of at least 257: 256 bytes and the end of text."
        )
    return size


def _train(name: str, size: int, texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE like GPT-2's (Radford et al. 2019), which can encode any text and decodes it exactly."""
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
            "the tokenizer is not GPT-2's.", where=origin, fix="Set data.tokenizer to its path instead of `gpt2`."
        )
    return tokenizer


def tokenizer_from(name: str, definition: str | None) -> Tokenizer:
    """Return the tokenizer with this definition, which another process has sent; None stands for bytes."""
    if definition is None:
        return ByteTokenizer()
    from tokenizers import Tokenizer as Backend

    return LibraryTokenizer(name, Backend.from_str(definition))


def read_definition(path: Path) -> Any:
    """Load a tokenizer.json as a tokenizer of the library."""
    from tokenizers import Tokenizer as Backend

    if not path.is_file():
        raise UserError(
            "no such tokenizer.", where=str(path), fix="Use bytes, gpt2, train:N or the path of a tokenizer.json."
        )
    try:
        return Backend.from_str(read_text(path))
    except Exception as error:  # the library raises a plain Exception for any file that it cannot read
        raise UserError(
            f"the tokenizer.json cannot be read ({error}).", where=str(path), fix="Save it again with `tokenizers`."
        ) from None


def _end_of_text(name: str, vocabulary: dict[str, int]) -> int:
    for token in _END_NAMES:
        if token in vocabulary:
            return vocabulary[token]
    raise UserError(
        "the tokenizer has no end-of-text token.", where=name, fix=f"Add one of {', '.join(_END_NAMES)} to it."
    )


def backend_fingerprint(backend: Any) -> str:
    """Return a digest of everything that decides the ids of a text, and of nothing else.

    It is the same for all releases of the library, which write the same tokenizer in different ways.
    """
    definition = json.loads(backend.to_str())
    model = {key: value for key, value in definition["model"].items() if value}  # absent, null and false mean the same
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
# Byte-level BPE by tiktoken, which is four times as fast as the `tokenizers` library, if the ids are provably the same.
#
# The library merges the listed pairs; tiktoken merges any two neighbours whose concatenation is a token, the token with
# the lowest id first. Both give the same ids if (1) the i-th merge makes a token of its own, with ids that rise with i,
# and (2) every token, encoded alone, is itself. Proof: when a token is the next one to be made, all merges of lower ids
# are done, and none of them has joined a part of the token with its surroundings. Inside of it there is then exactly
# the pair that the list has for it.


# GPT-2's words (Radford et al. 2019), as the library's ByteLevel splits them; possessive quantifiers never backtrack.
_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for: a printable character for itself, the others from 256 on."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_level_encoder(name: str, backend: Any) -> tiktoken.Encoding | None:
    """Return an encoder with the same ids as the library's tokenizer; None if that cannot be proved."""
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
    """Return whether every merge makes a token of its own, in the order of ids."""
    ids = [vocabulary.get("".join(pair.split(" ") if isinstance(pair, str) else pair), -1) for pair in merges]
    rising = all(before < after for before, after in zip([-1, *ids], ids, strict=False))
    return rising and len(ids) == sum(len(token) > 1 for token in vocabulary)


# ----------------------------------------------------------------------------------------------------
# GPT-2's tokenizer from any published form of its files; all of them give the same ids and fingerprint.


DEFINITION, VOCABULARY, MERGES, RANKS = "tokenizer.json", "encoder.json", "vocab.bpe", "r50k_base.tiktoken"
_FORMS = (DEFINITION, VOCABULARY, RANKS)
_DOWNLOAD_S = 60.0


def gpt2_backend() -> tuple[Any, str]:
    """Return GPT-2's tokenizer of the library, and where it was found.

    The places are $REDLINE_GPT2, the cache of redline, that of the hub, and the network.
    """
    if chosen := os.environ.get("REDLINE_GPT2"):
        path = Path(chosen).expanduser()
        file = _form_in(path) if path.is_dir() else path
        if file is None or not file.is_file():
            fix = f"Set it to a folder with {', '.join(_FORMS)} or to the path of one of these files."
            raise UserError("REDLINE_GPT2 does not name a tokenizer.", where=chosen, fix=fix)
        return _read(file), str(file)
    for folder in _folders():
        if file := _form_in(folder):
            return _read(file), str(file)
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
        fix = f"Put it there: {VOCABULARY} and {MERGES} are needed together."
        raise UserError("a file of GPT-2's tokenizer is missing.", where=str(path), fix=fix) from None
    except (OSError, ValueError, KeyError, binascii.Error):
        raise UserError("the file is not one of GPT-2's tokenizer.", where=str(path), fix="Copy it again.") from None


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
    """Make the tokenizer from tiktoken's ranks: the tokens in the order in which they were merged.

    The pair that a token was merged from follows from the tokens before it.
    """
    characters = {byte: character for character, byte in byte_alphabet().items()}
    spelling = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            first, second = _pair_of(token, rank, ranks)
            merges.append((spelling[first], spelling[second]))
    vocabulary = {spelling[token]: rank for token, rank in ranks.items()}
    return _backend(vocabulary | {END_OF_TEXT: len(vocabulary)}, merges)


def _pair_of(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two parts of the token that are left after all merges of lower ranks."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(first + second, rank) for first, second in itertools.pairwise(parts)]
        best = min(range(len(joined)), key=joined.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def _download() -> Any:
    """Download the ranks with tiktoken, and write the tokenizer to redline's cache."""
    ranks = _fetched_ranks()
    if ranks is None:
        raise UserError(
            "the GPT-2 tokenizer's files are not on this machine.",
            fix=f"Put its {DEFINITION} at {cache_dir() / 'gpt2' / DEFINITION}, "
            "or set REDLINE_GPT2 to the folder that holds it; a new run can use data.tokenizer=train:16384.",
        )
    backend = _from_ranks(ranks)
    with contextlib.suppress(OSError):  # a cache that cannot be written does not matter
        write_atomically(cache_dir() / "gpt2" / DEFINITION, backend.to_str())
    return backend


def _fetched_ranks() -> dict[bytes, int] | None:
    """Return the ranks; None without a network. In a thread, because behind a firewall tiktoken would wait forever."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return None
    fetched: list[dict[bytes, int]] = []

    def fetch() -> None:
        try:
            import tiktoken

            fetched.append(dict(tiktoken.get_encoding("r50k_base")._mergeable_ranks))
        except Exception:  # no network, in any of its forms; the caller reports that
            return

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(_DOWNLOAD_S)
    return fetched[0] if fetched else None
