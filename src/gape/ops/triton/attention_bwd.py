"""The backward kernels: dq and dc by tiles of queries, dk, dv and du by tiles of keys.

With p = exp2(s − lse), delta = Σ dO·O, dS = p·(dP − delta) and natural logits:

    dc_i = Σ_j dS·u_j·(j − i),    du_j = Σ_i dS·c_i·(j − i)

Both sums are taken tile by tile in float32, with positions counted from the tile's first key. There are no atomics, so
two runs give the same bits. With SKIP both skip exactly the tiles that the forward pass skipped: they judge by the same
numbers, and go no further than it found that a tile can matter.
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
    load_numbers,
    load_parts,
    load_rows,
    load_vector,
    local_positions,
    nearest,
    needed_by_columns,
    needed_by_rows,
    owner,
    products,
    run_of,
    single,
    store_parts,
    tile_from,
    visible,
    visible_keys,
    visible_queries,
)


@triton.jit
def _bwd_rows_kernel(
    grad_ptr, out_ptr, c_ptr, lse_ptr, numbers_ptr, n, n_q, d,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What the others want of each of n queries, (n, 4) in float32: c, c·(i mod BLOCK_M), lse and delta = Σ dO·O.

    A row without a key has lse −inf; +inf makes its p zero without a test in the other kernels.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    grad = load_rows(grad_ptr, start, d, 1, n, d, BLOCK, BLOCK_D, True, True).to(tl.float32)
    out = load_rows(out_ptr, start, d, 1, n, d, BLOCK, BLOCK_D, True, True).to(tl.float32)
    c = load_vector(c_ptr, start, n, 0.0, BLOCK, True)
    lse = load_vector(lse_ptr, start, n, 0.0, BLOCK, True)
    rows = start + tl.arange(0, BLOCK)
    ptrs, inside = numbers_ptr + rows * 4, rows < n
    tl.store(ptrs, c, mask=inside)
    tl.store(ptrs + 1, c * (rows % n_q % BLOCK_M).to(tl.float32), mask=inside)
    tl.store(ptrs + 2, tl.where(lse == float("-inf"), float("inf"), lse), mask=inside)
    tl.store(ptrs + 3, tl.sum(grad * out, 1), mask=inside)


@triton.jit
def dq_tile(
    CHECK: tl.constexpr, start_n, dq, dq_rest, dc,
    k_at, v_at, u_at, q, q_rest, grad, grad_rest, c, lse, delta, i_first, q_doc, offs_m,
    qp_ptr, kp_ptr, kd_ptr, mask_ptr,
    k_n, k_d, v_n, v_d, qp_n, kp_n, mask_m, mask_n, n_q, n_k, d, d_v, scale,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Add what the tile of keys from `start_n` on gives to dq and dc.

    CHECK: look at single pairs. k_at, v_at, u_at: where its keys, values and exposures lie.
    """
    offs_n = start_n + tl.arange(0, BLOCK_N)
    anchor = anchor_of(kp_ptr, kp_n, start_n, HAS_POSITIONS, COPIES)
    i, i_far = local_positions(qp_ptr, qp_n, offs_m, n_q, anchor, i_first, HAS_POSITIONS)
    j, j_far = local_positions(kp_ptr, kp_n, offs_n, n_k, anchor, 0, HAS_POSITIONS)
    k, k_rest = load_parts(k_at, 0, k_n, k_d, n_k - start_n, d, BLOCK_N, BLOCK_D, REST_D, CHECK, PARTIAL_D)
    v, v_rest = load_parts(v_at, 0, v_n, v_d, n_k - start_n, d_v, BLOCK_N, BLOCK_V, REST_V, CHECK, PARTIAL_V)
    s = products(q, q_rest, k, k_rest, REST_D)
    # Behind the product, so that it is not in registers while that runs.
    u, local = load_exposures(u_at, 0, n_k - start_n, BLOCK_N, CHECK, COPIES)
    if HAS_POSITIONS:
        distance = distances(i[:, None], i_far[:, None], j[None, :], j_far[None, :])
        earlier = distance >= 0
        lost = -(u[None, :] * distance)
    else:
        earlier = tl.arange(0, BLOCK_N)[None, :] <= (offs_m + (i_first - start_n))[:, None]
        lost = local[None, :] - i[:, None] * u[None, :]
    s = s * scale + (c[:, None] * lost - lse[:, None])
    if CHECK:
        k_doc = document_of(kd_ptr, offs_n, n_k, -1, HAS_DOCUMENTS)
        pairs = visible(
            earlier, offs_m[:, None], offs_n[None, :], n_q, n_k, q_doc[:, None], k_doc[None, :],
            mask_ptr, mask_m, mask_n, CAUSAL, HAS_DOCUMENTS, HAS_MASK,
        )  # fmt: skip
        s = tl.where(pairs, s, float("-inf"))
    p = tl.exp2(s)
    ds = p * (products(grad, grad_rest, v, v_rest, REST_V) - delta[:, None])
    dq, dq_rest = add_weighted(ds.to(k.dtype), k, k_rest, dq, dq_rest, REST_D)
    dc += in_eights(ds * lost, BLOCK_M, BLOCK_N)
    return dq, dq_rest, dc


