"""One pass that writes q and k as `split` hands them to attention: content, six columns of the bias, zeros.

It replaces :func:`gape.ops.columns.sides`, `torch.cat` and padding for positions in index order. The numbers are the
same. Rows are as wide as a multiple of eight, so each begins at 16 bytes, as cuDNN wants. The backward pass cuts the
gradients of q and k out of those of the rows, and reads the bias's columns for those of rates and exposures.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.columns import COLUMNS, significand_bits
from gape.ops.triton.configs import power_of_two
from gape.ops.triton.custom_ops import INTERPRETED, operator, traceable
from gape.ops.triton.split_bias import loss_gradient, rate_gradient, split_bias, steepest_rate, with_three

#: Coordinates of the content that one program copies, and its warps: a thread has four loads of 16 bytes under way. The
#: interpreter takes as long for a program whatever it has.
COPIED = 2**15 if INTERPRETED else 4096
WARPS = 4

#: Tokens of a program of the backward pass, which reads 12 bytes of each.
BACKWARD_TOKENS = 1024 if INTERPRETED else 128


@triton.jit
def program_rows(n_q_heads, n_q, n_k, T: tl.constexpr):
    """Whether this program has queries, its head, and its first token. Programs side by side have neighbouring tokens.

    q's come first, then k's.
    """
    program, q_blocks, k_blocks = tl.program_id(0), tl.cdiv(n_q, T), tl.cdiv(n_k, T)
    of_queries = program < n_q_heads * q_blocks
    blocks = tl.where(of_queries, q_blocks, k_blocks)
    program -= tl.where(of_queries, 0, n_q_heads * q_blocks)
    head = program // blocks
    return of_queries, head.to(tl.int64), (program - head * blocks).to(tl.int64) * T


@triton.jit
def augment_rows(
    x_ptr, number_ptr, out_ptr, x_b, x_h, x_n, head, start, n_heads, n, first, middle, apart, factor,
    QUERIES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    T: tl.constexpr, ANCHORS: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """T rows of one head from `start` on."""
    batch = tl.program_id(1).to(tl.int64)
    rows = start + tl.arange(0, T)[:, None]
    inside = rows < n
    number_ptr += (batch * n_heads + head) * n
    out_ptr += (batch * n_heads + head) * n * WIDTH + rows * WIDTH
    dims, tail = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, TAIL)[None, :]
    content = inside & (dims < DIM)
    x = tl.load(x_ptr + batch * x_b + head * x_h + rows * x_n + dims, mask=content)
    number = tl.load(number_ptr + rows, mask=inside, other=0.0)
    if QUERIES:
        number *= factor
    c0, c1, c2, c3, c4, c5 = split_bias(
        number, (rows + first).to(tl.float32), rows < middle, apart, QUERIES, ANCHORS, BITS, LIMIT
    )  # fmt: skip
    columns = with_three(with_three(0.0, tail, 3, c3, c4, c5), tail, 0, c0, c1, c2)
    tl.store(out_ptr + dims, x, mask=content)
    tl.store(out_ptr + DIM + tail, columns.to(out_ptr.dtype.element_ty), mask=inside & (tail < WIDTH - DIM))


@triton.jit
def _augment_fwd_kernel(
    q_ptr, k_ptr, rate_ptr, exposure_ptr, q_out_ptr, k_out_ptr, q_b, q_h, q_n, k_b, k_h, k_n,
    n_q_heads, n_k_heads, n_q, n_k, q_first, k_first, middle, apart, factor,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, T: tl.constexpr,
    ANCHORS: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """q, k (B, H, N, DIM) → (B, H, N, WIDTH), contiguous. q_first, k_first: position of row 0 from the first anchor.

    The first `middle` queries count from the first anchor, the others from the second, `apart` further on.
    factor: times which a rate is the scaled rate.
    """
    # Compilers hand a Python float over in float64, and all that it touches would be.
    factor = tl.cast(factor, tl.float32)
    of_queries, head, start = program_rows(n_q_heads, n_q, n_k, T)
    if of_queries:
        augment_rows(
            q_ptr, rate_ptr, q_out_ptr, q_b, q_h, q_n, head, start, n_q_heads, n_q, q_first, middle, apart, factor,
            True, DIM, WIDTH, BLOCK_D, TAIL, T, ANCHORS, BITS, LIMIT,
        )  # fmt: skip
    else:
        augment_rows(
            k_ptr, exposure_ptr, k_out_ptr, k_b, k_h, k_n, head, start, n_k_heads, n_k, k_first, middle, apart, factor,
            False, DIM, WIDTH, BLOCK_D, TAIL, T, ANCHORS, BITS, LIMIT,
        )  # fmt: skip


@triton.jit
def column_gradients(
    grad_ptr, number_ptr, out_ptr, g_b, g_h, g_n, g_d, head, start, n_heads, n, first, middle, apart, factor,
    QUERIES: tl.constexpr, DIM: tl.constexpr, T: tl.constexpr, ANCHORS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The gradients of T rates or exposures of one head from `start` on."""
    batch = tl.program_id(1).to(tl.int64)
    rows, slot = start + tl.arange(0, T)[:, None], tl.arange(0, 4)[None, :]
    inside = rows < n
    at = (batch * n_heads + head) * n + rows
    grad_ptr += batch * g_b + head * g_h + rows * g_n + (DIM + slot) * g_d
    ga = tl.load(grad_ptr, mask=inside & (slot < 3), other=0.0).to(tl.float32)
    gb = tl.load(grad_ptr + 3 * g_d, mask=inside & (slot < 3), other=0.0).to(tl.float32)
    position = (rows + first).to(tl.float32)
    if QUERIES:
        in_first = rows < middle
        i = position
        if ANCHORS == 2:
            i = tl.where(in_first, position, position - apart)
        gradient = rate_gradient(ga, gb, slot, i, in_first, ANCHORS) * factor
        # A rate that saturates has none.
        saturates = tl.load(number_ptr + at, mask=inside, other=0.0) * factor > steepest_rate(i, LIMIT)
        gradient = tl.where(saturates, 0.0, gradient)
    else:
        gradient = loss_gradient(ga, gb, slot, position, apart, ANCHORS)
    tl.store(out_ptr + at, gradient, mask=inside)


