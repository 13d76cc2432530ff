"""KERPLE: conditionally positive definite kernels of distance (Chi et al., arXiv 2205.09921)."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.positions.base import Sizes, distance, wide
from gape.positions.biased import Biased, inverse_softplus
from gape.utils.validation import invalid_argument

# Upper ends of the authors' uniform draws for r1 and r2.
_DRAWS = {"log": (2.0, 1.0), "power": (1.0, 2.0)}
_MARGIN = 0.01


class Kerple(Biased):
    """Adds −r1 · log(1 + r2·|i − j|) ("log") or −r1 · |i − j|^r2 ("power"), r1 and r2 learned per query head.

    r1 and r2 are softplus of the parameters `raw_r1` and `raw_r2`, each (Hq,); the exponent of "power", which
    must not exceed 2, is twice the sigmoid instead.

    Args:
        variant: "log" or "power".
        **sizes: see :class:`gape.positions.Scheme`.

    Raises:
        ValueError: for another variant.
    """

    def __init__(self, *, variant: str = "log", **sizes: Unpack[Sizes]) -> None:
        super().__init__(**sizes)
        if variant not in _DRAWS:
            raise invalid_argument("variant", variant, f"one of {sorted(_DRAWS)}")
        self.variant = variant
        self.raw_r1 = nn.Parameter(torch.empty(self.n_heads))
        self.raw_r2 = nn.Parameter(torch.empty(self.n_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw r1 and r2 as the authors do: "log" from U(0, 2) and U(0, 1), "power" the other way round.

        The draws keep 0.01 away from the ends, the authors' clamp, where the inverses are finite.
        """
        most_r1, most_r2 = _DRAWS[self.variant]
        self.raw_r1.copy_(inverse_softplus(torch.empty_like(self.raw_r1).uniform_(_MARGIN, most_r1 - _MARGIN)))
        r2 = torch.empty_like(self.raw_r2).uniform_(_MARGIN, most_r2 - _MARGIN)
        self.raw_r2.copy_((r2 / 2).logit() if self.variant == "power" else inverse_softplus(r2))

    @property
    def r1(self) -> Tensor:
        """(Hq,), above 0."""
        return F.softplus(self.raw_r1.to(wide(self.raw_r1.dtype)))

    @property
    def r2(self) -> Tensor:
        """(Hq,), above 0; for "power" below 2 as well."""
        raw = self.raw_r2.to(wide(self.raw_r2.dtype))
        return 2 * raw.sigmoid() if self.variant == "power" else F.softplus(raw)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The kernel of the distance, (1 or B, Hq, Nq, Nk)."""
        r1, r2 = self.r1[:, None, None], self.r2[:, None, None]
        away = distance(q_positions, k_positions).abs().to(r1.dtype)
        return -r1 * (away**r2 if self.variant == "power" else (r2 * away).log1p())
