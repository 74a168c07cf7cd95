"""The run's tokenizer as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redline.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, load_tokenizer, named_vocabulary
from redline.errors import UserError

DEFINITION, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def run_tokenizer(run: Path, name: str, fingerprint: str) -> Tokenizer | None:
    """The one that made the run's tokens: its own copy, else by name; None when its files are not here."""
    own = run / DEFINITION
    try:
        tokenizer = load_tokenizer(str(own) if own.is_file() else name)
    except UserError:
        if own.is_file():
            raise
        return None
    if tokenizer.fingerprint != fingerprint:
        what, fix = "this is not the tokenizer of the run.", "Put the run's own file back."
        raise UserError(what, where=str(own if own.is_file() else name), fix=fix)
    return tokenizer


def end_of_text(tokenizer: Tokenizer | None, name: str) -> int:
    """Its id; that of a well-known vocabulary is known without its files."""
    if tokenizer is not None:
        return tokenizer.eot
    known = named_vocabulary(name)
    if known is None:
        fix = "Put the tokenizer.json that the tokens were made with into the run's directory."
        raise UserError("the tokenizer's files are not here.", where=name, fix=fix)
    return known[1]


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, seq_len: int) -> None:
    """tokenizer.json and its settings. A text begins with the end-of-text token, as every document did in training."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    path = folder / DEFINITION
    if isinstance(tokenizer, ByteTokenizer):
        backend = byte_definition(tokenizer)
    else:
        tokenizer.save(path)
        backend = Backend.from_file(str(path))
    end = backend.id_to_token(tokenizer.eot)
    backend.post_processor = TemplateProcessing(
        single=f"{end} $A", pair=f"{end} $A {end}:1 $B:1", special_tokens=[(end, tokenizer.eot)]
    )
    backend.save(str(path))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def byte_definition(tokenizer: ByteTokenizer) -> Any:
    """Bytes as a BPE without merges: each byte has the character that GPT-2 gave it, and that has the byte's id."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab={_character(byte): byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    assert backend.token_to_id(END_OF_TEXT) == tokenizer.eot
    return backend


def _character(byte: int) -> str:
    """Printable Latin-1 stands for itself; what is left over is counted on from 256 (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte if byte in printable else 256 + [b for b in range(256) if b not in printable].index(byte))
