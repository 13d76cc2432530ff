"""What a cache keeps of a key, and what a query brings to it, in one launch each: content and coordinates side by side.

The numbers are, one for one, those of :func:`gape.ops.columns.key_columns` and :func:`gape.ops.columns.query_columns`
with one anchor, 0. A step of decoding has one token, so that time goes by launches; there they are some forty each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.columns import UNIT, significand_bits
from gape.ops.triton.custom_ops import direct
from gape.ops.triton.prologue_kernels import rounded, within

#: Tokens of a program and its warps.
TOKENS, WARPS = 16, 2


@triton.jit
def near(position, UNIT: tl.constexpr, LIMIT: tl.constexpr):
    """An integer position as float32, not a number beyond :func:`gape.ops.carried.furthest`."""
    position = position.to(tl.float32)
    far = (tl.abs(position) >= 16777216.0) | (tl.abs(position) * (1 / UNIT) > LIMIT)
    return tl.where(far, float("nan"), position)


@triton.jit
def query_numbers(
    gate, amplitude, i, context_length, factor, UNIT: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """The rounded rate and minus its product with the position, which are to be cut into pieces."""
    c = tl.div_rn(amplitude * gate, context_length) * factor
    # A rate that float16 cannot hold saturates, consistently for every key of the query.
    steepest = tl.div_rn(1.0, tl.maximum(tl.abs(i) * (1 / (UNIT * UNIT)), 1.0)) * LIMIT
    # Not a minimum, in which a gate that is not a number would be lost.
    c = rounded(tl.where(c > steepest, steepest, c), BITS)
    return c, -(c * (i * (1 / (UNIT * UNIT))))


@triton.jit
def key_numbers(landmark, j, UNIT: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr):
    """The rounded exposure and its product with the position."""
    u = rounded(1.0 - landmark, BITS)
    return u * UNIT, within(u * (j * (1 / UNIT)), LIMIT)


@triton.jit(do_not_specialize=("n",))
def join(
    x_ptr, side_ptr, amplitude_ptr, position_ptr, out_ptr,
    x_b, x_h, x_n, x_d, side_b, side_h, side_n, amplitude_h, position_b, position_n,
    n_heads, n, content, width, context_length, factor,
    QUERIES: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr,
    T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Rows (B, H, N, width), contiguous: content, six coordinates, zeros."""
    batch, head = (tl.program_id(1) // n_heads).to(tl.int64), (tl.program_id(1) % n_heads).to(tl.int64)
    tokens, columns = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T), tl.arange(0, W)
    there = tokens < n
    # A compiler may pass Python's floats in double precision.
    context_length, factor = tl.cast(context_length, tl.float32), tl.cast(factor, tl.float32)
    x_ptr += batch * x_b + head * x_h
    x = tl.load(
        x_ptr + tokens[:, None] * x_n + columns[None, :] * x_d,
        mask=there[:, None] & (columns < content)[None, :],
        other=0.0,
    ).to(tl.float32)
    side = tl.load(side_ptr + batch * side_b + head * side_h + tokens * side_n, mask=there, other=0.0)
    position = tl.load(position_ptr + batch * position_b + tokens * position_n, mask=there, other=0)
    position = near(position, UNIT, LIMIT)
    if QUERIES:
        amplitude = tl.load(amplitude_ptr + head * amplitude_h)
        single, product = query_numbers(side, amplitude, position, context_length, factor, UNIT, BITS, LIMIT)
    else:
        single, product = key_numbers(side, position, UNIT, BITS, LIMIT)
    # Pieces come first on the query's side and last on the key's.
    first = content if QUERIES else content + 3
    alone = content + 3 if QUERIES else content
    for i in tl.static_range(3):
        piece = rounded(product, BITS)
        product -= piece
        x = tl.where((columns == first + i)[None, :], piece[:, None], x)
        x = tl.where((columns == alone + i)[None, :], single[:, None], x)
    out_ptr += ((batch * n_heads + head) * n + tokens)[:, None] * width + columns[None, :]
    tl.store(out_ptr, x.to(out_ptr.dtype.element_ty), mask=there[:, None] & (columns < width)[None, :])


def joined_keys(k: Tensor, landmark: Tensor, positions: Tensor, width: int) -> Tensor:
    """Keys (B, Hk, N, D) in half precision with coordinates for landmarks (B, Hk, N) in float32, (B, Hk, N, width)."""
    return _launched(k, landmark, landmark, positions, width, context_length=1.0, factor=1.0, QUERIES=False)


def joined_queries(
    q: Tensor, gate: Tensor, amplitude: Tensor, positions: Tensor, width: int, *, context_length: float, scale: float
) -> Tensor:
    """Queries (B, Hq, N, D) with coordinates for gates (B, Hq, N) and amplitudes (Hq,), (B, Hq, N, width)."""
    factor = UNIT / scale
    return _launched(q, gate, amplitude, positions, width, context_length=context_length, factor=factor, QUERIES=True)


def _launched(
    x: Tensor,
    side: Tensor,
    amplitude: Tensor,
    positions: Tensor,
    width: int,
    *,
    context_length: float,
    factor: float,
    **flags: Any,
) -> Tensor:
    batch, heads, n, content = x.shape
    out = torch.empty(batch, heads, n, width, dtype=x.dtype, device=x.device)
    if out.numel():
        direct(join)[(-(-n // TOKENS), batch * heads)](
            x, side, amplitude, positions, out, *x.stride(), *side.stride(), amplitude.stride(-1),
            0 if positions.dim() == 1 else positions.stride(0), positions.stride(-1),
            heads, n, content, width, float(context_length), factor,
            UNIT=UNIT, BITS=significand_bits(x), LIMIT=torch.finfo(x.dtype).max / 2, T=TOKENS,
            W=1 << (width - 1).bit_length(), num_warps=WARPS,
            # A product and a difference in one instruction would give other pieces than torch's.
            enable_fp_fusion=False, **flags,
        )  # fmt: skip
    return out
