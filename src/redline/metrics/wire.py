"""How many bytes a text takes, and how that compares with its latents."""

from __future__ import annotations

import gzip


def text_bytes(text: str) -> dict[str, int]:
    raw = text.encode("utf-8")
    return {"utf8": len(raw), "gzip": len(gzip.compress(raw, compresslevel=9, mtime=0))}


def verdict(wire: float, text: float) -> str:
    """In words, which is shorter."""
    if wire > text:
        return f"the wire is {wire / text:.1f}× larger than the text"
    return f"the wire is {text / wire:.1f}× smaller than the text"
