"""The portable default: six extra coordinates carry −c_i·u_j·(i − j) to working precision at any length.

The rate c (over the softmax scale) and the exposure u are rounded once to the working dtype, the same on both
sides; the products c·i and u·j are then carried exactly, each in three pieces of the working dtype:

    query [−(c·i)₁, −(c·i)₂, −(c·i)₃, c, c, c]      key [u, u, u, (u·j)₁, (u·j)₂, (u·j)₃]

Positions are counted from an anchor near the queries (softmax does not see a common shift), and a power of two
UNIT moves magnitude between the sides so that float16 does not overflow. Rounding is straight-through for
gradients. A fused backward returns dq and dk in the working dtype, and the gradient of a gate is the difference
of two such columns; with gate gradients wanted, queries therefore go in chunks that each have their own anchor,
which bounds that loss by the chunk instead of by the length. `docs/precision.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gape.ops import sdpa
from gape.ops.problem import Problem
from gape.ops.rounding import pieces, round_significand, significand_bits, straight_through

#: Queries that share an anchor when gates need gradients through a half-precision backward.
ANCHOR_ROWS = 512

#: Width of the six columns.
COLUMNS = 6

UNIT = 256.0


def query_columns(rate: Tensor, positions: Tensor, scale: float, dtype: torch.dtype, bits: int) -> Tensor:
    """The query side: rate (B, Hq, Nq), positions (Nq,) or (B, Nq) counted from the anchor.

    Returns (B, Hq, Nq, 6) in `dtype`.
    """
    i = _wide_positions(positions, dtype)
    c = rate.to(i.dtype) * (UNIT / scale)
    # A rate that float16 cannot hold saturates, consistently for every key of the query.
    limit = torch.finfo(dtype).max / 2
    c = torch.minimum(c, limit / (i.abs() / UNIT**2).clamp(min=1.0))
    c = straight_through(c, round_significand(c, bits))
    columns = [-piece for piece in pieces(c * (i / UNIT**2), bits)] + [c, c, c]
    return torch.stack(columns, dim=-1).to(dtype)


def key_columns(exposure: Tensor, positions: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    """The key side: exposure (B, Hk, Nk), positions (Nk,) or (B, Nk) counted from the anchor.

    Returns (B, Hk, Nk, 6) in `dtype`.
    """
    j = _wide_positions(positions, dtype)
    u = exposure.to(j.dtype)
    u = straight_through(u, round_significand(u, bits))
    limit = torch.finfo(dtype).max / 2
    products = pieces((u * (j / UNIT)).clamp(-limit, limit), bits)
    return torch.stack([u * UNIT] * 3 + products, dim=-1).to(dtype)


def calls(problem: Problem) -> Iterator[sdpa.Call]:
    """The prepared attention calls, one per chunk of queries."""
    bits = significand_bits(problem.q)
    q_positions, k_positions = problem.seen.positions()
    rate, exposure = problem.rate, problem.exposure
    spans = sdpa.chunks(problem.seen.n_q, _chunk_rows(problem, bits))
    k, v = problem.k, problem.v
    if len(spans) > 1:
        # The chunks' gradients are added up in float32 and rounded once.
        k, v = k.to(exposure.dtype), v.to(exposure.dtype)
    for start, stop in spans:
        seen = problem.seen.rows(start, stop)
        i, j = q_positions[..., start:stop], k_positions[..., : seen.n_k]
        anchor = _anchor(problem, i, start, stop)
        q_columns = query_columns(rate[:, :, start:stop], i - anchor, problem.scale, problem.q.dtype, bits)
        k_columns = key_columns(exposure[:, :, : seen.n_k], j - anchor, problem.k.dtype, bits)
        yield sdpa.prepare(
            torch.cat([problem.q[:, :, start:stop], q_columns], dim=-1),
            torch.cat([k[:, :, : seen.n_k].to(problem.k.dtype), k_columns], dim=-1),
            v[:, :, : seen.n_k].to(problem.v.dtype),
            seen,
            problem.scale,
        )


def _chunk_rows(problem: Problem, bits: int) -> int:
    learns = any(x.requires_grad for x in (problem.gate, problem.landmark, problem.amplitude))
    if bits <= 11 and learns and torch.is_grad_enabled():
        return ANCHOR_ROWS
    return sdpa.MASK_ROWS if problem.seen.kind == "dense" else max(problem.seen.n_q, 1)


def _anchor(problem: Problem, i: Tensor, start: int, stop: int) -> int | Tensor:
    """A position in the middle of the chunk's queries, one per sequence where positions differ."""
    if problem.seen.index_order:
        return problem.seen.n_k - problem.seen.n_q + (start + stop) // 2
    if i.size(-1) == 0:
        return 0
    return (i.amin(-1, keepdim=True) + i.amax(-1, keepdim=True)) // 2


def _wide_positions(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Positions as floats wide enough for products with numbers of `dtype`, broadcastable to (B, H, N)."""
    half = dtype in (torch.bfloat16, torch.float16)
    # Apple's GPUs have no float64.
    wide = torch.float32 if half or positions.device.type == "mps" else torch.float64
    positions = positions.to(wide)
    return positions if positions.dim() == 1 else positions.unsqueeze(1)
