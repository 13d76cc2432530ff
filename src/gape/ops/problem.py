"""One call of the operator after its arguments were checked: what every implementation receives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gape.ops.visibility import Visibility


def bias_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gates, rate and bias beside content of `dtype`: float32, or float64 beside float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def learning(*tensors: Tensor | None) -> bool:
    """Whether a gradient will be asked of any of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def beside_heads(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Positions (N,) or (B, N) in `dtype`, in a shape that broadcasts against (B, H, N)."""
    positions = positions.to(dtype)
    return positions if positions.dim() == 1 else positions.unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Checked arguments. Shapes: B batch, Hq / Hk query / key heads, Nq / Nk tokens, D and Dv head dims.

    Attributes:
        q, k, v: (B, Hq, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv) of one floating dtype.
        gate, landmark, amplitude: (B, Hq, Nq), (B, Hk, Nk), (Hq,) in `bias_dtype(q.dtype)`.
        context_length: T.
        scale: the softmax scale.
        seen: which pairs may be used.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    landmark: Tensor
    amplitude: Tensor
    context_length: float
    scale: float
    seen: Visibility

    def rows(self, start: int, stop: int) -> Problem:
        """The same for queries start … stop − 1 and the keys that any of them may see."""
        seen = self.seen
        if seen.index_order and not seen.is_causal:
            # Of all keys, these queries are no longer the last.
            q_positions, k_positions = seen.positions()
            seen = replace(seen, q_positions=q_positions, k_positions=k_positions)
        seen = seen.rows(start, stop)
        return replace(
            self,
            q=self.q[:, :, start:stop],
            k=self.k[:, :, : seen.n_k],
            v=self.v[:, :, : seen.n_k],
            gate=self.gate[:, :, start:stop],
            landmark=self.landmark[:, :, : seen.n_k],
            seen=seen,
        )

    @property
    def rate(self) -> Tensor:
        """c_i = Γ_h · g_i / T, the logits a query loses per token of distance, (B, Hq, Nq)."""
        return self.amplitude[:, None] * self.gate / self.context_length

    @property
    def gates_learn(self) -> bool:
        """Whether a gradient will be asked of the gates."""
        return learning(self.gate, self.landmark, self.amplitude)

    @property
    def exposure(self) -> Tensor:
        """u_j = 1 − l_j, how unprotected a key is, (B, Hk, Nk)."""
        return 1 - self.landmark
