"""Tokens to text while they are written: a character may have several tokens, and a token's text depends on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
_CONTEXT = 8  # tokens before a text that decide how its first tokens are decoded


class TextStream:
    """Decodes tokens one by one.

    Some tokenizers drop the space before the first token that they decode, so each token is decoded together with the
    tokens of the step before it, whose text is then cut off.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode, self._tokens = decode, list(before)[-_CONTEXT:]
        self._begin, self._done = 0, len(self._tokens)

    def add(self, token: int) -> str:
        """Return the text that is complete with this token; "" while a character is not."""
        self._tokens.append(token)
        text = self._new_text()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._begin, self._done = self._done, len(self._tokens)
        return text

    def finish(self) -> str:
        """Return the rest, with a replacement character for an incomplete one."""
        text = self._new_text()
        self._begin, self._done = self._done, len(self._tokens)
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._tokens[self._begin : self._done]) if self._done > self._begin else ""
        return self._decode(self._tokens[self._begin :])[len(shown) :]
