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
        from redline.data.byte_bpe import byte_level_encoder

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
        from redline.data.gpt2 import gpt2_backend

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
