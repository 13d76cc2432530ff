"""What schemes with a learned bias on the logits share: the bias itself is all they define."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from gape.ops import attention
from gape.positions.base import Scheme


class Biased(Scheme):
    """Leaves q and k alone and adds `bias(q_positions, k_positions)` to the logits.

    The bias is dense, built for a slice of the queries at a time. It is computed in float32 (float64 where the
    parameters are float64) whatever the dtype of q, under autocast too.
    """

    refuses_gates: ClassVar[str | None] = (
        "it adds a learned bias on distance of its own, and the gated operator takes no dense bias"
    )

    @abstractmethod
    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Additive logits (1 or B, Hq, Nq, Nk)."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_side: Tensor | None,
        k_side: Tensor | None,
        *,
        scale: float,
        impl: str = "auto",
        **seen: Any,
    ) -> Tensor:
        """Attend under the bias; sides and `impl` are not used. Returns (B, Hq, Nq, Dv)."""
        return attention(q, k, v, bias=self.bias, scale=scale, **seen)


def inverse_softplus(value: Tensor) -> Tensor:
    """The x with softplus(x) = value > 0."""
    return value + (-(-value).expm1()).log()
