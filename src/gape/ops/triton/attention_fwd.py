"""The forward kernel: one program per tile of queries visits the tiles of keys with a running softmax.

Tiles are visited from the diagonal outwards. Those at the diagonal give each query a level, its largest logit so far,
which the others are measured against without a look at their own maximum: no maximum, no comparison between threads, no
sum to scale anew. float32 and bfloat16 hold what is 2⁶⁰ above the level. Where a query has more, a second launch
does its tile again with a running maximum.

With SKIP, the nearest tiles give each query a lower bound of its log-sum-exp, and tiles further out are skipped whose
best possible logits together are too far below it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gape.ops.triton.tiles import (
    GROUP,
    add_weighted,
    anchor_of,
    at_key,
    distances,
    document_of,
    empty_parts,
    in_eights,
    load_exposures,
    load_parts,
    load_vector,
    local_positions,
    nearest,
    needed_by_rows,
    owner,
    products,
    run_of,
    single,
    store_parts,
    visible,
    visible_keys,
)

#: The largest sum of weights that a query may have against its level; beyond it is done again.
MOST = tl.constexpr(2.0**60)

#: Tiles of queries that a program looks at which does some again.
TOGETHER = tl.constexpr(8)

#: Tiles whose bounds are added up at once.
WIDE = tl.constexpr(32)

#: How far apart the thresholds are that are tried, in powers of two.
STEP = tl.constexpr(2.25)

#: By what part two computations of one bound may differ.
APART = tl.constexpr(2.0**-18)

#: Tiles that hold less than 2 to minus this many of their even share need not be counted. All of them together, and
#: what sums in float32 may be wrong by, take less than the part of eps that is set aside.
UNCOUNTED = tl.constexpr(12.0)
ASIDE = tl.constexpr(2.0**-10)


@triton.jit
def fwd_tile(
    CHECK: tl.constexpr, LEVEL: tl.constexpr, start_n, top, total, acc, acc_rest,
    k_at, v_at, u_at, q, q_rest, c, i_first, q_doc, offs_m, qp_ptr, kp_ptr, kd_ptr, mask_ptr,
    k_n, k_d, v_n, v_d, qp_n, kp_n, mask_m, mask_n, n_q, n_k, d, d_v, scale,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Take the tile of keys from `start_n` on into the running softmax (top, total, acc, acc_rest).

    k_at, v_at, u_at: where its keys, values and exposures lie.
    CHECK: look at single pairs; a tile all of whose pairs are visible needs none. LEVEL: `top` is a level that stays.
    """
    offs_n = start_n + tl.arange(0, BLOCK_N)
    anchor = anchor_of(kp_ptr, kp_n, start_n, HAS_POSITIONS, COPIES)
    i, i_far = local_positions(qp_ptr, qp_n, offs_m, n_q, anchor, i_first, HAS_POSITIONS)
    j, j_far = local_positions(kp_ptr, kp_n, offs_n, n_k, anchor, 0, HAS_POSITIONS)
    k, k_rest = load_parts(k_at, 0, k_n, k_d, n_k - start_n, d, BLOCK_N, BLOCK_D, REST_D, CHECK, PARTIAL_D)
    s = products(q, q_rest, k, k_rest, REST_D) * scale
    # Behind the product, so that it is not in registers while that runs.
    u, local = load_exposures(u_at, 0, n_k - start_n, BLOCK_N, CHECK, COPIES)
    if HAS_POSITIONS:
        distance = distances(i[:, None], i_far[:, None], j[None, :], j_far[None, :])
        earlier = distance >= 0
        s -= c[:, None] * (u[None, :] * distance)
    elif not LEVEL:
        earlier = tl.arange(0, BLOCK_N)[None, :] <= (offs_m + (i_first - start_n))[:, None]
        # Positions of keys are small here, so nothing large is added before the rest is taken away.
        s += c[:, None] * local[None, :] - (c * i)[:, None] * u[None, :]
    if LEVEL:
        # In this order each operation is a product with a sum.
        p = tl.exp2(s + (c[:, None] * local[None, :] - ((c * i)[:, None] * u[None, :] + top[:, None])))
    else:
        if CHECK:
            k_doc = document_of(kd_ptr, offs_n, n_k, -1, HAS_DOCUMENTS)
            pairs = visible(
                earlier, offs_m[:, None], offs_n[None, :], n_q, n_k, q_doc[:, None], k_doc[None, :],
                mask_ptr, mask_m, mask_n, CAUSAL, HAS_DOCUMENTS, HAS_MASK,
            )  # fmt: skip
            s = tl.where(pairs, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        # A row without a key so far keeps −inf; 0 stands in for it so that no inf − inf arises.
        level = tl.where(higher == float("-inf"), 0.0, higher) if CHECK else higher
        p = tl.exp2(s - level[:, None])
        fade = tl.exp2(top - level)[:, None]
        top, total, acc, acc_rest = higher, total * fade, acc * fade, acc_rest * fade
    total += in_eights(p, BLOCK_M, BLOCK_N)
    v, v_rest = load_parts(v_at, 0, v_n, v_d, n_k - start_n, d_v, BLOCK_N, BLOCK_V, REST_V, CHECK, PARTIAL_V)
    acc, acc_rest = add_weighted(p.to(v.dtype), v, v_rest, acc, acc_rest, REST_V)
    return top, total, acc, acc_rest


@triton.jit
def empty_softmax(BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, REST_V: tl.constexpr):
    """The running softmax of rows without a key: the largest logit, the sum of exponentials in eight parts, of values.

    The last is in parts as :func:`load_parts` has them.
    """
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc, acc_rest = empty_parts(BLOCK_M, BLOCK_V, REST_V)
    return top, tl.zeros((BLOCK_M, 8), tl.float32), acc, acc_rest


@triton.jit
def too_high(total, acc, acc_rest):
    """Whether a query of the tile had logits too far above its level, or values that are too large for its weights."""
    count = tl.sum(tl.where(total < MOST, 0, 1), 0)
    # A weight of float16 is infinite far earlier than the sum, and so is what it was multiplied with.
    count += tl.sum(tl.sum(tl.where(tl.abs(acc) < float("inf"), 0, 1), 1), 0)
    count += tl.sum(tl.sum(tl.where(tl.abs(acc_rest) < float("inf"), 0, 1), 1), 0)
    return count > 0


@triton.jit
def log_sum(top, total):
    """Base-2 log-sum-exp of a running softmax, −inf for a row without a key."""
    return tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def apart(content, fade):
    """The bound content − fade, as low and as high as another kernel may have found it."""
    bound, room = content - fade, APART * (content + fade)
    return bound - room, bound + room


@triton.jit
def weight_within(bound, weight, limit):
    """What the tiles of a row weigh together whose bound is at most its limit."""
    return tl.sum(tl.where(bound <= limit[:, None], weight, 0.0), 1)


@triton.jit
def spare(
    lse, reach, c, offs_m, first, n_q, n_k, eps, end, k_reach_ptr, u_least_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What each query can spare, and the first tile that one cannot: of the tiles of keys before tile `end`.

    Five thresholds are tried, from eps shared out evenly over all keys up: the highest counts below which all tiles
    together stay within eps. Weights are in even shares, so that no eps is too small for them.
    """
    even = lse - APART * tl.abs(lse) + (tl.log2(eps) - tl.log2(single(n_k)))
    position, inside = first + offs_m, offs_m < n_q
    once, twice = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    thrice, four_times = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    earliest = tl.zeros((BLOCK_M,), tl.int32) + end
    for start in range(0, end, WIDE):
        tiles = start + tl.arange(0, WIDE)
        k_reach = tl.load(k_reach_ptr + tiles, mask=tiles < end, other=0.0)
        u_least = tl.load(u_least_ptr + tiles, mask=tiles < end, other=1.0)
        # All as one tile first: far from landmarks that is enough. A maximum would lose what is not a number.
        longest = tl.max(tl.where(k_reach >= 0, k_reach, float("inf")), 0)
        barest = tl.min(tl.where(u_least >= 0, u_least, float("-inf")), 0)
        distance = (position - (tl.minimum(start + WIDE, end) * BLOCK_N - 1)).to(tl.float32)
        _, together = apart(reach * longest, c * barest * distance)
        if tl.max(tl.where(together <= even - UNCOUNTED, 0, inside.to(tl.int32)), 0) > 0:
            to_each = (position[:, None] - (tiles * BLOCK_N + BLOCK_N - 1)[None, :]).to(tl.float32)
            least, most = apart(reach[:, None] * k_reach[None, :], c[:, None] * u_least[None, :] * to_each)
            weight = tl.where(tiles[None, :] < end, tl.exp2(most - even[:, None]), 0.0)
            once += weight_within(least, weight, even + STEP)
            twice += weight_within(least, weight, even + 2 * STEP)
            thrice += weight_within(least, weight, even + 3 * STEP)
            four_times += weight_within(least, weight, even + 4 * STEP)
            spared = (most <= even[:, None]) | (tiles >= end)[None, :]
            earliest = tl.minimum(earliest, tl.min(tl.where(spared, end, tiles[None, :]), 1))
    shares = single(n_k) * (1 - ASIDE) / BLOCK_N
    low = tl.where(once <= shares, even + STEP, even)
    low = tl.where(twice <= shares, even + 2 * STEP, low)
    low = tl.where(thrice <= shares, even + 3 * STEP, low)
    low = tl.where(four_times <= shares, even + 4 * STEP, low)
    # Rows past the end need nothing.
    return tl.where(inside, low, float("inf")), tl.min(tl.where(inside, earliest, end), 0)


@triton.jit
def fwd_needed(
    LEVEL: tl.constexpr, top, total, acc, acc_rest, home, rows, keys, c, reach, low, earliest, first, near, offs_m, n_k,
    key_row, k_reach_ptr, u_least_ptr, PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Visit the tiles of keys before tile `near` that a query may need, and count them.

    home: where key 0 lies, and strides, as :func:`at_key` takes them.
    """
    k_reach_ptr += key_row * tl.cdiv(n_k, BLOCK_N)
    u_least_ptr += key_row * tl.cdiv(n_k, BLOCK_N)
    visited = 0
    for step in range(0, near - earliest, GROUP):
        base = near - step - GROUP
        keep = needed_by_rows(base, first, offs_m, reach, c, low, k_reach_ptr, u_least_ptr, BLOCK_N)
        while keep != 0:
            begin, end, keep = run_of(keep)
            visited += end - begin
            k_at, v_at, u_at = at_key(*home, (base + begin) * BLOCK_N, COPIES)
            # No question inside the loop: it can be pipelined.
            for tile in range(base + begin, base + end):
                top, total, acc, acc_rest = fwd_tile(
                    False, LEVEL, tile * BLOCK_N, top, total, acc, acc_rest, k_at, v_at, u_at, *rows, *keys,
                    True, False, False, False, PARTIAL_D, PARTIAL_V,
                    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V, COPIES,
                )  # fmt: skip
                k_at, v_at, u_at = at_key(k_at, v_at, u_at, home[3], home[4], BLOCK_N, COPIES)
    return top, total, acc, acc_rest, visited


@triton.jit
def fwd_rows(
    LEVEL: tl.constexpr, start_m, tensors, skipping, strides, mask_strides, sizes,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr, SKIP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Attend from the tile of queries that begins at `start_m`; arguments are those of :func:`_fwd_kernel` in groups.

    LEVEL: measure tiles that are not at the diagonal against its level; a log-sum-exp of ∞ says that this failed.
    """
    q_ptr, k_ptr, v_ptr, c_ptr, u_ptr, qp_ptr, kp_ptr, qd_ptr, kd_ptr, mask_ptr, out_ptr, lse_ptr = tensors
    reach_ptr, low_ptr, k_reach_ptr, u_least_ptr, visited_ptr, earliest_ptr = skipping
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d = strides
    qp_b, qp_n, kp_b, kp_n, mask_b, mask_h, mask_m, mask_n = mask_strides
    n_heads, groups, n_q, n_k, d, d_v, scale, eps, out_b, out_h, out_n = sizes
    batch, head, key_head, key_row = owner(n_heads, groups)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    row = (batch * n_heads + head) * n_q
    home = (
        k_ptr + batch * k_b + key_head * k_h, v_ptr + batch * v_b + key_head * v_h,
        u_ptr + key_row * n_k * (2 if COPIES else 1), k_n, v_n,
    )  # fmt: skip
    keys = (
        qp_ptr + batch * qp_b, kp_ptr + batch * kp_b, kd_ptr + batch * n_k, mask_ptr + batch * mask_b + head * mask_h,
        k_n, k_d, v_n, v_d, qp_n, kp_n, mask_m, mask_n, n_q, n_k, d, d_v, single(scale),
    )  # fmt: skip
    q, q_rest = load_parts(
        q_ptr + batch * q_b + head * q_h, start_m, q_n, q_d, n_q, d, BLOCK_M, BLOCK_D, REST_D, True, PARTIAL_D
    )
    c = load_vector(c_ptr + row, start_m, n_q, 0.0, BLOCK_M, True)
    q_doc = document_of(qd_ptr + batch * n_q, offs_m, n_q, 0, HAS_DOCUMENTS)
    top, total, acc, acc_rest = empty_softmax(BLOCK_M, BLOCK_V, REST_V)
    first, stop, whole = visible_keys(
        start_m, n_q, n_k, CAUSAL, HAS_POSITIONS, HAS_DOCUMENTS, HAS_MASK, BLOCK_M, BLOCK_N
    )
    rows = (q, q_rest, c, first, q_doc, offs_m)
    near = nearest(first + start_m, BLOCK_N)
    begin = near * BLOCK_N if SKIP else whole
    for start_n in range(begin, stop, BLOCK_N):
        top, total, acc, acc_rest = fwd_tile(
            True, False, start_n, top, total, acc, acc_rest, *at_key(*home, start_n, COPIES),
            *rows, *keys, CAUSAL, HAS_POSITIONS, HAS_DOCUMENTS, HAS_MASK, PARTIAL_D, PARTIAL_V,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V, COPIES,
        )  # fmt: skip
    # Rows past the end have no key: against −inf their weights would be infinite.
    top = tl.where(offs_m < n_q, top, 0.0)
    if SKIP:
        reach = load_vector(reach_ptr + row, start_m, n_q, 0.0, BLOCK_M, True)
        low, earliest = spare(
            log_sum(top, tl.sum(total, 1)), reach, c, offs_m, first, n_q, n_k, single(eps), near,
            k_reach_ptr + key_row * tl.cdiv(n_k, BLOCK_N), u_least_ptr + key_row * tl.cdiv(n_k, BLOCK_N),
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        tl.store(low_ptr + row + offs_m, low, mask=offs_m < n_q)
        top, total, acc, acc_rest, visited = fwd_needed(
            LEVEL, top, total, acc, acc_rest, home, rows, keys, c, reach, low, earliest, first, near, offs_m, n_k,
            key_row, k_reach_ptr, u_least_ptr,
            PARTIAL_D, PARTIAL_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V, COPIES,
        )  # fmt: skip
        row_tile = tl.program_id(1) * tl.cdiv(n_q, BLOCK_M) + start_m // BLOCK_M
        tl.store(visited_ptr + row_tile, tl.cdiv(stop, BLOCK_N) - near + visited)
        tl.store(earliest_ptr + row_tile, earliest)
    elif not HAS_POSITIONS and not HAS_DOCUMENTS and not HAS_MASK:
        k_at, v_at, u_at = at_key(*home, 0, COPIES)
        for start_n in range(0, whole, BLOCK_N):
            top, total, acc, acc_rest = fwd_tile(
                False, LEVEL, start_n, top, total, acc, acc_rest, k_at, v_at, u_at, *rows, *keys,
                CAUSAL, False, False, False, PARTIAL_D, PARTIAL_V,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V, COPIES,
            )  # fmt: skip
            k_at, v_at, u_at = at_key(k_at, v_at, u_at, k_n, v_n, BLOCK_N, COPIES)
    whole_sum = tl.sum(total, 1)
    over = tl.where(whole_sum == 0.0, 1.0, whole_sum)[:, None]
    out_ptr += batch * out_b + head * out_h
    store_parts(out_ptr, acc / over, acc_rest / over, start_m, out_n, n_q, d_v, BLOCK_M, BLOCK_V, REST_V)
    lse = log_sum(top, whole_sum)
    if LEVEL:
        lse = tl.where(too_high(whole_sum, acc, acc_rest), float("inf"), lse)
    tl.store(lse_ptr + row + offs_m, lse, mask=offs_m < n_q)


@triton.jit
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr, c_ptr, u_ptr, qp_ptr, kp_ptr, qd_ptr, kd_ptr, mask_ptr, out_ptr, lse_ptr,
    reach_ptr, low_ptr, k_reach_ptr, u_least_ptr, visited_ptr, earliest_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    qp_b, qp_n, kp_b, kp_n, mask_b, mask_h, mask_m, mask_n,
    n_heads, groups, n_q, n_k, d, d_v, scale, eps, out_b, out_h, out_n,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr, SKIP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr, COPIES: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Outputs (B, Hq, Nq, Dv), of any strides but the last, and base-2 log-sum-exps (B, Hq, Nq), contiguous as c and
    documents are.

    u: exposures (B, Hk, Nk), with COPIES (B, Hk, Nk, 2) as `_exposures_kernel` writes them.

    SKIP reads reach (B, Hq, Nq), k_reach and u_least (B, Hk, tiles), writes low (B, Hq, Nq), visited and earliest
    (B, Hq, tiles).

    Without positions, documents and masks a second launch with AGAIN has to follow. With a running maximum it does
    tiles again that had logits too far above their level; a program looks at `TOGETHER`, as there is seldom one.
    """
    tensors = (q_ptr, k_ptr, v_ptr, c_ptr, u_ptr, qp_ptr, kp_ptr, qd_ptr, kd_ptr, mask_ptr, out_ptr, lse_ptr)
    skipping = (reach_ptr, low_ptr, k_reach_ptr, u_least_ptr, visited_ptr, earliest_ptr)
    strides = (q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d)
    mask_strides = (qp_b, qp_n, kp_b, kp_n, mask_b, mask_h, mask_m, mask_n)
    sizes = (n_heads, groups, n_q, n_k, d, d_v, scale, eps, out_b, out_h, out_n)
    if AGAIN:
        lse_row = lse_ptr + tl.program_id(1).to(tl.int64) * n_q
        begin = tl.program_id(0) * TOGETHER * BLOCK_M
        for start_m in range(begin, tl.minimum(begin + TOGETHER * BLOCK_M, n_q), BLOCK_M):
            if tl.load(lse_row + start_m) == float("inf"):
                fwd_rows(
                    False, start_m, tensors, skipping, strides, mask_strides, sizes,
                    CAUSAL, HAS_POSITIONS, HAS_DOCUMENTS, HAS_MASK, PARTIAL_D, PARTIAL_V, SKIP,
                    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V, COPIES,
                )  # fmt: skip
    else:
        # The longest rows of a triangle go first, so that no program is left over at the end.
        fwd_rows(
            not HAS_POSITIONS and not HAS_DOCUMENTS and not HAS_MASK,
            (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M, tensors, skipping, strides, mask_strides, sizes,
            CAUSAL, HAS_POSITIONS, HAS_DOCUMENTS, HAS_MASK, PARTIAL_D, PARTIAL_V, SKIP,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V, COPIES,
        )  # fmt: skip
