"""FIRE: a learned function of progressively interpolated distance (Li et al., arXiv 2310.04418)."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.positions.base import Sizes, distance, wide, without_autocast
from gape.positions.biased import Biased, inverse_softplus
from gape.utils.validation import positive_number, whole


class FIRE(Biased):
    """Adds MLP(ψ(|i − j|) / ψ(max(L, i))) to the logits, with ψ(x) = log(c·x + 1).

    The MLP has one hidden layer and one output per query head. c and the threshold L are learned, shared by the
    heads and kept positive by a softplus. The normaliser reads the query's own position, never the length at
    hand, so a cached key needs no correction; being absolute, positions must count from 0.

    Args:
        hidden: width of the hidden layer.
        init_c: c at start.
        init_threshold: L at start; what is learned is a factor on it.
        **sizes: see :class:`gape.positions.Scheme`.

    Raises:
        ValueError: an option is not positive.
    """

    def __init__(
        self, *, hidden: int = 32, init_c: float = 0.1, init_threshold: float = 512.0, **sizes: Unpack[Sizes]
    ) -> None:
        super().__init__(**sizes)
        self.init_c = positive_number("init_c", init_c)
        self.init_threshold = positive_number("init_threshold", init_threshold)
        self.inner_weight = nn.Parameter(torch.empty(whole("hidden", hidden)))
        self.inner_bias = nn.Parameter(torch.empty(hidden))
        self.outer_weight = nn.Parameter(torch.empty(self.n_heads, hidden))
        self.outer_bias = nn.Parameter(torch.empty(self.n_heads))
        self.raw_c = nn.Parameter(torch.empty(1))
        self.raw_stretch = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the MLP as `nn.Linear` does, set c and L back."""
        for inner in (self.inner_weight, self.inner_bias):
            inner.uniform_(-1.0, 1.0)
        for outer in (self.outer_weight, self.outer_bias):
            outer.uniform_(-(self.outer_weight.size(1) ** -0.5), self.outer_weight.size(1) ** -0.5)
        self.raw_c.copy_(inverse_softplus(torch.full_like(self.raw_c, self.init_c)))
        self.raw_stretch.copy_(inverse_softplus(torch.ones_like(self.raw_stretch)))

    @property
    def c(self) -> Tensor:
        """(1,), above 0: how much of the range nearby distances get."""
        return F.softplus(self.raw_c.to(wide(self.raw_c.dtype)))

    @property
    def threshold(self) -> Tensor:
        """(1,), above 0: L, the position up to which queries share one normaliser."""
        return self.init_threshold * F.softplus(self.raw_stretch.to(wide(self.raw_stretch.dtype)))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The MLP of the interpolated distance, (1 or B, Hq, Nq, Nk)."""
        c = self.c
        away = distance(q_positions, k_positions).abs().to(c.dtype)
        reach = torch.maximum(self.threshold, q_positions.to(c.dtype)).unsqueeze(-1)
        reach = reach.unsqueeze(1) if reach.dim() == 3 else reach
        x = (c * away).log1p() / (c * reach).log1p()
        inner_weight, inner_bias = self.inner_weight.to(c.dtype), self.inner_bias.to(c.dtype)
        with without_autocast(x.device):
            inner = F.relu(x.unsqueeze(-1) * inner_weight + inner_bias)
            out = F.linear(inner, self.outer_weight.to(c.dtype), self.outer_bias.to(c.dtype))
        return out.squeeze(1).movedim(-1, 1)
