"""A model's tokenizer with its chat template: conversations → text, and which characters of it are the answers.

An answer begins where the template asks for one (`add_generation_prompt`) and ends with the first special token after
what was said, so that a model learns to stop; white space that a template writes behind that token is not learnt.
Both places are found on the rendered text, with the turn and without it, and no knowledge of any template is needed.

Without a template a prompt and its completion are written as `bos? prompt ⏎ completion eos`: the mark at the
beginning only if the tokenizer itself puts one before every text, and no mark where the text has it already.
"""

from __future__ import annotations

import copy
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from redline.cache import check_regular, read_text
from redline.data.chat import ASSISTANT, USER, Conversation, Message
from redline.data.time_limit import Budget, TookTooLongError, processor_seconds
from redline.data.tokenizer import backend_fingerprint, encodings
from redline.data.tokens import digest_of
from redline.errors import UserError, install_hint

# ----------------------------------------------------------------------------------------------------
# Tokenizers that are a list of pieces with scores, `[["<unk>", 0.0], …, [" the", -6.0]]`: what is left of
# a SentencePiece model in small Llamas that come without a tokenizer.json (`tok512.json`).
#
# Such a tokenizer puts a space before a text, cuts it into characters (bytes, where it does not know one) and joins
# two neighbours as long as a piece is made of them, that of the highest score first. This is BPE whose merges are
# ordered by score, which the package tokenizers does.


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


KEY = "finetune.template"
CHATML = "chatml"
ANSWERS, ALL = "answers", "all"
OWN = "the model's own"
_FIX = f"Set {KEY}={CHATML}, or {KEY}=FILE.jinja with the one to use."
_CHATML = (
    "{{{{ {bos} }}}}"
    "{{%- for message in messages -%}}"
    "{{{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + {end} + '\\n' }}}}"
    "{{%- endfor -%}}"
    "{{%- if add_generation_prompt -%}}{{{{ '<|im_start|>assistant\\n' }}}}{{%- endif -%}}"
)
# Some templates write today's date. What is learnt must not depend on the day on which it is prepared.
_DAY = datetime(2024, 7, 26)
_MOST_SECONDS = 10.0  # of processor time for writing one conversation; ordinary templates take a thousandth of one
# Processor time for all conversations of a source: this much, and so much for each writing and each character written.
# Ordinary templates take under a millisecond for a writing and 0.02 µs for a character.
_SOURCE_SECONDS, _SECONDS_PER_WRITING, _SECONDS_PER_CHARACTER = 60.0, 0.01, 1e-6
_PROBE = Conversation("a probe", (Message(USER, "Which?"), Message(ASSISTANT, "This.")), is_pair=True)
_LONG_PROBE = Conversation("a probe", (*_PROBE.messages, *_PROBE.messages), is_pair=False)

Span = tuple[int, int]


class TemplateRefusalError(Exception):
    """Why the template cannot write a conversation."""


@dataclass(frozen=True)
class Rendered:
    text: str
    spans: tuple[Span, ...]  # of the answers, in characters


@dataclass(frozen=True)
class Coded:
    tokens: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.bool_]  # the token is a target


