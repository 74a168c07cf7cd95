"""The decoder as numbers: what is built follows from these, and so do all counts."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_MULTIPLE = 64  # tensor cores want it, and 50257 → 50304


def padded_vocab(vocab: int) -> int:
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True)
class DecoderShape:
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    mlp: str = "swiglu"
    tied: bool = True
    qk_norm: bool = False

    @property
    def d_attention(self) -> int:
        return self.heads * self.head_dim

    @property
    def d_qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def d_up(self) -> int:
        """Width of the first feed-forward matrix: gate and up are stored merged."""
        return 2 * self.d_ff if self.mlp == "swiglu" else self.d_ff

    @property
    def layer_matmul_parameters(self) -> int:
        attention = self.d_model * self.d_qkv + self.d_attention * self.d_model
        return attention + self.d_model * self.d_up + self.d_ff * self.d_model

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.d_model

    @property
    def matmul_parameters(self) -> int:
        """Parameters that multiply a token: the head counts (tied or not), the looked-up embedding does not."""
        return self.layers * self.layer_matmul_parameters + self.head_parameters

    @property
    def norm_parameters(self) -> int:
        per_layer = 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)
        return self.layers * per_layer + self.d_model

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.d_model * (1 if self.tied else 2)

    def not_fused(self, *, dropout: float, checkpointing: str) -> str:
        """Why the hand-written blocks cannot compute such a model; empty when they can."""
        reasons = {
            "model.dropout is on": dropout > 0,
            "train.grad_checkpointing is on": checkpointing != "none",
        }
        return ", ".join(reason for reason, holds in reasons.items() if holds)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_matmul_parameters + self.embedding_parameters + self.norm_parameters


# name → (layers, d_model, heads, d_ff); d_ff is about 8/3·d, a multiple of 64
SIZES: dict[str, tuple[int, int, int, int]] = {
    "1m": (4, 128, 4, 384),
    "2m": (4, 192, 4, 512),
    "5m": (6, 256, 4, 704),
    "15m": (8, 384, 6, 1024),
    "40m": (12, 512, 8, 1408),
    "125m": (12, 768, 12, 2048),
    "350m": (24, 1024, 16, 2688),
    "760m": (24, 1536, 16, 4096),
    "1.3b": (24, 2048, 16, 5504),
}
