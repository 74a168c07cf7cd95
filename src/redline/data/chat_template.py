"""A model's tokenizer with its chat template: conversations to text and tokens, and the loss mask of the answers.

An answer begins where the template ends when it asks for one (`add_generation_prompt`). It ends with the first special
token after its content, so that the model learns to stop; white space that the template writes after that token has no
loss. Both positions are found by rendering the conversation with the answer and without it, so nothing has to be known
about any particular template.

Without a template, a prompt and its completion are written as `bos? prompt ⏎ completion eos`. The bos token is written
only if the tokenizer puts one before every text, and neither token is written twice. A row of plain text is written as
`bos? text eos`, with a template or without one, and all of it is learnt.
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

from redline.cache import cache_dir, check_regular, explain_write_errors, read_text, write_atomically
from redline.data.chat import ASSISTANT, USER, Conversation, Message
from redline.data.time_limit import Budget, TookTooLongError, processor_seconds
from redline.data.tokenizer import backend_fingerprint, encodings
from redline.data.tokens import digest_of
from redline.errors import UserError, install_hint

# ----------------------------------------------------------------------------------------------------
# Tokenizers stored as a list of pieces with scores, `[["<unk>", 0.0], …, [" the", -6.0]]`: a SentencePiece model as
# exported with small Llamas that have no tokenizer.json (`tok512.json`).
#
# Such a tokenizer puts a space before the text, splits it into characters (unknown ones into bytes), and joins the two
# neighbours whose joined piece has the highest score until none can be joined. This is BPE with merges ordered by
# score, which the tokenizers package implements.


UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
_SPACE = "▁"  # stands for a space inside a piece
_MAX_PIECE_FILE_BYTES = 1 << 26
_USUAL_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def piece_file(folder: Path) -> Path | None:
    """Return the folder's `tok….json` if it has none of the usual tokenizer files."""
    if any((folder / name).exists() for name in _USUAL_FILES):
        return None
    files = sorted(folder.glob("tok*.json"))
    return files[0] if len(files) == 1 else None


def piece_tokenizer(path: Path) -> Any:
    """Load a list of pieces with scores as a tokenizer of transformers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    scores = _read_scores(path)
    numbers = {piece: number for number, piece in enumerate(scores)}
    marks = [piece for piece in (UNKNOWN, BEGIN, END) if piece in numbers]
    if marks[1:] != [BEGIN, END]:
        raise _not_pieces(path, f"{BEGIN} or {END} is missing")
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


def _read_scores(path: Path) -> dict[str, float]:
    """Return the score of each piece, in the order of the file, with spaces replaced by `▁`."""
    try:
        if path.stat().st_size > _MAX_PIECE_FILE_BYTES:
            raise _not_pieces(path, "too large")
        rows = json.loads(path.read_text(encoding="utf-8"))
        # Exporters put line breaks around control pieces so that they are visible when printed.
        pieces = {
            (piece.strip("\n") if piece.strip("\n") in (BEGIN, END) else piece).replace(" ", _SPACE): float(score)
            for piece, score in rows
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _not_pieces(path, type(error).__name__) from None
    if len(pieces) != len(rows) or "" in pieces:
        raise _not_pieces(path, "a piece is empty or repeated")
    return pieces


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return each pair of pieces whose concatenation is a piece, by the score of that piece, then by its number."""
    order = {piece: number for number, piece in enumerate(scores)}
    merges = [
        (-scores[piece], order[piece], (piece[:cut], piece[cut:]))
        for piece in scores
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [pair for *_, pair in sorted(merges)]


def _not_pieces(path: Path, why: str) -> UserError:
    fix = "Put the model's tokenizer.json there instead."
    return UserError(f"the file is not a list of pieces with scores ({why}).", where=str(path), fix=fix)


# ----------------------------------------------------------------------------------------------------
# Chat templates.


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
# Some templates write today's date. The training data must not depend on the day on which it is prepared.
_DAY = datetime(2024, 7, 26)
_MAX_SECONDS = 10.0  # processor time for rendering one conversation; ordinary templates take about a millisecond
# Processor time for all conversations of a source: a constant, plus an allowance per rendering and per character.
# Ordinary templates take less than a millisecond per rendering and 0.02 µs per character.
_SOURCE_SECONDS, _SECONDS_PER_RENDERING, _SECONDS_PER_CHARACTER = 60.0, 0.01, 1e-6
_PROBE = Conversation("a probe", (Message(USER, "Which?"), Message(ASSISTANT, "This.")), is_pair=True)
_LONG_PROBE = Conversation("a probe", (*_PROBE.messages, *_PROBE.messages), is_pair=False)

Span = tuple[int, int]


class TemplateRefusalError(Exception):
    """The template cannot render a conversation; the message is the reason."""


@dataclass(frozen=True)
class Rendered:
    text: str
    spans: tuple[Span, ...]  # of the answers, in characters
    is_text: bool = False  # plain text, which has no answers and is learnt entirely


@dataclass(frozen=True)
class EncodedSample:
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]  # whether the token is a target
    is_text: bool = False  # plain text, which asks nothing


