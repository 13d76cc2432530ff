"""The backward kernels: gradients by rows (dq, dc) and by columns (dk, dv, du).

With p = exp2(s − lse), dS = p·(dP − delta) and natural logits:

    dc_i = −Σ_j dS·u_j·(i − j),    du_j = −Σ_i dS·c_i·(i − j)

Both sums are taken tile by tile in float32, with positions counted from the tile's first key. There are no atomics, so
two runs give the same bits. Rows that saw nothing come with lse = +inf, which makes their p zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gape.ops.triton.tiles import anchor_of, biased_logits, document_of, load_rows, local_positions, visible


@triton.jit
def by_rows(
    q_ptr, k_ptr, v_ptr, c_ptr, u_ptr, qp_ptr, kp_ptr, qd_ptr, kd_ptr, mask_ptr,
    grad_ptr, lse_ptr, delta_ptr, dq_ptr, dc_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    qp_b, qp_n, kp_b, kp_n, mask_b, mask_h, mask_m, mask_n,
    n_heads, groups, n_q, n_k, d, d_v, scale, content_scale,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dq (B, Hq, Nq, D) and dc (B, Hq, Nq), contiguous; one program per tile of queries."""
    batch = (tl.program_id(1) // n_heads).to(tl.int64)
    head = (tl.program_id(1) % n_heads).to(tl.int64)
    key_head = head // groups
    start_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    row = (batch * n_heads + head) * n_q
    k_ptr += batch * k_b + key_head * k_h
    v_ptr += batch * v_b + key_head * v_h
    u_ptr += (batch * (n_heads // groups) + key_head) * n_k
    qp_ptr += batch * qp_b
    kp_ptr += batch * kp_b
    mask_ptr += batch * mask_b + head * mask_h
    q = load_rows(q_ptr + batch * q_b + head * q_h, q_n, q_d, offs_m, n_q, dims, d, True, PARTIAL_D)
    grad = load_rows(grad_ptr + row * d_v, d_v, 1, offs_m, n_q, value_dims, d_v, True, PARTIAL_V)
    c = tl.load(c_ptr + row + offs_m, mask=offs_m < n_q, other=0.0)
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < n_q, other=float("inf"))
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < n_q, other=0.0)
    q_doc = document_of(qd_ptr + batch * n_q, offs_m, n_q, 0, HAS_DOCUMENTS)

    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dc = tl.zeros((BLOCK_M,), tl.float32)
    first, stop, whole = n_k - n_q, n_k, 0
    if not HAS_POSITIONS and CAUSAL:
        stop = tl.minimum(n_k, first + start_m + BLOCK_M)
    if not HAS_POSITIONS and not HAS_DOCUMENTS and not HAS_MASK:
        whole = n_k
        if CAUSAL:
            whole = tl.minimum(n_k, first + start_m + 1)
        whole = (whole // BLOCK_N) * BLOCK_N
    for CHECK in tl.static_range(2):
        low, high = 0, whole
        if CHECK:
            low, high = whole, stop
        for start_n in range(low, high, BLOCK_N):
            offs_n = start_n + tl.arange(0, BLOCK_N)
            anchor = anchor_of(kp_ptr, kp_n, start_n, HAS_POSITIONS)
            i = local_positions(qp_ptr, qp_n, offs_m, n_q, anchor, first, HAS_POSITIONS)
            j = local_positions(kp_ptr, kp_n, offs_n, n_k, anchor, 0, HAS_POSITIONS)
            k = load_rows(k_ptr, k_n, k_d, offs_n, n_k, dims, d, CHECK, PARTIAL_D)
            v = load_rows(v_ptr, v_n, v_d, offs_n, n_k, value_dims, d_v, CHECK, PARTIAL_V)
            u = tl.load(u_ptr + offs_n, mask=offs_n < n_k, other=0.0)
            s = biased_logits(q, k, c, u, i, j, scale, PRECISION)
            if CHECK:
                k_doc = document_of(kd_ptr + batch * n_k, offs_n, n_k, -1, HAS_DOCUMENTS)
                seen = visible(
                    i, j, offs_m, offs_n, n_q, n_k, q_doc, k_doc, mask_ptr, mask_m, mask_n,
                    CAUSAL, HAS_DOCUMENTS, HAS_MASK,
                )  # fmt: skip
                s = tl.where(seen, s, float("-inf"))
            p = tl.exp2(s - lse[:, None])
            ds = p * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
            dc += tl.sum(ds * (u * j)[None, :], 1) - i * tl.sum(ds * u[None, :], 1)

    where = dq_ptr + (row + offs_m[:, None]) * d + dims[None, :]
    inside = (offs_m[:, None] < n_q) & (dims[None, :] < d)
    tl.store(where, (dq * content_scale).to(dq_ptr.dtype.element_ty), mask=inside)
    tl.store(dc_ptr + row + offs_m, dc, mask=offs_m < n_q)


@triton.jit
def by_columns(
    q_ptr, k_ptr, v_ptr, c_ptr, u_ptr, qp_ptr, kp_ptr, qd_ptr, kd_ptr, mask_ptr,
    grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, du_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    qp_b, qp_n, kp_b, kp_n, mask_b, mask_h, mask_m, mask_n,
    n_kv_heads, groups, n_q, n_k, d, d_v, scale, content_scale, log2e,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dk (B, Hk, Nk, D), dv (B, Hk, Nk, Dv), du (B, Hk, Nk), contiguous; one program per tile of keys.

    The program goes through all query heads that share the key head, so their sum needs no atomics.
    """
    batch = (tl.program_id(1) // n_kv_heads).to(tl.int64)
    key_head = (tl.program_id(1) % n_kv_heads).to(tl.int64)
    start_n = tl.program_id(0) * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    column = (batch * n_kv_heads + key_head) * n_k
    qp_ptr += batch * qp_b
    kp_ptr += batch * kp_b
    k = load_rows(k_ptr + batch * k_b + key_head * k_h, k_n, k_d, offs_n, n_k, dims, d, True, PARTIAL_D)
    v = load_rows(v_ptr + batch * v_b + key_head * v_h, v_n, v_d, offs_n, n_k, value_dims, d_v, True, PARTIAL_V)
    u = tl.load(u_ptr + column + offs_n, mask=offs_n < n_k, other=0.0)
    k_doc = document_of(kd_ptr + batch * n_k, offs_n, n_k, -1, HAS_DOCUMENTS)
    anchor = anchor_of(kp_ptr, kp_n, start_n, HAS_POSITIONS)
    j = local_positions(kp_ptr, kp_n, offs_n, n_k, anchor, 0, HAS_POSITIONS)

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    du = tl.zeros((BLOCK_N,), tl.float32)
    first, begin, whole = n_k - n_q, 0, n_q
    if not HAS_POSITIONS and CAUSAL:
        begin = (tl.maximum(start_n - first, 0) // BLOCK_M) * BLOCK_M
    if not HAS_POSITIONS and not HAS_DOCUMENTS and not HAS_MASK:
        # From this query on every pair is seen; queries past the end have p = 0 by their lse.
        whole = 0
        if CAUSAL:
            whole = tl.minimum(n_q, tl.cdiv(tl.maximum(start_n + BLOCK_N - 1 - first, 0), BLOCK_M) * BLOCK_M)
    for member in range(0, groups):
        head = key_head * groups + member
        row = (batch * n_kv_heads * groups + head) * n_q
        for CHECK in tl.static_range(2):
            low, high = whole, n_q
            if CHECK:
                low, high = begin, whole
            for start_m in range(low, high, BLOCK_M):
                offs_m = start_m + tl.arange(0, BLOCK_M)
                q = load_rows(q_ptr + batch * q_b + head * q_h, q_n, q_d, offs_m, n_q, dims, d, True, PARTIAL_D)
                grad = load_rows(grad_ptr + row * d_v, d_v, 1, offs_m, n_q, value_dims, d_v, True, PARTIAL_V)
                c = tl.load(c_ptr + row + offs_m, mask=offs_m < n_q, other=0.0)
                lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < n_q, other=float("inf"))
                delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < n_q, other=0.0)
                i = local_positions(qp_ptr, qp_n, offs_m, n_q, anchor, first, HAS_POSITIONS)
                s = biased_logits(q, k, c, u, i, j, scale, PRECISION)
                if CHECK:
                    q_doc = document_of(qd_ptr + batch * n_q, offs_m, n_q, 0, HAS_DOCUMENTS)
                    seen = visible(
                        i, j, offs_m, offs_n, n_q, n_k, q_doc, k_doc,
                        mask_ptr + batch * mask_b + head * mask_h, mask_m, mask_n,
                        CAUSAL, HAS_DOCUMENTS, HAS_MASK,
                    )  # fmt: skip
                    s = tl.where(seen, s, float("-inf"))
                p = tl.exp2(s - lse[:, None])
                dv += tl.dot(tl.trans(p.to(grad.dtype)), grad, input_precision=PRECISION)
                ds = p * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
                dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
                du += j * tl.sum(ds * c[:, None], 0) - tl.sum(ds * (c * i)[:, None], 0)

    inside = offs_n[:, None] < n_k
    dk_where = dk_ptr + (column + offs_n[:, None]) * d + dims[None, :]
    dv_where = dv_ptr + (column + offs_n[:, None]) * d_v + value_dims[None, :]
    tl.store(dk_where, (dk * content_scale).to(dk_ptr.dtype.element_ty), mask=inside & (dims[None, :] < d))
    tl.store(dv_where, dv.to(dv_ptr.dtype.element_ty), mask=inside & (value_dims[None, :] < d_v))
    # c came in base 2; the gradient is that of natural logits.
    tl.store(du_ptr + column + offs_n, du / log2e, mask=offs_n < n_k)
