"""Additive GRAPE: a penalty on distance whose rate the query and the key set together (model-architectures/GRAPE)."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.ops.inputs import bias_dtype
from gape.positions.base import Scheme, Side, Sizes, without_autocast
from gape.positions.biases import inverse_softplus, slopes
from gape.utils.constant import Constant
from gape.utils.validation import positive_number


class GRAPE(Scheme):
    """Adds −(i − j) · ω_h · m_h · (softplus(v_h·q_i / √D) + softplus(u_h·k_j / √D)), m_h ALiBi's slope.

    v and u are the directions `query_direction` and `key_direction`, each (Hq, D) and used at length 1; ω is softplus
    of `raw_omega`, (Hq,). The bias is dense, for a slice of the queries at a time. The authors also norm q and k, which
    is the model's business here.

    Args:
        init_omega: ω at start.
        **sizes: see :class:`gape.positions.Scheme`.

    Raises:
        ValueError: init_omega is not positive.
    """

    refuses_gates: ClassVar[str | None] = "GRAPE has a gate of the query and one of the key already"

    def __init__(self, *, init_omega: float = 1.0, **sizes: Unpack[Sizes]) -> None:
        super().__init__(**sizes)
        self.init_omega = positive_number("init_omega", init_omega)
        self._slopes = Constant(slopes(self.n_heads))
        self.raw_omega = nn.Parameter(torch.empty(self.n_heads))
        self.query_direction = nn.Parameter(torch.empty(self.n_heads, self.head_dim))
        self.key_direction = nn.Parameter(torch.empty(self.n_heads, self.head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the directions from a normal of deviation D^(−1/2) and set ω back, as the authors do."""
        for direction in (self.query_direction, self.key_direction):
            nn.init.normal_(direction, std=self.head_dim**-0.5)
        self.raw_omega.copy_(inverse_softplus(torch.full_like(self.raw_omega, self.init_omega)))

    def rates(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The two parts of the rate: of the queries, (B, Hq, Nq), and of the keys for each query head, (B, Hq, Nk)."""
        k = k.repeat_interleave(self.n_heads // k.size(1), dim=1)
        return self._rate(q, self.query_direction), self._rate(k, self.key_direction)

    def _rate(self, x: Tensor, direction: Tensor) -> Tensor:
        dtype = bias_dtype(x.dtype)
        with without_autocast(x.device):
            unit = F.normalize(direction.to(dtype), dim=-1, eps=1e-6)
            gate = F.softplus(torch.einsum("bhnd,hd->bhn", x.to(dtype), unit) * self.head_dim**-0.5)
            omega = F.softplus(self.raw_omega.to(dtype)) * self._slopes.on(x.device, dtype)
            return omega[:, None] * gate

    def terms(self, q: Tensor, k: Tensor, k_side: Side) -> dict[str, Any]:
        """The rates of the penalty."""
        return {"rates": self.rates(q, k)}
