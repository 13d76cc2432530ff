"""The dense form: logits written out, for what no fused kernel takes (caps, additive masks), and for weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gape.ops import sdpa
from gape.ops.problem import beside_heads, bias_dtype
from gape.ops.reference import visible_softmax

if TYPE_CHECKING:
    from gape.hf.attend import Sides


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sides: Sides | None,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the definition, in float32 (float64 beside float64), 1,024 queries at a time.

    Args are those of :func:`gape.hf.attend.attend`; positions may be left out without sides.

    Returns:
        (B, Hq, Nq, Dv) in q's dtype, and the weights (B, Hq, Nq, Nk), None for more than 1,024 queries.
    """
    dtype, groups = bias_dtype(q.dtype), q.size(1) // k.size(1)
    k, v = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    n_q, n_k = q.size(2), k.size(2)
    if mask is None:
        rows = torch.arange(n_q, device=q.device) + n_k - n_q
        mask = (torch.arange(n_k, device=q.device) <= rows.unsqueeze(-1))[None, None]
    outs, weights = [], None
    for start, stop in sdpa.chunks(n_q, sdpa.MASK_ROWS):
        a = scale * (q[:, :, start:stop].to(dtype) @ k.transpose(-1, -2))
        if softcap is not None:
            a = softcap * torch.tanh(a / softcap)
        part = mask if mask.size(-2) == 1 else mask[..., start:stop, :]
        visible = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
        if part.dtype != torch.bool:
            a = a + part.to(dtype).masked_fill(~visible, 0.0)
        if sides is not None:
            assert q_positions is not None
            assert k_positions is not None
            distance = _distance(q_positions[..., start:stop], k_positions, dtype)
            rate = (sides.amplitude[:, None] * sides.gate / sides.context_length).to(dtype)
            exposure = (1 - sides.landmark).to(dtype).repeat_interleave(groups, dim=1)
            a = a - rate[:, :, start:stop, None] * exposure.unsqueeze(-2) * distance
            visible = visible & (distance >= 0)
        weights = visible_softmax(a, visible)
        outs.append((weights @ v).to(q.dtype))
    return torch.cat(outs, dim=2), weights.to(q.dtype) if weights is not None and len(outs) == 1 else None


def _distance(q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
    """i − j, broadcastable to (B, H, Nq, Nk)."""
    i, j = beside_heads(q_positions, torch.int64), beside_heads(k_positions, torch.int64)
    return (i.unsqueeze(-1) - j.unsqueeze(-2)).to(dtype)
