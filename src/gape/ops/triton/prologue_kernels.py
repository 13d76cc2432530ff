"""One pass over q and k before attention: rotate, read the gates, write the bias's coordinates beside the content.

Rows come and go as wide as the head, with the two halves of the content at the start of the row's two halves and the
bias's coordinates in the gaps behind them, so that every access is aligned:

    [ content, first half | 3 coordinates | content, second half | 3 coordinates ]

The coordinates' numbers are, one for one, those that :mod:`gape.ops.columns` makes of the same gates; the docstring of
`gape.ops.split` says what they are. A program takes a block of tokens of one sample and goes through some heads of q or
some of k, so that cosines and sines are read once for all of them. Programs that run side by side have the same tokens,
so that cosines and sines come from the cache. The backward pass takes one head and several blocks, and leaves sums over
their tokens for the parameters: no atomics, so two runs give the same bits.

Attention that makes the bias itself gets rate and exposure beside the rows, whose gaps then hold zeros, and where it
skips tiles of keys the norms by which :func:`gape.ops.triton.tiles.needed` judges them: `_prologue_bounded_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gape.ops.triton.split_bias import (
    loss_gradient,
    rate_gradient,
    sigmoid,
    softplus,
    split_bias,
    steepest_rate,
    with_three,
)
from gape.ops.triton.tiles import SPAN


@triton.jit
def split_heads(n_q_heads, n_k_heads, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr):
    """Which block of tokens this program has, the first of its heads, and whether these are heads of q.

    Programs are counted through the groups of heads, q's and then k's, block after block.
    """
    q_groups = n_q_heads // Q_HEADS
    groups = q_groups + n_k_heads // K_HEADS
    block = tl.program_id(0) // groups
    group = tl.program_id(0) - block * groups
    of_queries = group < q_groups
    head = tl.where(of_queries, group * Q_HEADS, (group - q_groups) * K_HEADS)
    return block, head.to(tl.int64), of_queries


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, which_ptr, start, n,
    ROTATED: tl.constexpr, BY_HEAD: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Cosines and sines (T, HALF) of the tokens from `start` on; what is beyond the content is not to be used.

    BY_HEAD: of several tables, n tokens each, the one that is named behind which_ptr.
    """
    cos, sin = 0.0, 0.0
    if ROTATED:
        rows, half = tl.arange(0, T)[:, None], tl.arange(0, HALF)[None, :]
        at = start.to(tl.int64) * COLUMNS + (rows * COLUMNS + half)
        if BY_HEAD:
            at += tl.load(which_ptr).to(tl.int64) * n * COLUMNS
        if EVEN and COLUMNS >= HALF:
            cos, sin = tl.load(cos_ptr + at), tl.load(sin_ptr + at)
        else:
            valid = (rows < n - start) & (half < COLUMNS)
            cos = tl.load(cos_ptr + at, mask=valid, other=0.0)
            sin = tl.load(sin_ptr + at, mask=valid, other=0.0)
    return cos, sin


@triton.jit
def load_halves(x_ptr, inside, EDGE: tl.constexpr, EVEN: tl.constexpr):
    """Both halves of rows, (T, HALF) each."""
    if EVEN:
        a = tl.load(x_ptr)
        b = tl.load(x_ptr + EDGE)
    else:
        a = tl.load(x_ptr, mask=inside, other=0.0)
        b = tl.load(x_ptr + EDGE, mask=inside, other=0.0)
    return a, b


