"""Options, checks and costs of latent_prefix (LatentWire), computed from shapes without torch.

A byte encoder turns a text into a few latent vectors; an adapter per frozen language model turns these into a prefix of
embeddings, which the model reads in place of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ValidationError

from redline.errors import Problem, did_you_mean
from redline.fields import (
    Count,
    Flag,
    MaybeCount,
    MaybeWhole,
    NonNegative,
    Positive,
    Rule,
    Section,
    Text,
    Whole,
    none_or,
    one_of,
)
from redline.jobs.base import DecoderCosts, Job, JobOptions
from redline.planning.flops import FlopsPerToken, Passes
from redline.planning.memory import (
    WORKSPACE,
    Kernels,
    MemoryParts,
    adapter_moments,
    training_memory,
    workspace,
)
from redline.planning.shapes import DecoderShape, nf4_bytes
from redline.planning.shards import Sharded, Units
from redline.planning.speed import Work, decoder_work
from redline.units import parse_count

# ----------------------------------------------------------------------------------------------------
# The shape of what is trained: encoder, queries and adapters.


WORDS = 4096  # buckets of the word-hashing head
BYTES = 257  # 256 byte values and padding
GROUP = 32  # quantised latents: values that share one fp16 scale
BITS = {"fp16": 16, "int8": 8, "int4": 4}  # bits of one latent value, by format


def latent_bytes(values: int, kind: str) -> int:
    """Return the size of so many latent values in a format, scales included."""
    scales = 0 if kind == "fp16" else -(-values // GROUP) * 2
    return -(-values * BITS[kind] // 8) + scales


@dataclass(frozen=True)
class PrefixShape:
    d_z: int
    layers: int
    heads: int
    patch: int  # bytes per position of the encoder
    bytes: int  # the longest text
    slots: int  # latents that all models read
    private: int  # latents that only one model reads, for each model
    models: int
    words: bool  # whether there is a head that predicts the words of the text
    focus: float = 1.0  # initial focus of a query on its own stretch of the text

    @classmethod
    def of(cls, options: Any, models: int) -> PrefixShape:
        """Return the shape for a recipe's `latent_prefix` options."""
        names = ("d_z", "layers", "heads", "patch", "bytes", "slots", "focus")
        chosen = {name: getattr(options, name) for name in names}
        return cls(**chosen, private=options.private_slots, models=models, words=options.words_weight > 0)

    @property
    def read(self) -> int:
        """The number of latents that one model reads."""
        return self.slots + self.private

    @property
    def positions(self) -> int:
        """The encoder's positions for the longest text."""
        return self.bytes // self.patch

    @property
    def layer_parameters(self) -> int:
        return 12 * self.d_z**2 + 2 * self.d_z * 2

    def encoder_parameters(self) -> int:
        d = self.d_z
        embedded = BYTES * d + (self.patch * d * d if self.patch > 1 else 0)
        queries = (self.slots + self.models * self.private) * d
        # Cross-attention: q, k, v, out and MLP; three norms; two gates; a focus per head.
        pool = 12 * d * d + 2 * d * 3 + 2 + self.heads
        return embedded + self.layers * self.layer_parameters + 2 * d + queries + pool + 2 * d + self.word_parameters

    @property
    def word_parameters(self) -> int:
        return self.d_z * WORDS if self.words else 0

    def adapter_parameters(self, d_model: int) -> int:
        d = self.d_z
        layers = 2 * d * d + 4 * d * d + 2 * d * d_model + d * d_model  # three linear layers of the MLP, and the skip
        return self.read * d + 2 * d + layers + 2 * d * d_model + 1  # slots, norm, FiLM, scale

    def parameters(self, widths: Sequence[int]) -> int:
        """Return the trainable parameters, with frozen models of these widths."""
        return self.encoder_parameters() + sum(self.adapter_parameters(width) for width in widths)

    def flops(self, positions: float | None = None, pairs: float | None = None, filled: float | None = None) -> float:
        """Return the forward and backward FLOPs of encoder and cross-attention for one text; by default the longest.

        `positions` are those of the encoder, padding included; `filled` are those that hold a byte; `pairs` are the
        (query, key) pairs of self-attention, in which every position sees the filled ones.
        """
        positions = float(self.positions) if positions is None else positions
        filled = positions if filled is None else filled
        pairs = positions * filled if pairs is None else pairs
        d, queries = self.d_z, self.slots + self.models * self.private
        join = self.patch * d * d if self.patch > 1 else 0
        # The last summand is the keys and values of the cross-attention.
        by_position = positions * (join + self.layers * 12 * d * d + 2 * d * d)
        by_query = queries * (2 + 8) * d * d  # query and output projections; the feed-forward layer
        return 6.0 * (by_position + by_query) + 12.0 * d * (self.layers * pairs + queries * filled)

    def adapter_flops(self, d_model: int) -> float:
        """Return the forward and backward FLOPs of one model's adapter, and of the word head on its latents."""
        d = self.d_z
        by_slot = 2 * d * d + 4 * d * d + 3 * d * d_model + self.word_parameters
        return 6.0 * (self.read * by_slot + 2 * d * d_model)

    def activation_bytes(self, bytes_per_value: int) -> float:
        """Return the activation memory of one text: per layer the residual stream, the norms (also in float32),
        attention and the MLP."""
        return float(self.positions * self.layers * self.d_z * (14 * bytes_per_value + 16))


