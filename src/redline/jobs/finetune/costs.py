"""finetune: go on with a pretrained model, by low-rank adapters on a frozen base (in NF4 or not), or with all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from redline.errors import Problem
from redline.fields import AUTO, MaybeText, Section, one_of
from redline.jobs.causal_lm.costs import Costs as DecoderCosts
from redline.planning.flops import FlopsPerToken, with_scored_head
from redline.planning.memory import MemoryParts, activation_memory, adapter_moments, training_memory, workspace
from redline.planning.shapes import TARGETS, Adapter, DecoderShape, matrix_sides
from redline.planning.speed import Work, decoder_work

FORMULA = "4·N_base + 6·N_lora + 12·L·d·T"
FORMULA_CAUSAL = "4·N_base + 6·N_lora + 6·L·d·T"
FORMULA_RECOMPUTED = "2·(N_layers − N_down) + 2·N_lora + 2·L·d·T"
SCORED_ALL = "every token sees its whole row and has a target"


class Options(Section):
    model_keys: ClassVar[tuple[str, ...]] = ("method",)

    method: Annotated[str, one_of("qlora", "lora", "full")] = "qlora"
    learn: Annotated[str, one_of("answers", "all")] = "answers"  # what the loss is of
    template: MaybeText = None  # of chats: the base's own if not given; chatml, or a .jinja file
    overlong: Annotated[str, one_of("drop", "cut", "error")] = "drop"  # samples longer than data.seq_len


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    quantised = given.get("finetune.method", "qlora") == "qlora"
    return {
        "data.tokenizer": "base",
        "data.pack": True,
        "data.val_fraction": 0.02,
        "model.quant": "nf4" if quantised else "none",
    }


def added_tokens(recipe: Any) -> int:
    return 0


def problems(recipe: Any) -> list[Problem]:
    """What it cannot do without, and what does not go together."""
    model, method, found = recipe.model, recipe.finetune.method, []
    if model.base is None:
        found.append(Problem("model.base", "is missing.", "Name a folder, a .gguf file or a hub id."))
    if model.quant != ("nf4" if method == "qlora" else "none"):
        fix = f"Leave it out, or use finetune.method={'qlora' if model.quant == 'nf4' else 'lora'}."
        found.append(Problem("model.quant", f"{model.quant} does not go with finetune.method={method}.", fix))
    if recipe.data.tokenizer != "base":
        what = "fine-tuning reads with its base's own tokenizer."
        found.append(Problem("data.tokenizer", what, "Leave it out, or write base."))
    if method == "full" and model.lora != type(model).model_fields["lora"].default:
        fix = "Take it away (model.lora=null), or use finetune.method=lora."
        found.append(Problem("model.lora", "does nothing with finetune.method=full.", fix))
    if method != "full":
        rates = {key: getattr(recipe.train, key) for key in ("embedding_lr", "head_lr", "scalar_lr")}
        idle = [key for key, rate in rates.items() if rate not in (AUTO, recipe.train.lr)]
        what = f"does nothing with finetune.method={method}: only the adapters' matrices learn."
        found += [Problem(f"train.{key}", what, "Use train.lr.") for key in idle]
    if model.mlp != "swiglu":
        found.append(Problem("model.mlp", f"no base has {model.mlp}.", "Leave it out: the base says what it has."))
    if recipe.train.precision == "fp8" and method == "full":
        found.append(Problem("train.precision", "fp8 is for a frozen base.", "Use bf16, or finetune.method=qlora."))
    if recipe.train.precision == "fp8" and recipe.train.fp8 == "torchao":
        found.append(Problem("train.fp8", "torchao's is for weights that learn.", "Leave it out."))
    return found


def adapter_of(recipe: Any) -> Adapter | None:
    """None when all of the model learns."""
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

    def not_timed(self, shape: DecoderShape) -> dict[str, bool]:
        """Beside an adapter they were."""
        return super().not_timed(shape) | {"a base": self.adapter is None}

    def flops(self, shape: DecoderShape, seq_len: int, checkpointing: str) -> FlopsPerToken:
        """A frozen matrix has a gradient of its input, and none of itself."""
        assumed = "" if self.rows else SCORED_ALL
        if self.adapter is None:
            return replace(super().flops(shape, seq_len, checkpointing), assumed=assumed)
        document, matmuls = self.document(seq_len), self._matmuls(shape)
        attention = shape.layers * shape.d_attention * document
        useful, executed = matmuls + 12.0 * attention, matmuls + 6.0 * attention - sum(self._unasked(shape, document))
        palm, masked = (with_scored_head(form, "N_base", self.scored) for form in (FORMULA, FORMULA_CAUSAL))
        if checkpointing != "full":
            return FlopsPerToken(useful, executed, 0.0, palm, masked, assumed=assumed)
        run_again = shape.layers * shape.layer_recomputed_parameters + self.adapter.parameters(shape)
        again = 2.0 * run_again + 2.0 * attention
        return FlopsPerToken(useful, executed, again, palm, masked, FORMULA_RECOMPUTED, assumed)

    def _matmuls(self, shape: DecoderShape) -> float:
        """FLOPs of a token in the frozen matrices, at scored positions in the head, and in the adapters."""
        assert self.adapter is not None
        base = shape.layers * shape.layer_matmul_parameters + self.scored * shape.head_parameters
        return 4.0 * base + 6.0 * self.adapter.parameters(shape)

    def _unasked(self, shape: DecoderShape, document: float) -> tuple[float, float]:
        """The part of the first block's backward that autograd never runs: of matmuls, and of causal attention.

        The embedded tokens are frozen, so that nothing before the block's first adapter has a gradient, and the input
        of the linear that holds it has none either.
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
        """Of prompts nothing is scored, and how long answers are is for the data to say."""
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
        # one matrix at a time, as it is multiplied; a cast of the adapters
        dequantised = wide * max(a * b for a, b in matrix_sides(shape).values()) * (2 if shape.mlp == "swiglu" else 1)
        return MemoryParts(
            weights=adapter.base_bytes(shape, wide) + 4.0 * added * (2 if how["ema"] else 1),
            gradients=4.0 * added,
            optimizer=adapter_moments(added, how["optimizer"]),
            activations=activations + tokens * kept * wide,
            logits=logits,
            workspace=float(dequantised + wide * added) + workspace(kernels, imported=True),
        )

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work:
        whole = decoder_work(shape, seq_len, **how, passes=self.passes(seq_len))
        if self.adapter is None:
            return whole
        added, wide, matmuls = self.adapter.parameters(shape), how["bytes_per_value"], self._matmuls(shape)
        if self.rows:  # a ceiling of these data; without them the work is what expected speeds are calibrated on
            unasked, unasked_attention = self._unasked(shape, self.document(seq_len))
            matmuls, whole = matmuls - unasked, replace(whole, attention=whole.attention - unasked_attention)
        again = how["checkpointing"] == "full"
        run_again = shape.layers * shape.layer_recomputed_parameters + added
        per_update = whole.update * added / shape.parameters  # every parameter of an optimizer costs alike
        kept = self.adapter.kept_values() * shape.layers * wide
        return replace(
            whole,
            matmul=matmuls,
            recomputed=2.0 * run_again if again else 0.0,
            moved_least=whole.moved_least + 2 * kept,
            moved=whole.moved + 3 * kept + self.adapter.moved_values(shape) * shape.layers * wide,
            update=per_update,
            update_flops=0.0,
            gradient_bytes=4.0 * added,
        )
