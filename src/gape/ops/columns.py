"""The six coordinates that carry −c_i·u_j·(i − j) in pieces of the working dtype: one side for queries, one for keys.

:mod:`gape.ops.split` says how they work and when there are two anchors; `docs/results/precision.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gape.ops.inputs import Problem, beside_heads

#: A power of two that moves magnitude between the two sides of a product, so that float16 does not overflow.
UNIT = 256.0

_SIGNIFICAND = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


def significand_bits(x: Tensor) -> int:
    """Bits of significand that a matrix product of x's dtype keeps; TF32 keeps 11 of float32's 24."""
    if x.dtype == torch.float32 and x.is_cuda and tf32_allowed():
        return 11
    return _SIGNIFICAND[x.dtype]


def tf32_allowed() -> bool:
    """Whether matrix products in float32 may run in TF32 on a GPU, in whichever way that was set."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        return bool(matmul.allow_tf32)
    # Asking the older switch raises once the newer one was used.
    chosen = matmul.fp32_precision
    if chosen == "none":
        chosen = getattr(torch.backends, "fp32_precision", "none")
    return bool(chosen == "tf32")


def round_significand(x: Tensor, bits: int) -> Tensor:
    """x (float32 or float64) rounded to `bits` of significand, half to even, same dtype and no gradient.

    Done on the integer view: a cast there and back is what a compiler removes.
    """
    size, whole = (torch.int32, 24) if x.dtype == torch.float32 else (torch.int64, 53)
    drop = whole - bits
    if drop <= 0:
        return x.detach()
    raw = x.detach().view(size)
    odd = (raw >> drop) & 1
    return ((raw + ((1 << (drop - 1)) - 1) + odd) & -(1 << drop)).view(x.dtype)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The value of `rounded` with the gradient of x."""
    return x + (rounded - x).detach()


def pieces(x: Tensor, bits: int, count: int = 3) -> list[Tensor]:
    """Tensors of `bits` significand that add up to x, to `count` times as many bits.

    The first carries x's gradient: all of them meet the same partner, so one has the whole of it.
    """
    rest, parts = x.detach(), []
    for _ in range(count):
        parts.append(round_significand(rest, bits))
        rest = rest - parts[-1]
    return [straight_through(x, parts[0]), *parts[1:]]


#: Queries that two anchors are near enough to, 1,024 each, for gates that learn through a half-precision backward.
ANCHORED_ROWS = 2048

#: Significands up to which a backward pass is too short for one anchor.
SHORT_BITS = 11

#: Width of the columns of one anchor and three pieces, or of two and two.
COLUMNS = 6


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
    split = [-piece for piece in pieces(c * (i / UNIT**2), bits, count)]
    if len(positions) == 1:
        split += [c] * count
    else:
        first = torch.arange(rate.size(-1), device=rate.device) < positions[0].size(-1)
        split += [c * first] * count + [c * ~first] * count
    return torch.stack(split, dim=-1).to(dtype)


def key_columns(exposure: Tensor, positions: Sequence[Tensor], dtype: torch.dtype, bits: int, count: int = 3) -> Tensor:
    """The key side for exposure (B, Hk, Nk), whose `positions` are given once for every anchor.

    Returns:
        (B, Hk, Nk, count · (anchors + 1)) in `dtype`.
    """
    counted = [_wide(j, dtype) for j in positions]
    u = exposure.to(counted[0].dtype)
    u = straight_through(u, round_significand(u, bits))
    limit = torch.finfo(dtype).max / 2
    split = [u * UNIT] * count
    for j in counted:
        split += pieces((u * (j / UNIT)).clamp(-limit, limit), bits, count)
    return torch.stack(split, dim=-1).to(dtype)


def learns_shortly(problem: Problem) -> bool:
    """Whether gates learn through a backward pass too short for one anchor."""
    return significand_bits(problem.q) <= SHORT_BITS and problem.gates_learn


def index_anchors(start: int, stop: int, offset: int, *, near: bool) -> tuple[int, int, int, int]:
    """The anchors that :func:`sides` takes in index order, as numbers for kernels.

    Args:
        start, stop: queries start … stop − 1.
        offset: position of query 0; key 0 has position 0.
        near: whether gates learn through a short backward pass.

    Returns:
        Number of anchors, position of key 0 from the first, queries that count from the first, and how far the second
        is from it.
    """
    middle = (start + stop) // 2
    if not near or middle == start:
        return 1, -(offset + middle), stop - start, 0
    first, second = (start + middle) // 2, (middle + stop) // 2
    return 2, -(offset + first), middle - start, second - first


def sides(problem: Problem, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Both sides for queries start … stop − 1 and the keys that any of them may see.

    There is one anchor, the middle query, or one for each half where gates learn shortly.

    Returns:
        (B, Hq, stop − start, columns) in q's dtype and (B, Hk, n, columns) in k's.
    """
    visibility, bits = problem.visibility, significand_bits(problem.q)
    middle = (start + stop) // 2
    near = learns_shortly(problem)
    groups = [(start, middle), (middle, stop)] if near and middle > start else [(start, stop)]
    count = 2 if len(groups) == 2 and visibility.index_order else 3
    n_k = visibility.rows(start, stop).n_k
    anchors = [visibility.anchor(*group) for group in groups]
    q_positions, k_positions = visibility.positions()
    i = [q_positions[..., a:b] - anchor for (a, b), anchor in zip(groups, anchors, strict=True)]
    j = [k_positions[..., :n_k] - anchor for anchor in anchors]
    return (
        query_columns(problem.rate[:, :, start:stop], i, problem.scale, problem.q.dtype, bits, count),
        key_columns(problem.exposure[:, :, :n_k], j, problem.k.dtype, bits, count),
    )


def _wide(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Positions as floats wide enough for products with numbers of `dtype`, broadcastable to (B, H, N)."""
    half = dtype in (torch.bfloat16, torch.float16)
    # Apple's GPUs have no float64.
    wide = torch.float32 if half or positions.device.type == "mps" else torch.float64
    return beside_heads(positions, wide)
