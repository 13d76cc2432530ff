"""The paper's form: two extra coordinates carry M = c_i · (j·u_j + i·l_j), equal to the bias after softmax.

Exact in float32 and float64. In bfloat16 and float16 the two terms are large and cancel, so the error grows
with position: it is kept for fidelity to the paper; `split` is the form to use there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gape.ops import sdpa
from gape.ops.problem import Problem, bias_dtype


def query_columns(problem: Problem) -> Tensor:
    """[Γ·g, Γ·g·i/T] / scale, (B, Hq, Nq, 2) in q's dtype."""
    i, _ = problem.seen.positions()
    i = _beside_heads(i.to(bias_dtype(problem.q.dtype)))
    strength = problem.amplitude[:, None] * problem.gate / problem.scale
    return torch.stack([strength, strength * (i / problem.context_length)], dim=-1).to(problem.q.dtype)


def key_columns(problem: Problem) -> Tensor:
    """[j·(1 − l)/T, l], (B, Hk, Nk, 2) in k's dtype."""
    _, j = problem.seen.positions()
    j = _beside_heads(j.to(bias_dtype(problem.q.dtype)))
    columns = [problem.exposure * (j / problem.context_length), problem.landmark]
    return torch.stack(columns, dim=-1).to(problem.k.dtype)


def calls(problem: Problem) -> Iterator[sdpa.Call]:
    """The prepared attention calls, one per chunk of queries."""
    q = torch.cat([problem.q, query_columns(problem)], dim=-1)
    k = torch.cat([problem.k, key_columns(problem)], dim=-1)
    size = sdpa.MASK_ROWS if problem.seen.kind == "dense" else max(problem.seen.n_q, 1)
    for start, stop in sdpa.chunks(problem.seen.n_q, size):
        seen = problem.seen.rows(start, stop)
        yield sdpa.prepare(q[:, :, start:stop], k[:, :, : seen.n_k], problem.v[:, :, : seen.n_k], seen, problem.scale)


def _beside_heads(positions: Tensor) -> Tensor:
    """(N,) or (B, N) to a shape that broadcasts against (B, H, N)."""
    return positions if positions.dim() == 1 else positions.unsqueeze(1)
