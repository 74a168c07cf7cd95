"""A tokenizer as llama.cpp reads it: the `tokenizer.ggml.*` keys of a GGUF file, made from a tokenizer.json.

llama.cpp has its own code for each kind of tokenizer and for each way to split a text into words, so only the kinds
named here can be expressed. Any other is refused: a file with the wrong kind loads, and then reads every text wrongly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redline.cache import read_text
from redline.data.tokenizer import byte_alphabet
from redline.errors import UserError

# The types of tokens in a GGUF file.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_LEVEL, PIECES = "gpt2", "llama"  # llama.cpp's names of its two kinds of BPE
_SPACE = "▁"
# llama.cpp stops at a byte-level tokenizer without merges. These two characters are outside the byte alphabet, so no
# text contains the pair.
_NO_MERGE = "\ue000 \ue001"
_FIX = "Export it for transformers (leave out --format), which reads any tokenizer.json."

# llama.cpp's name of a way to split words → the regular expression in tokenizer.json, in front of a ByteLevel that
# does not split. GPT-2's own expression is inside ByteLevel.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _CONTRACTIONS + r"|\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"|\p{N}" + _REST: "qwen2",
}


@dataclass(frozen=True)
class Vocabulary:
    kind: str  # BYTE_LEVEL or PIECES
    split: str  # tokenizer.ggml.pre
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)  # bos, eos, eot, eom, unknown, padding → id
    begins: bool = False  # a text starts with bos
    prefixes_space: bool = False
    chat_template: str | None = None

    @property
    def stops(self) -> list[int]:
        return [self.special[name] for name in ("eos", "eot", "eom") if name in self.special]

    def token_bytes(self, number: int) -> bytes:
        """Return the bytes that a token adds to a text; none for a control token."""
        token, kind = self.tokens[number], self.types[number]
        if kind in (CONTROL, UNKNOWN, UNUSED):
            return b""
        if kind == BYTE:
            return bytes([int(token[3:5], 16)])
        if self.kind == PIECES or kind == USER_DEFINED:
            return token.replace(_SPACE, " ").encode()
        alphabet = byte_alphabet()
        return bytes(alphabet[character] for character in token)


def read_vocabulary(folder: Path, stops: list[int], chat_template: str | None = None) -> Vocabulary:
    """Read the tokenizer that transformers would load from the folder. `stops` are the ids that end an answer."""
    where = str(folder / "tokenizer.json")
    definition = json.loads(read_text(folder / "tokenizer.json"))
    settings = json.loads(read_text(folder / "tokenizer_config.json"))
    model = definition["model"]
    if model.get("type") != "BPE":
        raise UserError(f"llama.cpp cannot express its {model.get('type')} tokenizer as it is.", where=where, fix=_FIX)
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in definition["added_tokens"]}}
    size = max(ids.values()) + 1
    tokens = [f"[UNUSED{number}]" for number in range(size)]  # some vocabularies have gaps
    types = [UNUSED] * size
    for token, number in ids.items():
        tokens[number], types[number] = token, NORMAL
    for added in definition["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    split = _byte_level_split(definition, where)
    found = Vocabulary(
        kind=PIECES if split is None else BYTE_LEVEL,
        split=split or "default",
        tokens=tokens,
        types=types,
        special=_special(settings, ids, stops),
        begins=_begins(folder, settings, ids),
        chat_template=chat_template or _chat_template(folder, settings),
    )
    if split is not None:
        return replace(found, merges=merges or [_NO_MERGE])
    if model.get("byte_fallback") and _only_replaces_spaces(definition):
        for number, token in enumerate(tokens):
            if types[number] == NORMAL and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                types[number] = BYTE
        if (unknown := found.special.get("unknown")) is not None:
            types[unknown] = UNKNOWN
        return replace(found, scores=_scores(tokens, types, merges), prefixes_space=_prefixes_space(definition))
    what = "llama.cpp does not split words as this tokenizer does, so it would read texts as other tokens."
    raise UserError(what, where=where, fix=_FIX)


def _special(settings: dict[str, Any], ids: dict[str, int], stops: list[int]) -> dict[str, int]:
    """Return the ids of special tokens. llama.cpp ends an answer at eos, eot and eom; templates print eos."""
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found: dict[str, int] = {}
    for name, key in named.items():
        value = settings.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in ids:
            found[name] = ids[text]
    others = [stop for stop in stops if stop != found.get("eos")]
    found |= dict(zip(("eot", "eom"), others, strict=False))
    return found


def _begins(folder: Path, settings: dict[str, Any], ids: dict[str, int]) -> bool:
    """Whether the tokenizer puts bos before every text."""
    from tokenizers import Tokenizer as Backend

    value = settings.get("bos_token")
    text = value.get("content") if isinstance(value, dict) else value
    return text in ids and Backend.from_file(str(folder / "tokenizer.json")).encode("").ids[:1] == [ids[text]]


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    own = folder / "chat_template.jinja"
    text = read_text(own) if own.is_file() else settings.get("chat_template")
    return text if isinstance(text, str) and text else None


def _parts(part: Any, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre_tokenizer as a flat list."""
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Sequence":
        return [step for inner in part[key] for step in _parts(inner, key)]
    return [part]


def _byte_level_split(definition: dict[str, Any], where: str) -> str | None:
    """Return llama.cpp's name of how a byte-level tokenizer splits words; None if it is no such tokenizer."""
    steps = _parts(definition["pre_tokenizer"], "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None
    normalizers = [step.get("type") for step in _parts(definition["normalizer"], "normalizers")]
    if others := [str(kind) for kind in normalizers if kind != "NFC"]:
        what = f"its tokenizer changes a text before it splits it ({', '.join(others)}), which llama.cpp does not do."
        raise UserError(what, where=where, fix=_FIX)
    if steps[-1].get("add_prefix_space"):
        raise UserError("its tokenizer puts a space before a text.", where=where, fix=_FIX)
    *before, last = steps
    words = last.get("use_regex", True)
    if not before and (words or not definition["model"]["merges"]):  # without merges it does not matter how words split
        return "gpt-2"
    if len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits") and words:
        return "smollm"
    if len(before) == 1 and before[0].get("type") == "Split" and not words:
        return _SPLITS.get(before[0].get("pattern", {}).get("Regex", ""))
    return None


def _only_replaces_spaces(definition: dict[str, Any]) -> bool:
    steps = _parts(definition["normalizer"], "normalizers") + _parts(definition["pre_tokenizer"], "pretokenizers")
    replaced = [step for step in steps if step.get("type") == "Replace"]
    known = {step.get("type") for step in steps} <= {"Prepend", "Replace", "Metaspace"}
    spaces = all(step.get("pattern") == {"String": " "} and step.get("content") == _SPACE for step in replaced)
    return known and spaces and any(step.get("type") in ("Replace", "Metaspace") for step in steps)


def _prefixes_space(definition: dict[str, Any]) -> bool:
    steps = _parts(definition["normalizer"], "normalizers") + _parts(definition["pre_tokenizer"], "pretokenizers")
    return any(
        step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """Return a score per token: llama.cpp joins the neighbours whose joined piece has the highest score.

    A tokenizer.json orders the pairs instead. Pairs of one piece stand together in that list, as it was made from
    scores, so the place of the first gives the same order.
    """
    places: dict[str, int] = {}
    for place, merge in enumerate(merges):
        places.setdefault(merge.replace(" ", ""), place)
    last = len(merges)
    return [
        0.0 if kind in (CONTROL, UNKNOWN, BYTE, UNUSED) else -float(places.get(token, last))
        for token, kind in zip(tokens, types, strict=True)
    ]
