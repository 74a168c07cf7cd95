"""QLoRA with the usual stack, a peer of `python -m benchmarks finetune`.

The model is transformers', the adapters PEFT's, NF4 and the optimizer bitsandbytes'; with Liger's kernels on request.

    python -m benchmarks.peers.hf_qlora < request.json

The request is that of `finetune_steps` with `liger`, `recompute` and `micro_batch`; the answer is one JSON line. The
base has the same random values as in redline's rows, so that the first losses agree; it is quantised matrix by matrix.
Adapters are float32 under bf16 autocast, as in transformers' own trainer with `bf16=True`.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.finetune_steps import Figures, document_tokens, installed, random_rows, time_steps
from benchmarks.reply import has_room, reply
from redline.errors import UserError
from redline.fields import none_if_auto
from redline.jobs.base import export_problems
from redline.kernels.attention import Attention, MaskSpec
from redline.kernels.matmul import DTYPES
from redline.models.decoder import Decoder
from redline.models.families import shape_of, tensor_names, to_config
from redline.models.pretrained import random_tensors
from redline.planning.batch import BatchPlan
from redline.recipe.load import validate
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Model, Recipe, Train

LOW_BIT = {"paged_adamw_8bit": "PagedAdamW8bit", "adamw_8bit": "AdamW8bit"}  # the names of bitsandbytes' classes
PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "bitsandbytes")

Micro = tuple[Tensor, Tensor]  # inputs and targets


def frozen_base(recipe: Recipe, device: torch.device) -> Any:
    """Return transformers' model with its blocks in NF4; at most one matrix exists unquantised at a time."""
    dtype, length = DTYPES[recipe.train.precision], recipe.data.seq_len
    model = random_model(recipe.model, length, dtype, device, quantised=True)
    model.is_loaded_in_4bit = True  # PEFT checks this attribute
    return model


def random_model(description: Model, length: int, dtype: torch.dtype, device: torch.device, *, quantised: bool) -> Any:
    """Return transformers' model of this kind, frozen, with redline's random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = shape_of(description)
    values = to_config(description, seq_len=length, eot=0, dtype=str(dtype).removeprefix("torch."))
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
        decoder = Decoder(shape, attention=Attention("dense", MaskSpec()), dtype=dtype)
    hf_names = {name: (theirs, rows) for name, theirs, rows in tensor_names(shape)}
    for name, tensor in random_tensors(decoder, device):
        theirs, rows = hf_names[name]
        for hf_name, part in zip(theirs, tensor.split(rows) if rows else (tensor,), strict=True):
            _put(model, hf_name, part, dtype, quantised=quantised, double=description.quant_double)
    model.tie_weights()
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(
            config
        )  # its frequencies are not parameters, so `meta` left them empty
    assert not [name for name, p in model.named_parameters() if p.is_meta]
    model.config.use_cache = False
    return model


def _put(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype, *, quantised: bool, double: bool) -> None:
    path, _, kind = name.rpartition(".")
    owner = model.get_submodule(path)
    if quantised and isinstance(owner, nn.Linear) and kind == "weight" and ".layers." in path:
        model.set_submodule(path, _in_nf4(owner, tensor, dtype, double=double))
    else:
        setattr(owner, kind, nn.Parameter(tensor.to(dtype), requires_grad=False))


def _in_nf4(linear: nn.Linear, weight: Tensor, dtype: torch.dtype, *, double: bool) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    how: dict[str, Any] = {"compress_statistics": double, "quant_type": "nf4"}
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    layer = Linear4bit(*sizes, compute_dtype=dtype, device="meta", **how)
    frozen: Any = Params4bit(weight, requires_grad=False, module=layer, **how)
    layer.weight = frozen.to(weight.device)  # this call quantises it
    return layer


class Peer:
    """The model and its training loop."""

    def __init__(self, recipe: Recipe, *, liger: bool, recompute: bool) -> None:
        from peft import LoraConfig, get_peft_model

        self.train, self.device = recipe.train, torch.device(recipe.train.device)
        torch.manual_seed(self.train.seed)
        base = frozen_base(recipe, self.device)
        if liger:
            _use_liger(base)
        if recompute:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lora = recipe.model.lora
        adapters: dict[str, Any] = {
            "r": lora.r,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "target_modules": list(lora.target_modules),
            "use_rslora": lora.rslora,
        }
        self.model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **adapters)).train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(self.parameters, recipe.train)

    def step(self, micros: list[Micro]) -> Tensor:
        loss = self._backward(micros)
        if self.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _backward(self, micros: list[Micro]) -> Tensor:
        total = torch.zeros((), device=self.device)
        for inputs, targets in micros:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.train.precision == "bf16"):
                # The targets are the next tokens already; `shift_labels` keeps transformers from shifting them again.
                answer = self.model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False)
            loss = answer.loss / len(micros)
            loss.backward()
            total += loss.detach()
        return total

    def fits(self, micros: list[Micro]) -> bool:
        """Return whether a micro-batch and its gradients fit. Nothing is updated, so the first loss is the base's."""
        return has_room(lambda: self._backward(micros[:1]), self.optimizer)