class ChatTokenizer:
    """Encodes conversations and prompts, and decodes tokens."""

    def __init__(self, tokenizer: Any, name: str, template: str | None) -> None:
        from tokenizers import Tokenizer as Backend

        self.name = name
        self._tokenizer = tokenizer
        # A copy without post-processing, which would add special tokens that the template has written already, and in
        # some tokenizers shifts the offset of a word past its space.
        self._backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.post_processor = None
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint: str = backend_fingerprint(self._backend)
        self.template_name, self.template = self._choose_template(template)
        self.begin_source()
        self._check()

    # --- identity and special tokens

    @property
    def identity(self) -> str:
        """Return a digest of everything that decides how a conversation becomes tokens."""
        return digest_of([self.fingerprint, self.template, self._bos, self._eos, sorted(self._special)])

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the ids that end an answer: the token that the template writes there, then the tokenizer's eos."""
        ids = [self._id(self._end_mark), self._tokenizer.eos_token_id]
        return tuple(dict.fromkeys(int(i) for i in ids if i is not None))

    @property
    def pad(self) -> int:
        """Return the id that fills a row after its last sample."""
        own = self._tokenizer.pad_token_id
        return int(own) if own is not None else self.eos_ids[0] if self.eos_ids else 0

    @cached_property
    def _special(self) -> frozenset[str]:
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special) | {*self._tokenizer.all_special_tokens}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i in map(self._id, self._special) if i is not None)

    @cached_property
    def _any_special(self) -> re.Pattern[str]:
        longest_first = sorted(self._special, key=lambda token: (-len(token), token))
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def _eos(self) -> str:
        return str(self._tokenizer.eos_token or "")

    @cached_property
    def _bos(self) -> str:
        """Return the token that the tokenizer puts before every text; "" for most newer ones, which put none."""
        begins = self._tokenizer.backend_tokenizer.encode("", add_special_tokens=True).ids[:1]
        return str(self._tokenizer.bos_token) if begins and begins == [self._tokenizer.bos_token_id] else ""

    @cached_property
    def _end_mark(self) -> str:
        """Return the special token that ends an answer, or ""."""
        if self.template is None:
            return self._eos
        rendered = self.render(_PROBE)[0]
        marks = self._any_special.findall(rendered.text[slice(*rendered.spans[-1])])
        return str(marks[-1]) if marks else ""

    def _id(self, token: str) -> int | None:
        number = self._backend.token_to_id(token) if token else None
        return None if number is None else int(number)

    # --- which template

    def _choose_template(self, template: str | None) -> tuple[str | None, str | None]:
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
            what = f"the chat template {template!r} cannot be read."
            raise UserError(what, where=KEY, fix=f"Use {CHATML}, or the path of a .jinja file.") from None

    def _check(self) -> None:
        """Raise UserError before the first row for a template that never works, or a tokenizer without an eos token."""
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
        what = "the tokenizer has no end-of-text token."
        raise UserError(what, where=self.name, fix="Set eos_token in its tokenizer_config.json.")

    # --- conversations → text

    def begin_source(self) -> None:
        """Start a new budget of processor time for the template. Each source has its own."""
        self._budget = Budget(_SOURCE_SECONDS, _SECONDS_PER_RENDERING, _SECONDS_PER_CHARACTER)

    def render(self, conversation: Conversation, learn: str = ANSWERS) -> list[Rendered]:
        """Return the conversation as one text, with the spans of its answers.

        A template may rewrite earlier turns, for example by removing their reasoning. Then return one text for each
        answer, because this is what a model reads when it gives that answer (unless all tokens are trained on).
        """
        if conversation.is_text:
            return [self._render_text(conversation.messages[0].content)]
        if self.template is None:
            return [self._render_plain(conversation)]
        complete = self._render_turns(conversation, len(conversation.messages))
        if learn == ALL:
            return [Rendered(complete, ())]
        answers = [number for number, message in enumerate(conversation.messages) if message.role == ASSISTANT]
        turns = [self._answer_turn(conversation, number, complete) for number in answers]
        if all(complete.startswith(text) for text, _ in turns):
            return [Rendered(complete, tuple(span for _, span in turns))]
        return [Rendered(text, (span,)) for text, span in turns]

    def _answer_turn(self, conversation: Conversation, number: int, complete: str) -> tuple[str, Span]:
        """Return the text up to the end of answer `number`, and the span of the answer in it."""
        before = self._render_turns(conversation, number, asks=True)
        is_last = number + 1 == len(conversation.messages)
        text = complete if is_last else self._render_turns(conversation, number + 1)
        if not text.startswith(before):
            raise TemplateRefusalError("it does not write an answer at the place where it asks for one")
        return text, (len(before), self._end_of_answer(text, len(before), conversation.messages[number].content))

    def _end_of_answer(self, text: str, start: int, content: str) -> int:
        """Return the end of the first special token after the answer's content, or the end of the text."""
        for words in (content, content.strip()):  # some templates strip the content
            if (position := text.find(words, start)) >= 0:
                start = position + len(words)
                break
        mark = self._any_special.search(text, start)
        return mark.end() if mark else len(text)

    def _render_turns(self, conversation: Conversation, count: int, *, asks: bool = False) -> str:
        """Render the first `count` turns; with `asks`, also the beginning of the answer that follows."""
        return self._apply(conversation.as_dicts(count), asks=asks)

    def _apply(self, messages: list[dict[str, str]], *, asks: bool) -> str:
        """Run the template within its time limits."""
        how = {"add_generation_prompt": asks, "tokenize": False, "strftime_now": _DAY.strftime}
        try:
            with self._budget.charged(), processor_seconds(_MAX_SECONDS):
                text = str(self._tokenizer.apply_chat_template(messages, chat_template=self.template, **how))
        except TookTooLongError:
            what = f"the chat template ({self.template_name}) took more than {_MAX_SECONDS:g} s for one conversation."
            raise UserError(what, where=self.name, fix=_FIX) from None
        except Exception as error:  # a template may raise anything, and may meet types that it does not expect
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            self._refuse_slow()  # a template may also fail slowly, row after row
            raise TemplateRefusalError(f"it fails ({reason.rstrip('.')})") from None
        self._budget.allow_characters(len(text))
        self._refuse_slow()
        return text

    def _refuse_slow(self) -> None:
        budget = self._budget
        if not budget.is_over:
            return
        what = f"the chat template ({self.template_name}) took {budget.spent:.0f} s of processor time to render"
        what += f" {budget.calls:,} conversations of this source; at most {budget.allowed:.0f} s are allowed."
        raise UserError(what, where=self.name, fix=_FIX)

    def _render_plain(self, conversation: Conversation) -> Rendered:
        """Write a prompt and its completion without a template."""
        if not conversation.is_pair:
            what = f"the tokenizer has no chat template, which the chat at {conversation.place} needs."
            raise UserError(what, where=self.name, fix=_FIX)
        prompt, completion = (message.content for message in conversation.messages)
        before = self._plain_prompt(prompt)
        text = before + completion + ("" if completion.endswith(self._eos) else self._eos)
        return Rendered(text, ((len(before), len(text)),))

    @property
    def plain_jinja(self) -> str | None:
        """Return a template that writes a question as a run without a template reads it; None if there is a template.

        Inference engines would otherwise choose a template of their own, which the model has never seen.
        """
        if self.template is not None:
            return None
        end, begin = json.dumps(self._eos), json.dumps(self._bos)
        return (
            f"{{{{ {begin} }}}}{{% for message in messages %}}"
            "{% if message['role'] == 'user' %}{{ message['content'] + '\\n' }}"
            f"{{% elif message['role'] == 'assistant' %}}{{{{ message['content'] + {end} }}}}{{% endif %}}"
            "{% endfor %}"
        )

    def write_turns(self, messages: list[dict[str, str]], *, asks: bool) -> str:
        """Return the text of a conversation; with `asks`, also the beginning of the answer that follows."""
        if self.template is not None:
            return self._apply(messages, asks=asks)
        ends = {USER: "\n", ASSISTANT: self._eos}
        return self._bos + "".join(turn["content"] + ends[turn["role"]] for turn in messages)

    def _render_text(self, text: str) -> Rendered:
        """Write a plain text, with the tokens that begin and end it unless it has them already."""
        begin = "" if text.startswith(self._bos) else self._bos
        end = "" if not self._eos or text.endswith(self._eos) else self._eos
        return Rendered(begin + text + end, (), is_text=True)

    def _plain_prompt(self, prompt: str) -> str:
        return ("" if prompt.startswith(self._bos) else self._bos) + prompt + "\n"

    # --- text to tokens and back

    def encode_rendered(self, texts: Sequence[Rendered], learn: str) -> list[EncodedSample]:
        """Encode the texts. The loss mask has the tokens that begin inside an answer; with `all`, and for plain text,
        all but the first."""
        encoded = encodings(self._backend, [rendered.text for rendered in texts], self.name, offsets=True)
        return [_sample(encoding, text, learn) for encoding, text in zip(encoded, texts, strict=True)]

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens that a model reads before it answers the prompt."""
        messages = [{"role": USER, "content": prompt}]
        text = self._plain_prompt(prompt) if self.template is None else self._apply(messages, asks=True)
        return list(encodings(self._backend, [text], self.name)[0].ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that a model reads before it gives the next answer of a conversation."""
        if self.template is None:
            if [message.role for message in messages] != [USER]:
                what = "the tokenizer has no chat template, so it can write one question, without a system prompt."
                raise UserError(what, where=self.name, fix=_FIX)
            text = self._plain_prompt(messages[0].content)
        else:
            self.begin_source()  # the budget of a source limits its rows, not how long a person may chat
            try:
                text = self._apply([{"role": m.role, "content": m.content} for m in messages], asks=True)
            except TemplateRefusalError as reason:
                what = f"the chat template ({self.template_name}) cannot write this conversation: {reason}."
                raise UserError(
                    what, where=self.name, fix="Begin a new conversation, or leave out the system prompt."
                ) from None
        return list(encodings(self._backend, [text], self.name)[0].ids)

    def encode_bare(self, text: str) -> list[int]:
        """Encode text that a model continues, without a chat template."""
        text = text if text.startswith(self._bos) else self._bos + text
        return list(encodings(self._backend, [text], self.name)[0].ids)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer], *, special: bool = True) -> str:
        """Return the text; without `special`, leave the special tokens out."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=not special))

    def definition(self) -> str:
        """Return the content of a tokenizer.json."""
        return str(self._backend.to_str())

    def save(self, folder: Path) -> None:
        """Write the files that transformers reads, with the template in use, and its end-of-answer token as eos_token.

        Inference engines stop at the tokenizer's eos_token, which for a base model is often another token. If the
        template itself writes eos_token, the old one is kept, because the template would write other texts with a new
        one.
        """
        written = copy.deepcopy(self._tokenizer)
        written.chat_template = self.template
        if self._end_mark and self._end_mark != self._eos:
            written.eos_token = self._end_mark
            if _texts(ChatTokenizer(written, self.name, None)) != _texts(self):
                written.eos_token = self._eos or None
        written.save_pretrained(folder)


def definition_file(folder: Path) -> Path:
    """Return the tokenizer.json of a model's folder; for a tokenizer in another format, make it once, in the cache."""
    own = folder / "tokenizer.json"
    if own.is_file():
        return own
    definition = load_chat_tokenizer(folder).definition()
    made = cache_dir() / "tokenizers" / digest_of(definition) / "tokenizer.json"
    if not made.is_file():
        with explain_write_errors(made):
            made.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(made, definition)
    return made


