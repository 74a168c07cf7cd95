"""latent_prefix: a text as a few vectors that frozen language models read in its place (LatentWire)."""

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
from redline.jobs.base import Job, JobOptions
from redline.jobs.decoder_costs import DecoderCosts
from redline.planning.flops import FlopsPerToken, Passes
from redline.planning.memory import (
    WORKSPACE,
    MemoryParts,
    adapter_moments,
    training_memory,
    workspace,
)
from redline.planning.shapes import DecoderShape, nf4_bytes
from redline.planning.speed import Work, decoder_work
from redline.units import parse_count

# ----------------------------------------------------------------------------------------------------
# What turns a text into latents and latents into prefixes, as numbers.


WORDS = 4096  # kinds that words are sorted into, by a hash
BYTES = 257  # and one for padding
GROUP = 32  # values that share a scale of two bytes, where they are sent as whole numbers
BITS = {"fp16": 16, "int8": 8, "int4": 4}  # of a value that is sent


def wire_bytes(values: int, kind: str) -> int:
    """Of so many values: their bits, and the scales."""
    scales = 0 if kind == "fp16" else -(-values // GROUP) * 2
    return -(-values * BITS[kind] // 8) + scales


@dataclass(frozen=True)
class WireShape:
    d_z: int
    layers: int
    heads: int
    patch: int
    bytes: int  # of a text, at most
    slots: int
    private: int
    models: int
    words: bool  # a head that tells the words of the text
    focus: float = 1.0  # of a query on its own stretch of the text, at first

    @classmethod
    def of(cls, options: Any, models: int) -> WireShape:
        """`options` are a recipe's `latent_prefix`."""
        names = ("d_z", "layers", "heads", "patch", "bytes", "slots", "focus")
        chosen = {name: getattr(options, name) for name in names}
        return cls(**chosen, private=options.private_slots, models=models, words=options.words_weight > 0)

    @property
    def read(self) -> int:
        """Latents that one model reads."""
        return self.slots + self.private

    @property
    def positions(self) -> int:
        """Of the encoder, for the longest text."""
        return self.bytes // self.patch

    @property
    def layer_parameters(self) -> int:
        return 12 * self.d_z**2 + 2 * self.d_z * 2

    def encoder_parameters(self) -> int:
        d = self.d_z
        embedded = BYTES * d + (self.patch * d * d if self.patch > 1 else 0)
        queries = (self.slots + self.models * self.private) * d
        pool = 12 * d * d + 2 * d * 3 + 2 + self.heads  # q, k, v, out and MLP; three norms; two gates; the focus
        return embedded + self.layers * self.layer_parameters + 2 * d + queries + pool + 2 * d + self.word_parameters

    @property
    def word_parameters(self) -> int:
        return self.d_z * WORDS if self.words else 0

    def adapter_parameters(self, d_model: int) -> int:
        d = self.d_z
        layers = 2 * d * d + 4 * d * d + 2 * d * d_model + d * d_model  # three of the MLP, and the skip
        return self.read * d + 2 * d + layers + 2 * d * d_model + 1  # slots, norm, FiLM, scale

    def parameters(self, widths: Sequence[int]) -> int:
        """All that learns, for models of these widths."""
        return self.encoder_parameters() + sum(self.adapter_parameters(width) for width in widths)

    def flops(self, positions: float | None = None, pairs: float | None = None, held: float | None = None) -> float:
        """Forward and backward, of the encoder and of the latents' look at it, for one text; the longest if not given.

        `positions` are the encoder's, padding included; `held` those of them that hold a byte; `pairs` the queries and
        keys that see each other: every position sees those that hold a byte.
        """
        positions = float(self.positions) if positions is None else positions
        held = positions if held is None else held
        pairs = positions * held if pairs is None else pairs
        d, queries = self.d_z, self.slots + self.models * self.private
        join = self.patch * d * d if self.patch > 1 else 0
        by_position = positions * (join + self.layers * 12 * d * d + 2 * d * d)  # the last: keys and values of the look
        by_query = queries * (2 + 8) * d * d  # query and output; the feed-forward layer
        return 6.0 * (by_position + by_query) + 12.0 * d * (self.layers * pairs + queries * held)

    def adapter_flops(self, d_model: int) -> float:
        """Forward and backward, of one model's prefix, and of telling the text's words from its latents."""
        d = self.d_z
        by_slot = 2 * d * d + 4 * d * d + 3 * d * d_model + self.word_parameters
        return 6.0 * (self.read * by_slot + 2 * d * d_model)

    def activation_bytes(self, wide: int) -> float:
        """Kept of one text: in each layer the stream, what is normed (in float32 too), attention and the MLP."""
        return float(self.positions * self.layers * self.d_z * (14 * wide + 16))


NAME = "latent_prefix"
ROOM = 64  # positions for anchor and answer, unless data.seq_len says otherwise
_SHAPE = tuple(field.name for field in fields(DecoderShape))
_NEEDED = ("layers", "d_model", "heads", "d_ff", "vocab")
_WORDS = {"mlp": str, "skips": str, "tied": bool, "qk_norm": bool, "qkv_bias": bool}
FORMULA = "[4·Σ(N_blocks·T + N_head·A + 3·L·d·T²) + 6·N_wire·S + 12·L_e·d_z·S²] / data.seq_len"
FORMULA_CAUSAL = "[4·Σ(N_blocks·T + N_head·A + 1.5·L·d·T²) + 6·N_wire·S + 12·L_e·d_z·S²] / data.seq_len"
LONGEST = "every text and every answer is as long as it may be"


def _shape(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{value!r} is not a mapping of {', '.join(_NEEDED)}.")
    if unknown := [key for key in value if key not in _SHAPE]:
        hint = did_you_mean(unknown[0], _SHAPE)
        raise ValueError(
            f"{unknown[0]!r} is no part of a model's shape; there are {', '.join(_SHAPE)}. {hint}".rstrip()
        )
    if missing := [key for key in _NEEDED if key not in value]:
        raise ValueError(f"{missing[0]} is missing; a shape has {', '.join(_NEEDED)}.")
    for key, given in value.items():
        if key in _WORDS:
            fine = isinstance(given, _WORDS[key])
        else:
            fine = isinstance(given, int) and not isinstance(given, bool) and given >= (key in _NEEDED)
        if not fine:
            raise ValueError(f"{key} is {given!r}.")
    whole = {"kv_heads": value["heads"], "head_dim": value["d_model"] // value["heads"], **value}
    if min(whole["kv_heads"], whole["head_dim"]) < 1:
        raise ValueError("kv_heads and head_dim must be at least 1.")
    return whole


SHAPE = Rule(_shape, accepts={"type": "object", "required": list(_NEEDED)})


class Other(Section):
    """A further frozen model, beside `model.base`."""

    base: Text  # as model.base
    quant: Annotated[str, one_of("none", "nf4")] = "none"
    quant_double: Flag = True
    shape: Annotated[dict[str, Any] | None, none_or(SHAPE)] = None  # so that it can be planned before it is fetched


def _others(value: Any) -> tuple[Other, ...]:
    """Names, or {base, quant, quant_double, shape}."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is not a list of models: [{{base: ./other, quant: nf4}}].")
    found = []
    for item in value:
        try:
            entry = item if isinstance(item, Other) else {"base": item} if isinstance(item, str) else item
            found.append(Other.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            said = str(first.get("ctx", {}).get("error") or first["msg"]).rstrip(".")
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{item!r} is not {{base: PATH, quant: none or nf4}} ({place}: {said}).") from None
    return tuple(found)


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
        "anchor",
    )

    others: Annotated[tuple[Other, ...], BeforeValidator(_others)] = ()  # frozen models beside model.base
    only: MaybeWhole = None  # afterwards: answer with this one alone (0 is model.base); nothing else is opened
    d_z: Count = 256  # of a latent, and of the encoder
    slots: Count = 32  # latents that all models read
    private_slots: Whole = 0  # and, behind them, so many that only one reads, for each
    layers: Count = 6  # of the byte encoder
    heads: Count = 8
    patch: Count = 1  # bytes that are one position of the encoder
    focus: NonNegative = 1.0  # of a latent on its own stretch of the text, at first; 0: it begins with all of it
    bytes: Count = 2048  # of a text, at most
    anchor: Text = "Answer: "  # between prefix and answer
    first_tokens: Count = 4  # K: of an answer, that CE_K and KD_K are about
    first_weight: NonNegative = 0.5  # of the first token's loss
    first_clamp: Positive = 8.0  # it counts up to so many times as much, where it is worse than the rest
    k_weight: NonNegative = 0.5  # of the first K tokens' loss
    kd_weight: NonNegative = 1.0  # of the distance to the same model's prediction from the text
    tau: Positive = 2.0  # temperature of that
    match_weight: NonNegative = 0.0  # of the distance to the same model's last states, where it read the text
    words_weight: NonNegative = 0.0  # of telling the text's words from its latents
    scale_weight: NonNegative = 0.05  # of (scale − 1)²
    fade_steps: MaybeCount = None  # kd, match and words fade to nothing over so many steps


class LatentPrefixJob(Job):
    name = NAME
    Options: ClassVar[type[JobOptions]] = Options
    runtime = "redline.jobs.latent_prefix.objective:LatentPrefixRuntime"
    overlong_key = "data.overlong"
    answer_metric = "f1"  # under every condition
    answer_tokens = 32

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Make a sequence as long as what a model reads: prefix, anchor and answer."""
        own = {"data.tokenizer": "bytes"}
        keys = ("slots", "private_slots")
        asked = [given.get(f"{NAME}.{key}", Options.model_fields[key].default) for key in keys]
        try:
            return {**own, "data.seq_len": sum(parse_count(count) for count in asked) + ROOM}
        except (ValueError, TypeError):
            return own  # validation reports what is wrong with them

    def problems(self, recipe: Any) -> list[Problem]:
        model, data, options, found = recipe.model, recipe.data, recipe.latent_prefix, []
        if model.base is None:
            what = "is missing: the first of the frozen models."
            found.append(Problem("model.base", what, "Name a folder, a .gguf file or a hub id."))
        idle = {
            "model.lora": model.lora != type(model).model_fields["lora"].default,
            "model.dropout": model.dropout > 0,
        }
        found += [
            Problem(key, f"does nothing with objective={NAME}.", "Take it away.") for key, on in idle.items() if on
        ]
        if data.tokenizer != "bytes":
            what = "the wire reads bytes, and every frozen model brings its own tokenizer."
            found.append(Problem("data.tokenizer", what, "Leave it out."))
        for key, what in (
            ("pack", "rows are padded to a few lengths instead."),
            ("stream", "is for text, not for rows."),
        ):
            if getattr(data, key):
                found.append(Problem(f"data.{key}", what, "Take it away."))
        if recipe.train.precision == "fp8":
            found.append(Problem("train.precision", f"fp8 is not for {NAME} yet.", "Use bf16."))
        if options.d_z % options.heads or (options.d_z // options.heads) % 2:
            what = f"{options.heads} heads do not divide {NAME}.d_z {options.d_z} into even widths."
            found.append(Problem(f"{NAME}.heads", what, "Use d_z 256 and 8 heads."))
        if options.bytes % options.patch:
            fix = f"Use {NAME}.bytes={-(-options.bytes // options.patch) * options.patch}."
            found.append(
                Problem(f"{NAME}.patch", f"{options.patch} does not divide {NAME}.bytes {options.bytes}.", fix)
            )
        if data.seq_len < slots_read(options) + 2:
            what = f"{data.seq_len} positions have no room behind a prefix of {slots_read(options)}."
            found.append(Problem("data.seq_len", what, f"Use {slots_read(options) + ROOM}, or leave it out."))
        if options.only is not None and options.only > len(options.others):
            there = ", ".join(str(number) for number in range(1 + len(options.others)))
            found.append(Problem(f"{NAME}.only", f"there is no model {options.only}.", f"There are {there}."))
        if options.fade_steps and not (options.kd_weight or options.match_weight or options.words_weight):
            found.append(Problem(f"{NAME}.fade_steps", "there is nothing to fade.", "Take it away."))
        return found

    def reads_rows(self, given: Mapping[str, Any]) -> bool:
        return True

    def can_answer(self, recipe: Any) -> bool:
        return True

    def costs(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> Costs:
        return Costs(recipe, rows, micro)


def slots_read(options: Any) -> int:
    """Positions of a prefix: what the shared slots and one model's own take."""
    return int(options.slots + options.private_slots)


def taught(options: Any) -> bool:
    """Whether a teacher's states are needed."""
    return bool(options.kd_weight or options.match_weight)


@dataclass(frozen=True)
class Read:
    """Means over the rows: what one frozen model reads of a row, in a batch that is padded to its longest answer."""

    length: float  # positions
    squared: float  # the mean of the squared lengths: twice the pairs of a causal mask
    answer: float  # positions whose logits are formed
    first: float  # those of them that a teacher's logits are formed for


@dataclass(frozen=True)
class Encoded:
    """Means over the rows: what the encoder reads of a row, in a batch that is padded to its longest text."""

    positions: float
    pairs: float
    held: float


class Costs(DecoderCosts):
    """Of frozen decoders that a prefix is trained through, and of what makes the prefix."""

    assumed = ", a decoder's that is trained whole among them"

    def __init__(self, recipe: Any, rows: Mapping[str, Any] | None = None, micro: int = 1) -> None:
        super().__init__(recipe, rows, micro)
        options = recipe.latent_prefix
        self.wire = WireShape.of(options, 1 + len(options.others))
        self.answer = max(1, recipe.data.seq_len - slots_read(options))

    def unmeasured(self, shape: DecoderShape) -> str:
        return f"with objective={NAME} the fused ones are not measured yet"

    def shapes(self, shape: DecoderShape) -> list[DecoderShape]:
        """Of all frozen models; one that is not known yet counts as the first."""
        return [shape, *(DecoderShape(**one.shape) if one.shape else shape for one in self.recipe.latent_prefix.others)]

    def parameters(self, shape: DecoderShape) -> dict[str, int]:
        every = self.shapes(shape)
        learnt = self.wire.parameters([one.d_model for one in every])
        total = sum(one.parameters for one in every) + learnt
        return {"total": total, "trainable": learnt, "matmul": sum(one.matmul_parameters for one in every) + learnt}

    def flops(self, shape: DecoderShape, seq_len: int, checkpointing: str) -> FlopsPerToken:
        """Of a position that a frozen model reads; it has a gradient of its input, and none of itself."""
        text, every = self._text(), self.shapes(shape)
        useful = executed = self.wire.flops(text.positions, text.pairs, text.held)
        again, kd = 0.0, self.recipe.latent_prefix.kd_weight > 0
        for one, read in zip(every, self._reads(len(every), seq_len), strict=True):
            blocks = one.layers * one.layer_matmul_parameters * read.length
            head = 4.0 * read.answer + (2.0 * read.first if kd else 0.0)  # a teacher's logits have no gradient
            matmuls = 4.0 * blocks + head * one.head_parameters + self.wire.adapter_flops(one.d_model)
            pairs = one.layers * one.d_attention * read.squared
            useful += matmuls + 12.0 * pairs
            executed += matmuls + 6.0 * pairs
            recomputed = one.layers * one.layer_recomputed_parameters * read.length
            again += 2.0 * recomputed + 2.0 * pairs if checkpointing == "full" else 0.0
        return FlopsPerToken(
            useful / seq_len,
            executed / seq_len,
            again / seq_len,
            FORMULA,
            FORMULA_CAUSAL,
            "Σ(2·(N_blocks − N_down)·T + 2·L·d·T²) / data.seq_len" if again else "",
            "" if self.rows else LONGEST,
        )

    def _text(self) -> Encoded:
        """`rows["bytes"]`: for each padded length, shortest first, how many rows it takes, and the mean positions of
        these that hold a byte."""
        if not self.rows:
            longest = float(self.wire.positions)
            return Encoded(longest, longest**2, longest)
        buckets = [tuple(bucket) for bucket in self.rows["bytes"]]
        counts = [count for _, count, _ in buckets]
        positions = pairs = held = 0.0
        for place, (_, count, filled) in enumerate(buckets):
            share = count / sum(counts)
            for (length, _, _), chance in zip(buckets, longest_beside(counts, place, self.micro), strict=True):
                positions += share * chance * length
                pairs += share * chance * length * filled
            held += share * filled
        return Encoded(positions, pairs, held)

    def _reads(self, models: int, seq_len: int) -> list[Read]:
        """`rows["answers"]`: for each model, for each padded length of an answer, how many rows it takes;
        `rows["before"]`: for each model, its positions before and after the prefix, without the answer."""
        first = self.recipe.latent_prefix.first_tokens
        if not self.rows:
            whole = Read(seq_len, float(seq_len**2), self.answer, min(first, self.answer))
            return [whole] * models
        slots, found = slots_read(self.recipe.latent_prefix), []
        for buckets, before in zip(self.rows["answers"], self.rows["before"], strict=True):
            counts = [count for _, count in buckets]
            chances = [0.0] * len(buckets)
            for place, count in enumerate(counts):
                for longest, chance in enumerate(longest_beside(counts, place, self.micro)):
                    chances[longest] += count / sum(counts) * chance
            lengths = [slots + before + answer - 1 for answer, _ in buckets]
            found.append(
                Read(
                    sum(p * length for p, length in zip(chances, lengths, strict=True)),
                    sum(p * length**2 for p, length in zip(chances, lengths, strict=True)),
                    sum(p * answer for p, (answer, _) in zip(chances, buckets, strict=True)),
                    sum(p * min(first, answer) for p, (answer, _) in zip(chances, buckets, strict=True)),
                )
            )
        return found

    def certain(self, shape: DecoderShape) -> tuple[float, float]:
        """Prefix and one token: how long texts and answers are, to which batches are cut, is for the data to say."""
        seq_len, every = self.recipe.data.seq_len, self.shapes(shape)
        blocks = sum(one.layers * one.layer_matmul_parameters for one in every)
        attention = 6.0 * seq_len * sum(one.layers * one.d_attention for one in every)
        matmuls = self.flops(shape, seq_len, "none").executed - attention
        return 4.0 * blocks * (seq_len - self.answer + 1) / seq_len / matmuls, 0.0

    def memory(self, shape: DecoderShape, **how: Any) -> MemoryParts:
        wide, kernels = how["bytes_per_value"], how["kernels"]
        rows = max(1, how["tokens"] // self.recipe.data.seq_len)
        every = self.shapes(shape)
        learnt = self.wire.parameters([one.d_model for one in every])
        wholes = [training_memory(one, **how) for one in every]
        quants = [(self.recipe.model, shape), *zip(self.recipe.latent_prefix.others, every[1:], strict=True)]
        return MemoryParts(
            weights=sum(_frozen_bytes(one, of, wide) for of, one in quants) + 4.0 * learnt * (2 if how["ema"] else 1),
            gradients=4.0 * learnt,
            optimizer=adapter_moments(learnt, how["optimizer"]),
            activations=sum(whole.activations for whole in wholes) + rows * self.wire.activation_bytes(wide),
            # logits, their logarithms, both at the teacher's temperature, and gradients, in float32
            logits=float(sum(rows * self.answer * one.vocab * 4 * 6 for one in every)),
            workspace=float(wide * learnt + (WORKSPACE if kernels.gpu else workspace(kernels, imported=True))),
        )

    def work(self, shape: DecoderShape, seq_len: int, **how: Any) -> Work:
        every = self.shapes(shape)
        reads = self._reads(len(every), seq_len)
        works = [
            decoder_work(one, seq_len, **how, passes=_passes(read, seq_len))
            for one, read in zip(every, reads, strict=True)
        ]
        flops = self.flops(shape, seq_len, how["checkpointing"])
        attention = sum(one.attention for one in works)
        learnt = self.wire.parameters([one.d_model for one in every])
        again = how["checkpointing"] == "full"
        return replace(
            works[0],
            matmul=flops.executed - attention,
            attention=attention,
            recomputed=flops.recomputed - sum(one.attention_again for one in works) if again else 0.0,
            attention_again=sum(one.attention_again for one in works),
            touched=sum(one.touched for one in works),
            moved_least=sum(one.moved_least for one in works),
            moved=sum(one.moved for one in works),
            update=works[0].update * learnt / shape.parameters,  # every parameter of an optimizer costs alike
            update_flops=0.0,
            gradient_bytes=4.0 * learnt,
            kernels=sum(one.kernels for one in works),
        )


def longest_beside(counts: list[int], place: int, micro: int) -> list[float]:
    """For a row of bucket `place`: how likely each bucket is that of the longest of `micro` rows, itself among them.

    `counts` are the rows of all buckets, shortest first; the others are drawn from them without replacement.
    """
    total, up_to, below, found = sum(counts), 0, 0.0, []
    for bucket, count in enumerate(counts):
        up_to += count
        within = 0.0
        if bucket >= place:
            within = 1.0
            for drawn in range(1, micro):
                within *= max(0, up_to - drawn) / (total - drawn) if total >= micro else up_to / total
        found.append(within - below)
        below = within
    return found


def _passes(read: Read, seq_len: int) -> Passes:
    """Per position of data.seq_len. Logits are moved as if every position had some: speeds are calibrated so."""
    return Passes(read.length / seq_len, read.length / seq_len, read.squared / 2 / seq_len)


def _frozen_bytes(shape: DecoderShape, of: Any, wide: int) -> float:
    matrices = shape.layers * shape.layer_matmul_parameters
    blocks = nf4_bytes(matrices, of.quant_double) if of.quant == "nf4" else float(wide * matrices)
    return blocks + wide * shape.embedding_parameters + 4.0 * shape.scalar_parameters
