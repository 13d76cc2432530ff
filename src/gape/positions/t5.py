"""T5's relative bias: a learned number per head and bucket of distances (Raffel et al., arXiv 1910.10683)."""

from __future__ import annotations

import math
from typing import Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.positions.base import Sizes, distance, wide
from gape.positions.biased import Biased
from gape.utils.validation import above, even


class T5(Biased):
    """Adds table[bucket(i − j), h] to the logits, in T5's causal buckets.

    Half of the buckets hold one distance each, the rest grow geometrically up to `max_distance`, past which all
    distances share the last. Keys after their query count as distance 0.

    Args:
        n_buckets: number of buckets, even.
        max_distance: distance at which the last bucket begins.
        **sizes: see :class:`gape.positions.Scheme`.

    Raises:
        ValueError: n_buckets is odd or below 2, or max_distance does not exceed n_buckets / 2.
    """

    def __init__(self, *, n_buckets: int = 32, max_distance: int = 128, **sizes: Unpack[Sizes]) -> None:
        super().__init__(**sizes)
        self.n_buckets = even("n_buckets", n_buckets)
        self.max_distance = above("max_distance", max_distance, n_buckets // 2)
        self.table = nn.Parameter(torch.empty(n_buckets, self.n_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table from a normal of deviation E^(−1/2), as T5 does; E is Hq·D where n_embd is None."""
        nn.init.normal_(self.table, std=(self.n_embd or self.n_heads * self.head_dim) ** -0.5)

    def buckets(self, away: Tensor) -> Tensor:
        """The bucket of each distance i − j, int64 from 0 to n_buckets − 1."""
        away = away.clamp(min=0)
        exact = self.n_buckets // 2
        # float32 as in T5: where a bound falls on a whole number, trained tables expect its rounding.
        octaves = (away.clamp(min=exact).float() / exact).log() / math.log(self.max_distance / exact)
        coarse = exact + (octaves * (self.n_buckets - exact)).long()
        return torch.where(away < exact, away, coarse.clamp(max=self.n_buckets - 1))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The table's entry for each pair, (1 or B, Hq, Nq, Nk)."""
        buckets = self.buckets(distance(q_positions, k_positions)).squeeze(1)
        return F.embedding(buckets, self.table.to(wide(self.table.dtype))).movedim(-1, 1)