class ChatTokenizer:
    """Conversations → tokens, prompts → tokens, tokens → text."""

    def __init__(self, tokenizer: Any, name: str, template: str | None) -> None:
        from tokenizers import Tokenizer as Backend

        self.name = name
        self._tokenizer = tokenizer
        # A copy without post-processing: that adds marks which the template has written already, and in some
        # tokenizers moves a word's beginning behind its space.
        self._backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.post_processor = None
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint: str = backend_fingerprint(self._backend)
        self.template_name, self.template = self._chosen(template)
        self.begin_source()
        self._check()

    # --- what it is

    @property
    def identity(self) -> str:
        """Stands for everything that decides how a conversation becomes tokens."""
        return digest_of([self.fingerprint, self.template, self._bos, self._eos, sorted(self._special)])

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """What ends an answer: the token that the template writes there, then the tokenizer's own end of text."""
        found = [self._id(self._end_mark), self._tokenizer.eos_token_id]
        return tuple(dict.fromkeys(int(one) for one in found if one is not None))

    @property
    def pad(self) -> int:
        """Fills a row up; nothing is learnt from it."""
        own = self._tokenizer.pad_token_id
        return int(own) if own is not None else self.eos_ids[0] if self.eos_ids else 0

    @cached_property
    def _special(self) -> frozenset[str]:
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special) | {*self._tokenizer.all_special_tokens}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(one for one in map(self._id, self._special) if one is not None)

    @cached_property
    def _any_special(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=lambda token: (-len(token), token))
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def _eos(self) -> str:
        return str(self._tokenizer.eos_token or "")

    @cached_property
    def _bos(self) -> str:
        """The mark that the tokenizer puts before every text; most newer ones put none."""
        begins = self._tokenizer.backend_tokenizer.encode("", add_special_tokens=True).ids[:1]
        return str(self._tokenizer.bos_token) if begins and begins == [self._tokenizer.bos_token_id] else ""

    @cached_property
    def _end_mark(self) -> str:
        if self.template is None:
            return self._eos
        rendered = self.render(_PROBE)[0]
        marks = self._any_special.findall(rendered.text[slice(*rendered.spans[-1])])
        return str(marks[-1]) if marks else ""

    def _id(self, token: str) -> int | None:
        number = self._backend.token_to_id(token) if token else None
        return None if number is None else int(number)

    # --- which template

    def _chosen(self, template: str | None) -> tuple[str | None, str | None]:
        if template is None:
            own = self._tokenizer.chat_template
            own = own.get("default") if isinstance(own, dict) else own
            return (OWN, own) if own else (None, None)
        if template == CHATML:
            end = "<|im_end|>" if self._id("<|im_end|>") is not None else self._end_of_text()
            return CHATML, _CHATML.format(bos=json.dumps(self._bos), end=json.dumps(end))
        try:
            return template, read_text(Path(template).expanduser())
        except (OSError, UnicodeDecodeError):
            what = f"{template!r} is no chat template that can be read."
            raise UserError(what, where=KEY, fix=f"Write {CHATML}, or the path of a .jinja file.") from None

    def _check(self) -> None:
        """A template that never works, or a tokenizer without an end, is refused before the first row."""
        if self.template is None:
            self._end_of_text()
            return
        try:
            self.render(_PROBE)
        except TemplateRefusalError as reason:
            where = self.name if self.template_name == OWN else KEY
            raise UserError(f"the chat template ({self.template_name}): {reason}.", where=where, fix=_FIX) from None

    def _end_of_text(self) -> str:
        if self._eos:
            return self._eos
        what = "the tokenizer has no token that ends a text."
        raise UserError(what, where=self.name, fix="Set eos_token in its tokenizer_config.json.")

    # --- conversations → text

    def begin_source(self) -> None:
        """Start a new budget of processor time for the template: it is counted for each source."""
        self._budget = Budget(_SOURCE_SECONDS, _SECONDS_PER_WRITING, _SECONDS_PER_CHARACTER)

    def render(self, conversation: Conversation, learn: str = ANSWERS) -> list[Rendered]:
        """One text for a conversation. A template that rewrites earlier turns (by leaving out their thoughts, say)
        gives one for each answer instead, as a model meets them, when answers alone are learnt."""
        if self.template is None:
            return [self._plain(conversation)]
        whole = self._write(conversation, len(conversation.messages))
        if learn == ALL:
            return [Rendered(whole, ())]
        answers = [number for number, message in enumerate(conversation.messages) if message.role == ASSISTANT]
        turns = [self._turn(conversation, number, whole) for number in answers]
        if all(whole.startswith(text) for text, _ in turns):
            return [Rendered(whole, tuple(span for _, span in turns))]
        return [Rendered(text, (span,)) for text, span in turns]

    def _turn(self, conversation: Conversation, number: int, whole: str) -> tuple[str, Span]:
        """The text up to and with this answer, and where in it the answer lies."""
        before = self._write(conversation, number, asks=True)
        is_last = number + 1 == len(conversation.messages)
        text = whole if is_last else self._write(conversation, number + 1)
        if not text.startswith(before):
            raise TemplateRefusalError("it does not write an answer where it asks for one")
        return text, (len(before), self._end_of(text, len(before), conversation.messages[number].content))

    def _end_of(self, text: str, start: int, said: str) -> int:
        """Behind the special token that ends the answer; at the end of the turn where there is none."""
        for words in (said, said.strip()):
            if (found := text.find(words, start)) >= 0:
                start = found + len(words)
                break
        mark = self._any_special.search(text, start)
        return mark.end() if mark else len(text)

    def _write(self, conversation: Conversation, count: int, *, asks: bool = False) -> str:
        return self._apply(conversation.as_dicts(count), asks=asks)

    def _apply(self, messages: list[dict[str, str]], *, asks: bool) -> str:
        how = {"add_generation_prompt": asks, "tokenize": False, "strftime_now": _DAY.strftime}
        try:
            with self._budget.charged(), processor_seconds(_MOST_SECONDS):
                text = str(self._tokenizer.apply_chat_template(messages, chat_template=self.template, **how))
        except TookTooLongError:
            what = f"the chat template ({self.template_name}) wrote one conversation for {_MOST_SECONDS:g} s."
            raise UserError(what, where=self.name, fix=_FIX) from None
        except Exception as error:  # templates raise what they like, and meet types they did not expect
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            self._refuse_slow()  # before the next row: a template may also take its time to fail
            raise TemplateRefusalError(f"it fails ({reason.rstrip('.')})") from None
        self._budget.wrote(len(text))
        self._refuse_slow()
        return text

    def _refuse_slow(self) -> None:
        budget = self._budget
        if not budget.is_over:
            return
        what = f"the chat template ({self.template_name}) took {budget.spent:.0f} s of processor time to write"
        what += f" {budget.calls:,} conversations of this source, where {budget.allowed:.0f} s are allowed."
        raise UserError(what, where=self.name, fix=_FIX)

    def _plain(self, conversation: Conversation) -> Rendered:
        if not conversation.is_pair:
            what = f"this is a chat ({conversation.place}), and the tokenizer has no chat template."
            raise UserError(what, where=self.name, fix=_FIX)
        prompt, completion = (message.content for message in conversation.messages)
        before = self._asked(prompt)
        text = before + completion + ("" if completion.endswith(self._eos) else self._eos)
        return Rendered(text, ((len(before), len(text)),))

    def _asked(self, prompt: str) -> str:
        return ("" if prompt.startswith(self._bos) else self._bos) + prompt + "\n"

    # --- text → tokens and back

    def code(self, texts: Sequence[Rendered], learn: str) -> list[Coded]:
        """A token is learnt if it begins inside an answer; of `all`, every one that another comes before."""
        found = encodings(self._backend, [one.text for one in texts], self.name, offsets=True)
        return [_coded(encoding, one.spans, learn) for encoding, one in zip(found, texts, strict=True)]

    def encode(self, prompt: str) -> list[int]:
        """What a model reads before it answers."""
        asked = [{"role": USER, "content": prompt}]
        text = self._asked(prompt) if self.template is None else self._apply(asked, asks=True)
        return list(encodings(self._backend, [text], self.name)[0].ids)

    def encode_bare(self, text: str) -> list[int]:
        """A text to go on with, outside any chat."""
        begun = text if text.startswith(self._bos) else self._bos + text
        return list(encodings(self._backend, [begun], self.name)[0].ids)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer], *, special: bool = True) -> str:
        return str(self._backend.decode([int(one) for one in ids], skip_special_tokens=not special))

    def save(self, folder: Path) -> None:
        """Write the files that transformers reads: with the template that was used, and its end mark as eos_token.

        Inference engines stop at the tokenizer's eos_token, which for a base model is often another token. A template
        that itself writes eos_token keeps the old one, because with another it would write another text.
        """
        written = copy.deepcopy(self._tokenizer)
        written.chat_template = self.template
        if self._end_mark and self._end_mark != self._eos:
            written.eos_token = self._end_mark
            if _texts(ChatTokenizer(written, self.name, None)) != _texts(self):
                written.eos_token = self._eos or None
        written.save_pretrained(folder)


