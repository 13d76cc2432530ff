"""The bias in six coordinates, as the kernels of the prologue write it, and the functions of gates.

The numbers are, one for one, those of :func:`gape.ops.columns.key_columns` and :func:`gape.ops.columns.query_columns`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gape.ops import columns

#: A power of two between the two sides of a product, as in :mod:`gape.ops.columns`.
UNIT = tl.constexpr(columns.UNIT)

#: 1 / UNIT and 1 / UNIT². Products with powers of two are exact, and cost less than quotients.
PER_UNIT = tl.constexpr(1.0 / columns.UNIT)
PER_SQUARE = tl.constexpr(1.0 / columns.UNIT**2)


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
def rate_gradient(ga, gb, slot, i, in_first, ANCHORS: tl.constexpr):
    """The gradient (T, 1) of the scaled rate from that of the row's halves."""
    # Every piece of c·i meets the same partner, so the first column has the whole gradient.
    share_a = tl.where(slot == 0, -(i * PER_SQUARE), 0.0)
    if ANCHORS == 1:
        share_b = tl.where((slot >= 0) & (slot < 3), 1.0, 0.0)
    else:
        mine = tl.where(in_first, 1.0, 0.0)
        share_a = tl.where(slot == 2, mine, share_a)
        share_b = tl.where(slot == 0, mine, tl.where((slot > 0) & (slot < 3), 1.0 - mine, 0.0))
    return tl.sum(ga * share_a + gb * share_b, 1, keep_dims=True)


@triton.jit
def loss_gradient(ga, gb, slot, position, apart, ANCHORS: tl.constexpr):
    """The gradient (T, 1) of the share u that a key loses, from that of the row's halves."""
    share_a = tl.where((slot >= 0) & (slot < 2), UNIT, 0.0)
    here = position * PER_UNIT
    if ANCHORS == 1:
        share_a = tl.where(slot == 2, UNIT, share_a)
        share_b = tl.where(slot == 0, here, 0.0)
    else:
        share_a = tl.where(slot == 2, here, share_a)
        share_b = tl.where(slot == 1, (position - apart) * PER_UNIT, 0.0)
    return tl.sum(ga * share_a + gb * share_b, 1, keep_dims=True)
