"""What forward and backward kernels share: the pairs of a tile, and its logits with the bias made in registers.

Everything is in base 2: `scale` and `c` come multiplied by log₂e. Positions enter a tile counted from the tile's first
key, so that the two products of the bias, c·(u·j) and (c·i)·u, stay as small as the tile is near, and each logit
costs two fused multiply-adds in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def anchor_of(ptr, stride, start, HAS_POSITIONS: tl.constexpr):
    """The position of the tile's first key."""
    if HAS_POSITIONS:
        return tl.load(ptr + start * stride)
    return start


@triton.jit
def local_positions(ptr, stride, offsets, n, anchor, first, HAS_POSITIONS: tl.constexpr):
    """Positions of tokens `offsets`, counted from `anchor`, as float32; `first` is that of token 0 in index order."""
    if HAS_POSITIONS:
        position = tl.load(ptr + offsets * stride, mask=offsets < n, other=0)
        return (position - anchor).to(tl.float32)
    return (offsets + (first - anchor)).to(tl.float32)


@triton.jit
def load_rows(ptr, stride_n, stride_d, offsets, n, dims, d, CHECK_N: tl.constexpr, CHECK_D: tl.constexpr):
    """Rows `offsets` of a (N, D) matrix, zero past its ends; a check that is not needed costs nothing."""
    where = ptr + offsets[:, None].to(tl.int64) * stride_n + dims[None, :] * stride_d
    if CHECK_N and CHECK_D:
        return tl.load(where, mask=(offsets[:, None] < n) & (dims[None, :] < d), other=0.0)
    if CHECK_N:
        return tl.load(where, mask=offsets[:, None] < n, other=0.0)
    if CHECK_D:
        return tl.load(where, mask=dims[None, :] < d, other=0.0)
    return tl.load(where)


@triton.jit
def biased_logits(q, k, c, u, i, j, scale, PRECISION: tl.constexpr):
    """scale·qᵀk − c·u·(i − j) for q (M, D), k (N, D), c and i (M,), u and j (N,); float32 (M, N)."""
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return products * scale + c[:, None] * (u * j)[None, :] - (c * i)[:, None] * u[None, :]


@triton.jit
def visible(
    i, j, offs_m, offs_n, n_q, n_k, q_doc, k_doc, mask_ptr, mask_m, mask_n,
    CAUSAL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Which pairs of the tile may be used, (BLOCK_M, BLOCK_N)."""
    inside = (offs_m[:, None] < n_q) & (offs_n[None, :] < n_k)
    seen = inside
    if CAUSAL:
        seen = seen & (j[None, :] <= i[:, None])
    if HAS_DOCUMENTS:
        seen = seen & (q_doc[:, None] == k_doc[None, :])
    if HAS_MASK:
        where = mask_ptr + offs_m[:, None].to(tl.int64) * mask_m + offs_n[None, :].to(tl.int64) * mask_n
        seen = seen & (tl.load(where, mask=inside, other=0) != 0)
    return seen


@triton.jit
def document_of(ptr, offsets, n, other, HAS_DOCUMENTS: tl.constexpr):
    """Document ids of tokens `offsets`, `other` past the end; anything where there are no documents."""
    if HAS_DOCUMENTS:
        return tl.load(ptr + offsets, mask=offsets < n, other=other)
    return offsets
