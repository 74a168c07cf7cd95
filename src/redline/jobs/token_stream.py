"""The events of a text that a decoder writes token by token, for the jobs that do so."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from redline.data.text_stream import TextStream
from redline.errors import UserError
from redline.jobs.objective import Sampling
from redline.jobs.streaming import LENGTH, STOP, Event, Finished, Section, Token
from redline.models.decoder import Decoder
from redline.models.generate import decode, sampler

Decode = Callable[[list[int]], str]


def stream_tokens(
    model: Decoder,
    prompt: Sequence[int] | Tensor,
    how: Sampling,
    *,
    section: Section,
    vocab: int,
    stop: Collection[int],
    text_of: Decode,
    token_text: Decode | None = None,
    alternatives: int | None = None,
    context: int | None = None,
    continues: bool = False,
) -> Iterator[Event]:
    """Yield the section, the tokens of one continuation, and the whole text.

    The prompt is tokens, or embeddings [1, T, D]. `token_text` decodes single tokens, special ones included. With
    `context`, prompt and text together have at most that many tokens. With `continues` the text follows the prompt's
    without a break; otherwise it stands alone.
    """
    starts: Sequence[Sequence[int]] | Tensor
    if isinstance(prompt, Tensor):
        starts, before, length = prompt, [], prompt.shape[1]
    else:
        starts, before, length = [prompt], list(prompt) if continues else [], len(prompt)
    limit = how.tokens if context is None else min(how.tokens, context - length)
    if limit < 1:
        what = f"the prompt has {length:,} tokens, and the model reads {context:,}."
        raise UserError(what, fix="Use a shorter prompt, or begin a new conversation.")
    yield replace(section, prompt_tokens=length)
    pick = sampler(
        model.embedding.weight.device,
        seed=how.seed,
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
    )
    stream, written, stopped, texts = TextStream(text_of, before), 0, False, list[str]()
    name_of = token_text or text_of
    steps = decode(model, starts, limits=[limit], vocab=vocab, stop=stop, pick=pick, alternatives=alternatives)
    for step in steps:
        stopped, written = step.stopped[0], written + 1
        texts.append("" if stopped else stream.add(step.tokens[0]))
        likeliest = step.likeliest[0] if step.likeliest else []
        named = tuple((name_of([token]), logprob) for token, logprob in likeliest if math.isfinite(logprob))
        own = step.logprobs[0] if step.logprobs and math.isfinite(step.logprobs[0]) else None
        yield Token(section.section, texts[-1], own, named)
    if rest := stream.finish():
        texts.append(rest)
        yield Token(section.section, rest)
    yield Finished(section.section, "".join(texts), STOP if stopped else LENGTH, written)
