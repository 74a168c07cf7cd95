"""Steps of a latent prefix on random texts, timed: redline's own row of `redline bench latent`.

    python -m redline.bench.latent_steps < request.json

The request holds a resolved recipe, the facts of its data and how many `steps` to time; the answer is one JSON line.
The frozen models are random: nothing is fetched. Their teachers read the texts before the first step, as in training,
and `teacher_ms` is what that takes for the texts of one step.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from redline.bench.finetune_steps import PACKAGES, Figures, installed, time_steps
from redline.bench.latent_rows import TimedRows, timed_rows
from redline.bench.reply import reply
from redline.jobs.latent_prefix.costs import taught
from redline.recipe.resolve import DataFacts
from redline.training.step import step_batch, to_device
from redline.training.trial import ready


def contend(request: dict[str, Any]) -> Figures:
    with ready(request["recipe"], DataFacts(**request["facts"]), where="bench") as own:
        trainer, objective = own.trainer, own.objective
        vocabularies = {name: one.decoder.shape.vocab for name, one in objective.frozen.items()}
        rows = timed_rows(own.resolved.recipe, vocabularies, trainer.batch.global_batch)
        teacher_ms = 0.0
        for _ in range(2):  # the first look is slower
            states, teacher_ms = _taught(objective, rows)
        micros = TimedRows(rows.batch | states, rows.prompts, rows.answers).micros(trainer.batch.micro)
        batch = step_batch(objective, [to_device(one.batch, trainer.device) for one in micros])
        terms: list[dict[str, Tensor]] = []

        def step(number: int) -> Tensor:
            result = trainer.train_step(number, batch, 1.0)
            terms.append(result.terms)
            return result.loss

        total = trainer.batch.global_batch
        figures = time_steps(step, steps=request["steps"], tokens=total, device=trainer.device)
    return {
        **texts_a_second(figures),
        **own.said(),
        "first_terms": {name: term.item() for name, term in terms[0].items()},
        "teacher_ms": teacher_ms,
        "prompt_tokens": rows.prompt_tokens,
        "versions": installed(*PACKAGES),
    }


def texts_a_second(figures: Figures) -> Figures:
    """What is counted here are texts."""
    return {key.replace("tokens", "texts"): value for key, value in figures.items()}


@torch.no_grad()
def _taught(objective: Any, rows: TimedRows) -> tuple[dict[str, Tensor], float]:
    """What each teacher leaves on disk of a step's texts, and the milliseconds that reading them took."""
    options, device, found = objective.options, objective.device, {}
    if not taught(options):
        return {}, 0.0
    begin = time.perf_counter()
    with objective.uncompiled():
        for name, one in objective.frozen.items():
            size = (len(rows.prompts[name]), options.first_tokens, one.decoder.shape.d_model)
            states = found[f"teacher.{name}"] = torch.zeros(size, dtype=objective.dtype)
            said = [answer[: options.first_tokens] for answer in rows.answers[name]]
            for place, hidden in one.text_states(rows.prompts[name], said):
                states[place, : len(hidden)] = hidden.to("cpu", objective.dtype)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return found, 1e3 * (time.perf_counter() - begin)


if __name__ == "__main__":
    reply(contend)
