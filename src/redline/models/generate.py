"""Generation with a key-value cache, token by token: the one loop that sampling, evaluation, chat and the API share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from redline.kernels.attention import Bound
from redline.models.decoder import Decoder, KVCache

# The largest batch of prompts: rows, and positions in the key-value cache, which bound its memory.
_MOST_ROWS, _MOST_TOKENS = 64, 1 << 15
# Below this temperature the most likely token is taken: no other has a chance, and the division would overflow logits.
MIN_TEMPERATURE = 1e-3

Pick = Callable[[Tensor], Tensor]  # logits [B, V] → the chosen tokens [B]


@dataclass(frozen=True)
class Step:
    """What one forward pass wrote: a token for each row that was not finished before."""

    rows: list[int]
    tokens: list[int]
    stopped: list[bool]  # the token is a stop token, which is not part of the text
    # With `alternatives`: log-probabilities under the model itself, before temperature and filters.
    logprobs: list[float] = field(default_factory=list)  # of the tokens
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)  # tokens and their log-probabilities


@torch.no_grad()
def decode(
    model: Decoder,
    prompts: Sequence[Sequence[int]] | Tensor,
    *,
    limits: Sequence[int],
    vocab: int,
    stop: Collection[int] = (),
    pick: Pick | None = None,
    alternatives: int | None = None,
) -> Iterator[Step]:
    """Continue each prompt by up to as many tokens as its limit, or to a stop token; yield what each pass wrote.

    Prompts are tokens, or embeddings [B, T, D], which need not belong to any token. Prompts of different lengths are
    padded on the left, and nothing sees the padding. `pick` chooses tokens from logits; by default the likeliest.
    A finished row leaves the batch, except with `pick`: random draws must not depend on which rows have finished.
    """
    device, stops = model.embedding.weight.device, set(stop)
    inputs, padding, copies = _first_inputs(prompts, device)
    cache, position = model.new_cache(), 0
    active, unfinished = list(range(len(limits))), {row for row, limit in enumerate(limits) if limit >= 1}
    written = [0] * len(limits)
    if not unfinished:
        return
    while True:
        hidden = model(inputs, Bound(), cache, position, padding_B=padding)
        position += inputs.shape[1]
        logits = model.logits(hidden[:, -1])[:, :vocab]  # the rest only pads the vocabulary
        if copies is not None:  # equal prompts were read once
            _select_rows(cache, copies)
            logits, copies = logits[copies], None
        chosen = logits.argmax(-1) if pick is None else pick(logits)
        tokens = chosen.tolist()
        places = [place for place, row in enumerate(active) if row in unfinished]
        step = _step(active, places, tokens, stops, logits, chosen, alternatives)
        for row, stopped in zip(step.rows, step.stopped, strict=True):
            written[row] += 1
            if stopped or written[row] == limits[row]:
                unfinished.discard(row)
        yield step
        if not unfinished:
            return
        if pick is None and len(unfinished) < len(active):
            kept = torch.tensor([place for place, row in enumerate(active) if row in unfinished], device=device)
            _select_rows(cache, kept)
            active, chosen = [row for row in active if row in unfinished], chosen[kept]
            padding = None if padding is None else padding[kept]
        inputs = chosen[:, None]


def _first_inputs(
    prompts: Sequence[Sequence[int]] | Tensor, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the inputs of the first pass, the padding of each row, and for equal prompts how to copy the one row."""
    if isinstance(prompts, Tensor):
        return prompts, None, None
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths, default=0)
    if len(prompts) > 1 and all(list(prompt) == list(prompts[0]) for prompt in prompts):
        return (
            torch.tensor([list(prompts[0])], device=device),
            None,
            torch.zeros(len(prompts), device=device, dtype=torch.long),
        )
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    padding = None if len(set(lengths)) < 2 else longest - torch.tensor(lengths, device=device)
    return torch.tensor(rows, device=device), padding, None


def _select_rows(cache: list[KVCache], rows: Tensor) -> None:
    for layer in cache:
        layer.select_rows(rows)


