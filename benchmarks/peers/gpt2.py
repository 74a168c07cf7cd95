"""GPT-2 as nanoGPT trains it: the model of the baseline that `python -m benchmarks time-to-loss` runs against.

It has learned positions, LayerNorm and matrices without bias, GELU, a tied head and no dropout. It reads redline's own
batches and validation windows, so that every arm sees the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.jobs.causal_lm.objective import CausalLM
from redline.jobs.objective import Batch, Term
from redline.kernels.cross_entropy import IGNORE

STD = 0.02


@dataclass(frozen=True)
class Gpt2Shape:
    layers: int
    heads: int
    width: int
    vocab: int
    length: int  # of a sequence


MEDIUM = Gpt2Shape(24, 16, 1024, 50304, 1024)


class Gpt2Block(nn.Module):
    def __init__(self, shape: Gpt2Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)  # [B, heads, 3, T, width of a head]
        q, k, v = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gpt2(nn.Module):
    def __init__(self, shape: Gpt2Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Gpt2Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropies, from the logits of all tokens at once."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Initialise by N(0, 0.02); projections into the residual stream are divided by √(2·layers), as in GPT-2."""
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                weight.fill_(1.0)
                continue
            added = name.endswith(("out.weight", "down.weight"))
            std = STD / math.sqrt(2 * len(self.blocks)) if added else STD
            weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=generator))

    def description(self) -> dict[str, Any]:
        """Return the shape as it is, for the lock: redline's recipe has no words for parts of it."""
        shape = self.shape
        return {
            "architecture": "gpt2",
            "layers": shape.layers,
            "d_model": shape.width,
            "heads": shape.heads,
            "kv_heads": shape.heads,
            "head_dim": shape.width // shape.heads,
            "d_ff": 4 * shape.width,
            "vocab": shape.vocab,
            "mlp": "gelu",
            "norm": "layernorm",
            "positions": "learned",
            "bias": False,
            "dropout": 0.0,
            "tied": True,
            "qk_norm": False,
            "init": "gpt2",
            "embedding_std": STD,
            "kernels": "torch",
            "attention": "sdpa",
        }

    def counts(self) -> dict[str, int]:
        """Count parameters as the plan does: with the head, without positions and norms."""
        total = sum(weight.numel() for weight in self.parameters())
        norms = sum(weight.numel() for weight in self.parameters() if weight.dim() < 2)
        return {"total": total, "trainable": total, "matmul": total - norms - self.positions.weight.numel()}


def adamw(
    model: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.AdamW:
    """Return fused AdamW, with decay on tensors of two dimensions or more."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    rest = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


class Gpt2Job(CausalLM):
    """redline's data and evaluation with GPT-2 as the model."""

    model: Any

    def build(self, device: torch.device) -> None:
        model, self.device = self.recipe.model, device
        shape = Gpt2Shape(
            int(model.layers), int(model.heads), int(model.d_model), self.resolved.shape.vocab, self.seq_len
        )
        self.model = Gpt2(shape)
        self.model.initialise(torch.Generator().manual_seed(self.recipe.train.seed))
        self.model.to(device)
        self.forward: Callable[[Tensor, Tensor], Tensor] = self.model

    def compile(self) -> None:
        self.forward = torch.compile(self.model, dynamic=False)

    def loss(self, batch: Batch) -> dict[str, Term]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            total = self.forward(batch["inputs"], batch["targets"].contiguous())
        return {"cross_entropy": Term(total, "tokens")}

    def uncompiled(self) -> AbstractContextManager[Any]:
        return torch.compiler.set_stance("force_eager")
