"""A step of decoding: from q and k of a few tokens as projected to rows that carry the bias, in one launch for both.

Rotation and pieces are, one for one, those of :meth:`gape.positions.rotary.Rotary.rotate` and
:mod:`gape.ops.columns`; the gates are summed in another order, so that they may differ in their last bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.columns import UNIT, significand_bits
from gape.ops.limits import DECODE_QUERIES
from gape.ops.triton.carry import key_numbers, near, query_numbers
from gape.ops.triton.custom_ops import direct
from gape.ops.triton.decode_plan import power_of_two
from gape.ops.triton.prologue_kernels import rounded, sigmoid, softplus
from gape.ops.triton.tiles import single

if TYPE_CHECKING:
    from gape.ops.carried import Reading, Step

#: Rows of a program, which has all tokens of one head, and its warps.
TOKENS, WARPS = power_of_two(DECODE_QUERIES), 2


@triton.jit
def turned(
    x, x_ptr, there, columns, cos_ptr, sin_ptr, angles_n, tokens, content, ROTATED: tl.constexpr
):  # fmt: skip
    """Content x (T, W) turned; x_ptr points to its first coordinates (T, 1)."""
    if ROTATED:
        low = content // 2
        first = columns < low
        pair = tl.where(first, columns, columns - low)
        other = tl.load(x_ptr + tl.where(first, columns + low, columns - low), mask=there, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + tokens * angles_n + pair, mask=there, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + tokens * angles_n + pair, mask=there, other=0.0).to(tl.float32)
        x = x * cos + tl.where(first, -other, other) * sin
    return x


@triton.jit
def gate_reading(x, weight_ptr, bias_ptr, fixed, columns, content, LEARNED: tl.constexpr):
    """What a gate reads off content x (T, W), (T, 1)."""
    if LEARNED:
        weight = tl.load(weight_ptr + columns, mask=columns < content, other=0.0).to(tl.float32)
        z = tl.sum(x * weight, 1, keep_dims=True) + tl.load(bias_ptr).to(tl.float32)
    else:
        z = tl.zeros((x.shape[0], 1), tl.float32) + fixed
    return z


@triton.jit
def laid(x, columns, split, alone, split_at, alone_at, BITS: tl.constexpr):
    """Rows x (T, W) with a number (T, 1) in three pieces from one column on and another three times from another."""
    for i in tl.static_range(3):
        piece = rounded(split, BITS)
        split -= piece
        x = tl.where(columns == split_at + i, piece, x)
        x = tl.where(columns == alone_at + i, alone, x)
    return x


@triton.jit
def step_queries(
    x_ptr, positions_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr, amplitude_ptr, strength_ptr, floor_ptr,
    out_ptr, gate_ptr,
    batch, head, x_n, positions_n, angles_n, n_heads, n, skipped, content, width, fixed, context_length, factor,
    ROTATED: tl.constexpr, LEARNED: tl.constexpr, STRONG: tl.constexpr, WANTED: tl.constexpr,
    UNIT: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A head of q, which has no rows for the first `skipped` tokens."""
    rows, columns = tl.arange(0, T)[:, None], tl.arange(0, W)[None, :]
    there, tokens = rows < n, skipped + rows
    inside, source = there & (columns < content), x_ptr + rows * x_n
    x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    z = gate_reading(x, weight_ptr + head * content, bias_ptr + head, fixed, columns, content, LEARNED)
    gate = softplus(z) + tl.load(floor_ptr + head)
    amplitude = softplus(tl.load(amplitude_ptr + head).to(tl.float32))
    if STRONG:
        amplitude *= tl.abs(tl.load(strength_ptr + head).to(tl.float32))
    position = near(tl.load(positions_ptr + tokens * positions_n, mask=there, other=0), UNIT, LIMIT)
    c, product = query_numbers(gate, amplitude, position, context_length, factor, UNIT, BITS, LIMIT)
    x = turned(x, source, inside, columns, cos_ptr, sin_ptr, angles_n, tokens, content, ROTATED)
    x = laid(x, columns, product, c, content, content + 3, BITS)
    row = (batch * n_heads + head) * n + rows
    tl.store(out_ptr + row * width + columns, x.to(out_ptr.dtype.element_ty), mask=there & (columns < width))
    if WANTED:
        tl.store(gate_ptr + row, gate, mask=there)


