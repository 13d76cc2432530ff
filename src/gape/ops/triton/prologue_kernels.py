"""One pass over q or k before attention: rotate, read the gate, write the bias's coordinates beside the content.

Rows come and go as wide as the head, with the two halves of the content at the start of the row's two halves and the
bias's coordinates in the gaps behind them, so that every access is aligned:

    [ content, first half | 3 coordinates | content, second half | 3 coordinates ]

The coordinates' numbers are, one for one, those that :mod:`gape.ops.split` makes of the same gates; its docstring says
what they are. A program takes a block of tokens of one sample and goes through some of its heads, so that cosines and
sines are read once for all of them. The backward pass also leaves sums over the block's tokens for the parameters: no
atomics, so two runs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: A power of two between the two sides of a product, as in :mod:`gape.ops.rounding`.
UNIT = tl.constexpr(256.0)


@triton.jit
def rounded(x, BITS: tl.constexpr):
    """x (float32) to BITS of significand, half to even."""
    DROP: tl.constexpr = 24 - BITS
    raw = x.to(tl.int32, bitcast=True)
    odd = (raw >> DROP) & 1
    return ((raw + ((1 << (DROP - 1)) - 1) + odd) & -(1 << DROP)).to(tl.float32, bitcast=True)


@triton.jit
def softplus(z):
    """log(1 + eᶻ), to full relative precision where eᶻ is small."""
    e = tl.exp(tl.minimum(z, 20.0))
    t = 1.0 + e
    near = tl.where(t == 1.0, e, tl.log(t) * (e / tl.where(t == 1.0, 1.0, t - 1.0)))
    return tl.where(z > 20.0, z, near)


@triton.jit
def sigmoid(z):
    """1 / (1 + e⁻ᶻ), without overflow."""
    e = tl.exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def steepest_rate(i, LIMIT: tl.constexpr):
    """The largest rate whose product with i the dtype still holds."""
    return LIMIT / tl.maximum(tl.abs(i) / (UNIT * UNIT), 1.0)


@triton.jit
def laid(half, a, c0, c1, c2, LOW: tl.constexpr, EDGE: tl.constexpr):
    """Half a row: content a (T, HALF), three coordinates (T, 1) behind it, zeros from there on."""
    a = tl.where(half < LOW, a, 0.0)
    if EDGE > LOW:
        a = tl.where(half == LOW, c0, tl.where(half == LOW + 1, c1, tl.where(half == LOW + 2, c2, a)))
    return a


@triton.jit
def prepare(
    x_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr, factor_ptr, floor_ptr, out_ptr,
    x_b, x_h, x_n, n_heads, n, first, middle, apart,
    QUERIES: tl.constexpr, ROTATED: tl.constexpr, GATED: tl.constexpr, LOW: tl.constexpr, EDGE: tl.constexpr,
    HEADS: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr,
    BITS: tl.constexpr, ANCHORS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """x (B, H, N, W) → out (B, H, N, W), contiguous: content turned, the bias's coordinates in the gaps.

    LOW: coordinates of half the content. EDGE: W / 2. EVEN: blocks and halves fill their tiles. first: position of
    token 0 from the first anchor. middle: tokens before it count from the first anchor, those from it on from the
    second, `apart` further on. factor: what turns g into the scaled rate, per head.
    """
    start = tl.program_id(0) * T
    batch = tl.program_id(2).to(tl.int64)
    rows, half = tl.arange(0, T)[:, None], tl.arange(0, HALF)[None, :]
    inside = (rows < n - start) & (half < EDGE)
    turning = (rows < n - start) & (half < LOW)
    x_ptr += batch * x_b + start.to(tl.int64) * x_n
    out_ptr += (batch * n_heads * n + start) * (2 * EDGE)
    if ROTATED:
        cos = tl.load(cos_ptr + start * LOW + rows * LOW + half, mask=turning, other=0.0)
        sin = tl.load(sin_ptr + start * LOW + rows * LOW + half, mask=turning, other=0.0)
    position = (start + first + rows).to(tl.float32)
    in_first = start + rows < middle
    for step in range(HEADS):
        head = (tl.program_id(1) * HEADS + step).to(tl.int64)
        source = x_ptr + head * x_h + (rows * x_n + half)
        target = out_ptr + head * n * (2 * EDGE) + (rows * (2 * EDGE) + half)
        if EVEN:
            a = tl.load(source).to(tl.float32)
            b = tl.load(source + EDGE).to(tl.float32)
        else:
            a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(source + EDGE, mask=inside, other=0.0).to(tl.float32)
        zero = tl.zeros((T, 1), tl.float32)
        c0, c1, c2, c3, c4, c5 = zero, zero, zero, zero, zero, zero
        if GATED:
            wa = tl.load(weight_ptr + head * (2 * LOW) + half, mask=half < LOW, other=0.0)
            wb = tl.load(weight_ptr + head * (2 * LOW) + LOW + half, mask=half < LOW, other=0.0)
            z = tl.sum(a * wa + b * wb, 1, keep_dims=True) + tl.load(bias_ptr + head)
            if QUERIES:
                i = tl.where(in_first, position, position - apart)
                c = (tl.load(floor_ptr + head) + softplus(z)) * tl.load(factor_ptr + head)
                c = rounded(tl.minimum(c, steepest_rate(i, LIMIT)), BITS)
                product = c * (i / (UNIT * UNIT))
                p0 = rounded(product, BITS)
                p1 = rounded(product - p0, BITS)
                c0, c1 = -p0, -p1
                if ANCHORS == 1:
                    c2, c3, c4, c5 = -rounded(product - p0 - p1, BITS), c, c, c
                else:
                    c2 = tl.where(in_first, c, 0.0)
                    c3, c4, c5 = c2, c - c2, c - c2
            else:
                u = rounded(1.0 - sigmoid(z), BITS)
                product = tl.minimum(tl.maximum(u * (position / UNIT), -LIMIT), LIMIT)
                p0 = rounded(product, BITS)
                p1 = rounded(product - p0, BITS)
                c0, c1 = u * UNIT, u * UNIT
                if ANCHORS == 1:
                    c2, c3, c4, c5 = u * UNIT, p0, p1, rounded(product - p0 - p1, BITS)
                else:
                    other = tl.minimum(tl.maximum(u * ((position - apart) / UNIT), -LIMIT), LIMIT)
                    c2, c3, c4 = p0, p1, rounded(other, BITS)
                    c5 = rounded(other - c4, BITS)
        if ROTATED:
            a, b = a * cos - b * sin, b * cos + a * sin
        a = laid(half, a, c0, c1, c2, LOW, EDGE).to(out_ptr.dtype.element_ty)
        b = laid(half, b, c3, c4, c5, LOW, EDGE).to(out_ptr.dtype.element_ty)
        if EVEN:
            tl.store(target, a)
            tl.store(target + EDGE, b)
        else:
            tl.store(target, a, mask=inside)
            tl.store(target + EDGE, b, mask=inside)


@triton.jit
def undo(
    grad_ptr, x_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr, factor_ptr, floor_ptr, dx_ptr, sums_ptr,
    g_b, g_h, g_n, x_b, x_h, x_n, n_heads, n, first, middle, apart,
    QUERIES: tl.constexpr, ROTATED: tl.constexpr, GATED: tl.constexpr, LOW: tl.constexpr, EDGE: tl.constexpr,
    HEADS: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr,
    ANCHORS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The gradient of `prepare`: dx (B, N, H, W), contiguous, from grad (B, H, N, W); zero in the gaps.

    sums (B · blocks, H, C + 2): over the block's tokens, Σ dz·x, Σ dz, and for queries Σ d(factor).
    """
    start = tl.program_id(0) * T
    batch = tl.program_id(2).to(tl.int64)
    rows, half = tl.arange(0, T)[:, None], tl.arange(0, HALF)[None, :]
    inside = (rows < n - start) & (half < EDGE)
    turning = (rows < n - start) & (half < LOW)
    grad_ptr += batch * g_b + start.to(tl.int64) * g_n
    x_ptr += batch * x_b + start.to(tl.int64) * x_n
    dx_ptr += (batch * n + start) * n_heads * (2 * EDGE)
    sums_ptr += (batch * tl.num_programs(0) + tl.program_id(0)) * n_heads * (2 * LOW + 2)
    if ROTATED:
        cos = tl.load(cos_ptr + start * LOW + rows * LOW + half, mask=turning, other=0.0)
        sin = tl.load(sin_ptr + start * LOW + rows * LOW + half, mask=turning, other=0.0)
    position = (start + first + rows).to(tl.float32)
    in_first = start + rows < middle
    for step in range(HEADS):
        head = (tl.program_id(1) * HEADS + step).to(tl.int64)
        source = grad_ptr + head * g_h + (rows * g_n + half)
        content = x_ptr + head * x_h + (rows * x_n + half)
        if EVEN:
            da = tl.load(source).to(tl.float32)
            db = tl.load(source + EDGE).to(tl.float32)
        else:
            da = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            db = tl.load(source + EDGE, mask=inside, other=0.0).to(tl.float32)
        ga, gb = da, db
        if ROTATED:
            da, db = da * cos + db * sin, db * cos - da * sin
        da = tl.where(half < LOW, da, 0.0)
        db = tl.where(half < LOW, db, 0.0)
        if GATED:
            if EVEN:
                a = tl.load(content).to(tl.float32)
                b = tl.load(content + EDGE).to(tl.float32)
            else:
                a = tl.load(content, mask=inside, other=0.0).to(tl.float32)
                b = tl.load(content + EDGE, mask=inside, other=0.0).to(tl.float32)
            wa = tl.load(weight_ptr + head * (2 * LOW) + half, mask=half < LOW, other=0.0)
            wb = tl.load(weight_ptr + head * (2 * LOW) + LOW + half, mask=half < LOW, other=0.0)
            z = tl.sum(a * wa + b * wb, 1, keep_dims=True) + tl.load(bias_ptr + head)
            slot = half - LOW
            total = sums_ptr + head * (2 * LOW + 2)
            if QUERIES:
                i = tl.where(in_first, position, position - apart)
                factor = tl.load(factor_ptr + head)
                g = tl.load(floor_ptr + head) + softplus(z)
                # Every piece of c·i meets the same partner, so the first column has the whole gradient.
                share_a = tl.where(slot == 0, -i / (UNIT * UNIT), 0.0)
                if ANCHORS == 1:
                    share_b = tl.where((slot >= 0) & (slot < 3), 1.0, 0.0)
                else:
                    mine = tl.where(in_first, 1.0, 0.0)
                    share_a = tl.where(slot == 2, mine, share_a)
                    share_b = tl.where(slot == 0, mine, tl.where((slot > 0) & (slot < 3), 1.0 - mine, 0.0))
                dc = tl.sum(ga * share_a + gb * share_b, 1, keep_dims=True)
                dc = tl.where(g * factor <= steepest_rate(i, LIMIT), dc, 0.0)
                tl.store(total + 2 * LOW + 1, tl.sum(tl.where(rows < n - start, dc * g, 0.0)))
                dz = dc * factor * sigmoid(z)
            else:
                share_a = tl.where((slot >= 0) & (slot < 2), UNIT, 0.0)
                here = position / UNIT
                if ANCHORS == 1:
                    share_a = tl.where(slot == 2, UNIT, share_a)
                    share_b = tl.where(slot == 0, here, 0.0)
                else:
                    share_a = tl.where(slot == 2, here, share_a)
                    share_b = tl.where(slot == 1, (position - apart) / UNIT, 0.0)
                spared = sigmoid(z)
                dz = -tl.sum(ga * share_a + gb * share_b, 1, keep_dims=True) * spared * (1.0 - spared)
            dz = tl.where(rows < n - start, dz, 0.0)
            da += dz * wa
            db += dz * wb
            tl.store(total + half, tl.sum(dz * a, 0, keep_dims=True), mask=half < LOW)
            tl.store(total + LOW + half, tl.sum(dz * b, 0, keep_dims=True), mask=half < LOW)
            tl.store(total + 2 * LOW, tl.sum(dz))
        target = dx_ptr + head * (2 * EDGE) + (rows * (n_heads * 2 * EDGE) + half)
        if EVEN:
            tl.store(target, da.to(dx_ptr.dtype.element_ty))
            tl.store(target + EDGE, db.to(dx_ptr.dtype.element_ty))
        else:
            tl.store(target, da.to(dx_ptr.dtype.element_ty), mask=inside)
            tl.store(target + EDGE, db.to(dx_ptr.dtype.element_ty), mask=inside)