def _optimizer(parameters: list[nn.Parameter], train: Train) -> torch.optim.Optimizer:
    how: dict[str, Any] = {"lr": train.lr, "betas": train.betas, "eps": train.eps, "weight_decay": train.weight_decay}
    if train.optimizer == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **how)
    import bitsandbytes

    optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, LOW_BIT[train.optimizer])(parameters, **how)
    return optimizer


def _use_liger(model: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # what transformers' own trainer calls

    _apply_liger_kernel_to_instance(model=model)


def measure(request: dict[str, Any]) -> Figures:
    recipe, facts = validate(request["recipe"], where="bench"), DataFacts(**request["facts"])
    check_supported(recipe, liger=request["liger"], sample_tokens=request["sample_tokens"])
    length, batch = recipe.data.seq_len, none_if_auto(recipe.train.global_batch) or 1
    rows = random_rows(facts.vocab_size, int(batch), length, None)
    begin = time.perf_counter()
    peer = Peer(recipe, liger=request["liger"], recompute=request["recompute"])
    inputs, targets = (torch.from_numpy(part).to(peer.device) for part in rows[:2])
    plan: BatchPlan | None = BatchPlan(request["micro_batch"], int(batch) // request["micro_batch"])
    while plan is not None:
        micros = list(zip(inputs.split(plan.micro), targets.split(plan.micro), strict=True))
        if peer.fits(micros):
            break
        plan = plan.halved()
    if plan is None:
        raise UserError("The smallest micro-batch does not fit into memory.")
    warmup = time.perf_counter() - begin
    figures = time_steps(
        lambda _: peer.step(micros), steps=request["steps"], tokens=int(batch) * length, device=peer.device
    )
    return {
        **figures,
        "micro_batch": plan.micro,
        "document_tokens": document_tokens(rows[2]),
        "warmup_s": warmup,
        "precision": recipe.train.precision,
        "compiled": False,
        "recomputed": "full" if request["recompute"] else "none",
        "versions": installed(*PACKAGES, *(["liger-kernel"] if request["liger"] else [])),
    }


def check_supported(recipe: Recipe, *, liger: bool, sample_tokens: int | None) -> None:
    if problems := export_problems(recipe.model):
        raise UserError(problems[0].line())
    if sample_tokens is not None:
        raise UserError("This peer does not mask attention between the samples of a row.")
    if recipe.train.precision not in ("bf16", "fp32"):
        raise UserError(f"This peer supports bf16 and fp32, not {recipe.train.precision}.")
    if recipe.train.optimizer not in ("adamw", *LOW_BIT):
        raise UserError(f"This peer does not support the optimizer {recipe.train.optimizer}.")
    if liger and find_spec("liger_kernel") is None:
        raise UserError("The package liger_kernel is not installed.")
    if liger and recipe.train.device == "cpu":
        raise UserError("Liger's kernels need a GPU.")


if __name__ == "__main__":
    reply(measure)
