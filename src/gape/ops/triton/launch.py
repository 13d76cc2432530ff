"""`impl="triton"`: the bias made in float32 registers, every coordinate free for content, any length and layout."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gape.ops.problem import Problem
from gape.ops.triton import backward, forward

LOG2E = math.log2(math.e)

Saved = tuple[Tensor, Tensor]


class Layout(NamedTuple):
    """Who sees whom, as the kernels take it: tensors or None, and flags."""

    q_positions: Tensor | None
    k_positions: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None
    mask: Tensor | None
    causal: bool


def run(problem: Problem) -> Tensor:
    """The operator, (B, Hq, Nq, Dv) in q's dtype, which is not float64."""
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        problem.q, problem.k, problem.v, problem.rate, problem.exposure, problem.scale, layout(problem)
    )
    return out


def layout(problem: Problem) -> Layout:
    """The problem's visibility in the form that the kernels take."""
    seen, batch = problem.seen, problem.q.size(0)
    mask = seen.attn_mask
    if mask is not None:
        mask = mask.expand(batch, problem.q.size(1), seen.n_q, seen.n_k)
    return Layout(
        q_positions=None if seen.q_positions is None else seen.q_positions.expand(batch, -1),
        k_positions=None if seen.k_positions is None else seen.k_positions.expand(batch, -1),
        q_documents=None if seen.q_documents is None else seen.q_documents.contiguous(),
        k_documents=None if seen.k_documents is None else seen.k_documents.contiguous(),
        mask=mask,
        causal=seen.is_causal,
    )


class _Attention(torch.autograd.Function):
    """Forward and backward through the kernels; the rate and the exposure get float32 gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, c: Tensor, u: Tensor, scale: float, where: Layout) -> Tensor:
        out, lse = _forward(q, k, v, c, u, scale, where)
        ctx.save_for_backward(q, k, v, c, u, out, lse, *where[:5])
        ctx.scale, ctx.causal = scale, where.causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, c, u, out, lse, *where = ctx.saved_tensors
        grads = _backward(q, k, v, c, u, out, lse, grad, ctx.scale, Layout._make([*where, ctx.causal]))
        return (*grads, None, None)


def _forward(q: Tensor, k: Tensor, v: Tensor, c: Tensor, u: Tensor, scale: float, where: Layout) -> Saved:
    batch, n_heads, n_q, _ = q.shape
    out = torch.empty(batch, n_heads, n_q, v.size(-1), dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, n_heads, n_q, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    tile = tiles_for(q, v, "attend")
    arguments = _arguments(q, k, v, c, u, where, tile)
    grid = (-(-n_q // tile["BLOCK_M"]), batch * n_heads)
    forward.attend[grid](
        *arguments.tensors, out, lse, *arguments.strides, n_heads, *arguments.sizes, scale * LOG2E, **arguments.flags
    )
    return out, lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, u: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float,
    where: Layout,
) -> tuple[Tensor, ...]:  # fmt: skip
    grad = grad.contiguous()
    delta = (grad.float() * out.float()).sum(-1)
    blank = torch.empty_like if q.numel() and k.numel() else torch.zeros_like
    dq, dk, dv = (blank(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dc, du = (blank(x, memory_format=torch.contiguous_format) for x in (c, u))
    if q.numel() == 0 or k.numel() == 0:
        return dq, dk, dv, dc, du
    # A row that saw nothing has −inf; +inf makes its weights zero without a test in the kernels.
    upstream = (grad, lse.masked_fill(lse == -torch.inf, torch.inf), delta)
    tile = tiles_for(q, v, "by_rows")
    a = _arguments(q, k, v, c, u, where, tile)
    rows = (-(-q.size(2) // tile["BLOCK_M"]), q.size(0) * q.size(1))
    backward.by_rows[rows](
        *a.tensors, *upstream, dq, dc, *a.strides, q.size(1), *a.sizes, scale * LOG2E, scale, **a.flags
    )
    tile = tiles_for(q, v, "by_columns")
    a = _arguments(q, k, v, c, u, where, tile)
    columns = (-(-k.size(2) // tile["BLOCK_N"]), k.size(0) * k.size(1))
    backward.by_columns[columns](
        *a.tensors, *upstream, dk, dv, du, *a.strides, k.size(1), *a.sizes, scale * LOG2E, scale, LOG2E, **a.flags
    )
    return dq, dk, dv, dc, du


class _Arguments(NamedTuple):
    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    flags: dict[str, Any]


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, u: Tensor, where: Layout, tile: dict[str, int]
) -> _Arguments:
    """What all kernels take, in their order."""
    n_q, n_k, d, d_v = q.size(2), k.size(2), q.size(3), v.size(3)
    positions = [(0, 0) if p is None else p.stride() for p in (where.q_positions, where.k_positions)]
    mask = (0, 0, 0, 0) if where.mask is None else where.mask.stride()
    flags = {
        "CAUSAL": where.causal,
        "HAS_POSITIONS": where.q_positions is not None,
        "HAS_DOCUMENTS": where.q_documents is not None,
        "HAS_MASK": where.mask is not None,
        "PARTIAL_D": d != tile["BLOCK_D"],
        "PARTIAL_V": d_v != tile["BLOCK_V"],
        # TF32 would shorten float32 content; it does not touch half precision.
        "PRECISION": "ieee",
    }
    # A pointer that is never followed stands in for what is not there: kernels do arithmetic on all of them.
    optional = tuple(q if x is None else x for x in where[:5])
    return _Arguments(
        tensors=(q, k, v, (c * LOG2E).contiguous(), u.contiguous(), *optional),
        strides=(*q.stride(), *k.stride(), *v.stride(), *positions[0], *positions[1], *mask),
        sizes=(q.size(1) // k.size(1), n_q, n_k, d, d_v),
        flags=flags | tile,
    )


#: Tile sizes and launch options by kernel, for half precision with heads of up to 64 and up to 128, and for float32.
TILES: dict[str, dict[str, tuple[int, int, int, int]]] = {
    "narrow": {"attend": (128, 64, 4, 3), "by_rows": (64, 64, 4, 3), "by_columns": (64, 64, 4, 3)},
    "wide": {"attend": (128, 128, 8, 3), "by_rows": (64, 64, 4, 2), "by_columns": (64, 64, 4, 2)},
    "float32": {"attend": (32, 32, 4, 2), "by_rows": (32, 32, 4, 2), "by_columns": (32, 32, 4, 2)},
}


def tiles_for(q: Tensor, v: Tensor, kernel: str) -> dict[str, int]:
    """Tile sizes and launch options of a kernel; widths are powers of two of at least 16, which matrix units want."""
    width, value_width = (max(16, 1 << (x.size(-1) - 1).bit_length()) for x in (q, v))
    kind = "wide" if max(width, value_width) > 64 else "narrow"
    rows, columns, warps, stages = TILES["float32" if q.dtype == torch.float32 else kind][kernel]
    tile = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_D": width, "BLOCK_V": value_width}
    return tile | {"num_warps": warps, "num_stages": stages}
