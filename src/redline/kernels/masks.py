"""The description of an attention mask, with its dense form, which the tests take as the definition."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from redline.planning.layout import Layout


@dataclass(frozen=True)
class MaskSpec:
    """A causal mask, optionally within documents only; or the mask of block diffusion (arXiv 2503.09573).

    In block diffusion a row is a noisy copy of a sequence followed by a clean copy; `noisy` and `clean` hold the block
    number of each of their positions. A noisy block sees itself and the clean blocks before it; a clean block sees the
    clean blocks up to itself.
    """

    causal: bool = True  # ignored in block diffusion
    documents: bool = False
    noisy: tuple[int, ...] = ()
    clean: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert not (self.documents and self.blocks), "block diffusion has one document per row"
        assert all(a <= b for copy in (self.noisy, self.clean) for a, b in pairwise(copy)), (
            "block numbers must not decrease"
        )

    @classmethod
    def of_layout(cls, layout: Layout) -> MaskSpec:
        """Return the mask of a diffusion job's layout."""
        if not layout.clean:
            return cls(causal=False)  # a single noisy block, in which every position sees every other
        noisy, clean = (tuple(layout.block_of[place] for place in copy) for copy in (layout.noisy, layout.clean))
        return cls(noisy=noisy, clean=clean)

    @property
    def blocks(self) -> bool:
        """Whether this is a mask of block diffusion."""
        return bool(self.noisy or self.clean)

    @property
    def length(self) -> int:
        """The positions of a row of block diffusion, both copies together."""
        return len(self.noisy) + len(self.clean)

    @property
    def own_blocks(self) -> list[tuple[int, int]]:
        """The noisy blocks as runs of equal size: (number of blocks, size of each)."""
        sizes = [len(list(block)) for _, block in groupby(self.noisy)]
        return [(len(list(equal)), size) for size, equal in groupby(sizes)]

    def __str__(self) -> str:
        """Return a description that is short enough for a cache key, however many positions there are."""
        if not self.blocks:
            return f"MaskSpec(causal={self.causal}, documents={self.documents})"
        digest = hashlib.sha256(repr((self.noisy, self.clean)).encode()).hexdigest()[:12]
        return f"MaskSpec({len(self.noisy)} noisy, {len(self.clean)} clean, {digest})"

    def tables(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Return for each position its block number, and whether it is noisy: integers [T]."""
        noisy = (1,) * len(self.noisy) + (0,) * len(self.clean)
        block_T, noisy_T = torch.tensor(((*self.noisy, *self.clean), noisy), dtype=torch.int32, device=device)
        return block_T, noisy_T

    def allows(self, query: Tensor, key: Tensor, same_document: Tensor | None) -> Tensor:
        """Return whether position `query` sees position `key`; the arguments broadcast."""
        if self.blocks:
            return sees_block(*self.tables(query.device), query, key)
        seen = query >= key if self.causal else torch.ones_like(query >= key)
        return seen if same_document is None else seen & same_document

    def dense(self, length: int, documents_BT: Tensor | None = None, device: torch.device | None = None) -> Tensor:
        """Return a boolean mask [B or 1, 1, T, T], True where the query (row) sees the key (column)."""
        assert not self.blocks or length == self.length, "a row holds a noisy and a clean copy"
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
    """Return whether `query` sees `key` in block diffusion."""
    own = (block_T[query] == block_T[key]) & (noisy_T[query] == 1)
    earlier = block_T[query] - noisy_T[query] >= block_T[key]  # noisy is 1 or 0: a clean query also sees its own block
    return torch.where(noisy_T[key] == 1, own, earlier)
