"""What tiles of keys are judged by where attention skips: norms of queries, largest norms and least exposures of keys.

One pass over q and one over k. :func:`gape.ops.triton.tiles.needed` says how the numbers are used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.triton.configs import tiles_for
from gape.ops.triton.custom_ops import traceable
from gape.ops.triton.tiles import LOG2E

#: What a norm in float32 may have been rounded down by.
SLACK = 1 + 2**-16


@triton.jit
def stretched(x_ptr, x_b, x_h, x_n, x_d, row, heads, tokens, n, width, stretch, BLOCK_D: tl.constexpr):
    """Euclidean norms (T,) of rows of x (B, H, N, D), times `stretch`; zero beyond the last token."""
    d = tl.arange(0, BLOCK_D)[None, :]
    x_ptr += (row // heads).to(tl.int64) * x_b + (row % heads).to(tl.int64) * x_h
    where = tokens[:, None].to(tl.int64) * x_n + d.to(tl.int64) * x_d
    x = tl.load(x_ptr + where, mask=(tokens[:, None] < n) & (d < width), other=0.0).to(tl.float32)
    return tl.sqrt(tl.sum(x * x, 1)) * tl.cast(stretch, tl.float32)


@triton.jit
def of_queries(
    q_ptr, reach_ptr, q_b, q_h, q_n, q_d, heads, n, width, stretch, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """q (B, H, N, D) → each row's norm, stretched, (B, H, N)."""
    row = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = stretched(q_ptr, q_b, q_h, q_n, q_d, row, heads, tokens, n, width, stretch, BLOCK_D)
    tl.store(reach_ptr + row.to(tl.int64) * n + tokens, length, mask=tokens < n)


@triton.jit
def of_keys(
    k_ptr, u_ptr, reach_ptr, least_ptr, k_b, k_h, k_n, k_d, heads, n, width, stretch,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """k (B, H, N, D) and u (B, H, N) → of each BLOCK keys the largest norm, stretched, and the least u."""
    row = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = stretched(k_ptr, k_b, k_h, k_n, k_d, row, heads, tokens, n, width, stretch, BLOCK_D)
    u = tl.load(u_ptr + row.to(tl.int64) * n + tokens, mask=tokens < n, other=1.0)
    # Extremes would lose what is not a number, and a key that holds it must keep its tile.
    length = tl.where(length >= 0, length, float("inf"))
    u = tl.where(u >= 0, u, float("-inf"))
    at = row.to(tl.int64) * tl.cdiv(n, BLOCK) + tl.program_id(0)
    tl.store(reach_ptr + at, tl.max(length, 0))
    tl.store(least_ptr + at, tl.min(u, 0))


def bounds(q: Tensor, k: Tensor, v: Tensor, u: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """How far a query's products reach, (B, Hq, Nq), and of each tile of keys the largest norm and least exposure.

    Args:
        q, k, v: (B, Hq, Nq, D), (B, Hk, Nk, D) and (B, Hk, Nk, Dv), any strides.
        u: exposures (B, Hk, Nk) in float32.
        scale: the softmax scale, which with log₂e is on the query's side.

    Returns:
        Three float32 tensors, the last two (B, Hk, tiles).
    """
    tile = tiles_for(q, v, "attend", skip=True)
    sizes = {"BLOCK": tile["BLOCK_N"], "BLOCK_D": tile["BLOCK_D"]}
    blocks = [-(-x.size(2) // sizes["BLOCK"]) for x in (q, k)]
    reach = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    k_reach, u_least = (
        torch.empty(*k.shape[:2], blocks[1], dtype=torch.float32, device=q.device) for _ in ("norms", "exposures")
    )
    traceable(of_queries)[(blocks[0], q.size(0) * q.size(1))](
        q, reach, *q.stride(), q.size(1), q.size(2), q.size(3), scale * LOG2E * SLACK, **sizes, num_warps=4
    )
    traceable(of_keys)[(blocks[1], k.size(0) * k.size(1))](
        k, u.contiguous(), k_reach, u_least, *k.stride(), k.size(1), k.size(2), k.size(3), SLACK, **sizes, num_warps=4
    )
    return reach, k_reach, u_least
