"""The bias in six coordinates, as kernels write it: shared by the prologue and by the launches below.

The numbers are, one for one, those of :func:`gape.ops.columns.key_columns` and :func:`gape.ops.columns.query_columns`.
Keys for a cache, and queries that attend to them, count positions from 0: :func:`augmented_keys` and
:func:`augmented_queries` put content and coordinates side by side in one launch each, where torch takes some forty. A
step of decoding has few tokens, so that its time goes by launches: :func:`step_rows` makes both from q and k as
projected, in one launch. Its rotation is that of :meth:`gape.positions.rotary.Rotary.rotate`; gates are summed in
another order, so that they may differ in their last bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops import columns
from gape.ops.columns import significand_bits
from gape.ops.limits import DECODE_QUERIES
from gape.ops.triton.configs import power_of_two
from gape.ops.triton.custom_ops import direct
from gape.ops.triton.tiles import single

if TYPE_CHECKING:
    from gape.ops.decode_prologue import Reading, Step

#: A power of two between the two sides of a product, as in :mod:`gape.ops.columns`.
UNIT = tl.constexpr(columns.UNIT)

#: 1 / UNIT and 1 / UNIT². Products with powers of two are exact, and cost less than quotients.
PER_UNIT = tl.constexpr(1.0 / columns.UNIT)
PER_SQUARE = tl.constexpr(1.0 / columns.UNIT**2)

#: Tokens of a program, at most those of a step of decoding, and its warps.
TOKENS, WARPS = power_of_two(DECODE_QUERIES), 2


@triton.jit
def rounded(x, BITS: tl.constexpr):
    """x (float32) to BITS of significand, half to even."""
    DROP: tl.constexpr = 24 - BITS
    raw = x.to(tl.int32, bitcast=True)
    odd = (raw >> DROP) & 1
    near = ((raw + ((1 << (DROP - 1)) - 1) + odd) & -(1 << DROP)).to(tl.float32, bitcast=True)
    # What is not a number stays so: a GPU writes it with all bits set, which one more would turn into zero.
    return tl.where(tl.abs(x) >= 0.0, near, x)


@triton.jit
def clamped(x, LIMIT: tl.constexpr):
    """x between -LIMIT and LIMIT; what is not a number stays so, which it would not in a minimum."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def softplus(z):
    """log(1 + eᶻ), to full relative precision where eᶻ is small."""
    e = tl.exp(tl.minimum(z, 20.0))
    t = 1.0 + e
    near = tl.where(t == 1.0, e, tl.log(t) * (e / tl.where(t == 1.0, 1.0, t - 1.0)))
    # What is not a number stays so.
    return tl.where(z <= 20.0, near, z)


@triton.jit
def sigmoid(z):
    """1 / (1 + e⁻ᶻ), without overflow."""
    e = tl.exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def steepest_rate(i, LIMIT: tl.constexpr):
    """The largest rate whose product with i the dtype still holds."""
    return tl.div_rn(1.0, tl.maximum(tl.abs(i) * PER_SQUARE, 1.0)) * LIMIT


@triton.jit
def three_pieces(x, BITS: tl.constexpr):
    """Three numbers of BITS of significand that add up to x, to three times as many bits."""
    first = rounded(x, BITS)
    second = rounded(x - first, BITS)
    return first, second, rounded(x - first - second, BITS)


