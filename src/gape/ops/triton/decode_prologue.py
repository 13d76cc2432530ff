"""The kernel of :func:`gape.ops.prologue.decode_prologue`: a token's gates, rotation and place in its page.

A program has one head of q, or one head of k and v. The rotation is that of
:meth:`gape.positions.rotary.Rotary.rotate`, bit for bit; gates are summed in another order, so that they may differ in
their last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.paged import Pages
from gape.ops.prologue import Reading, Step, tables_of
from gape.ops.triton.custom_ops import direct
from gape.ops.triton.paged import DTYPES, PAGE, integers, slot_addresses, tile_widths
from gape.ops.triton.split_bias import sigmoid, softplus
from gape.ops.triton.tiles import single


@triton.jit
def load_row(ptr, d, BLOCK_D: tl.constexpr):
    """A row of d numbers in float32, zeros behind."""
    dims = tl.arange(0, BLOCK_D)
    return tl.load(ptr + dims, mask=dims < d, other=0.0).to(tl.float32)


@triton.jit
def rotate_row(x, x_ptr, cos_ptr, sin_ptr, d, ROTATED: tl.constexpr, BLOCK_D: tl.constexpr):
    """The row x, which begins at x_ptr, rotated in pairs (x_m, x_{m + d/2})."""
    if ROTATED:
        dims, half = tl.arange(0, BLOCK_D), d // 2
        first, inside = dims < half, dims < d
        pair = tl.where(first, dims, dims - half)
        other = tl.load(x_ptr + tl.where(first, dims + half, dims - half), mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + pair, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + pair, mask=inside, other=0.0).to(tl.float32)
        x = x * cos + tl.where(first, -other, other) * sin
    return x


@triton.jit
def read_gate(x, weight_ptr, bias_ptr, fixed, head, d, LEARNED: tl.constexpr, BLOCK_D: tl.constexpr):
    """What a gate reads off the row x of a head."""
    z = fixed
    if LEARNED:
        z = tl.sum(x * load_row(weight_ptr + head * d, d, BLOCK_D), 0) + tl.load(bias_ptr + head).to(tl.float32)
    return z


@triton.jit
def or_infinite(x):
    """x, infinite where it is not a number: a maximum would lose that."""
    return tl.where((x >= 0.0) | (x < 0.0), x, float("inf"))


# Nothing here differs from token to token: layers and tokens share one kernel.
@triton.jit(
    do_not_specialize=("room", "positions_b", "angles_b", "angles_r"),
    do_not_specialize_on_alignment=(
        "positions_ptr", "addresses_ptr", "lengths_ptr", "norm_ptr", "reach_ptr", "own_ptr",
    ),
)  # fmt: skip
def _decode_prologue_kernel(
    q_out_ptr, rate_ptr, q_ptr, k_ptr, v_ptr, positions_ptr, cos_ptr, sin_ptr, which_ptr,
    gate_weight_ptr, gate_bias_ptr, landmark_weight_ptr, landmark_bias_ptr, amplitude_ptr, strength_ptr, floor_ptr,
    addresses_ptr, lengths_ptr, norm_ptr, reach_ptr, own_ptr,
    q_b, q_h, k_b, k_h, v_b, v_h, positions_b, angles_b, angles_r, heads, key_heads, room, d, d_v,
    fixed_gate, fixed_landmark, context_length, scale,
    ROTATED: tl.constexpr, BY_HEAD: tl.constexpr, GATE_LEARNED: tl.constexpr, LANDMARK_LEARNED: tl.constexpr,
    STRONG: tl.constexpr, MEASURED: tl.constexpr, DTYPE: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """q_out (B, Hq, d) and rates (B, Hq), contiguous; keys and values go to their pages.

    BY_HEAD: which_ptr has the table of cosines and sines of each head of q, then of k, angles_r apart.
    """
    VALUES_AT: tl.constexpr = PAGE * KEY_WIDTH * (DTYPE.primitive_bitwidth // 8)
    EXPOSURES_AT: tl.constexpr = VALUES_AT + PAGE * VALUE_WIDTH * (DTYPE.primitive_bitwidth // 8)
    batch = (tl.program_id(0) // (heads + key_heads)).to(tl.int64)
    head = (tl.program_id(0) % (heads + key_heads)).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    cos_ptr += batch * angles_b
    sin_ptr += batch * angles_b
    own = 0
    if BY_HEAD:
        own = tl.load(which_ptr + head).to(tl.int64) * angles_r
    if head < heads:
        q_ptr += batch * q_b + head * q_h
        q = load_row(q_ptr, d, BLOCK_D)
        z = read_gate(q, gate_weight_ptr, gate_bias_ptr, single(fixed_gate), head, d, GATE_LEARNED, BLOCK_D)
        amplitude = softplus(tl.load(amplitude_ptr + head).to(tl.float32))
        if STRONG:
            amplitude *= tl.abs(tl.load(strength_ptr + head).to(tl.float32))
        gate = softplus(z) + tl.load(floor_ptr + head)
        row = batch * heads + head
        tl.store(rate_ptr + row, tl.div_rn(amplitude * gate, single(context_length)))
        q = rotate_row(q, q_ptr, cos_ptr + own, sin_ptr + own, d, ROTATED, BLOCK_D).to(DTYPE)
        tl.store(q_out_ptr + row * d + dims, q, mask=dims < d)
        if MEASURED:
            key_head = head // (heads // key_heads)
            k_ptr += batch * k_b + key_head * k_h
            if BY_HEAD:
                own = tl.load(which_ptr + heads + key_head).to(tl.int64) * angles_r
            k = load_row(k_ptr, d, BLOCK_D)
            k = rotate_row(k, k_ptr, cos_ptr + own, sin_ptr + own, d, ROTATED, BLOCK_D).to(DTYPE)
            q, k = q.to(tl.float32), k.to(tl.float32)
            tl.atomic_max(reach_ptr + head, or_infinite(single(scale) * tl.sqrt(tl.sum(q * q, 0))))
            tl.atomic_max(own_ptr + head, or_infinite(-single(scale) * tl.sum(q * k, 0)))
    else:
        head -= heads
        sequence = batch * key_heads + head
        slot = tl.load(lengths_ptr + sequence)
        address, valid = slot_addresses(addresses_ptr, sequence, slot, slot >= 0, room)
        place = slot % PAGE
        k_ptr += batch * k_b + head * k_h
        k = load_row(k_ptr, d, BLOCK_D)
        z = read_gate(
            k, landmark_weight_ptr, landmark_bias_ptr, single(fixed_landmark), head, d, LANDMARK_LEARNED, BLOCK_D
        )
        k = rotate_row(k, k_ptr, cos_ptr + own, sin_ptr + own, d, ROTATED, BLOCK_D).to(DTYPE)
        tl.store(
            address.to(tl.pointer_type(DTYPE)) + place * KEY_WIDTH + dims, k, mask=dims < tl.where(valid, KEY_WIDTH, 0)
        )
        value_dims = tl.arange(0, BLOCK_V)
        v = load_row(v_ptr + batch * v_b + head * v_h, d_v, BLOCK_V).to(DTYPE)
        v_out = (address + VALUES_AT).to(tl.pointer_type(DTYPE)) + place * VALUE_WIDTH + value_dims
        tl.store(v_out, v, mask=value_dims < tl.where(valid, VALUE_WIDTH, 0))
        tl.store((address + EXPOSURES_AT).to(tl.pointer_type(tl.float32)) + place, 1.0 - sigmoid(z), mask=valid)
        position = tl.load(positions_ptr + batch * positions_b).to(tl.int32)
        tl.store((address + EXPOSURES_AT + PAGE * 4).to(tl.pointer_type(tl.int32)) + place, position, mask=valid)
        k = k.to(tl.float32)
        tl.atomic_max(norm_ptr + sequence, tl.where(valid, or_infinite(tl.sqrt(tl.sum(k * k, 0))), 0.0))


def decode_prologue(
    q: Tensor, k: Tensor, v: Tensor, step: Step, pages: Pages, *, scale: float,
    measured: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`gape.ops.prologue.decode_prologue`."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, _, d = q.shape
    _, key_heads, room = pages.addresses.shape
    out = torch.empty(batch, heads, 1, d, dtype=pages.layout.dtype, device=q.device)
    rate = torch.empty(batch, heads, 1, dtype=torch.float32, device=q.device)
    # What is never read stands in for what is not there.
    cos, sin, which = (q if x is None else x for x in tables_of(step.angles))
    by_head = step.angles is not None and len(step.angles) == 3
    angles_r, *of_rows = cos.stride() if by_head else (0, *cos.stride())
    gate_weight, gate_bias, fixed_gate = _reading(step.gate, q)
    landmark_weight, landmark_bias, fixed_landmark = _reading(step.landmark, k)
    reach, own = (rate, rate) if measured is None else measured
    positions = integers(step.positions)
    direct(_decode_prologue_kernel)[(batch * (heads + key_heads),)](
        out, rate, q, k, v, positions, cos, sin, which, gate_weight, gate_bias, landmark_weight, landmark_bias,
        step.raw_amplitude, q if step.strength is None else step.strength, step.floor,
        pages.addresses, pages.lengths, pages.key_norm, reach, own,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        0 if positions.dim() == 1 else positions.stride(0), of_rows[0] if len(of_rows) == 3 else 0, angles_r,
        heads, key_heads, room, d, v.size(-1), fixed_gate, fixed_landmark, float(step.context_length), float(scale),
        ROTATED=step.angles is not None, BY_HEAD=by_head, GATE_LEARNED=gate_weight is not q,
        LANDMARK_LEARNED=landmark_weight is not k, STRONG=step.strength is not None, MEASURED=measured is not None,
        DTYPE=DTYPES[pages.layout.dtype], num_warps=1 if max(pages.layout[:2]) <= 128 else 2,
        **tile_widths(pages.layout),
        # A product and a difference in one instruction would give other numbers than torch's.
        enable_fp_fusion=False,
    )  # fmt: skip
    return out, rate


def _reading(reading: Reading, stand_in: Tensor) -> tuple[Tensor, Tensor, float]:
    """Weights, biases and the number in their place."""
    if isinstance(reading, float):
        return stand_in, stand_in, reading
    weight, bias = reading
    return weight.contiguous(), bias, 0.0
