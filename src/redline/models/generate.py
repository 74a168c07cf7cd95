"""Sampling text from a decoder with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.kernels.attention import Bound
from redline.models.decoder import Decoder, KVCache

# The largest batch of prompts: rows, and positions in the key-value cache, which bound its memory.
_MOST_ROWS, _MOST_TOKENS = 64, 1 << 15
# Below this temperature the most likely token is taken: no other has a chance, and the division would overflow logits.
MIN_TEMPERATURE = 1e-3


@torch.no_grad()
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
    device = model.embedding.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    cache = model.new_cache()
    rows = torch.tensor([list(prompt)] * count, device=device)
    sampled: list[Tensor] = []
    done = torch.zeros(count, dtype=torch.bool, device=device)
    stops = sorted({stop} if isinstance(stop, int) else stop or ())
    stop_tokens = torch.tensor(stops, device=device)
    position = 0
    for _ in range(tokens):
        hidden = model(rows, Bound(), cache, position)
        position += rows.shape[1]
        logits = model.logits(hidden[:, -1])[:, :vocab]  # the rest only pads the vocabulary
        rows = sample_token(logits, generator, temperature=temperature, top_k=top_k, top_p=top_p)[:, None]
        sampled.append(rows[:, 0])
        if stops:
            done |= torch.isin(rows[:, 0], stop_tokens)
            if bool(done.all()):
                break
    if not sampled:
        return [[] for _ in range(count)]
    return [_before_stop(row, stops) for row in torch.stack(sampled, 1).tolist()]


def _before_stop(row: list[int], stops: list[int]) -> list[int]:
    """Return the tokens before the first stop token."""
    return row[: min((row.index(stop) for stop in stops if stop in row), default=len(row))]


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


@dataclass(frozen=True)
class Completion:
    """The tokens that a model wrote after a prompt."""

    tokens: list[int]
    ended: bool  # by a stop token; False: cut at the limit


@torch.no_grad()
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
    answers: list[Completion | None] = [None] * len(prompts)
    lengths = [len(prompt) for prompt in prompts]
    for places in _batches_by_length(lengths, tokens):
        limits = [tokens if longest is None else min(tokens, longest - lengths[place]) for place in places]
        batch = [prompts[place] for place in places]
        for row, completion in _decode_greedily(model, batch, limits, vocab, set(stop)):
            answers[places[row]] = completion
            progress(sum(answer is not None for answer in answers))
    assert all(answer is not None for answer in answers)
    return [answer for answer in answers if answer is not None]


@torch.no_grad()
def continue_embeddings(
    model: Decoder,
    start_BTD: Tensor,
    *,
    tokens: int,
    vocab: int,
    stop: Collection[int],
    generator: torch.Generator | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> list[Completion]:
    """Return completions of prompts that are given as embeddings [B, T, D], which need not belong to any token.

    Greedy, unless a temperature is given.
    """
    generator = generator or torch.Generator(device=start_BTD.device)
    cache, position, inputs = model.new_cache(), 0, start_BTD
    rows: list[list[int]] = [[] for _ in start_BTD]
    ended = [False] * len(rows)
    for _ in range(tokens):
        hidden = model(inputs, Bound(), cache, position)
        position += inputs.shape[1]
        logits = model.logits(hidden[:, -1])[:, :vocab]
        chosen = sample_token(logits, generator, temperature=temperature, top_k=top_k, top_p=top_p)
        for row, token in enumerate(chosen.tolist()):
            ended[row] = ended[row] or token in stop
            if not ended[row]:
                rows[row].append(token)
        if all(ended):
            break
        inputs = chosen[:, None]
    return [Completion(row, end) for row, end in zip(rows, ended, strict=True)]


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


def _decode_greedily(
    model: Decoder, prompts: Sequence[Sequence[int]], limits: Sequence[int], vocab: int, stops: set[int]
) -> Iterator[tuple[int, Completion]]:
    """Yield (row, completion) as rows finish.

    All rows are at the same position. The first pass reads as many tokens as the shortest prompt has. From then on each
    row reads the next token of its prompt while there is one, and after that its own last token. So nothing is padded
    or masked, and a row computes exactly what it would alone.
    """
    device = model.embedding.weight.device
    written: list[list[int]] = [[] for _ in prompts]
    for row, limit in enumerate(limits):
        if limit < 1:
            yield row, Completion([], ended=False)
    active = [row for row, limit in enumerate(limits) if limit >= 1]
    position, cache = 0, model.new_cache()
    shortest = min((len(prompts[row]) for row in active), default=0)
    inputs = [list(prompts[row][:shortest]) for row in active]
    while active:
        hidden = model(torch.tensor(inputs, device=device), Bound(), cache, position)
        position += len(inputs[0])
        likeliest = model.logits(hidden[:, -1])[:, :vocab].argmax(-1).tolist()
        inputs, remaining = [], []
        for place, row in enumerate(active):
            token = prompts[row][position] if position < len(prompts[row]) else likeliest[place]
            if position >= len(prompts[row]):
                if token not in stops:
                    written[row].append(token)
                if token in stops or len(written[row]) == limits[row]:
                    yield row, Completion(written[row], ended=token in stops)
                    continue
            inputs.append([token])
            remaining.append(place)
        if len(remaining) < len(active):
            _select_rows(cache, torch.tensor(remaining, device=device, dtype=torch.long))
            active = [active[place] for place in remaining]


def _select_rows(cache: list[KVCache], rows: Tensor) -> None:
    """Remove all rows but these from the cache."""
    for layer in cache:
        assert layer.keys is not None
        assert layer.values is not None
        layer.keys, layer.values = layer.keys[rows], layer.values[rows]