@triton.jit
def split_bias(
    x, position, in_first, apart, QUERIES: tl.constexpr, ANCHORS: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """The six coordinates of the bias, each as x is shaped; :mod:`gape.ops.columns` says what they are.

    x: the rate of queries, times UNIT over the softmax scale, or the exposure of keys. position: from the first anchor.
    in_first: which queries count from the first of two anchors; the others count from the second, `apart` further on.
    With one anchor neither is read.
    """
    if QUERIES:
        i = position
        if ANCHORS == 2:
            i = tl.where(in_first, position, position - apart)
        # A rate that float16 cannot hold saturates, consistently for every key of the query. Not a minimum, in which
        # a gate that is not a number would be lost.
        steepest = steepest_rate(i, LIMIT)
        c = rounded(tl.where(x > steepest, steepest, x), BITS)
        first, second, third = three_pieces(c * (i * PER_SQUARE), BITS)
        c0, c1, c2, c3, c4, c5 = -first, -second, -third, c, c, c
        if ANCHORS == 2:
            c2 = tl.where(in_first, c, 0.0)
            c3, c4, c5 = c2, c - c2, c - c2
    else:
        u = rounded(x, BITS)
        first, second, third = three_pieces(clamped(u * (position * PER_UNIT), LIMIT), BITS)
        c0, c1, c2, c3, c4, c5 = u * UNIT, u * UNIT, u * UNIT, first, second, third
        if ANCHORS == 2:
            c2, c3 = first, second
            c4, c5, _ = three_pieces(clamped(u * ((position - apart) * PER_UNIT), LIMIT), BITS)
    return c0, c1, c2, c3, c4, c5


@triton.jit
def with_three(x, columns, at, c0, c1, c2):
    """Rows x (T, W) with three numbers (T, 1) in the columns from `at` on."""
    return tl.where(columns == at, c0, tl.where(columns == at + 1, c1, tl.where(columns == at + 2, c2, x)))


@triton.jit
def with_bias(
    x, columns, content, number, position, QUERIES: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Rows x (T, W) of `content` coordinates with those of the bias behind them, for positions counted from 0."""
    c0, c1, c2, c3, c4, c5 = split_bias(number, position, 0, 0, QUERIES, 1, BITS, LIMIT)
    return with_three(with_three(x, columns, content, c0, c1, c2), columns, content + 3, c3, c4, c5)


@triton.jit
def position_of(position, LIMIT: tl.constexpr):
    """An integer position as float32, not a number beyond :func:`gape.ops.carried.furthest`."""
    position = position.to(tl.float32)
    far = (tl.abs(position) >= 16777216.0) | (tl.abs(position) * PER_UNIT > LIMIT)
    return tl.where(far, float("nan"), position)


@triton.jit(do_not_specialize=("n",))
def _augment_kernel(
    x_ptr, side_ptr, amplitude_ptr, position_ptr, out_ptr,
    x_b, x_h, x_n, x_d, side_b, side_h, side_n, amplitude_h, position_b, position_n,
    n_heads, n, content, width, context_length, factor,
    QUERIES: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Rows (B, H, N, width), contiguous: content, six coordinates, zeros."""
    batch, head = (tl.program_id(1) // n_heads).to(tl.int64), (tl.program_id(1) % n_heads).to(tl.int64)
    tokens, columns = (tl.program_id(0).to(tl.int64) * T + tl.arange(0, T))[:, None], tl.arange(0, W)[None, :]
    inside = tokens < n
    x_ptr += batch * x_b + head * x_h
    x = tl.load(x_ptr + tokens * x_n + columns * x_d, mask=inside & (columns < content), other=0.0).to(tl.float32)
    side = tl.load(side_ptr + batch * side_b + head * side_h + tokens * side_n, mask=inside, other=0.0)
    position = position_of(
        tl.load(position_ptr + batch * position_b + tokens * position_n, mask=inside, other=0), LIMIT
    )
    if QUERIES:
        amplitude = tl.load(amplitude_ptr + head * amplitude_h)
        number = tl.div_rn(amplitude * side, single(context_length)) * single(factor)
    else:
        number = 1.0 - side
    x = with_bias(x, columns, content, number, position, QUERIES, BITS, LIMIT)
    out_ptr += ((batch * n_heads + head) * n + tokens) * width + columns
    tl.store(out_ptr, x.to(out_ptr.dtype.element_ty), mask=inside & (columns < width))


def augmented_keys(k: Tensor, landmark: Tensor, positions: Tensor, width: int) -> Tensor:
    """Keys (B, Hk, N, D) in half precision with coordinates for landmarks (B, Hk, N) in float32, (B, Hk, N, width)."""
    return _augmented(k, landmark, landmark, positions, width, context_length=1.0, factor=1.0, QUERIES=False)


def augmented_queries(
    q: Tensor, gate: Tensor, amplitude: Tensor, positions: Tensor, width: int, *, context_length: float, scale: float
) -> Tensor:
    """Queries (B, Hq, N, D) with coordinates for gates (B, Hq, N) and amplitudes (Hq,), (B, Hq, N, width)."""
    factor = UNIT.value / scale
    return _augmented(q, gate, amplitude, positions, width, context_length=context_length, factor=factor, QUERIES=True)


def _augmented(
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
        direct(_augment_kernel)[(-(-n // TOKENS), batch * heads)](
            x, side, amplitude, positions, out, *x.stride(), *side.stride(), amplitude.stride(-1),
            0 if positions.dim() == 1 else positions.stride(0), positions.stride(-1),
            heads, n, content, width, float(context_length), factor,
            BITS=significand_bits(x), LIMIT=torch.finfo(x.dtype).max / 2, T=TOKENS,
            W=power_of_two(width), num_warps=WARPS,
            # A product and a difference in one instruction would give other pieces than torch's.
            enable_fp_fusion=False, **flags,
        )  # fmt: skip
    return out


@triton.jit
def rotated(
    x, x_ptr, filled, columns, cos_ptr, sin_ptr, angles_n, tokens, content, ROTATED: tl.constexpr
):  # fmt: skip
    """Content x (T, W) rotated; x_ptr points to its first coordinates (T, 1)."""
    if ROTATED:
        low = content // 2
        first = columns < low
        pair = tl.where(first, columns, columns - low)
        other = tl.load(x_ptr + tl.where(first, columns + low, columns - low), mask=filled, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + tokens * angles_n + pair, mask=filled, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + tokens * angles_n + pair, mask=filled, other=0.0).to(tl.float32)
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
def step_queries(
    x_ptr, positions_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr, amplitude_ptr, strength_ptr, floor_ptr,
    out_ptr, gate_ptr,
    batch, head, x_n, positions_n, angles_n, n_heads, n, skipped, content, width, fixed, context_length, factor,
    ROTATED: tl.constexpr, LEARNED: tl.constexpr, STRONG: tl.constexpr, WANTED: tl.constexpr,
    BITS: tl.constexpr, LIMIT: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A head of q, which has no rows for the first `skipped` tokens."""
    rows, columns = tl.arange(0, T)[:, None], tl.arange(0, W)[None, :]
    inside, tokens = rows < n, skipped + rows
    filled, source = inside & (columns < content), x_ptr + rows * x_n
    x = tl.load(source + columns, mask=filled, other=0.0).to(tl.float32)
    z = gate_reading(x, weight_ptr + head * content, bias_ptr + head, fixed, columns, content, LEARNED)
    gate = softplus(z) + tl.load(floor_ptr + head)
    amplitude = softplus(tl.load(amplitude_ptr + head).to(tl.float32))
    if STRONG:
        amplitude *= tl.abs(tl.load(strength_ptr + head).to(tl.float32))
    position = position_of(tl.load(positions_ptr + tokens * positions_n, mask=inside, other=0), LIMIT)
    c = tl.div_rn(amplitude * gate, context_length) * factor
    x = rotated(x, source, filled, columns, cos_ptr, sin_ptr, angles_n, tokens, content, ROTATED)
    x = with_bias(x, columns, content, c, position, True, BITS, LIMIT)
    row = (batch * n_heads + head) * n + rows
    tl.store(out_ptr + row * width + columns, x.to(out_ptr.dtype.element_ty), mask=inside & (columns < width))
    if WANTED:
        tl.store(gate_ptr + row, gate, mask=inside)


@triton.jit
def step_keys(
    x_ptr, positions_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr, out_ptr,
    batch, head, x_n, positions_n, angles_n, n_heads, n, content, width, fixed,
    ROTATED: tl.constexpr, LEARNED: tl.constexpr,
    BITS: tl.constexpr, LIMIT: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """A head of k."""
    rows, columns = tl.arange(0, T)[:, None], tl.arange(0, W)[None, :]
    inside = rows < n
    filled, source = inside & (columns < content), x_ptr + rows * x_n
    x = tl.load(source + columns, mask=filled, other=0.0).to(tl.float32)
    z = gate_reading(x, weight_ptr + head * content, bias_ptr + head, fixed, columns, content, LEARNED)
    position = position_of(tl.load(positions_ptr + rows * positions_n, mask=inside, other=0), LIMIT)
    x = rotated(x, source, filled, columns, cos_ptr, sin_ptr, angles_n, rows, content, ROTATED)
    x = with_bias(x, columns, content, 1.0 - sigmoid(z), position, False, BITS, LIMIT)
    row = (batch * n_heads + head) * n + rows
    tl.store(out_ptr + row * width + columns, x.to(out_ptr.dtype.element_ty), mask=inside & (columns < width))


# Nothing here differs from token to token: a kernel is compiled anew for each integer that is 1 or divides by 16.
@triton.jit(
    do_not_specialize=("n_q", "n_k", "positions_b", "positions_n", "angles_b"),
    do_not_specialize_on_alignment=("positions_ptr",),
)
def _step_kernel(
    q_ptr, k_ptr, positions_ptr, cos_ptr, sin_ptr, q_weight_ptr, q_bias_ptr, k_weight_ptr, k_bias_ptr,
    amplitude_ptr, strength_ptr, floor_ptr, q_out_ptr, k_out_ptr, gate_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, positions_b, positions_n, angles_b, angles_n,
    n_q_heads, n_k_heads, n_q, n_k, content, width, fixed_gate, fixed_landmark, context_length, factor,
    ROTATED: tl.constexpr, GATE_LEARNED: tl.constexpr, LANDMARK_LEARNED: tl.constexpr, STRONG: tl.constexpr,
    GATE_WANTED: tl.constexpr,
    BITS: tl.constexpr, LIMIT: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
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
            ROTATED, GATE_LEARNED, STRONG, GATE_WANTED, BITS, LIMIT, T, W,
        )  # fmt: skip
    else:
        head -= n_q_heads
        step_keys(
            k_ptr + batch * k_b + head * k_h, positions_ptr, cos_ptr, sin_ptr, k_weight_ptr, k_bias_ptr,
            k_out_ptr, batch, head, k_n, positions_n, angles_n, n_k_heads, n_k, content, width, single(fixed_landmark),
            ROTATED, LANDMARK_LEARNED, BITS, LIMIT, T, W,
        )  # fmt: skip


def step_rows(
    q: Tensor, k: Tensor, step: Step, *, width: int, scale: float, gate: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows (B, Hq, Nq, width) and (B, Hk, Nk, width), and gates (B, Hq, Nq) in float32 where they are wanted.

    Args:
        q, k: (B, Hq, Nq, C) and (B, Hk, Nk, C) in float32 or half precision, 1 ≤ Nq ≤ Nk ≤ 16, as projected.
        step: what is to be done to them.
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
    cos, sin = (q, q) if step.angles is None else step.angles
    positions = step.positions
    gate_weight, gate_bias, fixed_gate = _reading(step.gate, q)
    landmark_weight, landmark_bias, fixed_landmark = _reading(step.landmark, k)
    flags: dict[str, Any] = {
        "ROTATED": step.angles is not None, "GATE_LEARNED": gate_weight is not q,
        "LANDMARK_LEARNED": landmark_weight is not k, "STRONG": step.strength is not None, "GATE_WANTED": gate,
    }  # fmt: skip
    direct(_step_kernel)[(batch * (n_q_heads + n_k_heads),)](
        q, k, positions, cos, sin, gate_weight, gate_bias, landmark_weight, landmark_bias,
        step.raw_amplitude, q if step.strength is None else step.strength, step.floor,
        queries, keys, queries if gates is None else gates,
        *q.stride()[:3], *k.stride()[:3], 0 if positions.dim() == 1 else positions.stride(0), positions.stride(-1),
        0 if cos.dim() == 2 else cos.stride(0), cos.stride(-2),
        n_q_heads, n_k_heads, n_q, n_k, content, width, fixed_gate, fixed_landmark,
        float(step.context_length), UNIT.value / scale,
        BITS=significand_bits(queries), LIMIT=torch.finfo(dtype).max / 2, T=TOKENS,
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