@triton.jit
def step_keys(
    x_ptr, positions_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr, out_ptr,
    batch, head, x_n, positions_n, angles_n, n_heads, n, content, width, fixed,
    ROTATED: tl.constexpr, LEARNED: tl.constexpr,
    UNIT: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A head of k."""
    rows, columns = tl.arange(0, T)[:, None], tl.arange(0, W)[None, :]
    there = rows < n
    inside, source = there & (columns < content), x_ptr + rows * x_n
    x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    z = gate_reading(x, weight_ptr + head * content, bias_ptr + head, fixed, columns, content, LEARNED)
    position = near(tl.load(positions_ptr + rows * positions_n, mask=there, other=0), UNIT, LIMIT)
    u, product = key_numbers(sigmoid(z), position, UNIT, BITS, LIMIT)
    x = turned(x, source, inside, columns, cos_ptr, sin_ptr, angles_n, rows, content, ROTATED)
    x = laid(x, columns, product, u, content + 3, content, BITS)
    row = (batch * n_heads + head) * n + rows
    tl.store(out_ptr + row * width + columns, x.to(out_ptr.dtype.element_ty), mask=there & (columns < width))


# Nothing here differs from token to token: a kernel is compiled anew for each integer that is 1 or divides by 16.
@triton.jit(
    do_not_specialize=("n_q", "n_k", "positions_b", "positions_n", "angles_b"),
    do_not_specialize_on_alignment=("positions_ptr",),
)
def step(
    q_ptr, k_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, q_bias_ptr, k_weight_ptr, k_bias_ptr,
    amplitude_ptr, strength_ptr, floor_ptr, q_out_ptr, k_out_ptr, gate_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, positions_b, positions_n, angles_b, angles_n,
    n_q_heads, n_k_heads, n_q, n_k, content, width, fixed_gate, fixed_landmark, context_length, factor,
    ROTATED: tl.constexpr, GATE_LEARNED: tl.constexpr, LANDMARK_LEARNED: tl.constexpr, STRONG: tl.constexpr,
    GATE_WANTED: tl.constexpr,
    UNIT: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Rows (B, H, N, width) of q and k, contiguous: content, six coordinates, zeros; gates (B, Hq, N) where wanted.

    A program has a head of q or of k. Queries are those of the last n_q of the n_k tokens that positions and angles
    belong to.
    """
    heads = n_q_heads + n_k_heads
    batch, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    positions_ptr += batch * positions_b
    cos_ptr += batch * angles_b
    sin_ptr += batch * angles_b
    if head < n_q_heads:
        step_queries(
            q_ptr + batch * q_b + head * q_h, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, q_bias_ptr,
            amplitude_ptr, strength_ptr, floor_ptr, q_out_ptr, gate_ptr, batch, head, q_n, positions_n, angles_n,
            n_q_heads, n_q, n_k - n_q, content, width, single(fixed_gate), single(context_length), single(factor),
            ROTATED, GATE_LEARNED, STRONG, GATE_WANTED, UNIT, BITS, LIMIT, T, W,
        )  # fmt: skip
    else:
        head -= n_q_heads
        step_keys(
            k_ptr + batch * k_b + head * k_h, positions_ptr, cos_ptr, sin_ptr, k_weight_ptr, k_bias_ptr,
            k_out_ptr, batch, head, k_n, positions_n, angles_n, n_k_heads, n_k, content, width, single(fixed_landmark),
            ROTATED, LANDMARK_LEARNED, UNIT, BITS, LIMIT, T, W,
        )  # fmt: skip


def stepped(
    q: Tensor, k: Tensor, told: Step, *, width: int, scale: float, gate: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows (B, Hq, Nq, width) and (B, Hk, Nk, width), and gates (B, Hq, Nq) in float32 where they are wanted.

    Args:
        q, k: (B, Hq, Nq, C) and (B, Hk, Nk, C) in float32 or half precision, 1 ≤ Nq ≤ Nk ≤ 16, as projected.
        told: what is to be done to them.
        width: of the rows, at least C + 6.
        scale: the softmax scale.
        gate: whether gates are wanted.
        dtype: of the rows, in half precision.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (batch, n_q_heads, n_q, content), (_, n_k_heads, n_k, _) = q.shape, k.shape
    queries = torch.empty(batch, n_q_heads, n_q, width, dtype=dtype, device=q.device)
    keys = torch.empty(batch, n_k_heads, n_k, width, dtype=dtype, device=k.device)
    gates = torch.empty(batch, n_q_heads, n_q, dtype=torch.float32, device=q.device) if gate else None
    # What is never read stands in for what is not there.
    cos, sin = (q, q) if told.angles is None else told.angles
    positions = told.positions
    gate_weight, gate_bias, fixed_gate = _reading(told.gate, q)
    landmark_weight, landmark_bias, fixed_landmark = _reading(told.landmark, k)
    flags: dict[str, Any] = {
        "ROTATED": told.angles is not None, "GATE_LEARNED": gate_weight is not q,
        "LANDMARK_LEARNED": landmark_weight is not k, "STRONG": told.strength is not None, "GATE_WANTED": gate,
    }  # fmt: skip
    direct(step)[(batch * (n_q_heads + n_k_heads),)](
        q, k, positions, cos, sin, gate_weight, gate_bias, landmark_weight, landmark_bias,
        told.raw_amplitude, q if told.strength is None else told.strength, told.floor,
        queries, keys, queries if gates is None else gates,
        *q.stride()[:3], *k.stride()[:3], 0 if positions.dim() == 1 else positions.stride(0), positions.stride(-1),
        0 if cos.dim() == 2 else cos.stride(0), cos.stride(-2),
        n_q_heads, n_k_heads, n_q, n_k, content, width, fixed_gate, fixed_landmark,
        float(told.context_length), UNIT / scale,
        UNIT=UNIT, BITS=significand_bits(queries), LIMIT=torch.finfo(dtype).max / 2, T=TOKENS,
        W=power_of_two(width), num_warps=WARPS,
        # A product and a difference in one instruction would give other numbers than torch's.
        enable_fp_fusion=False, **flags,
    )  # fmt: skip
    return queries, keys, gates


def _reading(reading: Reading, stand_in: Tensor) -> tuple[Tensor, Tensor, float]:
    """Weights, biases and the number in their place."""
    if isinstance(reading, float):
        return stand_in, stand_in, reading
    weight, bias = reading
    return weight.contiguous(), bias, 0.0
