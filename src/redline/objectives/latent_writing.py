"""Answers of frozen models: from latents, and from the text itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from redline.models.generate import answer_each, generate, write_after
from redline.objectives.base import Answered, Sample, Sampling
from redline.objectives.latent_models import Frozen
from redline.objectives.latent_teacher import text_prompt

if TYPE_CHECKING:
    from redline.objectives.latent_prefix import LatentPrefix

_AT_ONCE = 64


def context_of(model: Frozen) -> int:
    assert model.spec.base is not None
    return model.spec.base.context


def from_latents(job: LatentPrefix, name: str, z_BMD: torch.Tensor, tokens: int, **how: Any) -> list[Answered]:
    """The likeliest answer to each, unless `how` says otherwise."""
    one, found = job.frozen[name], []
    assert one.reader is not None
    for some in z_BMD.split(_AT_ONCE):
        start = one.start(job.model.prefix(name, some))
        made = write_after(one.decoder, start, tokens=tokens, vocab=one.vocab, stop=one.reader.eos_ids, **how)
        found += [Answered(one.reader.decode(row.tokens), row.ended) for row in made]
    return found


def from_prompts(model: Frozen, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answered]:
    assert model.reader is not None
    made = answer_each(
        model.decoder,
        prompts,
        tokens=tokens,
        vocab=model.vocab,
        stop=model.reader.eos_ids,
        longest=context_of(model),
    )
    return [Answered(model.reader.decode(row.tokens), row.ended) for row in made]


@torch.no_grad()
def written(job: LatentPrefix, text: str, how: Sampling) -> list[Sample]:
    """For each model `how.count` answers from latents, each beside one from the text."""
    latents, found = job.encoded([text] * how.count), []
    options = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
    for name, one in job.frozen.items():
        assert one.reader is not None
        generator = torch.Generator(device=job.device).manual_seed(how.seed)
        said = from_latents(job, name, latents[name], how.tokens, generator=generator, **options)
        room = max(1, min(how.tokens, context_of(one) // 2))
        prompt = text_prompt(one, text, context_of(one) - room)
        read = generate(
            one.decoder,
            prompt,
            count=how.count,
            tokens=room,
            vocab=one.vocab,
            seed=how.seed,
            stop=one.reader.eos_ids,
            **options,  # type: ignore[arg-type]
        )
        found += [
            Sample(text, f"{one.spec.title}, from latents: {latent.text}\n{one.spec.title}, from the text: {plain}")
            for latent, plain in zip(said, (one.reader.decode(row) for row in read), strict=True)
        ]
    return found