def _texts(tokenizer: ChatTokenizer) -> list[str]:
    """Return what the template writes for each of the probes, or why it refuses to."""
    found = []
    for probe in (_PROBE, _LONG_PROBE):
        try:
            found += [one.text for one in tokenizer.render(probe)]
        except TemplateRefusalError as reason:
            found.append(str(reason))
    return found


def _coded(encoding: Any, spans: Sequence[Span], learn: str) -> Coded:
    tokens = np.array(encoding.ids, dtype=np.int32)
    learnt = np.full(len(tokens), learn == ALL, dtype=bool)
    if learn != ALL:
        offsets = encoding.offsets  # (start, end) in order: a tuple of one compares as the start alone
        for start, end in spans:
            learnt[bisect_left(offsets, (start,)) : bisect_left(offsets, (end,))] = True
    learnt[:1] = False
    return Coded(tokens, learnt)


def load_chat_tokenizer(folder: Path, template: str | None = None) -> ChatTokenizer:
    """The tokenizer of a model's folder; `template` is chatml or a file, and the model's own if not given."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        what = "chat templates need the transformers package."
        raise UserError(what, fix=f"Install it: {install_hint('finetune')}.") from None
    if not folder.is_dir():
        raise UserError("no such folder.", where=str(folder), fix="Give the folder of a model with its tokenizer.")
    try:
        for entry in folder.iterdir():  # transformers opens them by name, and would wait at a FIFO
            if entry.exists() and not entry.is_dir():
                check_regular(entry)
        if listed := piece_file(folder):
            tokenizer = piece_tokenizer(listed)
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # each tokenizer's code raises its own kinds
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        fix = "Put the model's tokenizer.json and tokenizer_config.json there."
        raise UserError(f"no tokenizer that can be read ({reason.rstrip('.')}).", where=str(folder), fix=fix) from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        fix = "Convert it with `tokenizers`, or take a release of the model that has one."
        raise UserError("the tokenizer has no tokenizer.json.", where=str(folder), fix=fix)
    return ChatTokenizer(tokenizer, folder.name, template)