@triton.jit
def store_halves(x_ptr, a, b, inside, EDGE: tl.constexpr, EVEN: tl.constexpr):
    """Both halves of rows to where they belong, in its dtype."""
    if EVEN:
        tl.store(x_ptr, a.to(x_ptr.dtype.element_ty))
        tl.store(x_ptr + EDGE, b.to(x_ptr.dtype.element_ty))
    else:
        tl.store(x_ptr, a.to(x_ptr.dtype.element_ty), mask=inside)
        tl.store(x_ptr + EDGE, b.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_weights(weight_ptr, half, LOW: tl.constexpr):
    """Both halves of a gate's weights in float32, (1, HALF) each, 0 beyond the content."""
    a = tl.load(weight_ptr + half, mask=half < LOW, other=0.0)
    b = tl.load(weight_ptr + LOW + half, mask=half < LOW, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def prepare_heads(
    x_ptr, weight_ptr, bias_ptr, amplitude_ptr, floor_ptr, out_ptr, x_b, x_h, x_n,
    cos_ptr, sin_ptr, which_ptr, start, head, n_heads, n, first, middle, apart, factor,
    QUERIES: tl.constexpr, ROTATED: tl.constexpr, BY_HEAD: tl.constexpr, GATED: tl.constexpr, LOW: tl.constexpr,
    EDGE: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr,
    EVEN: tl.constexpr, BITS: tl.constexpr, ANCHORS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """HEADS heads of x from `head` on, T tokens from `start` on."""
    batch = tl.program_id(1).to(tl.int64)
    rows, half = tl.arange(0, T)[:, None], tl.arange(0, HALF)[None, :]
    inside = (rows < n - start) & (half < EDGE)
    source = x_ptr + batch * x_b + start.to(tl.int64) * x_n + head * x_h + (rows * x_n + half)
    to_next = tl.cast(n, tl.int64) * (2 * EDGE)
    target = out_ptr + (batch * n_heads + head) * to_next + start.to(tl.int64) * (2 * EDGE) + (rows * (2 * EDGE) + half)
    weight_ptr += head * (2 * LOW)
    bias_ptr += head
    amplitude_ptr += head
    floor_ptr += head
    which_ptr += head
    coming_a, coming_b = load_halves(source, inside, EDGE, EVEN)
    cos, sin = load_angles(cos_ptr, sin_ptr, which_ptr, start, n, ROTATED, BY_HEAD, COLUMNS, T, HALF, EVEN)
    position = (start + first + rows).to(tl.float32)
    for step in tl.static_range(HEADS):
        a, b = coming_a.to(tl.float32), coming_b.to(tl.float32)
        if step + 1 < HEADS:
            # Under way while this head is worked on.
            source += x_h
            coming_a, coming_b = load_halves(source, inside, EDGE, EVEN)
        turned_a, turned_b = a, b
        if BY_HEAD and step > 0:
            cos, sin = load_angles(
                cos_ptr, sin_ptr, which_ptr + step, start, n, ROTATED, BY_HEAD, COLUMNS, T, HALF, EVEN
            )  # fmt: skip
        if ROTATED:
            turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
        if GATED:
            wa, wb = load_weights(weight_ptr + step * (2 * LOW), half, LOW)
            z = tl.sum(a * wa + b * wb, 1, keep_dims=True) + tl.load(bias_ptr + step)
            if QUERIES:
                number = (tl.load(floor_ptr + step) + softplus(z)) * (tl.load(amplitude_ptr + step) * factor)
            else:
                number = 1.0 - sigmoid(z)
            c0, c1, c2, c3, c4, c5 = split_bias(
                number, position, start + rows < middle, apart, QUERIES, ANCHORS, BITS, LIMIT
            )  # fmt: skip
            turned_a = with_three(tl.where(half < LOW, turned_a, 0.0), half, LOW, c0, c1, c2)
            turned_b = with_three(tl.where(half < LOW, turned_b, 0.0), half, LOW, c3, c4, c5)
        store_halves(target, turned_a, turned_b, inside, EDGE, EVEN)
        target += to_next


@triton.jit
def _prologue_fwd_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, which_ptr,
    q_weight_ptr, q_bias_ptr, amplitude_ptr, floor_ptr, k_weight_ptr, k_bias_ptr,
    q_out_ptr, k_out_ptr, q_b, q_h, q_n, k_b, k_h, k_n, n_q_heads, n_k_heads, n, first, middle, apart, factor,
    ROTATED: tl.constexpr, BY_HEAD: tl.constexpr, GATED: tl.constexpr, LOW: tl.constexpr, EDGE: tl.constexpr,
    COLUMNS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr,
    EVEN: tl.constexpr, ANCHORS: tl.constexpr, LIMIT: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """q and k (B, H, N, W) → the same, contiguous: content turned, the bias's coordinates in the gaps.

    LOW: coordinates of half the content. EDGE: W / 2. COLUMNS: of the cosines and sines, LOW or more. EVEN: blocks and
    halves fill their tiles. first: position of token 0 from the first anchor. middle: tokens before it count from the
    first anchor, those from it on from the second, `apart` further on. factor: times which amplitude · g is the scaled
    rate. BY_HEAD: which_ptr has the table of cosines and sines of each head of q, then of k.
    """
    # Compilers hand a Python float over in float64, and all that it touches would be.
    factor = tl.cast(factor, tl.float32)
    block, head, of_queries = split_heads(n_q_heads, n_k_heads, Q_HEADS, K_HEADS)
    if of_queries:
        prepare_heads(
            q_ptr, q_weight_ptr, q_bias_ptr, amplitude_ptr, floor_ptr, q_out_ptr, q_b, q_h, q_n,
            cos_ptr, sin_ptr, which_ptr, block * T, head, n_q_heads, n, first, middle, apart, factor,
            True, ROTATED, BY_HEAD, GATED, LOW, EDGE, COLUMNS, Q_HEADS, T, HALF, EVEN, BITS, ANCHORS, LIMIT,
        )  # fmt: skip
    else:
        prepare_heads(
            k_ptr, k_weight_ptr, k_bias_ptr, amplitude_ptr, floor_ptr, k_out_ptr, k_b, k_h, k_n,
            cos_ptr, sin_ptr, which_ptr + n_q_heads, block * T, head, n_k_heads, n, first, middle, apart, factor,
            False, ROTATED, BY_HEAD, GATED, LOW, EDGE, COLUMNS, K_HEADS, T, HALF, EVEN, BITS, ANCHORS, LIMIT,
        )  # fmt: skip


@triton.jit
def rotate_halves(a, b, cos, sin, half, ROTATED: tl.constexpr, LOW: tl.constexpr, EDGE: tl.constexpr):
    """Both halves of rows, (T, HALF) each, turned; zeros beyond the content."""
    turned_a, turned_b = a, b
    if ROTATED:
        turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
    if LOW < EDGE:
        turned_a, turned_b = tl.where(half < LOW, turned_a, 0.0), tl.where(half < LOW, turned_b, 0.0)
    return turned_a, turned_b


@triton.jit
def row_norms(a, b, like):
    """Euclidean norms (T,) of rows as they are stored behind `like`: rounded, as they enter products."""
    a, b = a.to(like.dtype.element_ty).to(tl.float32), b.to(like.dtype.element_ty).to(tl.float32)
    return tl.sqrt(tl.sum(a * a + b * b, 1))


@triton.jit
def bound_heads(
    x_ptr, weight_ptr, bias_ptr, amplitude_ptr, floor_ptr, out_ptr, number_ptr, places_ptr, reach_ptr, least_ptr,
    x_b, x_h, x_n, cos_ptr, sin_ptr, which_ptr, block, head, n_heads, n, factor, stretch,
    QUERIES: tl.constexpr, ROTATED: tl.constexpr, BY_HEAD: tl.constexpr, BOUNDED: tl.constexpr, PLACES: tl.constexpr,
    LOW: tl.constexpr, EDGE: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, T: tl.constexpr,
    HALF: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """HEADS heads of x from `head` on, T tokens of block `block`."""
    start = block * T
    row = tl.program_id(1).to(tl.int64) * n_heads + head
    tokens = tl.arange(0, T)
    valid = tokens < n - start
    rows, half = tokens[:, None], tl.arange(0, HALF)[None, :]
    inside = valid[:, None] & (half < EDGE)
    x_ptr += tl.program_id(1).to(tl.int64) * x_b + start.to(tl.int64) * x_n + head * x_h + (rows * x_n + half)
    out_ptr += (row * n + start) * (2 * EDGE) + (rows * (2 * EDGE) + half)
    which_ptr += head
    coming_a, coming_b = load_halves(x_ptr, inside, EDGE, EVEN)
    cos, sin = load_angles(cos_ptr, sin_ptr, which_ptr, start, n, ROTATED, BY_HEAD, COLUMNS, T, HALF, EVEN)
    for step in tl.static_range(HEADS):
        a, b = coming_a.to(tl.float32), coming_b.to(tl.float32)
        if step + 1 < HEADS:
            # Under way while this head is worked on.
            x_ptr += x_h
            coming_a, coming_b = load_halves(x_ptr, inside, EDGE, EVEN)
        wa, wb = load_weights(weight_ptr + (head + step) * (2 * LOW), half, LOW)
        z = tl.sum(a * wa + b * wb, 1) + tl.load(bias_ptr + head + step).to(tl.float32)
        if BY_HEAD and step > 0:
            cos, sin = load_angles(
                cos_ptr, sin_ptr, which_ptr + step, start, n, ROTATED, BY_HEAD, COLUMNS, T, HALF, EVEN
            )  # fmt: skip
        a, b = rotate_halves(a, b, cos, sin, half, ROTATED, LOW, EDGE)
        store_halves(out_ptr, a, b, inside, EDGE, EVEN)
        out_ptr += tl.cast(n, tl.int64) * (2 * EDGE)
        if QUERIES:
            gate = tl.load(floor_ptr + head + step) + softplus(z)
            number = gate * (tl.load(amplitude_ptr + head + step) * factor)
        else:
            number = 1.0 - sigmoid(z)
        tl.store(number_ptr + (row + step) * n + start + tokens, number, mask=valid)
        if PLACES and not QUERIES:
            pair_ptr = places_ptr + ((row + step) * n + start + tokens) * 2
            tl.store(pair_ptr, number, mask=valid)
            tl.store(pair_ptr + 1, number * ((start + tokens) % SPAN).to(tl.float32), mask=valid)
        if BOUNDED:
            length = row_norms(a, b, out_ptr) * stretch
            if QUERIES:
                tl.store(reach_ptr + (row + step) * n + start + tokens, length, mask=valid)
            else:
                # Extremes would lose what is not a number, and a key that holds it must keep its tile.
                length = tl.where(valid & ~(length >= 0), float("inf"), length)
                number = tl.where(valid, tl.where(number >= 0, number, float("-inf")), 1.0)
                tl.store(reach_ptr + (row + step) * tl.cdiv(n, T) + block, tl.max(length, 0))
                tl.store(least_ptr + (row + step) * tl.cdiv(n, T) + block, tl.min(number, 0))


# Layers have these anywhere, and share the kernel.
@triton.jit(do_not_specialize_on_alignment=("q_bias_ptr", "amplitude_ptr", "floor_ptr", "k_bias_ptr"))
def _prologue_bounded_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, which_ptr,
    q_weight_ptr, q_bias_ptr, amplitude_ptr, floor_ptr, k_weight_ptr, k_bias_ptr,
    q_out_ptr, k_out_ptr, c_ptr, u_ptr, places_ptr, reach_ptr, k_reach_ptr, u_least_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, cos_b, n_q_heads, n_k_heads, n, factor, q_stretch, k_stretch,
    ROTATED: tl.constexpr, BY_HEAD: tl.constexpr, BOUNDED: tl.constexpr, PLACES: tl.constexpr, LOW: tl.constexpr,
    EDGE: tl.constexpr, COLUMNS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, T: tl.constexpr,
    HALF: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """q and k (B, H, N, W) → the same, contiguous: turned, zeros in the gaps; and beside them rates and exposures.

    BOUNDED: also the norms of the rows, stretched: each query's (B, Hq, N), the largest of each T keys, and beside that
    their least exposure (B, Hk, blocks). PLACES: also u and u · (j mod SPAN) side by side, (B, Hk, N, 2). cos_b: from a
    sample's cosines to the next one's. factor: times which amplitude · g is the rate. Others as `_prologue_fwd_kernel`
    has them.
    """
    # Compilers hand a Python float over in float64, and all that it touches would be.
    factor, q_stretch = tl.cast(factor, tl.float32), tl.cast(q_stretch, tl.float32)
    k_stretch = tl.cast(k_stretch, tl.float32)
    block, head, of_queries = split_heads(n_q_heads, n_k_heads, Q_HEADS, K_HEADS)
    cos_ptr += tl.program_id(1).to(tl.int64) * cos_b
    sin_ptr += tl.program_id(1).to(tl.int64) * cos_b
    if of_queries:
        bound_heads(
            q_ptr, q_weight_ptr, q_bias_ptr, amplitude_ptr, floor_ptr, q_out_ptr, c_ptr, places_ptr, reach_ptr,
            u_least_ptr, q_b, q_h, q_n, cos_ptr, sin_ptr, which_ptr, block, head, n_q_heads, n, factor, q_stretch,
            True, ROTATED, BY_HEAD, BOUNDED, PLACES, LOW, EDGE, COLUMNS, Q_HEADS, T, HALF, EVEN,
        )  # fmt: skip
    else:
        bound_heads(
            k_ptr, k_weight_ptr, k_bias_ptr, amplitude_ptr, floor_ptr, k_out_ptr, u_ptr, places_ptr, k_reach_ptr,
            u_least_ptr, k_b, k_h, k_n, cos_ptr, sin_ptr, which_ptr + n_q_heads, block, head, n_k_heads, n, factor,
            k_stretch, False, ROTATED, BY_HEAD, BOUNDED, PLACES, LOW, EDGE, COLUMNS, K_HEADS, T, HALF, EVEN,
        )  # fmt: skip


@triton.jit
def gate_gradient(
    z, ga, gb, slot, position, in_first, apart, floor_ptr, amplitude_ptr, factor,
    QUERIES: tl.constexpr, ANCHORS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The gradients (T, 1) of the gate's reading z and of the amplitude from that of the row's halves."""
    damplitude = tl.zeros_like(z)
    if QUERIES:
        i = tl.where(in_first, position, position - apart)
        scaled = tl.load(amplitude_ptr) * factor
        g = tl.load(floor_ptr) + softplus(z)
        dc = rate_gradient(ga, gb, slot, i, in_first, ANCHORS)
        dc = tl.where(g * scaled <= steepest_rate(i, LIMIT), dc, 0.0)
        damplitude = dc * g * factor
        dz = dc * scaled * sigmoid(z)
    else:
        spared = sigmoid(z)
        dz = -loss_gradient(ga, gb, slot, position, apart, ANCHORS) * spared * (1.0 - spared)
    return dz, damplitude


@triton.jit
def undo_gate(
    a, b, wa, wb, ga, gb, da, db, half, position, in_first, apart, bias_ptr, floor_ptr, amplitude_ptr, factor,
    QUERIES: tl.constexpr, LOW: tl.constexpr, ANCHORS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The halves of a row's gradient with what the gate adds, zero in the gaps, and what the row gives to the sums."""
    z = tl.sum(a * wa + b * wb, 1, keep_dims=True) + tl.load(bias_ptr)
    # Tokens that are not there have no gradient and so add nothing.
    dz, damplitude = gate_gradient(
        z, ga, gb, half - LOW, position, in_first, apart, floor_ptr, amplitude_ptr, factor, QUERIES, ANCHORS, LIMIT
    )  # fmt: skip
    da, db = tl.where(half < LOW, da + dz * wa, 0.0), tl.where(half < LOW, db + dz * wb, 0.0)
    # The gap has room for what is not a weight's.
    return da, db, tl.where(half == LOW, dz, tl.where(half == LOW + 1, damplitude, dz * a)), dz * b


@triton.jit
def store_sums(sums_ptr, a, b, half, LOW: tl.constexpr):
    """Sums over tokens of (T, HALF) in the order of the parameters: both halves' weights, bias, amplitude."""
    tl.store(sums_ptr + tl.where(half < LOW, half, half + LOW), tl.sum(a, 0, keep_dims=True), mask=half < LOW + 2)
    tl.store(sums_ptr + LOW + half, tl.sum(b, 0, keep_dims=True), mask=half < LOW)


@triton.jit
def undo_head(
    grad_ptr, x_ptr, weight_ptr, bias_ptr, amplitude_ptr, floor_ptr, dx_ptr, sums_ptr, g_b, g_h, g_n, x_b, x_h, x_n,
    cos_ptr, sin_ptr, which_ptr, start, head, n_heads, n, first, middle, apart, factor,
    QUERIES: tl.constexpr, ROTATED: tl.constexpr, BY_HEAD: tl.constexpr, GATED: tl.constexpr, LOW: tl.constexpr,
    EDGE: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr,
    EVEN: tl.constexpr, ANCHORS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The gradient of `prepare_heads` for one head and PARTS · T tokens from `start` on, and sums over them."""
    batch = tl.program_id(1).to(tl.int64)
    rows, half = tl.arange(0, T)[:, None], tl.arange(0, HALF)[None, :]
    grad_ptr += batch * g_b + head * g_h + start.to(tl.int64) * g_n + (rows * g_n + half)
    x_ptr += batch * x_b + head * x_h + start.to(tl.int64) * x_n + (rows * x_n + half)
    dx_ptr += ((batch * n + start) * n_heads + head) * (2 * EDGE) + (rows * (n_heads * 2 * EDGE) + half)
    inside = (rows < n - start) & (half < EDGE)
    coming_ga, coming_gb = load_halves(grad_ptr, inside, EDGE, EVEN)
    if GATED:
        coming_a, coming_b = load_halves(x_ptr, inside, EDGE, EVEN)
        wa, wb = load_weights(weight_ptr + head * (2 * LOW), half, LOW)
        sums_a, sums_b = tl.zeros((T, HALF), tl.float32), tl.zeros((T, HALF), tl.float32)
    for part in tl.static_range(PARTS):
        ga, gb = coming_ga.to(tl.float32), coming_gb.to(tl.float32)
        da, db, here = ga, gb, inside
        if GATED:
            a, b = coming_a.to(tl.float32), coming_b.to(tl.float32)
        cos, sin = load_angles(cos_ptr, sin_ptr, which_ptr + head, start, n, ROTATED, BY_HEAD, COLUMNS, T, HALF, EVEN)
        position, in_first = (start + first + rows).to(tl.float32), start + rows < middle
        if part + 1 < PARTS:
            # Under way while this part is worked on.
            start += T
            inside = (rows < n - start) & (half < EDGE)
            grad_ptr += T * g_n
            coming_ga, coming_gb = load_halves(grad_ptr, inside, EDGE, EVEN)
            if GATED:
                x_ptr += T * x_n
                coming_a, coming_b = load_halves(x_ptr, inside, EDGE, EVEN)
        if ROTATED:
            da, db = ga * cos + gb * sin, gb * cos - ga * sin
        if GATED:
            da, db, share_a, share_b = undo_gate(
                a, b, wa, wb, ga, gb, da, db, half, position, in_first, apart,
                bias_ptr + head, floor_ptr + head, amplitude_ptr + head, factor, QUERIES, LOW, ANCHORS, LIMIT,
            )  # fmt: skip
            sums_a, sums_b = sums_a + share_a, sums_b + share_b
        store_halves(dx_ptr, da, db, here, EDGE, EVEN)
        dx_ptr += T * n_heads * (2 * EDGE)
    if GATED:
        store_sums(sums_ptr + head * (2 * LOW + 2), sums_a, sums_b, half, LOW)


@triton.jit
def _prologue_bwd_kernel(
    q_grad_ptr, k_grad_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, which_ptr,
    q_weight_ptr, q_bias_ptr, amplitude_ptr, floor_ptr, k_weight_ptr, k_bias_ptr, dq_ptr, dk_ptr, sums_ptr,
    qg_b, qg_h, qg_n, kg_b, kg_h, kg_n, q_b, q_h, q_n, k_b, k_h, k_n,
    n_q_heads, n_k_heads, n, first, middle, apart, factor,
    ROTATED: tl.constexpr, BY_HEAD: tl.constexpr, GATED: tl.constexpr, LOW: tl.constexpr, EDGE: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr,
    ANCHORS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The gradient of `_prologue_fwd_kernel`: dq and dk (B, N, H, W), contiguous, zero in the gaps.

    Gradients of its outputs are (B, H, N, W). sums (B · blocks, Hq + Hk, C + 2): over a program's tokens, Σ dz·x, Σ dz,
    and the amplitude's (0 for k).
    """
    # Compilers hand a Python float over in float64, and all that it touches would be.
    factor = tl.cast(factor, tl.float32)
    block, head, of_queries = split_heads(n_q_heads, n_k_heads, 1, 1)
    blocks = (n + PARTS * T - 1) // (PARTS * T)
    sums_ptr += (tl.program_id(1).to(tl.int64) * blocks + block) * (n_q_heads + n_k_heads) * (2 * LOW + 2)
    start = block * (PARTS * T)
    if of_queries:
        undo_head(
            q_grad_ptr, q_ptr, q_weight_ptr, q_bias_ptr, amplitude_ptr, floor_ptr, dq_ptr, sums_ptr,
            qg_b, qg_h, qg_n, q_b, q_h, q_n,
            cos_ptr, sin_ptr, which_ptr, start, head, n_q_heads, n, first, middle, apart, factor,
            True, ROTATED, BY_HEAD, GATED, LOW, EDGE, COLUMNS, PARTS, T, HALF, EVEN, ANCHORS, LIMIT,
        )  # fmt: skip
    else:
        undo_head(
            k_grad_ptr, k_ptr, k_weight_ptr, k_bias_ptr, amplitude_ptr, floor_ptr, dk_ptr,
            sums_ptr + n_q_heads * (2 * LOW + 2),
            kg_b, kg_h, kg_n, k_b, k_h, k_n,
            cos_ptr, sin_ptr, which_ptr + n_q_heads, start, head, n_k_heads, n, first, middle, apart, factor,
            False, ROTATED, BY_HEAD, GATED, LOW, EDGE, COLUMNS, PARTS, T, HALF, EVEN, ANCHORS, LIMIT,
        )  # fmt: skip
