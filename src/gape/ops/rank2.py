"""The paper's form: two extra coordinates carry M = c_i · (j·u_j + i·l_j), equal to the bias after softmax.

Its two terms are large and cancel, so what a dtype rounds grows with position. In float32 and float64 positions are
counted from the middle of a call's queries, which softmax does not see, and little is lost. In bfloat16 and float16 the
form is kept as the paper has it, absolute positions included, to compare with; `split` is the one to use there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gape.ops import sdpa
from gape.ops.inputs import Problem, beside_heads, bias_dtype

#: Width of the columns.
COLUMNS = 2


def query_columns(strength: Tensor, positions: Tensor, context_length: float, dtype: torch.dtype) -> Tensor:
    """[Γ·g, Γ·g·i/T] / scale for strength Γ·g/scale (B, Hq, Nq); (B, Hq, Nq, 2) in `dtype`."""
    i = beside_heads(positions, bias_dtype(dtype))
    return torch.stack([strength, strength * (i / context_length)], dim=-1).to(dtype)


def key_columns(landmark: Tensor, positions: Tensor, context_length: float, dtype: torch.dtype) -> Tensor:
    """[j·(1 − l)/T, l] for landmark (B, Hk, Nk); (B, Hk, Nk, 2) in `dtype`."""
    j = beside_heads(positions, bias_dtype(dtype))
    return torch.stack([(1 - landmark) * (j / context_length), landmark], dim=-1).to(dtype)


def calls(problem: Problem) -> Iterator[sdpa.Call]:
    """The prepared attention calls, one per chunk of queries."""
    visibility, exact = problem.visibility, problem.q.dtype in (torch.float32, torch.float64)
    for start, stop in sdpa.chunks(visibility.n_q, sdpa.MASK_ROWS if sdpa.draws_mask(visibility, problem.q) else None):
        part = problem.rows(start, stop)
        yield (sdpa.exact_call(part) if exact else None) or _call(
            part, part.visibility.anchor(0, part.visibility.n_q) if exact else 0
        )


def _call(problem: Problem, anchor: int | Tensor) -> sdpa.Call:
    """The prepared call for all queries at once, positions counted from `anchor`."""
    dtype, length = problem.q.dtype, problem.context_length
    i, j = problem.visibility.positions()
    strength = problem.amplitude[:, None] * problem.gate / problem.scale
    q = torch.cat([problem.q, query_columns(strength, i - anchor, length, dtype)], dim=-1)
    k = torch.cat([problem.k, key_columns(problem.landmark, j - anchor, length, dtype)], dim=-1)
    return sdpa.prepare(q, k, problem.v, problem.visibility, problem.scale)