NAME = "latent_prefix"
ROOM = 64  # default positions for anchor and answer behind the prefix
_SHAPE_KEYS = tuple(field.name for field in fields(DecoderShape))
_REQUIRED_KEYS = ("layers", "d_model", "heads", "d_ff", "vocab")
_KEY_TYPES = {"mlp": str, "skips": str, "tied": bool, "qk_norm": bool, "qkv_bias": bool}  # the others are integers
# T: positions of one model, A: answer tokens, S: positions of the encoder, N_wire: parameters of encoder and adapters.
# 4 instead of 6 per frozen parameter: the backward pass forms the gradient of the input, not of the weight.
FORMULA = "[4·Σ(N_blocks·T + N_head·A + 3·L·d·T²) + 6·N_wire·S + 12·L_e·d_z·S²] / data.seq_len"
FORMULA_CAUSAL = "[4·Σ(N_blocks·T + N_head·A + 1.5·L·d·T²) + 6·N_wire·S + 12·L_e·d_z·S²] / data.seq_len"
ASSUMES_LONGEST = "every text and every answer has the largest length"


def _shape(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{value!r} is not a mapping of {', '.join(_REQUIRED_KEYS)}.")
    if unknown := [key for key in value if key not in _SHAPE_KEYS]:
        hint = did_you_mean(unknown[0], _SHAPE_KEYS)
        known = ", ".join(_SHAPE_KEYS)
        raise ValueError(f"{unknown[0]!r} is not a key of a model's shape. The keys are {known}. {hint}".rstrip())
    if missing := [key for key in _REQUIRED_KEYS if key not in value]:
        raise ValueError(f"{missing[0]} is missing; a shape needs {', '.join(_REQUIRED_KEYS)}.")
    for key, item in value.items():
        if key in _KEY_TYPES:
            valid = isinstance(item, _KEY_TYPES[key])
        else:
            valid = isinstance(item, int) and not isinstance(item, bool) and item >= (key in _REQUIRED_KEYS)
        if not valid:
            raise ValueError(f"{key} cannot be {item!r}.")
    shape = {"kv_heads": value["heads"], "head_dim": value["d_model"] // value["heads"], **value}
    if min(shape["kv_heads"], shape["head_dim"]) < 1:
        raise ValueError("kv_heads and head_dim must be at least 1.")
    return shape


SHAPE = Rule(_shape, accepts={"type": "object", "required": list(_REQUIRED_KEYS)})


class OtherModel(Section):
    """A frozen model besides `model.base`."""

    base: Text  # the same forms as model.base
    quant: Annotated[str, one_of("none", "nf4")] = "none"
    quant_double: Flag = True
    shape: Annotated[dict[str, Any] | None, none_or(SHAPE)] = None  # lets `plan` work before the model is downloaded


def _others(value: Any) -> tuple[OtherModel, ...]:
    """Parse a list whose entries are names or {base, quant, quant_double, shape}."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is not a list of models: [{{base: ./other, quant: nf4}}].")
    models = []
    for item in value:
        try:
            entry = item if isinstance(item, OtherModel) else {"base": item} if isinstance(item, str) else item
            models.append(OtherModel.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            reason = str(first.get("ctx", {}).get("error") or first["msg"]).rstrip(".")
            key = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{item!r} is not {{base: PATH, quant: none or nf4}} ({key}: {reason}).") from None
    return tuple(models)


class Options(JobOptions):
    settable_after_training: ClassVar[tuple[str, ...]] = ("only",)
    path_keys: ClassVar[tuple[str, ...]] = ("others",)
    model_keys: ClassVar[tuple[str, ...]] = (
        "d_z",
        "slots",
        "private_slots",
        "layers",
        "heads",
        "patch",
        "bytes",
        "question_aware",
        "anchor",
    )

    others: Annotated[tuple[OtherModel, ...], BeforeValidator(_others)] = ()  # frozen models besides model.base
    only: MaybeWhole = None  # after training: open and use only this model (0 is model.base)
    d_z: Count = 256  # width of a latent and of the encoder
    slots: Count = 32  # latents that all models read
    private_slots: Whole = 0  # further latents for each model that only this model reads
    layers: Count = 6  # of the byte encoder
    heads: Count = 8
    patch: Count = 1  # bytes per position of the encoder
    focus: NonNegative = 1.0  # initial focus of a latent on its own stretch of the text; 0: on the whole text
    bytes: Count = 2048  # the longest text
    question_aware: Flag = True  # the encoder reads the question too; false: only the model does, after the prefix
    anchor: Text = "Answer: "  # text between prefix and answer
    first_tokens: Count = 4  # K: the tokens of an answer that CE_K and KD_K cover
    first_weight: NonNegative = 0.5  # coefficient of CE_first
    first_clamp: Positive = 8.0  # CE_first counts up to this many times where it is larger than the answer's mean CE
    k_weight: NonNegative = 0.5  # coefficient of CE_K
    kd_weight: NonNegative = 1.0  # coefficient of KD_K: KL to the same model's prediction when it reads the text
    tau: Positive = 2.0  # temperature of KD_K
    match_weight: NonNegative = 0.0  # coefficient of the distance to the teacher's last hidden states
    words_weight: NonNegative = 0.0  # coefficient of predicting the text's words from its latents
    tokens_weight: NonNegative = 0.0  # coefficient of predicting the text's tokens from its prefix, by their embeddings
    scale_weight: NonNegative = 0.05  # coefficient of (scale − 1)²
    fade_steps: MaybeCount = None  # steps over which kd, match, words and tokens fade linearly to 0


class LatentPrefixJob(Job):
    """Train a byte encoder and adapters, through frozen models, to replace a text by a few latents."""

    name = NAME
    Options: ClassVar[type[JobOptions]] = Options
    runtime = "redline.jobs.latent_prefix.objective:LatentPrefixRuntime"
    exports_code = True
    overlong_key = "data.overlong"
    answer_metric = "f1"  # under every condition
    answer_tokens = 32
    # A row is a few hundred positions for each of several frozen models, padded to one of a few lengths.
    whole_sequences = (
        "the frozen models of latent_prefix read short rows of many lengths, which a split would not speed up"
    )

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Default the tokenizer to bytes, and `data.seq_len` to the length of prefix, anchor and answer."""
        tokenizer = {"data.tokenizer": "bytes"}
        keys = ("slots", "private_slots")
        stated = [given.get(f"{NAME}.{key}", Options.model_fields[key].default) for key in keys]
        try:
            return {**tokenizer, "data.seq_len": sum(parse_count(count) for count in stated) + ROOM}
        except (ValueError, TypeError):
            return tokenizer  # validation of the keys themselves reports this

    def problems(self, recipe: Any) -> list[Problem]:
        model, data, options, problems = recipe.model, recipe.data, recipe.latent_prefix, []
        if model.base is None:
            what = "is missing: it names the first frozen model."
            problems.append(Problem("model.base", what, "Name a folder, a .gguf file or a hub id."))
        idle = {
            "model.lora": model.lora != type(model).model_fields["lora"].default,
            "model.dropout": model.dropout > 0,
        }
        problems += [
            Problem(key, f"has no effect with objective={NAME}.", "Remove it.") for key, on in idle.items() if on
        ]
        if data.tokenizer != "bytes":
            what = "cannot be set: the encoder reads bytes, and every frozen model has its own tokenizer."
            problems.append(Problem("data.tokenizer", what, "Leave it out."))
        for key, what in (
            ("pack", "does not apply: rows are padded to a few lengths instead."),
            ("stream", "works with text, not with rows of source and answer."),
        ):
            if getattr(data, key):
                problems.append(Problem(f"data.{key}", what, "Remove it."))
        if recipe.train.precision == "fp8":
            problems.append(Problem("train.precision", f"fp8 is not supported by {NAME}.", "Use bf16."))
        if options.d_z % options.heads or (options.d_z // options.heads) % 2:
            what = f"{options.heads} heads do not divide {NAME}.d_z {options.d_z} into heads of even width."
            problems.append(Problem(f"{NAME}.heads", what, "Use d_z 256 and 8 heads."))
        if options.bytes % options.patch:
            fix = f"Use {NAME}.bytes={-(-options.bytes // options.patch) * options.patch}."
            problems.append(
                Problem(f"{NAME}.patch", f"{options.patch} does not divide {NAME}.bytes {options.bytes}.", fix)
            )
        if data.seq_len < prefix_length(options) + 2:
            what = f"{data.seq_len} positions leave no room for an answer behind a prefix of {prefix_length(options)}."
            problems.append(Problem("data.seq_len", what, f"Use {prefix_length(options) + ROOM}, or leave it out."))
        if options.only is not None and options.only > len(options.others):
            known = ", ".join(str(number) for number in range(1 + len(options.others)))
            problems.append(Problem(f"{NAME}.only", f"there is no model {options.only}.", f"Use one of {known}."))
        fading = ("kd_weight", "match_weight", "words_weight", "tokens_weight")
        if options.fade_steps and not any(getattr(options, key) for key in fading):
            what = f"has no effect: {', '.join(fading[:-1])} and {fading[-1]} are 0."
            problems.append(Problem(f"{NAME}.fade_steps", what, "Remove it."))
        return problems

    def reads_rows(self, given: Mapping[str, Any]) -> bool:
        return True

    def can_answer(self, recipe: Any) -> bool:
        return True

    def costs(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> Costs:
        return Costs(recipe, rows, micro)


def prefix_length(options: Any) -> int:
    """Return the positions of one model's prefix: the shared slots and its private ones."""
    return int(options.slots + options.private_slots)


def needs_teacher(options: Any) -> bool:
    """Return whether a loss term uses the hidden states of the teacher."""
    return bool(options.kd_weight or options.match_weight)


@dataclass(frozen=True)
class ModelLengths:
    """What one frozen model reads per row, averaged over the rows, in batches padded to their longest answer."""

    length: float  # positions
    squared: float  # mean of the squared lengths, which is twice the pairs of a causal mask
    answer: float  # positions whose logits are formed
    first: float  # positions for which the teacher's logits are formed, too


@dataclass(frozen=True)
class EncoderLengths:
    """What the encoder reads per row, averaged over the rows, in batches padded to their longest text."""

    positions: float
    pairs: float  # (query, key) pairs of self-attention
    filled: float  # positions that hold a byte


class Costs(DecoderCosts):
    """Costs of the frozen decoders through which a prefix is trained, and of what produces the prefix."""

    # Appended to the source of the expected speed: it was measured on decoders with all weights trained.
    assumed = " of a decoder with all weights trained"

    def __init__(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> None:
        super().__init__(recipe, rows, micro)
        options = recipe.latent_prefix
        self.prefix = PrefixShape.of(options, 1 + len(options.others))
        self.answer = max(1, recipe.data.seq_len - prefix_length(options))
        self.named = self.prefix.read if options.tokens_weight else 0  # positions whose tokens are predicted

    def unmeasured(self, shape: DecoderShape) -> str:
        return f"with objective={NAME} the fused ones are not measured yet"

    def shapes(self, shape: DecoderShape) -> list[DecoderShape]:
        """Return the shapes of all frozen models; one without a known shape counts as the first."""
        return [shape, *(DecoderShape(**one.shape) if one.shape else shape for one in self.recipe.latent_prefix.others)]

    def parameters(self, shape: DecoderShape) -> dict[str, int]:
        shapes = self.shapes(shape)
        trained = self.prefix.parameters([one.d_model for one in shapes])
        total = sum(one.parameters for one in shapes) + trained
        return {"total": total, "trainable": trained, "matmul": sum(one.matmul_parameters for one in shapes) + trained}

    def flops(self, shape: DecoderShape, seq_len: int, checkpointing: str) -> FlopsPerToken:
        """Return the FLOPs per position of `data.seq_len`.

        A frozen matrix costs 4 instead of 6 per parameter: its input has a gradient, the matrix has none.
        """
        text, shapes = self._encoder_lengths(), self.shapes(shape)
        useful = executed = self.prefix.flops(text.positions, text.pairs, text.filled)
        recomputed, kd = 0.0, self.recipe.latent_prefix.kd_weight > 0
        for one, lengths in zip(shapes, self._model_lengths(len(shapes), seq_len), strict=True):
            blocks = one.layers * one.layer_matmul_parameters * lengths.length
            head = 4.0 * lengths.answer + (2.0 * lengths.first if kd else 0.0)  # the teacher's logits have no gradient
            head += 4.0 * self.named  # its embeddings are as large as the head
            matmuls = 4.0 * blocks + head * one.head_parameters + self.prefix.adapter_flops(one.d_model)
            pairs = one.layers * one.d_attention * lengths.squared
            useful += matmuls + 12.0 * pairs
            executed += matmuls + 6.0 * pairs
            again = one.layers * one.layer_recomputed_parameters * lengths.length
            recomputed += 2.0 * again + 2.0 * pairs if checkpointing == "full" else 0.0
        return FlopsPerToken(
            useful / seq_len,
            executed / seq_len,
            recomputed / seq_len,
            FORMULA,
            FORMULA_CAUSAL,
            "Σ(2·(N_blocks − N_down)·T + 2·L·d·T²) / data.seq_len" if recomputed else "",
            "" if self.rows else ASSUMES_LONGEST,
        )

    def _encoder_lengths(self) -> EncoderLengths:
        """Return the encoder's mean lengths.

        `rows["bytes"]` holds, for each padded length (shortest first), the number of rows of that length and their mean
        number of filled positions.
        """
        if not self.rows:
            longest = float(self.prefix.positions)
            return EncoderLengths(longest, longest**2, longest)
        buckets = [tuple(bucket) for bucket in self.rows["bytes"]]
        counts = [count for _, count, _ in buckets]
        positions = pairs = mean_filled = 0.0
        for own, (_, count, filled) in enumerate(buckets):
            share = count / sum(counts)
            for (length, _, _), chance in zip(buckets, longest_bucket_chances(counts, own, self.micro), strict=True):
                positions += share * chance * length
                pairs += share * chance * length * filled
            mean_filled += share * filled
        return EncoderLengths(positions, pairs, mean_filled)

    def _model_lengths(self, models: int, seq_len: int) -> list[ModelLengths]:
        """Return the mean lengths of each frozen model.

        `rows["answers"]` holds, for each model and each padded length of an answer, the number of rows of that length;
        `rows["before"]` holds, for each model, its positions besides prefix and answer (begin and anchor).
        """
        first = self.recipe.latent_prefix.first_tokens
        if not self.rows:
            longest = ModelLengths(seq_len, float(seq_len**2), self.answer, min(first, self.answer))
            return [longest] * models
        slots, models_lengths = prefix_length(self.recipe.latent_prefix), []
        for buckets, before in zip(self.rows["answers"], self.rows["before"], strict=True):
            counts = [count for _, count in buckets]
            chances = [0.0] * len(buckets)
            for own, count in enumerate(counts):
                for longest_bucket, chance in enumerate(longest_bucket_chances(counts, own, self.micro)):
                    chances[longest_bucket] += count / sum(counts) * chance
            lengths = [slots + before + answer - 1 for answer, _ in buckets]
            models_lengths.append(
                ModelLengths(
                    sum(p * length for p, length in zip(chances, lengths, strict=True)),
                    sum(p * length**2 for p, length in zip(chances, lengths, strict=True)),
                    sum(p * answer for p, (answer, _) in zip(chances, buckets, strict=True)),
                    sum(p * min(first, answer) for p, (answer, _) in zip(chances, buckets, strict=True)),
                )
            )
        return models_lengths

    def certain(self, shape: DecoderShape) -> tuple[float, float]:
        """Return the shares of the matmuls and of the attention that any data need.

        That is prefix and one answer token: the lengths of texts and answers are known only from the data.
        """
        seq_len, shapes = self.recipe.data.seq_len, self.shapes(shape)
        blocks = sum(one.layers * one.layer_matmul_parameters for one in shapes)
        attention = 6.0 * seq_len * sum(one.layers * one.d_attention for one in shapes)
        matmuls = self.flops(shape, seq_len, "none").executed - attention
        return 4.0 * blocks * (seq_len - self.answer + 1) / seq_len / matmuls, 0.0

    def units(self, shape: DecoderShape, precision: str, checkpointing: str, kernels: Kernels) -> Units:
        """Return what FSDP shards: the prefix model, as if it were one unit. Each rank holds the frozen models."""
        models = zip((self.recipe.model, *self.recipe.latent_prefix.others), self.shapes(shape), strict=True)
        frozen = sum(_frozen_bytes(one, options, 4 if precision == "fp32" else 2) for options, one in models)
        trained = self.prefix.parameters([one.d_model for one in self.shapes(shape)])
        return Units(0, (), (Sharded(int(trained), 1),), replicated=frozen)

    def memory(self, shape: DecoderShape, **how: Any) -> MemoryParts:
        value_bytes, kernels = how["bytes_per_value"], how["kernels"]
        rows = max(1, how["tokens"] // self.recipe.data.seq_len)
        shapes = self.shapes(shape)
        trained = self.prefix.parameters([one.d_model for one in shapes])
        decoders = [training_memory(one, **how) for one in shapes]
        models = [(self.recipe.model, shape), *zip(self.recipe.latent_prefix.others, shapes[1:], strict=True)]
        frozen = sum(_frozen_bytes(one, options, value_bytes) for options, one in models)
        return MemoryParts(
            weights=frozen + 4.0 * trained * (2 if how["ema"] else 1),
            gradients=4.0 * trained,
            optimizer=adapter_moments(trained, how["optimizer"]),
            activations=sum(one.activations for one in decoders) + rows * self.prefix.activation_bytes(value_bytes),
            # Logits, their logarithms, both at the teacher's temperature, and gradients, in float32; of the prefix,
            # logits, their logarithms and gradients.
            logits=float(sum(rows * one.vocab * 4 * (6 * self.answer + 3 * self.named) for one in shapes)),
            workspace=float(value_bytes * trained + (WORKSPACE if kernels.gpu else workspace(kernels, imported=True))),
        )

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work:
        shapes = self.shapes(shape)
        works = [
            decoder_work(one, seq_len, **how, passes=_passes(lengths, seq_len))
            for one, lengths in zip(shapes, self._model_lengths(len(shapes), seq_len), strict=True)
        ]
        flops = self.flops(shape, seq_len, how["checkpointing"])
        attention = sum(one.attention for one in works)
        trained = self.prefix.parameters([one.d_model for one in shapes])
        recomputes = how["checkpointing"] == "full"
        return replace(
            works[0],
            matmul=flops.executed - attention,
            attention=attention,
            recomputed=flops.recomputed - sum(one.attention_again for one in works) if recomputes else 0.0,
            attention_again=sum(one.attention_again for one in works),
            touched=sum(one.touched for one in works),
            moved_least=sum(one.moved_least for one in works),
            moved=sum(one.moved for one in works),
            update=works[0].update * trained / shape.parameters,  # every parameter costs the optimizer the same
            update_flops=0.0,
            gradient_bytes=4.0 * trained,
            kernels=sum(one.kernels for one in works),
        )


def longest_bucket_chances(counts: list[int], own: int, micro: int) -> list[float]:
    """Return, for each length bucket, the probability that it is the longest of a micro-batch.

    The micro-batch has `micro` rows, of which one is in bucket `own`. `counts` are the rows of all buckets, shortest
    first; the other rows are drawn from them without replacement.
    """
    total, up_to, previous, chances = sum(counts), 0, 0.0, []
    for bucket, count in enumerate(counts):
        up_to += count
        none_longer = 0.0  # the probability that no row is in a longer bucket than this one
        if bucket >= own:
            none_longer = 1.0
            for drawn in range(1, micro):
                none_longer *= max(0, up_to - drawn) / (total - drawn) if total >= micro else up_to / total
        chances.append(none_longer - previous)
        previous = none_longer
    return chances


def _passes(lengths: ModelLengths, seq_len: int) -> Passes:
    """Return the passes per position of data.seq_len.

    The traffic of logits is counted as if every position had some, because the measured speeds were calibrated so.
    """
    return Passes(lengths.length / seq_len, lengths.length / seq_len, lengths.squared / 2 / seq_len)


def _frozen_bytes(shape: DecoderShape, options: Any, value_bytes: int) -> float:
    matrices = shape.layers * shape.layer_matmul_parameters
    blocks = nf4_bytes(matrices, options.quant_double) if options.quant == "nf4" else float(value_bytes * matrices)
    return blocks + value_bytes * shape.embedding_parameters + 4.0 * shape.scalar_parameters