@triton.jit
def dq_needed(
    dq, dq_rest, dc, home, rows, keys, c, first, near, start_m, n_q, n_k, row, key_row,
    reach_ptr, low_ptr, earliest_ptr, k_reach_ptr, u_least_ptr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Of the tiles of keys before tile `near`, add what those give that the forward pass took in.

    home: where key 0 lies, and strides, as :func:`at_key` takes them.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    k_reach_ptr += key_row * tl.cdiv(n_k, BLOCK_N)
    u_least_ptr += key_row * tl.cdiv(n_k, BLOCK_N)
    reach = load_vector(reach_ptr + row, start_m, n_q, 0.0, BLOCK_M, True)
    low = load_vector(low_ptr + row, start_m, n_q, float("inf"), BLOCK_M, True)
    earliest = tl.load(earliest_ptr + tl.program_id(1) * tl.num_programs(0) + start_m // BLOCK_M)
    for step in range(0, near - earliest, GROUP):
        base = near - step - GROUP
        keep = needed_by_rows(base, first, offs_m, reach, c, low, k_reach_ptr, u_least_ptr, BLOCK_N)
        while keep != 0:
            begin, end, keep = run_of(keep)
            k_at, v_at, u_at = at_key(*home, (base + begin) * BLOCK_N, COPIES)
            for tile in range(base + begin, base + end):
                dq, dq_rest, dc = dq_tile(
                    False, tile * BLOCK_N, dq, dq_rest, dc, k_at, v_at, u_at, *rows, *keys,
                    True, False, False, False, PARTIAL_D, PARTIAL_V,
                    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V, COPIES,
                )  # fmt: skip
                k_at, v_at, u_at = at_key(k_at, v_at, u_at, home[3], home[4], BLOCK_N, COPIES)
    return dq, dq_rest, dc


@triton.jit
def _bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, c_ptr, u_ptr, qp_ptr, kp_ptr, qd_ptr, kd_ptr, mask_ptr,
    grad_ptr, numbers_ptr, dq_ptr, dc_ptr, reach_ptr, low_ptr, earliest_ptr, k_reach_ptr, u_least_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    qp_b, qp_n, kp_b, kp_n, mask_b, mask_h, mask_m, mask_n,
    n_heads, groups, n_q, n_k, d, d_v, scale, content_scale,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr, SKIP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """dq (B, Hq, Nq, D) and dc (B, Hq, Nq), contiguous; one program per tile of queries."""
    batch, head, key_head, key_row = owner(n_heads, groups)
    start_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
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
    grad, grad_rest = load_parts(
        grad_ptr + row * d_v, start_m, d_v, 1, n_q, d_v, BLOCK_M, BLOCK_V, REST_V, True, PARTIAL_V
    )
    c, _, lse, delta = load_numbers(numbers_ptr + row * 4, start_m, n_q, BLOCK_M, True)
    q_doc = document_of(qd_ptr + batch * n_q, offs_m, n_q, 0, HAS_DOCUMENTS)
    dq, dq_rest = empty_parts(BLOCK_M, BLOCK_D, REST_D)
    dc = tl.zeros((BLOCK_M, 8), tl.float32)
    first, stop, whole = visible_keys(
        start_m, n_q, n_k, CAUSAL, HAS_POSITIONS, HAS_DOCUMENTS, HAS_MASK, BLOCK_M, BLOCK_N
    )
    rows = (q, q_rest, grad, grad_rest, c, lse, delta, first, q_doc, offs_m)
    near = nearest(first + start_m, BLOCK_N)
    for start_n in range(near * BLOCK_N if SKIP else whole, stop, BLOCK_N):
        dq, dq_rest, dc = dq_tile(
            True, start_n, dq, dq_rest, dc, *at_key(*home, start_n, COPIES), *rows, *keys,
            CAUSAL, HAS_POSITIONS, HAS_DOCUMENTS, HAS_MASK, PARTIAL_D, PARTIAL_V,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V, COPIES,
        )  # fmt: skip
    if SKIP:
        dq, dq_rest, dc = dq_needed(
            dq, dq_rest, dc, home, rows, keys, c, first, near, start_m, n_q, n_k, row, key_row,
            reach_ptr, low_ptr, earliest_ptr, k_reach_ptr, u_least_ptr,
            PARTIAL_D, PARTIAL_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V, COPIES,
        )  # fmt: skip
    else:
        k_at, v_at, u_at = at_key(*home, 0, COPIES)
        for start_n in range(0, whole, BLOCK_N):
            dq, dq_rest, dc = dq_tile(
                False, start_n, dq, dq_rest, dc, k_at, v_at, u_at, *rows, *keys,
                CAUSAL, HAS_POSITIONS, HAS_DOCUMENTS, HAS_MASK, PARTIAL_D, PARTIAL_V,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V, COPIES,
            )  # fmt: skip
            k_at, v_at, u_at = at_key(k_at, v_at, u_at, k_n, v_n, BLOCK_N, COPIES)
    factor = single(content_scale)
    store_parts(dq_ptr + row * d, dq * factor, dq_rest * factor, start_m, d, n_q, d, BLOCK_M, BLOCK_D, REST_D)
    tl.store(dc_ptr + row + offs_m, tl.sum(dc, 1), mask=offs_m < n_q)


@triton.jit
def dkv_tile(
    CHECK: tl.constexpr, start_m, dk, dk_rest, dv, dv_rest, du, q_at, grad_at, numbers_at,
    k, k_rest, v, v_rest, u, j, j_far, anchor, i_first, k_doc, offs_n, qp_ptr, qd_ptr, mask_ptr,
    q_n, q_d, qp_n, mask_m, mask_n, n_q, n_k, d, d_v, scale,
    RAGGED: tl.constexpr, CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_MASK: tl.constexpr, PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr,
):  # fmt: skip
    """Add what the tile of queries from `start_m` on gives to dk, dv and du.

    CHECK: look at single pairs. q_at, grad_at, numbers_at: where its rows lie. Pairs lie (key, query), so that sums run
    along a row. Queries past the end have nothing but zeros, and give nothing. Both products that weights and their
    gradients are made of come first: in between fewer numbers are held than a thread has registers.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q, q_rest = load_parts(q_at, 0, q_n, q_d, n_q - start_m, d, BLOCK_M, BLOCK_D, REST_D, RAGGED, PARTIAL_D)
    grad, grad_rest = load_parts(grad_at, 0, d_v, 1, n_q - start_m, d_v, BLOCK_M, BLOCK_V, REST_V, RAGGED, PARTIAL_V)
    s = products(k, k_rest, q, q_rest, REST_D)
    dp = products(v, v_rest, grad, grad_rest, REST_V)
    c, local, lse, delta = load_numbers(numbers_at, 0, n_q - start_m, BLOCK_M, RAGGED)
    if HAS_POSITIONS:
        i, i_far = local_positions(qp_ptr, qp_n, offs_m, n_q, anchor, 0, HAS_POSITIONS)
        distance = distances(i[None, :], i_far[None, :], j[:, None], j_far[:, None])
        earlier = distance >= 0
        lost = -(c[None, :] * distance)
    else:
        # Counted from the tile's first query, so that what is large is the key's, of which a thread has few.
        i = tl.arange(0, BLOCK_M).to(tl.float32)
        j = (offs_n - (i_first + start_m)).to(tl.float32)
        earlier = j[:, None] <= i[None, :]
        lost = j[:, None] * c[None, :] - local[None, :]
    s = s * scale + (u[:, None] * lost - lse[None, :])
    if CHECK:
        q_doc = document_of(qd_ptr, offs_m, n_q, 0, HAS_DOCUMENTS)
        pairs = visible(
            earlier, offs_m[None, :], offs_n[:, None], n_q, n_k, q_doc[None, :], k_doc[:, None],
            mask_ptr, mask_m, mask_n, CAUSAL, HAS_DOCUMENTS, HAS_MASK,
        )  # fmt: skip
        s = tl.where(pairs, s, float("-inf"))
    p = tl.exp2(s)
    ds = p * (dp - delta[None, :])
    dv, dv_rest = add_weighted(p.to(grad.dtype), grad, grad_rest, dv, dv_rest, REST_V)
    dk, dk_rest = add_weighted(ds.to(q.dtype), q, q_rest, dk, dk_rest, REST_D)
    du += in_eights(ds * lost, BLOCK_N, BLOCK_M)
    return dk, dk_rest, dv, dv_rest, du


@triton.jit
def at_query(q_ptr, grad_ptr, numbers_ptr, q_n, d_v, count):
    """Pointers to queries, gradients and numbers of queries moved on by `count` queries: as :func:`at_key`."""
    count = tl.cast(count, tl.int64)
    return q_ptr + count * q_n, grad_ptr + count * d_v, numbers_ptr + count * 4


@triton.jit
def dkv_of_head(
    dk, dk_rest, dv, dv_rest, du, home, rest, begin, whole, first, start_n, n_q, row,
    reach_ptr, c_ptr, low_ptr, earliest_ptr, k_reach_ptr, u_least_ptr,
    SKIP: tl.constexpr, RAGGED: tl.constexpr, CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr, PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr,
):  # fmt: skip
    """Add what the queries of one head from `begin` on give; those further off SKIP asks whether they took part.

    home: where query 0 lies, and strides, as :func:`at_query` takes them.
    """
    # The tiles of queries of which `nearest` says that they come to these keys by judging them.
    judged = tile_from(start_n + 2 * BLOCK_N - 1, first, n_q, BLOCK_M)
    for start_m in range(begin, judged if SKIP else whole, BLOCK_M):
        dk, dk_rest, dv, dv_rest, du = dkv_tile(
            True, start_m, dk, dk_rest, dv, dv_rest, du, *at_query(*home, start_m), *rest,
            RAGGED, CAUSAL, HAS_POSITIONS, HAS_DOCUMENTS, HAS_MASK, PARTIAL_D, PARTIAL_V,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V,
        )  # fmt: skip
    if SKIP:
        tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        k_reach, u_least = tl.load(k_reach_ptr + tile), tl.load(u_least_ptr + tile)
        earliest_ptr += row // n_q * tl.cdiv(n_q, BLOCK_M)
        for start in range(judged, n_q, GROUP * BLOCK_M):
            keep = needed_by_columns(
                start, start_n // BLOCK_N, first, n_q, reach_ptr + row, c_ptr + row, low_ptr + row, earliest_ptr,
                k_reach, u_least, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            while keep != 0:
                block, end, keep = run_of(keep)
                q_at, grad_at, numbers_at = at_query(*home, start + block * BLOCK_M)
                for start_m in range(start + block * BLOCK_M, start + end * BLOCK_M, BLOCK_M):
                    dk, dk_rest, dv, dv_rest, du = dkv_tile(
                        False, start_m, dk, dk_rest, dv, dv_rest, du, q_at, grad_at, numbers_at, *rest,
                        RAGGED, CAUSAL, False, False, False, PARTIAL_D, PARTIAL_V,
                        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V,
                    )  # fmt: skip
                    q_at, grad_at, numbers_at = at_query(q_at, grad_at, numbers_at, home[3], home[4], BLOCK_M)
    elif not HAS_POSITIONS and not HAS_DOCUMENTS and not HAS_MASK:
        q_at, grad_at, numbers_at = at_query(*home, whole)
        for start_m in range(whole, n_q, BLOCK_M):
            dk, dk_rest, dv, dv_rest, du = dkv_tile(
                False, start_m, dk, dk_rest, dv, dv_rest, du, q_at, grad_at, numbers_at, *rest,
                RAGGED, CAUSAL, False, False, False, PARTIAL_D, PARTIAL_V,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V,
            )  # fmt: skip
            q_at, grad_at, numbers_at = at_query(q_at, grad_at, numbers_at, home[3], home[4], BLOCK_M)
    return dk, dk_rest, dv, dv_rest, du


@triton.jit
def _bwd_dkv_kernel(
    q_ptr, k_ptr, v_ptr, c_ptr, u_ptr, qp_ptr, kp_ptr, qd_ptr, kd_ptr, mask_ptr,
    grad_ptr, numbers_ptr, dk_ptr, dv_ptr, du_ptr, reach_ptr, low_ptr, earliest_ptr, k_reach_ptr, u_least_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    qp_b, qp_n, kp_b, kp_n, mask_b, mask_h, mask_m, mask_n,
    n_heads, n_kv_heads, n_q, n_k, d, d_v, scale, content_scale, log2e,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr, SKIP: tl.constexpr,
    RAGGED: tl.constexpr, ALONE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    REST_D: tl.constexpr, REST_V: tl.constexpr,
):  # fmt: skip
    """dk (B, Hk, Nk, D), dv (B, Hk, Nk, Dv), du (B, Hk, Nk), contiguous; one program per tile of keys.

    The program goes through all query heads that share the key head, so their sum needs no atomics. ALONE: there is
    only one, and no loop over them. RAGGED: the queries do not fill their last tile.
    """
    batch, key_head, _, key_row = owner(n_kv_heads, 1)
    groups = 1 if ALONE else n_heads // n_kv_heads
    start_n = tl.program_id(0) * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    column = key_row * n_k
    qp_ptr += batch * qp_b
    kp_ptr += batch * kp_b
    qd_ptr += batch * n_q
    k, k_rest = load_parts(
        k_ptr + batch * k_b + key_head * k_h, start_n, k_n, k_d, n_k, d, BLOCK_N, BLOCK_D, REST_D, True, PARTIAL_D
    )
    v, v_rest = load_parts(
        v_ptr + batch * v_b + key_head * v_h, start_n, v_n, v_d, n_k, d_v, BLOCK_N, BLOCK_V, REST_V, True, PARTIAL_V
    )
    u = load_vector(u_ptr + column, start_n, n_k, 0.0, BLOCK_N, True)
    k_doc = document_of(kd_ptr + batch * n_k, offs_n, n_k, -1, HAS_DOCUMENTS)
    anchor = anchor_of(kp_ptr, kp_n, start_n, HAS_POSITIONS, 0)
    j, j_far = local_positions(kp_ptr, kp_n, offs_n, n_k, anchor, 0, HAS_POSITIONS)
    dk, dk_rest = empty_parts(BLOCK_N, BLOCK_D, REST_D)
    dv, dv_rest = empty_parts(BLOCK_N, BLOCK_V, REST_V)
    du = tl.zeros((BLOCK_N, 8), tl.float32)
    first, begin, whole = visible_queries(
        start_n, n_q, n_k, CAUSAL, HAS_POSITIONS, HAS_DOCUMENTS, HAS_MASK, BLOCK_M, BLOCK_N
    )
    for member in range(0, groups):
        head = key_head * groups + member
        row = (batch * n_heads + head) * n_q
        home = (q_ptr + batch * q_b + head * q_h, grad_ptr + row * d_v, numbers_ptr + row * 4, q_n, d_v)
        rest = (
            k, k_rest, v, v_rest, u, j, j_far, anchor, first, k_doc, offs_n,
            qp_ptr, qd_ptr, mask_ptr + batch * mask_b + head * mask_h,
            q_n, q_d, qp_n, mask_m, mask_n, n_q, n_k, d, d_v, single(scale),
        )  # fmt: skip
        dk, dk_rest, dv, dv_rest, du = dkv_of_head(
            dk, dk_rest, dv, dv_rest, du, home, rest, begin, whole, first, start_n, n_q, row,
            reach_ptr, c_ptr, low_ptr, earliest_ptr, k_reach_ptr, u_least_ptr, SKIP, RAGGED, CAUSAL, HAS_POSITIONS,
            HAS_DOCUMENTS, HAS_MASK, PARTIAL_D, PARTIAL_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, REST_D, REST_V,
        )  # fmt: skip
    factor = single(content_scale)
    store_parts(dk_ptr + column * d, dk * factor, dk_rest * factor, start_n, d, n_k, d, BLOCK_N, BLOCK_D, REST_D)
    store_parts(dv_ptr + column * d_v, dv, dv_rest, start_n, d_v, n_k, d_v, BLOCK_N, BLOCK_V, REST_V)
    # c came in base 2; the gradient is that of natural logits.
    tl.store(du_ptr + column + offs_n, tl.sum(du, 1) / single(log2e), mask=offs_n < n_k)
