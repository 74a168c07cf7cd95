"""Who may see whom: one description, with the dense form that tests take as the truth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskSpec:
    """Causal, and optionally within the same document only."""

    causal: bool = True
    documents: bool = False

    def allows(self, query: Tensor, key: Tensor, same_document: Tensor | None) -> Tensor:
        """Whether position `query` sees position `key`; broadcasts."""
        seen = query >= key if self.causal else torch.ones_like(query >= key)
        return seen if same_document is None else seen & same_document

    def dense(self, length: int, documents_BT: Tensor | None = None, device: torch.device | None = None) -> Tensor:
        """Boolean [B or 1, 1, T, T]: True where the query (row) sees the key (column)."""
        if self.documents:
            assert documents_BT is not None, "a document mask needs document ids"
            device = documents_BT.device
        position = torch.arange(length, device=device)
        same = None
        if self.documents and documents_BT is not None:
            same = documents_BT[:, :, None] == documents_BT[:, None, :]
        allowed = self.allows(position[:, None], position[None, :], same)
        return allowed[:, None] if allowed.dim() == 3 else allowed[None, None]