@triton.jit
def _augment_bwd_kernel(
    q_grad_ptr, k_grad_ptr, rate_ptr, exposure_ptr, drate_ptr, dexposure_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    n_q_heads, n_k_heads, n_q, n_k, q_first, k_first, middle, apart, factor,
    DIM: tl.constexpr, T: tl.constexpr, ANCHORS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The gradients of rates (B, Hq, Nq) and exposures (B, Hk, Nk) from those of `_augment_fwd_kernel`'s outputs."""
    factor = tl.cast(factor, tl.float32)
    of_queries, head, start = program_rows(n_q_heads, n_q, n_k, T)
    if of_queries:
        column_gradients(
            q_grad_ptr, rate_ptr, drate_ptr, q_b, q_h, q_n, q_d, head, start, n_q_heads, n_q, q_first, middle, apart,
            factor, True, DIM, T, ANCHORS, LIMIT,
        )  # fmt: skip
    else:
        column_gradients(
            k_grad_ptr, exposure_ptr, dexposure_ptr, k_b, k_h, k_n, k_d, head, start, n_k_heads, n_k, k_first, middle,
            apart, factor, False, DIM, T, ANCHORS, LIMIT,
        )  # fmt: skip


@operator("gape::augment", batched=4)
def augment(
    q: Tensor, k: Tensor, rate: Tensor, exposure: Tensor, factor: float, anchors: int, first: int, middle: int,
    apart: int, offset: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k with the columns of the bias behind their content, then zeros up to a multiple of eight.

    Args:
        q, k: (B, Hq, Nq, D) and (B, Hk, Nk, D), rotated, bfloat16 or float16, any strides.
        rate, exposure: (B, Hq, Nq) and (B, Hk, Nk) in float32.
        factor: times which a rate is the scaled rate.
        anchors, first, middle, apart: as :func:`gape.ops.columns.index_anchors` gives them.
        offset: position of query 0; key 0 has position 0.

    Returns:
        (B, Hq, Nq, W) and (B, Hk, Nk, W) in their dtype, contiguous.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    dim = q.size(-1)
    width = -(-(dim + COLUMNS) // 8) * 8
    outs = tuple(torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device) for x in (q, k))
    block = power_of_two(dim)
    # The columns of narrow heads are wider than their content.
    tokens = max(1, COPIED // max(block, 16))
    if q.numel() + k.numel():
        traceable(_augment_fwd_kernel)[_grid(rate, exposure, tokens)](
            q, k, rate.contiguous(), exposure.contiguous(), *outs, *q.stride()[:3], *k.stride()[:3],
            *_sizes(rate, exposure), first + offset, first, middle, apart, factor,
            DIM=dim, WIDTH=width, BLOCK_D=block, TAIL=power_of_two(width - dim), T=tokens, ANCHORS=anchors,
            BITS=significand_bits(q), LIMIT=torch.finfo(q.dtype).max / 2, num_warps=WARPS,
            # A product and a difference in one instruction would give other numbers than torch's.
            enable_fp_fusion=False,
        )  # fmt: skip
    return outs[0], outs[1]


@operator("gape::augment_backward", batched=4)
def augment_backward(
    q_grad: Tensor, k_grad: Tensor, rate: Tensor, exposure: Tensor, dim: int, factor: float, anchors: int, first: int,
    middle: int, apart: int, offset: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of rate and exposure, contiguous in float32, from those of the rows of :func:`augment`."""
    rate, exposure = rate.contiguous(), exposure.contiguous()
    drate, dexposure = torch.empty_like(rate), torch.empty_like(exposure)
    if rate.numel() + exposure.numel():
        traceable(_augment_bwd_kernel)[_grid(rate, exposure, BACKWARD_TOKENS)](
            q_grad, k_grad, rate, exposure, drate, dexposure, *q_grad.stride(), *k_grad.stride(),
            *_sizes(rate, exposure), first + offset, first, middle, apart, factor,
            DIM=dim, T=BACKWARD_TOKENS, ANCHORS=anchors, LIMIT=torch.finfo(q_grad.dtype).max / 2, num_warps=WARPS,
        )  # fmt: skip
    return drate, dexposure


def _grid(rate: Tensor, exposure: Tensor, tokens: int) -> tuple[int, int]:
    programs = sum(x.size(1) * ((x.size(2) + tokens - 1) // tokens) for x in (rate, exposure))
    return programs, rate.size(0)


def _sizes(rate: Tensor, exposure: Tensor) -> tuple[int, int, int, int]:
    return rate.size(1), exposure.size(1), rate.size(2), exposure.size(2)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, _, rate, exposure, *settings = inputs
    ctx.save_for_backward(rate, exposure)
    ctx.dim, ctx.settings = q.size(-1), settings


def _backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Any, ...]:
    numbers: tuple[Tensor | None, Tensor | None] = None, None
    if any(ctx.needs_input_grad[2:4]):
        numbers = torch.ops.gape.augment_backward(q_grad, k_grad, *ctx.saved_tensors, ctx.dim, *ctx.settings)
    return q_grad[..., : ctx.dim], k_grad[..., : ctx.dim], *numbers, *(None,) * len(ctx.settings)


augment.register_autograd(_backward, setup_context=_setup)
