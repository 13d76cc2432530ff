"""Causal attention among the tokens of a prompt, with the log-sum-exp that merging with cached keys needs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gape.ops.decode_prologue import Step
from gape.ops.inputs import learning
from gape.ops.limits import triton_cannot
from gape.ops.prologue import Angles, GateReading, ready, whole_rows

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


class Projected(NamedTuple):
    """What attention among projected tokens gives.

    Attributes:
        out: (B, Hq, n, Dv).
        base_2_lse: log-sum-exp in base 2, (B, Hq, n).
        q, k: rotated.
        base_2_rate: the rate times log₂e, (B, Hq, n) in float32.
        exposure: (B, Hk, n) in float32.
    """

    out: Tensor
    base_2_lse: Tensor
    q: Tensor
    k: Tensor
    base_2_rate: Tensor
    exposure: Tensor

    @property
    def lse(self) -> Tensor:
        """Natural log-sum-exp, (B, Hq, n)."""
        return self.base_2_lse * math.log(2)

    @property
    def rate(self) -> Tensor:
        """The rate c_i, (B, Hq, n)."""
        return self.base_2_rate * math.log(2)


def projects(q: Tensor, k: Tensor, v: Tensor, step: Step) -> bool:
    """Whether :func:`projected_attention` can run: half precision on a GPU, rows that share positions, no gradient."""
    plain = type(q) is type(k) is type(v) is Tensor
    if not plain or torch.compiler.is_compiling() or learning(q, k, v):
        return False
    # Two dimensions, and one more where heads rotate in several ways.
    shared = step.positions.dim() == 1 and (step.angles is None or step.angles[0].dim() == len(step.angles))
    whole = whole_rows(q.size(-1), q.size(1), v.size(-1)) == q.size(-1)
    return shared and whole and q.is_cuda and q.dtype == k.dtype == v.dtype and ready(q.device, q.dtype)


def projected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    reading: GateReading,
    *,
    scale: float,
    eps: float,
) -> Projected:
    """Read gates off q and k, rotate both and attend in index order: two launches.

    Args:
        q, k, v: (B, Hq, n, D), (B, Hk, n, D) and (B, Hk, n, Dv) as projected, for which :func:`projects` says yes.
        angles: cosines and sines of the tokens, as in :class:`gape.ops.decode_prologue.Step`.
        reading: the gates.
        scale: the softmax scale.
        eps: attention that a query may lose to tiles that are not read.
    """
    from gape.ops.triton.attention import attend_projected  # noqa: PLC0415

    return Projected(*attend_projected(q, k, v, angles, reading, scale=scale, eps=eps))
