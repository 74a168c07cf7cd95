"""The folder of `redline export --format gguf`: the GGUF file, Ollama's Modelfile, and what the check found."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.data.chat_template import ChatTokenizer
from redline.data.tokenizer import Tokenizer
from redline.errors import UserError, install_hint
from redline.export.gguf_file import check_package, described, write_gguf
from redline.export.gguf_vocabulary import Vocabulary, read_vocabulary
from redline.export.llama_cpp import OPENINGS, PACKAGE, QUESTIONS, Check, Reading, check, is_installed
from redline.export.modelfile import find_turns, modelfile
from redline.export.tensors import Named
from redline.jobs.objective import Log

CHECKED_TOKENS = 64  # continued after each prompt


@dataclass(frozen=True)
class GgufModel:
    """A model that is ready to be written."""

    name: str
    config: Mapping[str, Any]  # config.json
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Callable[[], Named]
    write_tokenizer: Callable[[Path], None] | None
    tokenizer: Tokenizer | None  # of a model that continues text
    chat: ChatTokenizer | None  # of a model on a base
    answers: bool  # it was trained to answer questions
    where: str


def gguf_name(quant: str) -> str:
    return f"model-{quant}.gguf"


def write_gguf_folder(
    folder: Path, model: GgufModel, quant: str, *, verify: bool | None, tokens: int, log: Log
) -> Check | None:
    """Write the file and the Modelfile, and check the file in llama.cpp.

    Without `verify` given, the check runs if llama.cpp is installed.
    """
    check_package()
    if verify and not is_installed():
        what = f"--verify needs llama.cpp, in the package {PACKAGE}."
        raise UserError(what, where=model.where, fix=f"Install it: {install_hint('gguf')}.")
    if model.write_tokenizer is None:
        what = "a GGUF file holds its tokenizer, and the files of this run's tokenizer are missing here."
        raise UserError(what, where=model.where, fix="Copy its tokenizer.json into the run's directory.")
    base = described(model.config, model.where)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # a killed process leaves nothing elsewhere
        model.write_tokenizer(Path(scratch))
        plain = model.chat.plain_jinja if model.chat is not None and model.answers else None
        vocabulary = read_vocabulary(Path(scratch), _stops(model), plain)
        texts = _plain_encoder(Path(scratch))
    file = folder / gguf_name(quant)
    write_gguf(
        file,
        name=model.name,
        model=base,
        vocabulary=vocabulary,
        tensors=model.tensors,
        shapes=model.shapes,
        quant=quant,
    )
    (folder / "Modelfile").write_text(_modelfile(file.name, model, vocabulary, base.context), encoding="utf-8")
    if verify is False or not is_installed():
        if verify is None:
            log(f"the file is not checked in llama.cpp, which is not installed: {install_hint('gguf')} installs it")
        return None
    reading = Reading(
        texts=texts,
        prompts=_prompts(model),
        chats=QUESTIONS if vocabulary.chat_template is not None and model.chat is not None else (),
        stops=vocabulary.stops,
        vocab=len(vocabulary.tokens),
        token_bytes=vocabulary.token_bytes,
    )
    found = check(file, base, model.tensors(), reading, quant, tokens)
    if found.chats_equal is not None and found.chats_equal < found.prompts:
        different = found.prompts - found.chats_equal
        log(f"llama.cpp renders {different} of {found.prompts} chats as other tokens than the run")
    return found


def _stops(model: GgufModel) -> list[int]:
    if model.chat is not None:
        return list(model.chat.eos_ids)
    assert model.tokenizer is not None
    return [model.tokenizer.eot]


def _plain_encoder(folder: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


def _prompts(model: GgufModel) -> list[list[int]]:
    if model.chat is not None:
        asks = model.answers or model.chat.template is not None
        return [model.chat.encode(text) for text in QUESTIONS] if asks else [*map(model.chat.encode_bare, OPENINGS)]
    assert model.tokenizer is not None
    return [[model.tokenizer.eot, *model.tokenizer.encode(text)] for text in OPENINGS]


def _modelfile(file: str, model: GgufModel, vocabulary: Vocabulary, context: int) -> str:
    names = {kind: vocabulary.tokens[number] for kind, number in vocabulary.special.items()}
    bos, chats = names.get("bos", ""), vocabulary.chat_template is not None
    turns = None
    if model.chat is not None and chats:
        chat = model.chat
        turns = find_turns(lambda messages: chat.write_turns(messages, asks=True), bos)
    return modelfile(
        file,
        turns=turns,
        chats=chats,
        stops=[vocabulary.tokens[number] for number in vocabulary.stops],
        bos=bos,
        begins=vocabulary.begins,
        context=context,
    )
