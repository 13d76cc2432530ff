"""The portable default: six extra coordinates carry −c_i·u_j·(i − j) to working precision at any length.

The rate c (over the softmax scale) and the exposure u are rounded once to the working dtype, the same on both
sides; the products c·i and u·j are then carried exactly, each in three pieces of the working dtype:

    query [−(c·i)₁, −(c·i)₂, −(c·i)₃, c, c, c]      key [u, u, u, (u·j)₁, (u·j)₂, (u·j)₃]

Positions are counted from an anchor among the queries (softmax does not see a common shift), and a power of two,
UNIT, moves magnitude between the sides so that float16 does not overflow. Rounding is straight-through for gradients.

A fused backward returns dq and dk in the working dtype, and the gradient of a gate is the difference of two such
columns, so it loses what the distance to the anchor costs. Where gates learn, queries therefore go in chunks whose two
halves have an anchor each; near an anchor two pieces are enough, so this takes six coordinates too:

    query [−(c·i)₁, −(c·i)₂, c, c, 0, 0] or [−(c·i)₁, −(c·i)₂, 0, 0, c, c]
    key   [u, u, (u·j)₁, (u·j)₂, (u·j′)₁, (u·j′)₂]      i from its own anchor, j from the first, j′ from the second

`docs/precision.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gape.ops import sdpa
from gape.ops.problem import Problem
from gape.ops.rounding import pieces, round_significand, significand_bits, straight_through

#: Queries of one call where gates learn through a half-precision backward: two anchors, 1,024 queries each.
ANCHORED_ROWS = 2048

#: Width of the columns.
COLUMNS = 6

UNIT = 256.0

Anchor = int | Tensor


def query_columns(rate: Tensor, positions: Sequence[Tensor], scale: float, dtype: torch.dtype, bits: int) -> Tensor:
    """The query side for rate (B, Hq, Nq).

    Args:
        rate: c, in float32 or float64.
        positions: of consecutive groups of the queries, each (n,) or (B, n) and counted from the group's own anchor;
            one group, or two.
        scale: the softmax scale.
        dtype: of the columns.
        bits: significand that each piece may use.

    Returns:
        (B, Hq, Nq, 6) in `dtype`.
    """
    groups, count = len(positions), COLUMNS // (len(positions) + 1)
    i = _wide(torch.cat(list(positions), dim=-1), dtype)
    c = rate.to(i.dtype) * (UNIT / scale)
    # A rate that float16 cannot hold saturates, consistently for every key of the query.
    limit = torch.finfo(dtype).max / 2
    c = torch.minimum(c, limit / (i.abs() / UNIT**2).clamp(min=1.0))
    c = straight_through(c, round_significand(c, bits))
    columns = [-piece for piece in pieces(c * (i / UNIT**2), bits, count)]
    if groups == 1:
        columns += [c] * count
    else:
        first = torch.arange(rate.size(-1), device=rate.device) < positions[0].size(-1)
        columns += [c * first] * count + [c * ~first] * count
    return torch.stack(columns, dim=-1).to(dtype)


def key_columns(exposure: Tensor, positions: Sequence[Tensor], dtype: torch.dtype, bits: int) -> Tensor:
    """The key side for exposure (B, Hk, Nk), whose `positions` are given once for every anchor.

    Returns:
        (B, Hk, Nk, 6) in `dtype`.
    """
    count = COLUMNS // (len(positions) + 1)
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
    learns = bits <= 11 and _gates_learn(problem)
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
        anchors = [_anchor(problem, q_positions, *group) for group in groups]
        i = [q_positions[..., a:b] - anchor for (a, b), anchor in zip(groups, anchors, strict=True)]
        j = [k_positions[..., : seen.n_k] - anchor for anchor in anchors]
        q_columns = query_columns(rate[:, :, start:stop], i, problem.scale, problem.q.dtype, bits)
        k_columns = key_columns(exposure[:, :, : seen.n_k], j, problem.k.dtype, bits)
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


def _chunk_rows(problem: Problem, learns: bool) -> int:
    rows = ANCHORED_ROWS if learns else max(problem.seen.n_q, 1)
    return min(rows, sdpa.MASK_ROWS) if problem.seen.kind == "dense" else rows


def _anchor(problem: Problem, positions: Tensor, start: int, stop: int) -> Anchor:
    """A position in the middle of queries start … stop − 1, one per sequence where positions differ."""
    if problem.seen.index_order:
        return problem.seen.n_k - problem.seen.n_q + (start + stop) // 2
    if start == stop:
        return 0
    part = positions[..., start:stop]
    return (part.amin(-1, keepdim=True) + part.amax(-1, keepdim=True)) // 2


def _wide(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Positions as floats wide enough for products with numbers of `dtype`, broadcastable to (B, H, N)."""
    half = dtype in (torch.bfloat16, torch.float16)
    # Apple's GPUs have no float64.
    wide = torch.float32 if half or positions.device.type == "mps" else torch.float64
    positions = positions.to(wide)
    return positions if positions.dim() == 1 else positions.unsqueeze(1)
