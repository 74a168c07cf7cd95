"""finetune, without torch: train a pretrained model further, by adapters on a frozen base or with all its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from redline.errors import Problem
from redline.fields import AUTO, MaybeText, one_of
from redline.jobs.base import DecoderCosts, Job, JobOptions
from redline.planning.flops import FlopsPerToken, with_scored_head
from redline.planning.memory import MemoryParts, activation_memory, adapter_moments, training_memory, workspace
from redline.planning.shapes import TARGETS, Adapter, DecoderShape, matrix_sides
from redline.planning.speed import Work, decoder_work

FORMULA = "4·N_base + 6·N_lora + 12·L·d·T"
FORMULA_CAUSAL = "4·N_base + 6·N_lora + 6·L·d·T"
FORMULA_RECOMPUTED = "2·(N_layers − N_down) + 2·N_lora + 2·L·d·T"
SCORED_ALL = "every token sees its whole row and has a target"


class Options(JobOptions):
    model_keys: ClassVar[tuple[str, ...]] = ("method",)

    method: Annotated[str, one_of("qlora", "lora", "full")] = "qlora"
    learn: Annotated[str, one_of("answers", "all")] = "answers"  # the tokens that the loss is taken over
    template: MaybeText = None  # of chats: chatml or a .jinja file; the base's own if not given
    overlong: Annotated[str, one_of("drop", "cut", "error")] = "drop"  # samples longer than data.seq_len


class FinetuneJob(Job):
    name = "finetune"
    Options: ClassVar[type[JobOptions]] = Options
    runtime = "redline.jobs.finetune.objective:FinetuneRuntime"
    exports = True
    reads_stream = False  # all conversations are read, and packed, before training starts
    overlong_key = "finetune.overlong"

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        quantised = given.get("finetune.method", "qlora") == "qlora"
        return {
            "data.tokenizer": "base",
            "data.pack": True,
            "data.val_fraction": 0.02,
            "model.quant": "nf4" if quantised else "none",
        }

    def problems(self, recipe: Any) -> list[Problem]:
        model, method, found = recipe.model, recipe.finetune.method, []
        if model.base is None:
            found.append(Problem("model.base", "is missing.", "Name a folder, a .gguf file or a hub id."))
        if model.quant != ("nf4" if method == "qlora" else "none"):
            fix = f"Leave it out, or use finetune.method={'qlora' if model.quant == 'nf4' else 'lora'}."
            found.append(Problem("model.quant", f"{model.quant} does not go with finetune.method={method}.", fix))
        if recipe.data.tokenizer != "base":
            what = "fine-tuning uses the tokenizer of its base."
            found.append(Problem("data.tokenizer", what, "Leave it out, or write base."))
        if method == "full" and model.lora != type(model).model_fields["lora"].default:
            fix = "Remove it (model.lora=null), or use finetune.method=lora."
            found.append(Problem("model.lora", "does nothing with finetune.method=full.", fix))
        if method != "full":
            rates = {key: getattr(recipe.train, key) for key in ("embedding_lr", "head_lr", "scalar_lr")}
            unused = [key for key, rate in rates.items() if rate not in (AUTO, recipe.train.lr)]
            what = f"does nothing with finetune.method={method}: only the adapters' matrices are trained."
            found += [Problem(f"train.{key}", what, "Use train.lr.") for key in unused]
        if model.mlp != "swiglu":
            found.append(Problem("model.mlp", f"no base has {model.mlp}.", "Leave it out: the base defines it."))
        if recipe.train.precision == "fp8" and method == "full":
            found.append(Problem("train.precision", "fp8 is for a frozen base.", "Use bf16, or finetune.method=qlora."))
        if recipe.train.precision == "fp8" and recipe.train.fp8 == "torchao":
            found.append(Problem("train.fp8", "torchao's fp8 is for weights that are trained.", "Leave it out."))
        return found

    def reads_rows(self, given: Mapping[str, Any]) -> bool:
        return True

    def can_answer(self, recipe: Any) -> bool:
        return True

    def adapter(self, recipe: Any) -> Adapter | None:
        return adapter_of(recipe)

    def costs(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> Costs:
        return Costs(recipe, rows, micro)


def adapter_of(recipe: Any) -> Adapter | None:
    """Return the adapter that a finetune recipe trains; None if it trains all weights."""
    lora, method = recipe.model.lora, recipe.finetune.method
    if method == "full":
        return None
    return Adapter(lora.r, lora.target_modules, method == "qlora", recipe.model.quant_double)


class Costs(DecoderCosts):
    def __init__(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> None:
        super().__init__(recipe, rows, micro)
        self.adapter = adapter_of(recipe)

    def parameters(self, shape: DecoderShape) -> dict[str, int]:
        counted = super().parameters(shape)
        if self.adapter is None:
            return counted
        added = self.adapter.parameters(shape)
        return {**counted, "total": shape.parameters + added, "trainable": added}

    def untimed_features(self, shape: DecoderShape) -> dict[str, bool]:
        """A base with adapters was timed; a base that is trained itself was not."""
        return super().untimed_features(shape) | {"a base": self.adapter is None}

    def flops(self, shape: DecoderShape, seq_len: int, checkpointing: str) -> FlopsPerToken:
        """Count FLOPs per token. For a frozen matrix the backward computes the gradient of its input only: 4 FLOPs per
        weight instead of 6."""
        assumed = "" if self.rows else SCORED_ALL
        if self.adapter is None:
            return replace(super().flops(shape, seq_len, checkpointing), assumed=assumed)
        document, matmuls = self.document(seq_len), self._matmuls(shape)
        attention = shape.layers * shape.d_attention * document
        useful, executed = (
            matmuls + 12.0 * attention,
            matmuls + 6.0 * attention - sum(self._pruned_backward(shape, document)),
        )
        palm, masked = (with_scored_head(form, "N_base", self.scored) for form in (FORMULA, FORMULA_CAUSAL))
        if checkpointing != "full":
            return FlopsPerToken(useful, executed, 0.0, palm, masked, assumed=assumed)
        run_again = shape.layers * shape.layer_recomputed_parameters + self.adapter.parameters(shape)
        again = 2.0 * run_again + 2.0 * attention
        return FlopsPerToken(useful, executed, again, palm, masked, FORMULA_RECOMPUTED, assumed)

    def _matmuls(self, shape: DecoderShape) -> float:
        """Return the FLOPs of a token in the frozen matrices, the adapters and, at scored positions, the head."""
        assert self.adapter is not None
        base = shape.layers * shape.layer_matmul_parameters + self.scored * shape.head_parameters
        return 4.0 * base + 6.0 * self.adapter.parameters(shape)

    def _pruned_backward(self, shape: DecoderShape, document: float) -> tuple[float, float]:
        """Return the FLOPs of the first block's backward that autograd never runs: of matmuls and of causal attention.

        The embeddings are frozen, so nothing before the block's first adapter needs a gradient, and neither does the
        input of the linear that holds this adapter.
        """
        assert self.adapter is not None
        matmuls, attention, inputs = 0.0, 0.0, matrix_sides(shape)
        for linear, size in (
            ("qkv", shape.d_model * shape.d_qkv),
            ("out", shape.d_attention * shape.d_model),
            ("up", shape.d_model * shape.d_up),
            ("down", shape.d_ff * shape.d_model),
        ):
            if linear == "out":
                attention = 4.0 * shape.d_attention * document
            held = [inputs[name][0] for name in self.adapter.targets if TARGETS[name][0] == linear and name in inputs]
            matmuls += 2.0 * (size + self.adapter.r * sum(held))
            if held:
                break
        return matmuls, attention

    def certain(self, shape: DecoderShape) -> tuple[float, float]:
        """Leave out the head where prompts are not scored: the data decide how much of a row the answers are."""
        matmul, attention = super().certain(shape)
        if self.recipe.finetune.learn == "answers":
            matmul -= shape.head_parameters / shape.matmul_parameters
        return matmul, attention

    def memory(self, shape: DecoderShape, **how: Any) -> MemoryParts:
        if self.adapter is None:
            return training_memory(shape, **how)
        adapter, wide, tokens, kernels = self.adapter, how["bytes_per_value"], how["tokens"], how["kernels"]
        passing = {key: how[key] for key in ("tokens", "bytes_per_value", "checkpointing", "kernels")}
        activations, logits = activation_memory(shape, **passing, head_learns=False)
        added = adapter.parameters(shape)
        kept = 0.0 if how["checkpointing"] == "full" else adapter.kept_values() * shape.layers
        # The base is dequantised one matrix at a time, where it is multiplied; the adapters are cast as a whole.
        dequantised = wide * max(a * b for a, b in matrix_sides(shape).values()) * (2 if shape.gated else 1)
        return MemoryParts(
            weights=adapter.base_bytes(shape, wide) + 4.0 * added * (2 if how["ema"] else 1),
            gradients=4.0 * added,
            optimizer=adapter_moments(added, how["optimizer"]),
            activations=activations + tokens * kept * wide,
            logits=logits,
            workspace=float(dequantised + wide * added) + workspace(kernels, imported=True),
        )

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work:
        full = decoder_work(shape, seq_len, **how, passes=self.passes(seq_len))
        if self.adapter is None:
            return full
        added, wide, matmuls = self.adapter.parameters(shape), how["bytes_per_value"], self._matmuls(shape)
        if (
            self.rows
        ):  # for the ceiling of these data; without rows, the work must be what expected speeds were calibrated with
            pruned, pruned_attention = self._pruned_backward(shape, self.document(seq_len))
            matmuls, full = matmuls - pruned, replace(full, attention=full.attention - pruned_attention)
        again = how["checkpointing"] == "full"
        run_again = shape.layers * shape.layer_recomputed_parameters + added
        per_update = full.update * added / shape.parameters  # an optimizer costs the same per parameter
        kept = self.adapter.kept_values() * shape.layers * wide
        return replace(
            full,
            matmul=matmuls,
            recomputed=2.0 * run_again if again else 0.0,
            moved_least=full.moved_least + 2 * kept,
            moved=full.moved + 3 * kept + self.adapter.moved_values(shape) * shape.layers * wide,
            update=per_update,
            update_flops=0.0,
            gradient_bytes=4.0 * added,
        )
