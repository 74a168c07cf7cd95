"""What jobs whose decoder may train in fp8 have in common: which matmuls, their scales, and what of them is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redline.kernels.float8_choice import Float8Choice, Shapes, choose
from redline.models.float8 import LINEARS
from redline.objectives.base import Batch
from redline.objectives.decoder import BEGUN, DecoderObjective
from redline.recipe.resolve import Resolved

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

    def rehearsals(self, micro: int) -> list[tuple[int, Batch]]:
        """fp8 looks at its tensors in bf16 before it first scales them; a few sequences show enough, and fit."""
        scales, found = self.model.scales, super().rehearsals(micro)
        if scales is None or scales.known:
            return found
        return [(few := min(micro, _LOOKED_AT), self.worst_batch(few)), *found]

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
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
