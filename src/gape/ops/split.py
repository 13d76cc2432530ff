"""The portable default: six extra coordinates carry −c_i·u_j·(i − j) to working precision at any length.

The rate c (over the softmax scale) and the exposure u are rounded once to the working dtype, the same on both
sides; the products c·i and u·j are then carried exactly, each in three pieces of the working dtype:

    query [−(c·i)₁, −(c·i)₂, −(c·i)₃, c, c, c]      key [u, u, u, (u·j)₁, (u·j)₂, (u·j)₃]

Positions are counted from an anchor among the queries (softmax does not see a common shift), and a power of two,
UNIT, moves magnitude between the sides so that float16 does not overflow. Rounding is straight-through for gradients.

A fused backward returns dq and dk in the working dtype, and the gradient of a gate is the difference of two such
columns, so it loses what the distance to the anchor costs. Where gates learn, queries therefore go in chunks whose two
halves have an anchor each. In index order both are near their queries and two pieces are enough, so this takes six
coordinates too (explicit positions may be anywhere: there three pieces stay, and it takes nine):

    query [−(c·i)₁, −(c·i)₂, c, c, 0, 0] or [−(c·i)₁, −(c·i)₂, 0, 0, c, c]
    key   [u, u, (u·j)₁, (u·j)₂, (u·j′)₁, (u·j′)₂]      i from its own anchor, j from the first, j′ from the second

`docs/precision.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gape.ops import sdpa
from gape.ops.problem import Problem, beside_heads
from gape.ops.rounding import UNIT, pieces, round_significand, significand_bits, straight_through

#: Queries of one call where gates learn through a half-precision backward: two anchors, 1,024 queries each.
ANCHORED_ROWS = 2048

#: Width of the columns of one anchor and three pieces.
COLUMNS = 6

#: Significands up to which a backward pass is too short for one anchor.
SHORT_BITS = 11


def query_columns(
    rate: Tensor, positions: Sequence[Tensor], scale: float, dtype: torch.dtype, bits: int, count: int = 3
) -> Tensor:
    """The query side for rate (B, Hq, Nq).

    Args:
        rate: c, in float32 or float64.
        positions: of consecutive groups of the queries, each (n,) or (B, n) and counted from the group's own anchor;
            one group, or two.
        scale: the softmax scale.
        dtype: of the columns.
        bits: significand that each piece may use.
        count: pieces of a product.

    Returns:
        (B, Hq, Nq, count · (groups + 1)) in `dtype`.
    """
    i = _wide(torch.cat(list(positions), dim=-1), dtype)
    c = rate.to(i.dtype) * (UNIT / scale)
    # A rate that float16 cannot hold saturates, consistently for every key of the query.
    limit = torch.finfo(dtype).max / 2
    c = torch.minimum(c, limit / (i.abs() / UNIT**2).clamp(min=1.0))
    c = straight_through(c, round_significand(c, bits))
    columns = [-piece for piece in pieces(c * (i / UNIT**2), bits, count)]
    if len(positions) == 1:
        columns += [c] * count
    else:
        first = torch.arange(rate.size(-1), device=rate.device) < positions[0].size(-1)
        columns += [c * first] * count + [c * ~first] * count
    return torch.stack(columns, dim=-1).to(dtype)


def key_columns(exposure: Tensor, positions: Sequence[Tensor], dtype: torch.dtype, bits: int, count: int = 3) -> Tensor:
    """The key side for exposure (B, Hk, Nk), whose `positions` are given once for every anchor.

    Returns:
        (B, Hk, Nk, count · (anchors + 1)) in `dtype`.
    """
    counted = [_wide(j, dtype) for j in positions]
    u = exposure.to(counted[0].dtype)
    u = straight_through(u, round_significand(u, bits))
    limit = torch.finfo(dtype).max / 2
    columns = [u * UNIT] * count
    for j in counted:
        columns += pieces((u * (j / UNIT)).clamp(-limit, limit), bits, count)
    return torch.stack(columns, dim=-1).to(dtype)


def calls(problem: Problem) -> Iterator[sdpa.Call]:
    """The prepared attention calls, one per chunk of queries."""
    bits = significand_bits(problem.q)
    learns = bits <= SHORT_BITS and _gates_learn(problem)
    count = 2 if learns and problem.seen.index_order else 3
    spans = sdpa.chunks(problem.seen.n_q, _chunk_rows(problem, learns))
    q_positions, k_positions = problem.seen.positions()
    rate, exposure = problem.rate, problem.exposure
    k, v = problem.k, problem.v
    if len(spans) > 1:
        # The chunks' gradients are added up in float32 and rounded once.
        k, v = k.to(exposure.dtype), v.to(exposure.dtype)
    for start, stop in spans:
        seen = problem.seen.rows(start, stop)
        middle = (start + stop) // 2
        groups = [(start, middle), (middle, stop)] if learns and middle > start else [(start, stop)]
        anchors = [problem.seen.anchor(*group) for group in groups]
        i = [q_positions[..., a:b] - anchor for (a, b), anchor in zip(groups, anchors, strict=True)]
        j = [k_positions[..., : seen.n_k] - anchor for anchor in anchors]
        q_columns = query_columns(rate[:, :, start:stop], i, problem.scale, problem.q.dtype, bits, count)
        k_columns = key_columns(exposure[:, :, : seen.n_k], j, problem.k.dtype, bits, count)
        yield sdpa.prepare(
            torch.cat([problem.q[:, :, start:stop], q_columns], dim=-1),
            torch.cat([k[:, :, : seen.n_k].to(problem.k.dtype), k_columns], dim=-1),
            v[:, :, : seen.n_k].to(problem.v.dtype),
            seen,
            problem.scale,
        )


def _gates_learn(problem: Problem) -> bool:
    gates = (problem.gate, problem.landmark, problem.amplitude)
    return torch.is_grad_enabled() and any(x.requires_grad for x in gates)


def _chunk_rows(problem: Problem, learns: bool) -> int | None:
    if sdpa.draws_mask(problem.seen, problem.q):
        return min(ANCHORED_ROWS, sdpa.MASK_ROWS)
    return ANCHORED_ROWS if learns else None


def _wide(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Positions as floats wide enough for products with numbers of `dtype`, broadcastable to (B, H, N)."""
    half = dtype in (torch.bfloat16, torch.float16)
    # Apple's GPUs have no float64.
    wide = torch.float32 if half or positions.device.type == "mps" else torch.float64
    return beside_heads(positions, wide)
