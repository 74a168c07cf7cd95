"""Sampling with a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.kernels.attention import Bound
from redline.models.transformer import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    *,
    count: int,
    tokens: int,
    vocab: int,
    seed: int,
    stop: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
) -> list[list[int]]:
    """`count` continuations of the prompt; each ends before `stop` or after `tokens`."""
    device = model.embedding.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    cache = model.new_cache()
    rows = torch.tensor([list(prompt)] * count, device=device)
    made: list[Tensor] = []
    done = torch.zeros(count, dtype=torch.bool, device=device)
    position = 0
    for _ in range(tokens):
        hidden = model(rows, Bound(), cache, position)
        position += rows.shape[1]
        logits = model.logits(hidden[:, -1])[:, :vocab]  # the padding entries are no tokens
        rows = choose(logits, generator, temperature=temperature, top_k=top_k, top_p=top_p)[:, None]
        made.append(rows[:, 0])
        if stop is not None:
            done |= rows[:, 0] == stop
            if bool(done.all()):
                break
    return [_until(row, stop) for row in torch.stack(made, 1).tolist()] if made else [[] for _ in range(count)]


def _until(row: list[int], stop: int | None) -> list[int]:
    return row[: row.index(stop)] if stop in row else row


def choose(
    logits: Tensor, generator: torch.Generator, *, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """One token per row; temperature 0 is greedy."""
    if temperature == 0:
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
