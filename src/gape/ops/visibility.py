"""Who may see whom: causality by position, packed documents and masks, kept unexpanded until needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """The pairs (query, key) that attention may use, as described by the caller.

    Without positions the order is that of the tensors: keys 0 … n_k − 1, queries the last n_q of those.
    That case is known without looking at any data, so causality there needs no mask tensor.

    Attributes:
        n_q, n_k: numbers of queries and keys.
        device: where masks are built.
        q_positions, k_positions: int64, (N,) or (B, N); both None in index order, both set otherwise.
        q_documents, k_documents: integer (B, N), or both None.
        attn_mask: bool, 4-dimensional, broadcastable to (B, Hq, Nq, Nk); True may attend.
        is_causal: a key is seen only from its own position or a later one.
    """

    n_q: int
    n_k: int
    device: torch.device
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None
    attn_mask: Tensor | None = None
    is_causal: bool = True

    @property
    def index_order(self) -> bool:
        """Whether positions are those of the tensors, queries last."""
        return self.q_positions is None

    @property
    def kind(self) -> str:
        """How the pairs are described to a kernel: "full", "causal", "lower-right" or "dense".

        "causal" is the square triangle; "lower-right" the triangle of n_q < n_k queries that come last;
        "dense" needs a mask tensor.
        """
        if self.q_documents is not None or self.attn_mask is not None:
            return "dense"
        if not self.is_causal:
            return "full"
        if not self.index_order:
            return "dense"
        if self.n_q == 1:
            return "full"
        return "causal" if self.n_q == self.n_k else "lower-right"

    def positions(self) -> tuple[Tensor, Tensor]:
        """Query and key positions as int64 tensors of shape (N,) or (B, N)."""
        if self.q_positions is not None and self.k_positions is not None:
            return self.q_positions, self.k_positions
        keys = torch.arange(self.n_k, device=self.device)
        return keys[self.n_k - self.n_q :], keys

    def anchor(self, start: int, stop: int) -> int | Tensor:
        """A position among queries start … stop − 1 to count from: an int in index order, else (1,) or (B, 1).

        It is the middle one, or the median: pads may have any position without moving it much.
        """
        if self.q_positions is None:
            return self.n_k - self.n_q + (start + stop) // 2
        if start == stop:
            return 0
        return self.q_positions[..., start:stop].median(dim=-1, keepdim=True).values

    def rows(self, start: int, stop: int) -> Visibility:
        """The same for queries start … stop − 1, without the keys that causality hides from all of them."""
        n_k = self.n_k
        if self.index_order and self.is_causal:
            n_k += stop - self.n_q
        return replace(
            self,
            n_q=stop - start,
            n_k=n_k,
            q_positions=None if self.q_positions is None else self.q_positions[..., start:stop],
            q_documents=None if self.q_documents is None else self.q_documents[:, start:stop],
            k_documents=None if self.k_documents is None else self.k_documents[:, :n_k],
            attn_mask=_cut(_cut(self.attn_mask, -2, start, stop), -1, 0, n_k),
        )

    def mask(self) -> Tensor | None:
        """The pairs as a bool tensor broadcastable to (B, Hq, Nq, Nk); None where every pair is seen."""
        parts = []
        if self.is_causal and not (self.index_order and self.n_q == 1):
            q_positions, k_positions = self.positions()
            earlier = k_positions.unsqueeze(-2) <= q_positions.unsqueeze(-1)
            parts.append(earlier[None, None] if earlier.dim() == 2 else earlier[:, None])
        if self.q_documents is not None and self.k_documents is not None:
            parts.append((self.q_documents.unsqueeze(-1) == self.k_documents.unsqueeze(-2))[:, None])
        if self.attn_mask is not None:
            parts.append(self.attn_mask)
        if not parts:
            return None
        mask = parts[0]
        for part in parts[1:]:
            mask = mask & part
        return mask


def _cut(mask: Tensor | None, dim: int, start: int, stop: int) -> Tensor | None:
    """Slice a mask along one axis, which may be broadcast."""
    if mask is None or mask.size(dim) == 1:
        return mask
    return mask.narrow(dim, start, stop - start)
