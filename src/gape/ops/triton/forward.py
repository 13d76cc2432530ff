"""The forward kernel: one program per tile of queries walks the tiles of keys with a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from gape.ops.triton.tiles import anchor_of, biased_logits, document_of, load_rows, local_positions, visible


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, c_ptr, u_ptr, qp_ptr, kp_ptr, qd_ptr, kd_ptr, mask_ptr, out_ptr, lse_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    qp_b, qp_n, kp_b, kp_n, mask_b, mask_h, mask_m, mask_n,
    n_heads, groups, n_q, n_k, d, d_v, scale,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Outputs (B, Hq, Nq, Dv) and base-2 log-sum-exps (B, Hq, Nq), both contiguous; c, u, documents too."""
    batch = (tl.program_id(1) // n_heads).to(tl.int64)
    head = (tl.program_id(1) % n_heads).to(tl.int64)
    key_head = head // groups
    # The longest rows of a triangle go first, so that no program is left over at the end.
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
    c = tl.load(c_ptr + row + offs_m, mask=offs_m < n_q, other=0.0)
    q_doc = document_of(qd_ptr + batch * n_q, offs_m, n_q, 0, HAS_DOCUMENTS)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    first, stop, whole = n_k - n_q, n_k, 0
    if not HAS_POSITIONS and CAUSAL:
        stop = tl.minimum(n_k, first + start_m + BLOCK_M)
    if not HAS_POSITIONS and not HAS_DOCUMENTS and not HAS_MASK:
        # Tiles before this key need no look at single pairs.
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
            u = tl.load(u_ptr + offs_n, mask=offs_n < n_k, other=0.0)
            s = biased_logits(q, k, c, u, i, j, scale, PRECISION)
            if CHECK:
                k_doc = document_of(kd_ptr + batch * n_k, offs_n, n_k, -1, HAS_DOCUMENTS)
                seen = visible(
                    i, j, offs_m, offs_n, n_q, n_k, q_doc, k_doc, mask_ptr, mask_m, mask_n,
                    CAUSAL, HAS_DOCUMENTS, HAS_MASK,
                )  # fmt: skip
                s = tl.where(seen, s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            # A row that has seen nothing yet keeps −inf; 0 stands in for it so that no inf − inf arises.
            level = tl.where(higher == float("-inf"), 0.0, higher) if CHECK else higher
            p = tl.exp2(s - level[:, None])
            fade = tl.exp2(top - level)
            total = total * fade + tl.sum(p, 1)
            v = load_rows(v_ptr, v_n, v_d, offs_n, n_k, value_dims, d_v, CHECK, PARTIAL_V)
            acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            top = higher

    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    where = out_ptr + (row + offs_m[:, None]) * d_v + value_dims[None, :]
    tl.store(where, out.to(out_ptr.dtype.element_ty), mask=(offs_m[:, None] < n_q) & (value_dims[None, :] < d_v))
    tl.store(lse_ptr + row + offs_m, lse, mask=offs_m < n_q)