def _texts(tokenizer: ChatTokenizer) -> list[str]:
    """Return what the template writes for each of the probes, or why it fails."""
    texts = []
    for probe in (_PROBE, _LONG_PROBE):
        try:
            texts += [rendered.text for rendered in tokenizer.render(probe)]
        except TemplateRefusalError as reason:
            texts.append(str(reason))
    return texts


def _sample(encoding: Any, text: Rendered, learn: str) -> EncodedSample:
    tokens = np.array(encoding.ids, dtype=np.int32)
    learns_all = learn == ALL or text.is_text
    loss_mask = np.full(len(tokens), learns_all, dtype=bool)
    if not learns_all:
        offsets = encoding.offsets  # (start, end), sorted; a tuple of one element compares by the start alone
        for start, end in text.spans:
            loss_mask[bisect_left(offsets, (start,)) : bisect_left(offsets, (end,))] = True
    loss_mask[:1] = False  # nothing predicts the first token
    return EncodedSample(tokens, loss_mask, text.is_text)


def load_chat_tokenizer(folder: Path, template: str | None = None) -> ChatTokenizer:
    """Load the tokenizer in a model's folder. `template` is chatml, a file, or None for the model's own template."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        what = "chat templates need the transformers package."
        raise UserError(what, fix=f"Install it: {install_hint('finetune')}.") from None
    if not folder.is_dir():
        raise UserError("no such folder.", where=str(folder), fix="Give the folder of a model and its tokenizer.")
    try:
        for entry in folder.iterdir():  # transformers opens files by name, and would wait forever at a FIFO
            if entry.exists() and not entry.is_dir():
                check_regular(entry)
        if pieces := piece_file(folder):
            tokenizer = piece_tokenizer(pieces)
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # each tokenizer class raises errors of its own
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        fix = "Put the model's tokenizer.json and tokenizer_config.json there."
        what = f"the tokenizer cannot be read ({reason.rstrip('.')})."
        raise UserError(what, where=str(folder), fix=fix) from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        fix = "Convert it with `tokenizers`, or use a release of the model that has one."
        raise UserError("the tokenizer has no tokenizer.json.", where=str(folder), fix=fix)
    return ChatTokenizer(tokenizer, folder.name, template)
