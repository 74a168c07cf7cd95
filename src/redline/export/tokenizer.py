"""The run's tokenizer in the format of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redline.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, load_tokenizer, named_vocabulary
from redline.errors import UserError

DEFINITION, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def run_tokenizer(run: Path, name: str, fingerprint: str) -> Tokenizer | None:
    """Open the tokenizer that made the run's tokens: its copy in the run, or by name; None if its files are missing."""
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
    """Return the id of the end-of-text token. For well-known vocabularies no files are needed."""
    if tokenizer is not None:
        return tokenizer.eot
    known = named_vocabulary(name)
    if known is None:
        fix = "Copy the tokenizer.json that the tokens were made with into the run's directory."
        raise UserError("the tokenizer's files are missing.", where=name, fix=fix)
    return known[1]


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, seq_len: int) -> None:
    """Write tokenizer.json and its settings.

    The exported tokenizer puts the end-of-text token before a text, since every document had it there in training.
    """
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
    """Return a BPE without merges whose tokens are bytes: GPT-2's character for each byte has the byte as its id."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab={_character(byte): byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    assert backend.token_to_id(END_OF_TEXT) == tokenizer.eot
    return backend


def _character(byte: int) -> str:
    """Return GPT-2's character for a byte (Radford et al. 2019).

    Printable Latin-1 characters stand for themselves; the other bytes are numbered from 256.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte if byte in printable else 256 + [b for b in range(256) if b not in printable].index(byte))
