"""Sampling with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.kernels.attention import Bound
from redline.models.decoder import Decoder
from redline.models.layers import KVCache

# Of prompts that are answered side by side: the cache of so many positions is all that is held.
_MOST_ROWS, _MOST_TOKENS = 64, 1 << 15
COLDEST = 1e-3  # a temperature below this leaves the likeliest token alone, and would let logits overflow


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
    """`count` continuations of the prompt; each ends before a `stop` or after `tokens`."""
    device = model.embedding.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    cache = model.new_cache()
    rows = torch.tensor([list(prompt)] * count, device=device)
    made: list[Tensor] = []
    done = torch.zeros(count, dtype=torch.bool, device=device)
    stops = sorted({stop} if isinstance(stop, int) else stop or ())
    marks = torch.tensor(stops, device=device)
    position = 0
    for _ in range(tokens):
        hidden = model(rows, Bound(), cache, position)
        position += rows.shape[1]
        logits = model.logits(hidden[:, -1])[:, :vocab]  # the padding entries are no tokens
        rows = choose(logits, generator, temperature=temperature, top_k=top_k, top_p=top_p)[:, None]
        made.append(rows[:, 0])
        if stops:
            done |= torch.isin(rows[:, 0], marks)
            if bool(done.all()):
                break
    return [_until(row, stops) for row in torch.stack(made, 1).tolist()] if made else [[] for _ in range(count)]


def _until(row: list[int], stops: list[int]) -> list[int]:
    return row[: min((row.index(stop) for stop in stops if stop in row), default=len(row))]


def choose(
    logits: Tensor, generator: torch.Generator, *, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """One token per row; temperature 0 is greedy."""
    if temperature < COLDEST:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # what lies before it already suffices
        probabilities = torch.zeros_like(ordered).scatter(-1, order, ordered.masked_fill(beyond, 0.0))
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


@dataclass(frozen=True)
class Written:
    tokens: list[int]
    ended: bool  # by a stop; otherwise cut


@torch.no_grad()
def answer_each(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    vocab: int,
    stop: Collection[int],
    longest: int | None = None,
    told: Callable[[int], None] = lambda _: None,
) -> list[Written]:
    """The likeliest answer to each prompt, of at most `tokens`; prompt and answer have no more than `longest`.

    `told` hears how many are answered, whenever some are.
    """
    found: list[Written | None] = [None] * len(prompts)
    lengths = [len(prompt) for prompt in prompts]
    for places in _alike(lengths, tokens):
        limits = [tokens if longest is None else min(tokens, longest - lengths[place]) for place in places]
        for row, written in _side_by_side(model, [prompts[place] for place in places], limits, vocab, set(stop)):
            found[places[row]] = written
            told(sum(one is not None for one in found))
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


@torch.no_grad()
def write_after(
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
) -> list[Written]:
    """What follows embeddings that no tokens may have: the likeliest, unless a temperature says otherwise."""
    chance = generator or torch.Generator(device=start_BTD.device)
    cache, position, ahead = model.new_cache(), 0, start_BTD
    made: list[list[int]] = [[] for _ in start_BTD]
    ended = [False] * len(made)
    for _ in range(tokens):
        hidden = model(ahead, Bound(), cache, position)
        position += ahead.shape[1]
        logits = model.logits(hidden[:, -1])[:, :vocab]
        chosen = choose(logits, chance, temperature=temperature, top_k=top_k, top_p=top_p)
        for row, token in enumerate(chosen.tolist()):
            ended[row] = ended[row] or token in stop
            if not ended[row]:
                made[row].append(token)
        if all(ended):
            break
        ahead = chosen[:, None]
    return [Written(row, end) for row, end in zip(made, ended, strict=True)]


def _alike(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Places of prompts that go together: alike in length, and the longest first, so that memory runs out at once or
    never."""
    some: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if some and (len(some) == _MOST_ROWS or (len(some) + 1) * (lengths[some[0]] + tokens) > _MOST_TOKENS):
            yield some
            some = []
        some.append(place)
    if some:
        yield some


def _side_by_side(
    model: Decoder, prompts: Sequence[Sequence[int]], limits: Sequence[int], vocab: int, stops: set[int]
) -> Iterator[tuple[int, Written]]:
    """Rows as they end. All are at the same position: as many tokens as the shortest prompt has are read at once;
    from there on a row reads its prompt's next token while there is one, and then its own last. So nothing is padded
    or masked, and a row computes what it would alone."""
    device = model.embedding.weight.device
    made: list[list[int]] = [[] for _ in prompts]
    for row, limit in enumerate(limits):
        if limit < 1:
            yield row, Written([], ended=False)
    alive = [row for row, limit in enumerate(limits) if limit >= 1]
    position, cache = 0, model.new_cache()
    first = min((len(prompts[row]) for row in alive), default=0)
    ahead = [list(prompts[row][:first]) for row in alive]
    while alive:
        hidden = model(torch.tensor(ahead, device=device), Bound(), cache, position)
        position += len(ahead[0])
        likeliest = model.logits(hidden[:, -1])[:, :vocab].argmax(-1).tolist()
        ahead, staying = [], []
        for place, row in enumerate(alive):
            token = prompts[row][position] if position < len(prompts[row]) else likeliest[place]
            if position >= len(prompts[row]):
                if token not in stops:
                    made[row].append(token)
                if token in stops or len(made[row]) == limits[row]:
                    yield row, Written(made[row], ended=token in stops)
                    continue
            ahead.append([token])
            staying.append(place)
        if len(staying) < len(alive):
            _keep(cache, torch.tensor(staying, device=device, dtype=torch.long))
            alive = [alive[place] for place in staying]


def _keep(cache: list[KVCache], rows: Tensor) -> None:
    for layer in cache:
        assert layer.keys is not None
        assert layer.values is not None
        layer.keys, layer.values = layer.keys[rows], layer.values[rows]
