"""Documents of a split of tokens: their keys, to find those that two splits share, and the first one's text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from redline.data.tokens import TokenSplit

MOST_TOKENS = 50_000_000  # of a split that is read through for its keys: about 200 MB
KEY_TOKENS = 64  # the first of a document, which its key is made of: the held-out end of a file may be cut off


def document_keys(split: TokenSplit) -> list[bytes] | None:
    """Return one key per document, made of its first tokens; None for a split too large to read through."""
    if len(split) > MOST_TOKENS:
        return None
    return list(dict.fromkeys(hashlib.blake2b(one.tobytes(), digest_size=16).digest() for one in _beginnings(split)))


def _beginnings(split: TokenSplit) -> Iterator[npt.NDArray[np.int64]]:
    starts = np.flatnonzero(np.concatenate([np.asarray(piece) == split.eot for piece in split.pieces]))
    ends = np.append(starts[1:], len(split))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        length = min(KEY_TOKENS, end - start - 1)
        if length > 0:
            yield split.read(start + 1, length).astype(np.int64)


def first_tokens(split: TokenSplit, count: int) -> list[int]:
    """Return the first `count` tokens of the split's first document, without its end-of-text mark."""
    tokens = split.read(0, min(len(split), count + 1)).tolist()
    body = tokens[1:] if tokens and tokens[0] == split.eot else tokens[:count]
    return body[: body.index(split.eot)] if split.eot in body else body
