"""A latent prefix trained with a straightforward loop: the peer of `python -m benchmarks latent`.

    python -m benchmarks.peers.latent_textbook < request.json

The request is that of `latent_steps` with `one_pass` and `micro_batch`; the answer is one JSON line. The frozen models
are transformers' with the same random values as in redline's rows; the trained module is the same; nothing is compiled
or cached between steps. The loss of the answer, of its first token and of each of its first K tokens have separate
forward passes, and the teacher reads every text in every step, in one forward pass up to its last K positions. With
`one_pass` all terms of the student come from one forward pass, and logits are computed only where they are needed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.finetune_steps import Figures, installed, time_steps
from benchmarks.latent_steps import ANCHOR, BEGIN, TimedRows, rename_to_texts, timed_rows
from benchmarks.peers.hf_qlora import PACKAGES, random_model
from benchmarks.reply import has_room, reply
from redline.errors import UserError
from redline.jobs.base import export_problems
from redline.jobs.latent_prefix.costs import PrefixShape
from redline.jobs.latent_prefix.data import options_of
from redline.jobs.latent_prefix.encoder import PrefixModel, word_loss
from redline.kernels.cross_entropy import IGNORE
from redline.kernels.matmul import DTYPES
from redline.planning.batch import BatchPlan
from redline.planning.shapes import DecoderShape
from redline.recipe.load import validate
from redline.recipe.schema import Model, Recipe

Terms = dict[str, Tensor]


class Reader:
    """One frozen model, which reads an answer after a prefix or after a text."""

    def __init__(self, model: Any, device: torch.device, *, keep_all: bool) -> None:
        self.model, self.device, self.keep_all = model, device, keep_all
        self.embed = model.get_input_embeddings()
        self.begin, self.anchor = (self.embed(torch.tensor(ids, device=device)) for ids in (BEGIN, ANCHOR))

    def after_prefix(self, prefix_BMD: Tensor, answer_BT: Tensor) -> Tensor:
        """Return logits [B, T + 1, V] from the anchor's last position on."""
        begin, anchor = (part.expand(len(prefix_BMD), -1, -1) for part in (self.begin, self.anchor))
        read = torch.cat((begin, prefix_BMD.to(begin.dtype), anchor, self.embed(answer_BT)), 1)
        wanted = answer_BT.shape[1] + 1
        output = self.model(inputs_embeds=read, use_cache=False, logits_to_keep=0 if self.keep_all else wanted)
        logits: Tensor = output.logits[:, -wanted:].float()
        return logits

    @torch.no_grad()
    def after_text(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], k: int) -> Tensor:
        """Return logits [B, K, V] of the K positions after each text; zeros where an answer is shorter."""
        rows = [[*prompt, *answer[: k - 1]] for prompt, answer in zip(prompts, answers, strict=True)]
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
        states = self.model.model(input_ids=tokens.to(self.device), use_cache=False).last_hidden_state
        first_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=self.device)
        places_BK = (first_B1 + torch.arange(k, device=self.device)).clamp_max(tokens.shape[1] - 1)
        taken = states.gather(1, places_BK[..., None].expand(-1, -1, states.shape[-1]))
        logits: Tensor = self.model.lm_head(taken).float()
        return logits


class Textbook:
    """The frozen models, the trained encoder, and the training loop."""

    def __init__(self, recipe: Recipe, *, one_pass: bool) -> None:
        self.recipe, self.options, self.one_pass = recipe, options_of(recipe), one_pass
        self.device, self.dtype = torch.device(recipe.train.device), DTYPES[recipe.train.precision]
        self.models = descriptions(recipe)
        self.readers = {name: self._reader(model) for name, model in self.models.items()}
        widths = {name: int(model.d_model) for name, model in self.models.items()}
        rms = {name: float(r.embed.weight.float().square().mean().sqrt()) for name, r in self.readers.items()}
        self.model = PrefixModel(PrefixShape.of(self.options, len(widths)), widths, rms, dtype=self.dtype).to(
            self.device
        )
        self.model.initialise(recipe.train.seed)
        train = recipe.train
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,
        )

    def _reader(self, model: Model) -> Reader:
        length = self.recipe.data.seq_len + self.options.bytes
        frozen = random_model(model, length, self.dtype, self.device, quantised=model.quant == "nf4")
        # Not `eval`: bitsandbytes would then use kernels without a backward. There is no dropout to switch off.
        return Reader(frozen.train(), self.device, keep_all=not self.one_pass)

    def step(self, micros: list[TimedRows]) -> Terms:
        terms = self._backward(micros)
        if self.recipe.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return terms

    def _backward(self, micros: list[TimedRows]) -> Terms:
        weights = self._weights(micros)
        totals: Terms = {}
        for micro in micros:
            terms = {name: sums / weights[name] for name, sums in self._sums(micro).items()}
            torch.stack([self._coefficient(name) * term for name, term in terms.items()]).sum().backward()
            for name, term in terms.items():
                part = self._coefficient(name) * term.detach()
                totals[name] = totals[name] + part if name in totals else part
        return totals

    def _weights(self, micros: list[TimedRows]) -> dict[str, float]:
        """Return the weights of the terms, summed over the whole batch."""
        k, weights = self.options.first_tokens, {"scale": float(len(micros))}
        for name in self.readers:
            lengths = [len(answer) for micro in micros for answer in micro.answers[name]]
            positions = float(sum(min(k, length) for length in lengths))
            weights |= {f"ce_{name}": float(sum(lengths)), f"k_{name}": positions, f"kd_{name}": positions}
            weights |= {f"first_{name}": float(len(lengths)), f"words_{name}": float(len(lengths))}
        return weights

    def _coefficient(self, name: str) -> float:
        return float(getattr(self.options, f"{name.partition('_')[0]}_weight", 1.0)) / len(self.readers)

    def _sums(self, rows: TimedRows) -> Terms:
        options, sums = self.options, {}
        latents = self.model.latents(rows.batch["bytes"])
        for name, reader in self.readers.items():
            prefix, targets = self.model.prefix(name, latents[name]), rows.batch[f"targets.{name}"]
            students = one_pass if self.one_pass else separate_passes
            losses, first, early = students(reader, prefix, targets, options.first_tokens)
            ratio = first / (losses.sum(1) / (targets != IGNORE).sum(1))
            sums[f"ce_{name}"] = losses.sum()
            sums[f"first_{name}"] = (first * ratio.detach().clamp(1.0, options.first_clamp)).sum()
            early_targets = targets[:, : early.shape[1]]
            sums[f"k_{name}"] = _losses(early, early_targets).sum()
            if options.kd_weight:
                teacher = reader.after_text(rows.prompts[name], rows.answers[name], options.first_tokens)[
                    :, : early.shape[1]
                ]
                sums[f"kd_{name}"] = _distance(early, teacher, options.tau, early_targets != IGNORE)
            if self.model.words is not None:
                sums[f"words_{name}"] = word_loss(self.model.words, latents[name], rows.batch["words"]).sum()
        if options.scale_weight:
            sums["scale"] = self.model.scale_terms()
        return sums

    def fits(self, micros: list[TimedRows]) -> bool:
        """Return whether a micro-batch fits. Nothing is updated."""
        return has_room(lambda: self._backward(micros[:1]), self.optimizer)


