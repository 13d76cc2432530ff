"""Causal attention among the tokens of a prompt, with the log-sum-exp that merging with cached keys needs."""

from __future__ import annotations

import torch
from torch import Tensor

from gape.ops.limits import triton_cannot

#: Logits that the plain form makes at once.
_LOGITS = 2**26


def causal_in_kernels(q: Tensor, v: Tensor) -> bool:
    """Whether :func:`causal_attention` runs in a kernel, and not in PyTorch."""
    return q.is_cuda and triton_cannot(q, v) is None


@torch.no_grad()
def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, exposure: Tensor, *, scale: float, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention of tokens in index order, each to itself and to those before it, without gradients.

    Args:
        q, k, v: (B, Hq, n, D), (B, Hk, n, D) and (B, Hk, n, Dv), rotated.
        rate: c_i of each query, (B, Hq, n) in float32 or float64.
        exposure: 1 − landmark, (B, Hk, n).
        scale: the softmax scale.
        eps: attention that a query may lose to tiles that are not read; only kernels skip.

    Returns:
        Output (B, Hq, n, Dv) in q's dtype and natural log-sum-exp (B, Hq, n) in float32 (float64 beside float64).
    """
    if causal_in_kernels(q, v):
        from gape.ops.triton.attention import causal_answer  # noqa: PLC0415

        return causal_answer(q, k, v, rate, exposure, scale=scale, eps=eps)
    dtype, n, groups = exposure.dtype, q.size(2), q.size(1) // k.size(1)
    k, v = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    exposure = exposure.repeat_interleave(groups, dim=1)
    places = torch.arange(n, device=q.device)
    at_once = max(1, _LOGITS // max(1, q.size(0) * q.size(1) * n))
    outs, lses = [], []
    for start in range(0, n, at_once):
        rows = slice(start, start + at_once)
        distance = places[rows, None] - places
        logits = scale * (q[:, :, rows].to(dtype) @ k.mT)
        logits = logits - rate[:, :, rows, None].to(dtype) * exposure.unsqueeze(2) * distance
        logits = logits.masked_fill(distance < 0, -torch.inf)
        lses.append(logits.logsumexp(-1))
        outs.append(logits.softmax(-1) @ v)
    return torch.cat(outs, dim=2).to(q.dtype), torch.cat(lses, dim=2)
