"""Tokenizers that are a list of pieces with scores, `[["<unk>", 0.0], …, [" the", -6.0]]`: what is left of
a SentencePiece model in small Llamas that come without a tokenizer.json (`tok512.json`).

Such a tokenizer puts a space before a text, cuts it into characters (bytes, where it does not know one) and joins two
neighbours as long as a piece is made of them, that of the highest score first. This is BPE whose merges are ordered by
score, which the package tokenizers does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redline.errors import UserError

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
_SPACE = "▁"  # how the package writes one inside a piece
_LARGEST = 1 << 26  # bytes
_KNOWN = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def piece_file(folder: Path) -> Path | None:
    """`tok….json`, where no usual tokenizer is."""
    if any((folder / name).exists() for name in _KNOWN):
        return None
    found = sorted(folder.glob("tok*.json"))
    return found[0] if len(found) == 1 else None


def piece_tokenizer(path: Path) -> Any:
    """As transformers has them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    scores = _read(path)
    numbers = {piece: number for number, piece in enumerate(scores)}
    marks = [piece for piece in (UNKNOWN, BEGIN, END) if piece in numbers]
    if marks[1:] != [BEGIN, END]:
        raise _broken(path, f"there is no {BEGIN} or no {END} in it")
    unknown = UNKNOWN if UNKNOWN in numbers else None
    backend = Tokenizer(models.BPE(numbers, _merges(scores), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    spaced = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*spaced, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, numbers[BEGIN])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BEGIN, eos_token=END, unk_token=unknown)


def _read(path: Path) -> dict[str, float]:
    """Piece → score, in their order; spaces as the package writes them."""
    try:
        if path.stat().st_size > _LARGEST:
            raise _broken(path, "it is too large")
        rows = json.loads(path.read_text(encoding="utf-8"))
        # control pieces stand between line breaks, so that they are seen when printed
        pieces = {
            (piece.strip("\n") if piece.strip("\n") in (BEGIN, END) else piece).replace(" ", _SPACE): float(score)
            for piece, score in rows
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(path, type(error).__name__) from None
    if len(pieces) != len(rows) or "" in pieces:
        raise _broken(path, "a piece is empty, or there twice")
    return pieces


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Each pair of pieces that is a third, by the third's score, and by its number where these are equal."""
    order = {piece: number for number, piece in enumerate(scores)}
    found = [
        (-scores[piece], order[piece], (piece[:cut], piece[cut:]))
        for piece in scores
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [pair for *_, pair in sorted(found)]


def _broken(path: Path, why: str) -> UserError:
    fix = "Put the model's tokenizer.json there instead."
    return UserError(f"is no list of pieces with their scores ({why}).", where=str(path), fix=fix)