def separate_passes(reader: Reader, prefix: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return −log p of the answer [B, A] and of its first token [B], and logits [B, K, V], by 2 + K forward passes."""
    answer = targets.clamp_min(0)
    losses = _losses(reader.after_prefix(prefix, answer[:, :-1]), targets)
    first = _losses(reader.after_prefix(prefix, answer[:, :0]), targets[:, :1])[:, 0]
    early = [reader.after_prefix(prefix, answer[:, :t])[:, -1] for t in range(min(k, targets.shape[1]))]
    return losses, first, torch.stack(early, 1)


def one_pass(reader: Reader, prefix: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same from one forward pass."""
    logits = reader.after_prefix(prefix, targets[:, :-1].clamp_min(0))
    losses = _losses(logits, targets)
    return losses, losses[:, 0], logits[:, :k]


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return flat.view(targets.shape)


def _distance(student: Tensor, teacher: Tensor, tau: float, exists: Tensor) -> Tensor:
    """Return τ²·KL(teacher ‖ student), summed over the positions that exist."""
    p, log_q = (teacher / tau).softmax(-1), (student / tau).log_softmax(-1)
    return tau**2 * (F.kl_div(log_q, p, reduction="none").sum(-1) * exists).sum()


def descriptions(recipe: Recipe) -> dict[str, Model]:
    """Return each frozen model as the `model` section of a recipe."""
    models = {"0": recipe.model}
    for number, other in enumerate(options_of(recipe).others, 1):
        assert other.shape is not None
        how = {**vars(DecoderShape(**other.shape)), "quant": other.quant, "quant_double": other.quant_double}
        models[str(number)] = recipe.model.model_copy(update=how)
    return models


def check_supported(recipe: Recipe) -> None:
    options = options_of(recipe)
    for model in descriptions(recipe).values():
        if problems := export_problems(model):
            raise UserError(problems[0].line())
    for key in ("match_weight", "fade_steps"):
        if getattr(options, key):
            raise UserError(f"This peer does not support latent_prefix.{key}.")
    if recipe.train.precision not in ("bf16", "fp32"):
        raise UserError(f"This peer supports bf16 and fp32, not {recipe.train.precision}.")
    if recipe.train.optimizer != "adamw":
        raise UserError(f"This peer does not support the optimizer {recipe.train.optimizer}.")


def measure(request: dict[str, Any]) -> Figures:
    recipe = validate(request["recipe"], where="bench")
    check_supported(recipe)
    begin = time.perf_counter()
    textbook = Textbook(recipe, one_pass=request["one_pass"])
    total = int(recipe.train.global_batch)
    rows = timed_rows(recipe, {name: int(model.vocab) for name, model in textbook.models.items()}, total)
    batch = {key: tensor.to(textbook.device) for key, tensor in rows.batch.items()}
    rows_on_device = TimedRows(batch, rows.prompts, rows.answers)
    plan: BatchPlan | None = BatchPlan(request["micro_batch"], total // request["micro_batch"])
    while plan is not None and not textbook.fits(micros := rows_on_device.micros(plan.micro)):
        plan = plan.halved()
    if plan is None:
        raise UserError("The smallest micro-batch does not fit into memory.")
    warmup, terms = time.perf_counter() - begin, []

    def step(number: int) -> Tensor:
        terms.append(textbook.step(micros))
        return torch.stack(list(terms[-1].values())).sum()

    figures = time_steps(step, steps=request["steps"], tokens=total, device=textbook.device)
    return {
        **rename_to_texts(figures),
        "first_terms": {name: term.item() for name, term in terms[0].items()},
        "prompt_tokens": rows.prompt_tokens,
        "micro_batch": plan.micro,
        "warmup_s": warmup,
        "precision": recipe.train.precision,
        "compiled": False,
        "versions": installed(*PACKAGES),
    }


if __name__ == "__main__":
    reply(measure)