def _step(
    active: list[int],
    places: list[int],
    tokens: list[int],
    stops: set[int],
    logits: Tensor,
    chosen: Tensor,
    alternatives: int | None,
) -> Step:
    rows, written = [active[place] for place in places], [tokens[place] for place in places]
    stopped = [token in stops for token in written]
    if alternatives is None:
        return Step(rows, written, stopped)
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    top = logprobs.topk(min(max(1, alternatives), logprobs.shape[1]))
    pairs = [list(zip(*both, strict=True)) for both in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
    return Step(rows, written, stopped, [own[p] for p in places], [pairs[p][:alternatives] for p in places])


def sampler(
    device: torch.device, *, seed: int, temperature: float, top_k: int | None, top_p: float | None
) -> Pick | None:
    """Return how `decode` chooses tokens at random; None for temperature 0."""
    if temperature < MIN_TEMPERATURE:
        return None
    generator = torch.Generator(device=device).manual_seed(seed)

    def pick(logits: Tensor) -> Tensor:
        return sample_token(logits, generator, temperature=temperature, top_k=top_k, top_p=top_p)

    return pick


def generate(
    model: Decoder,
    prompt: Sequence[int],
    *,
    count: int,
    tokens: int,
    vocab: int,
    seed: int,
    stop: int | Collection[int] | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
) -> list[list[int]]:
    """Return `count` continuations of the prompt; each ends before a token of `stop` or after `tokens` tokens."""
    pick = sampler(model.embedding.weight.device, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
    stops = {stop} if isinstance(stop, int) else stop or ()
    steps = decode(model, [prompt] * count, limits=[tokens] * count, vocab=vocab, stop=stops, pick=pick)
    return [one.tokens for one in _completions(steps, [tokens] * count)]


@dataclass(frozen=True)
class Completion:
    """The tokens that a model wrote after a prompt."""

    tokens: list[int]
    ended: bool  # by a stop token; False: cut at the limit


def _completions(
    steps: Iterator[Step], limits: Sequence[int], on_finished: Callable[[], None] = lambda: None
) -> list[Completion]:
    """Collect what the steps wrote, without stop tokens; call `on_finished` for each row when it is complete."""
    rows: list[list[int]] = [[] for _ in limits]
    ended = [False for _ in limits]
    for limit in limits:
        if limit < 1:
            on_finished()
    for step in steps:
        for row, token, stopped in zip(step.rows, step.tokens, step.stopped, strict=True):
            ended[row] = stopped
            if not stopped:
                rows[row].append(token)
            if stopped or len(rows[row]) == limits[row]:
                on_finished()
    return [Completion(row, end) for row, end in zip(rows, ended, strict=True)]


def greedy_answers(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    vocab: int,
    stop: Collection[int],
    longest: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Completion]:
    """Return the greedy answer to each prompt, of at most `tokens` tokens.

    Prompt and answer together have at most `longest` tokens. `progress` is called with the number of finished answers
    after each one.
    """
    answers: dict[int, Completion] = {}
    lengths = [len(prompt) for prompt in prompts]
    finished = 0

    def count_finished() -> None:
        nonlocal finished
        finished += 1
        progress(finished)

    for places in _batches_by_length(lengths, tokens):
        limits = [tokens if longest is None else min(tokens, longest - lengths[place]) for place in places]
        steps = decode(model, [prompts[place] for place in places], limits=limits, vocab=vocab, stop=stop)
        answers |= dict(zip(places, _completions(steps, limits, count_finished), strict=True))
    return [answers[place] for place in range(len(prompts))]


def continue_embeddings(
    model: Decoder,
    start_BTD: Tensor,
    *,
    tokens: int,
    vocab: int,
    stop: Collection[int],
    pick: Pick | None = None,
) -> list[Completion]:
    """Return completions of prompts that are given as embeddings [B, T, D]; greedy without `pick`."""
    limits = [tokens] * len(start_BTD)
    return _completions(decode(model, start_BTD, limits=limits, vocab=vocab, stop=stop, pick=pick), limits)


def sample_token(
    logits: Tensor, generator: torch.Generator, *, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Return one token per row, sampled with top-k and nucleus (top-p) filtering; temperature 0 is greedy."""
    if temperature < MIN_TEMPERATURE:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the more likely tokens already reach top_p
        probabilities = torch.zeros_like(ordered).scatter(-1, order, ordered.masked_fill(beyond, 0.0))
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _batches_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield the places of prompts that form a batch.

    Prompts of similar length go together, and the longest batch comes first: if memory runs out, it does so at once.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and (len(batch) == _MOST_ROWS or (len(batch) + 1) * (lengths[batch[0]] + tokens) > _MOST_TOKENS):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
