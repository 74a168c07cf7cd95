"""Who may see whom: one description, with the dense form that tests take as the truth."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from redline.planning.layout import Layout


@dataclass(frozen=True)
class MaskSpec:
    """Causal, and optionally within the same document only; or block diffusion (arXiv 2503.09573).

    There a row is a noisy copy of a sequence and a clean one behind it, and `noisy` and `clean` give the block of each
    of their positions. A noisy block sees itself and the clean blocks before it, a clean block the clean ones up to
    itself.
    """

    causal: bool = True  # says nothing where there are blocks
    documents: bool = False
    noisy: tuple[int, ...] = ()
    clean: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert not (self.documents and self.blocks), "blocks are of one document"
        assert all(a <= b for copy in (self.noisy, self.clean) for a, b in pairwise(copy)), "blocks follow one another"

    @classmethod
    def of_layout(cls, layout: Layout) -> MaskSpec:
        if not layout.clean:
            return cls(causal=False)  # one block: all is noisy and sees all
        noisy, clean = (tuple(layout.block_of[place] for place in copy) for copy in (layout.noisy, layout.clean))
        return cls(noisy=noisy, clean=clean)

    @property
    def blocks(self) -> bool:
        return bool(self.noisy or self.clean)

    @property
    def read(self) -> int:
        """Positions of a row of both copies."""
        return len(self.noisy) + len(self.clean)

    @property
    def own_blocks(self) -> list[tuple[int, int]]:
        """How many noisy blocks of which size follow one another."""
        sizes = [len(list(block)) for _, block in groupby(self.noisy)]
        return [(len(list(equal)), size) for size, equal in groupby(sizes)]

    def __str__(self) -> str:
        """Short enough for a name, however many positions there are."""
        if not self.blocks:
            return f"MaskSpec(causal={self.causal}, documents={self.documents})"
        digest = hashlib.sha256(repr((self.noisy, self.clean)).encode()).hexdigest()[:12]
        return f"MaskSpec({len(self.noisy)} noisy, {len(self.clean)} clean, {digest})"

    def tables(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Of each position read its block, and whether it is noisy: integers [T]."""
        noisy = (1,) * len(self.noisy) + (0,) * len(self.clean)
        block_T, noisy_T = torch.tensor(((*self.noisy, *self.clean), noisy), dtype=torch.int32, device=device)
        return block_T, noisy_T

    def allows(self, query: Tensor, key: Tensor, same_document: Tensor | None) -> Tensor:
        """Whether position `query` sees position `key`; broadcasts."""
        if self.blocks:
            return sees_block(*self.tables(query.device), query, key)
        seen = query >= key if self.causal else torch.ones_like(query >= key)
        return seen if same_document is None else seen & same_document

    def dense(self, length: int, documents_BT: Tensor | None = None, device: torch.device | None = None) -> Tensor:
        """Boolean [B or 1, 1, T, T]: True where the query (row) sees the key (column)."""
        assert not self.blocks or length == self.read, "a row is both copies"
        if self.documents:
            assert documents_BT is not None, "a document mask needs document ids"
            device = documents_BT.device
        position = torch.arange(length, device=device)
        same = None
        if self.documents and documents_BT is not None:
            same = documents_BT[:, :, None] == documents_BT[:, None, :]
        allowed = self.allows(position[:, None], position[None, :], same)
        return allowed[:, None] if allowed.dim() == 3 else allowed[None, None]


def sees_block(block_T: Tensor, noisy_T: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The rule of block diffusion."""
    own = (block_T[query] == block_T[key]) & (noisy_T[query] == 1)
    earlier = block_T[query] - noisy_T[query] >= block_T[key]  # for a clean query its own block too
    return torch.where(noisy_T[key] == 1, own, earlier)
