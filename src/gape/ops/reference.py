"""The definition: dense, in float32 or float64. Other dense code takes its bias and its softmax from here.

a_ij = scale · q_iᵀ k_j − c_i · u_j · (i − j),    c_i = Γ_h · g_i / T,    u_j = 1 − l_j
"""

from __future__ import annotations

import torch
from torch import Tensor

from gape.ops.inputs import Problem, beside_heads, bias_dtype


def logits(problem: Problem) -> Tensor:
    """a_ij for every pair, visible or not, (B, Hq, Nq, Nk) in `bias_dtype`."""
    dtype = bias_dtype(problem.q.dtype)
    groups = problem.q.size(1) // problem.k.size(1)
    k = problem.k.to(dtype).repeat_interleave(groups, dim=1)
    u = problem.exposure.repeat_interleave(groups, dim=1)
    content = problem.scale * (problem.q.to(dtype) @ k.transpose(-1, -2))
    return content - penalty(problem.rate, u, distance(*problem.visibility.positions(), dtype))


def penalty(rate: Tensor, exposure: Tensor, distance: Tensor) -> Tensor:
    """c_i · u_j · (i − j), what a logit loses under the gates.

    Args:
        rate: c, (B, Hq, Nq).
        exposure: u, (B, Hq, Nk), of the keys that each query head reads.
        distance: i − j, broadcastable to (B, Hq, Nq, Nk).
    """
    return rate.unsqueeze(-1) * exposure.unsqueeze(-2) * distance


def distance(q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
    """i − j of integer positions (N,) or (B, N), broadcastable to (B, H, Nq, Nk) in `dtype`."""
    i, j = beside_heads(q_positions, torch.int64), beside_heads(k_positions, torch.int64)
    return (i.unsqueeze(-1) - j.unsqueeze(-2)).to(dtype)


def weights(problem: Problem) -> Tensor:
    """The attention weights, (B, Hq, Nq, Nk) in `bias_dtype`; a row that sees nothing is all zeros."""
    return visible_softmax(logits(problem), problem.visibility.mask())


def log_sum_exp(problem: Problem) -> Tensor:
    """Natural log-sum-exp of the logits, (B, Hq, Nq) in `bias_dtype`, without gradient; −inf for an empty row."""
    a, mask = logits(problem).detach(), problem.visibility.mask()
    return (a if mask is None else a.masked_fill(~mask, -torch.inf)).logsumexp(-1)


def visible_softmax(a: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of logits a (B, Hq, Nq, Nk) over the pairs of a bool mask; a row that sees nothing is all zeros."""
    if mask is None:
        return a.softmax(-1)
    # An empty row attends to everything first and is then set to zero: no NaN, and no gradient.
    safe = mask | ~mask.any(-1, keepdim=True)
    return a.masked_fill(~safe, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)


def run(problem: Problem) -> Tensor:
    """The operator by its definition. Time and memory are quadratic; returns (B, Hq, Nq, Dv) in q's dtype."""
    groups = problem.q.size(1) // problem.k.size(1)
    w = weights(problem)
    v = problem.v.to(w.dtype).repeat_interleave(groups, dim=1)
    return (w @ v).to(problem.q.dtype)
