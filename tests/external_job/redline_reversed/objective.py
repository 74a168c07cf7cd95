"""The half that needs torch: the model, the batches, evaluation and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from redline.data.corpus import TextData, load_text, random_text, text_tokenizer, training_index
from redline.data.loader import inputs_and_targets
from redline.jobs.objective import Batch, DecoderObjective, JobRuntime, Sample, Sampling, perplexity
from redline.models.generate import generate


class ReversedLM(DecoderObjective):
    def __init__(self, resolved: Any, data: TextData) -> None:
        super().__init__(resolved)
        self.data, self.span = data, self.recipe.reversed_lm.span  # type: ignore[attr-defined]

    def build(self, device: torch.device) -> None:
        self.device = device
        self.model = self.decoder().to(device)
        self.model.initialise(torch.Generator().manual_seed(self.recipe.train.seed))

    def batch(self, samples: np.ndarray) -> Batch:
        assert self.data.corpus is not None
        return self._rows(self.data.tokens.train, training_index(self.recipe, self.data.corpus).starts(samples))

    def _rows(self, split: Any, starts: np.ndarray) -> Batch:
        return self._reversed(split.windows(starts, self.seq_len + 1))

    def _reversed(self, rows: np.ndarray) -> Batch:
        order = np.arange(rows.shape[1])
        order = np.concatenate([order[first : first + self.span][::-1] for first in range(0, len(order), self.span)])
        return self.laid_out(*inputs_and_targets(rows[:, order]), None)

    def worst_batch(self, micro: int) -> Batch:
        return self._reversed(np.zeros((micro, self.seq_len + 1), dtype=np.int64))

    @torch.no_grad()
    def evaluate(self, micro: int) -> dict[str, float | None]:
        split = self.data.held_out
        count = 0 if split is None else min((len(split) - 1) // self.seq_len, self.recipe.eval.sequences)
        losses = []
        for number in range(count):
            batch = self._rows(split, np.array([number * self.seq_len]))
            losses.append(float(self.loss(batch)["cross_entropy"].sum) / self.seq_len)
        loss = float(np.mean(losses)) if losses else None
        return {"loss": loss, "perplexity": perplexity(loss) if loss is not None else None}

    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        tokenizer, tokens = self.data.tokenizer, self.data.tokens
        if tokenizer is None:
            return []
        start = [tokens.eot, *tokenizer.encode(prompt)]
        rows = generate(self.model, start, stop=tokens.eot, vocab=tokens.vocab_size, **vars(how))
        return [Sample(prompt, tokenizer.decode(row)) for row in rows]


class ReversedRuntime(JobRuntime[TextData]):
    def load_data(self, recipe: Any, *, for_evaluation: bool = False, progress: Any = None) -> TextData:
        return load_text(recipe, for_evaluation=for_evaluation, progress=progress)

    def random_data(self, facts: Any) -> TextData:
        return random_text(facts)

    def tokenizer_alone(self, facts: Any, folder: Path, recipe: Any) -> TextData:
        return text_tokenizer(facts, folder)

    def create(self, resolved: Any, data: TextData) -> ReversedLM:
        return ReversedLM(resolved, data)
