"""What jobs that train the one decoder have in common: its attention, its loss, and how a batch is laid out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from redline.data.packing import cu_seqlens
from redline.errors import UserError
from redline.jobs.objective import Batch, Objective, ParamGroup, Term
from redline.kernels.attention import Attention, Bound, Selection, select
from redline.kernels.cross_entropy import IGNORE, linear_cross_entropy
from redline.kernels.float8_choice import Float8Choice, Shapes, choose
from redline.kernels.masks import MaskSpec
from redline.kernels.matmul import DTYPES
from redline.kernels.softmax_loss import compile_loss
from redline.models.adapters import LoraLinear
from redline.models.decoder import Decoder
from redline.models.float8 import LINEARS
from redline.models.layers import Linear
from redline.recipe.resolve import Resolved

# ----------------------------------------------------------------------------------------------------
# What each parameter of a decoder is to the optimizer.


def role_groups(model: nn.Module) -> list[ParamGroup]:
    """Hidden matrices, embeddings, the head, and everything with one dimension."""
    found: dict[str, dict[str, nn.Parameter]] = {}
    splits: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                full = f"{path}.{name}" if path else name
                found.setdefault(_role(path, module, parameter), {})[full] = parameter
                splits[full] = _splits(module, parameter)
    return [ParamGroup(role, members, {n: splits[n] for n in members}) for role, members in found.items()]


def _splits(module: nn.Module, parameter: nn.Parameter) -> tuple[int, ...]:
    """Rows of each of the matrices that lie one below the other in it."""
    if isinstance(module, LoraLinear):
        return (module.r,) * len(module.adapters)
    return module.splits if isinstance(module, Linear) else (parameter.shape[0],)


def _role(path: str, module: nn.Module, parameter: nn.Parameter) -> str:
    if parameter.dim() < 2:
        return "scalar"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "head" if path == "head" else "matrix"


BEGUN = "as chosen when the run began"


class DecoderObjective(Objective):
    model: Decoder
    device: torch.device

    def __init__(self, resolved: Resolved) -> None:
        self.resolved, self.recipe = resolved, resolved.recipe
        self.selection: Selection | None = None
        self.seq_len = self.recipe.data.seq_len
        self.mask = MaskSpec(causal=True, documents=self.recipe.data.pack)
        self.dtype = DTYPES[self.recipe.train.precision]

    # --- building

    def decoder(self) -> Decoder:
        """Without weights yet."""
        options = self.recipe.model
        if options.kernels == "fused" and self.device.type == "cuda" and find_spec("triton") is None:
            fix = "Install triton, or use model.kernels=torch."
            raise UserError("fused kernels need the package triton.", where="model.kernels", fix=fix)
        self.selection = self.selection or self._select_attention()
        grouped = self.resolved.shape.kv_heads != self.resolved.shape.heads
        self.attention = Attention(self.selection.backend, self.mask, self.device.type, grouped=grouped)
        return Decoder(
            self.resolved.shape,
            attention=self.attention,
            rope_theta=options.rope_theta,
            rope_scaling=options.rope_scaling,
            eps=options.norm_eps,
            dropout=options.dropout,
            softcap=options.softcap,
            dtype=self.dtype,
            checkpointing=self.recipe.train.grad_checkpointing,
            kernels=options.kernels,
        )

    def _select_attention(self) -> Selection:
        """Measured once in a run's life: a resumed run computes with what it began with."""
        asked, train, shape = self.recipe.model.attention, self.recipe.train, self.resolved.shape
        if train.deterministic and asked == "auto":
            return Selection("flash", "its backward can be deterministic")
        at = (self.resolved.batch.micro, shape.heads, self.read_length, shape.head_dim)
        return select(asked, self.mask, device=self.device.type, dtype=self.dtype, shape=at)

    @property
    def read_length(self) -> int:
        """Positions that the model reads for one sequence."""
        return self.seq_len

    @property
    def compiled(self) -> bool:
        return bool(self.recipe.train.compile) and self.recipe.model.kernels != "fused"

    @property
    def replayable(self) -> bool:
        """flex makes its mask anew for each batch, and looks at it."""
        return self.recipe.model.dropout == 0 and self.attention.backend != "flex"

    @property
    def recorded(self) -> bool:
        """Whether all batches must be laid out alike."""
        return self.recipe.train.graph and self.replayable and self.device.type == "cuda"

    def choices(self) -> list[tuple[str, Any, str]]:
        assert self.selection is not None
        return [("model.attention", self.selection.backend, self.selection.reason)]

    def param_groups(self) -> list[ParamGroup]:
        return role_groups(self.model)

    def compile(self) -> None:
        if self.device.type == "cuda" and self.recipe.model.kernels != "fused":
            compile_loss()  # on a CPU the in-place version is as fast
        self.model.compile_blocks(self.recipe.train.compile_mode)

    # --- a batch

    def laid_out(self, inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray | None) -> Batch:
        """With what the attention needs to keep documents apart, where it does and there is more than one in a row."""
        batch = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        if self.mask.documents:
            assert documents is not None
            if self.attention.varlen and not self.recorded and (documents == documents[:, :1]).all():
                return batch  # a recorded step would go on with the documents it was recorded with
            batch["documents"] = torch.from_numpy(documents)
            if self.attention.varlen:
                batch |= self._borders(documents)
        return batch

    def _borders(self, documents: np.ndarray) -> Batch:
        """A kernel is launched for as many documents as this says, each as long as the longest: empty ones cost."""
        borders = cu_seqlens(documents)
        room = max(256, documents.size // 32) if self.recorded else 64
        padded = np.full(max(room, _power_of_two(len(borders))), documents.size, dtype=borders.dtype)
        padded[: len(borders)] = borders
        batch = {"borders": torch.from_numpy(padded)}
        if self.recorded or self.compiled:
            return batch  # each other length would be recorded, or compiled for
        longest = _power_of_two(int(np.diff(borders).max()))
        return {**batch, "longest": torch.tensor(min(longest, documents.shape[1]))}

    def weights(self, batch: Batch) -> dict[str, float]:
        return {"tokens": float((batch["targets"] != IGNORE).sum())}

    def loss(self, batch: Batch) -> dict[str, Term]:
        hidden = self.model(batch["inputs"], self._bind(batch)).flatten(0, 1)
        if "places" in batch:
            hidden = hidden.index_select(0, batch["places"])
        total = self.cross_entropy(hidden, batch["targets"].flatten())
        return {"cross_entropy": Term(total, "tokens")}

    def cross_entropy(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        fused = self.recipe.model.kernels == "fused"
        return linear_cross_entropy(
            hidden_ND, self.model.head_weight, targets_N, softcap=self.model.softcap, fused=fused
        )

    def _bind(self, batch: Batch) -> Bound:
        longest = int(batch["longest"]) if "longest" in batch else None
        return self.attention.bind(batch["inputs"].shape[1], batch.get("documents"), batch.get("borders"), longest)

    def uncompiled(self) -> AbstractContextManager[Any]:
        """Evaluation is too short to compile a forward of its own for — except flex and split, which need it."""
        if not self.compiled or self.attention.backend in ("flex", "split"):
            return nullcontext()  # seconds of imports are saved where nothing is compiled
        return torch.compiler.set_stance("force_eager")

    # --- what survives a restart

    def state(self) -> dict[str, Any]:
        return {"attention": self.selection.backend} if self.selection else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self.selection = Selection(state["attention"], BEGUN)


def scored_alone(batch: Batch) -> Batch:
    """With the targets that are learnt, and their places: no logits are made of the others.

    Their number is rounded up to a quarter of the batch, so that a compiler meets few sizes.
    """
    targets = batch["targets"].numpy().ravel()  # by numpy: a loader's thread has no pool of torch's in a forked process
    places = np.flatnonzero(targets != IGNORE)
    size = _quarters(len(places), len(targets))
    if size >= len(targets):
        return batch
    learnt, rows = np.full(size, IGNORE, dtype=targets.dtype), np.zeros(size, dtype=np.int64)
    learnt[: len(places)], rows[: len(places)] = targets[places], places
    return {**batch, "targets": torch.from_numpy(learnt), "places": torch.from_numpy(rows)}


def _quarters(count: int, most: int) -> int:
    step = max(1, most // 4)
    return max(1, -(-count // step)) * step


def _power_of_two(least: int) -> int:
    """So that a compiled step meets few sizes."""
    return 1 << (least - 1).bit_length()


# ----------------------------------------------------------------------------------------------------
# What jobs whose decoder may train in fp8 have in common: which matmuls, their scales, and what of them is kept.


_LOOKED_AT = 8  # sequences


class InFloat8(DecoderObjective):
    base_learns = True

    def __init__(self, resolved: Resolved) -> None:
        super().__init__(resolved)
        self.float8: Float8Choice | None = None
        self.magnitudes: list[list[float]] | None = None  # of the fp8 tensors, from a checkpoint

    def use_float8(self) -> None:
        """Where the recipe wants it. Which matmuls is measured once in a run's life, too."""
        if self.recipe.train.precision != "fp8":
            return
        if self.float8 is None:
            fused = self.recipe.model.kernels == "fused"
            self.float8 = choose(self.recipe.train.fp8, self.matmuls(), fused=fused, learns=self.base_learns)
        if in_blocks := [name for name in self.float8.linears if name in LINEARS]:
            self.model.use_float8(in_blocks, self.device)
        if self.model.scales is not None:
            self.model.scales.load(self.magnitudes)

    def matmuls(self) -> Shapes:
        """Tokens and widths of everything that fp8 may serve."""
        shape, tokens = self.resolved.shape, self.resolved.batch.micro * self.read_length
        return {
            "qkv": (tokens, shape.d_model, shape.d_qkv),
            "out": (tokens, shape.d_attention, shape.d_model),
            "up": (tokens, shape.d_model, shape.d_up),
            "down": (tokens, shape.d_ff, shape.d_model),
        }

    def warmup_batches(self, micro: int) -> list[tuple[int, Batch]]:
        """fp8 looks at its tensors in bf16 before it first scales them; a few sequences show enough, and fit."""
        scales, found = self.model.scales, super().warmup_batches(micro)
        if scales is None or scales.known:
            return found
        return [(few := min(micro, _LOOKED_AT), self.worst_batch(few)), *found]

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        scales = self.model.scales
        before = None if scales is None else scales.state()
        try:
            yield
        finally:
            if scales is not None and before is not None:
                scales.load(before)

    def choices(self) -> list[tuple[str, Any, str]]:
        found = super().choices()
        if self.float8 is not None:
            found.append(("train.fp8", self.float8.text, self.float8.reason))
        return found

    def warnings(self) -> list[str]:
        found, choice = super().warnings(), self.float8
        if choice is not None and not choice.linears:
            return [*found, f"train.precision=fp8 is off, the run trains in bf16: {choice.reason}"]
        if choice is not None and choice.failed:
            which = ", ".join(choice.failed)
            return [*found, f"fp8 failed in the trial of {which}, which stays in bf16: {choice.reason}"]
        return found

    def state(self) -> dict[str, Any]:
        found = super().state()
        if self.float8 is not None:
            found |= {"fp8": [self.float8.backend, list(self.float8.linears)]}
            found |= {"fp8_magnitudes": self.model.scales.state() if self.model.scales else None}
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if "fp8" in state:
            backend, linears = state["fp8"]
            self.float8, self.magnitudes = Float8Choice(backend, tuple(linears), BEGUN), state["fp8_magnitudes"]
