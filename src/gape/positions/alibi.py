"""ALiBi: a fixed linear penalty on distance (Press et al., arXiv 2108.12409)."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from gape.ops import gated_attention
from gape.positions.base import Scheme, Sizes, distance, wide
from gape.utils.constant import Constant


class ALiBi(Scheme):
    """Adds −m_h · (i − j) to the logits, m_h fixed per query head.

    It is the gated operator with every gate 1 and every landmark 0, and runs as such: no Nq × Nk bias exists.
    """

    refuses_gates: ClassVar[str | None] = "ALiBi already is the gated operator, with constant gates"
    gated: ClassVar[bool] = True

    def __init__(self, **sizes: Unpack[Sizes]) -> None:
        super().__init__(**sizes)
        self._slopes = Constant(slopes(self.n_heads))

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
        """Attend under the penalty; the sides are not used. Returns (B, Hq, Nq, Dv)."""
        dtype = wide(q.dtype)
        return gated_attention(
            q,
            k,
            v,
            torch.ones(q.shape[:3], dtype=dtype, device=q.device),
            torch.zeros(k.shape[:3], dtype=dtype, device=k.device),
            self._slopes.on(q.device, dtype),
            context_length=1.0,
            scale=scale,
            impl=impl,
            **seen,
        )

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """−m_h · (i − j), (1 or B, Hq, Nq, Nk) in float32: what `attend` adds, written out."""
        slope = self._slopes.on(q_positions.device, torch.float32)
        return -slope[:, None, None] * distance(q_positions, k_positions)


def slopes(n_heads: int) -> list[float]:
    """The paper's slopes: 2^(−8h/H) for h = 1 … H where H is a power of two.

    Otherwise those of the largest power of two below, then every other slope of the next power.
    """
    power = 1 << (n_heads.bit_length() - 1)
    finer = [2.0 ** (-4 * step / power) for step in range(1, 2 * (n_heads - power), 2)]
    return [2.0 ** (-8 * head / power) for head in range(1, power + 1)] + finer
