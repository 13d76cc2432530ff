"""Kernels of the decode path: parts of an attention over runs of keys, and their merging.

One program reads a run of the keys of one key head once, for all query heads that share it: their rows are stacked
into one tile, which also gives the matrix units the 16 rows they want. Each program leaves a normalised partial output
and the base-2 log-sum-exp of its logits; the parts are then weighed by those, in their order, so that two runs give
the same bits. The last program of a key head to finish merges them, which it knows by a ticket, or a second kernel.

Distances are integers before they are floats, the bias −c·u·(i − j) is float32, and the landmark is read as it is
cached: nothing is computed over the whole cache beforehand. Everything is in base 2: `scale` and `rate_unit` come
multiplied by log₂e.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(ptrs, rows, columns, CHECK_ROWS: tl.constexpr, CHECK_COLUMNS: tl.constexpr):
    """A tile of the cache, zero where `rows` or `columns` say no; a check that is not needed costs nothing."""
    if CHECK_ROWS and CHECK_COLUMNS:
        return tl.load(ptrs, mask=rows[:, None] & columns[None, :], other=0.0)
    if CHECK_ROWS:
        return tl.load(ptrs, mask=rows[:, None], other=0.0)
    if CHECK_COLUMNS:
        return tl.load(ptrs, mask=columns[None, :], other=0.0)
    return tl.load(ptrs)


@triton.jit
def load_landmarks(ptrs, inside, CHECK: tl.constexpr):
    """The landmarks of a tile, zero where `inside` says no."""
    if CHECK:
        return tl.load(ptrs, mask=inside, other=0.0)
    return tl.load(ptrs)


@triton.jit
def merge_row(
    part_ptr, lse_ptr, out_ptr, whole_lse_ptr, row, first, splits, d_v, unit,
    PARTS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write output and natural log-sum-exp of a row, zeros and −inf where it has no key; parts begin at `first`."""
    value_dims = tl.arange(0, BLOCK_V)
    lse_ptr += first
    part_ptr += first * d_v
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, splits, PARTS):
        some = start + tl.arange(0, PARTS)
        valid = some < splits
        # Other multiprocessors wrote these: never from the cache of this one.
        lse = tl.load(lse_ptr + some, mask=valid, other=float("-inf"), cache_modifier=".cg")
        ptrs = part_ptr + some[:, None] * d_v + value_dims[None, :]
        part = tl.load(ptrs, mask=valid[:, None] & (value_dims < d_v)[None, :], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(lse, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight, fade = tl.exp2(lse - level), tl.exp2(top - level)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(weight[:, None] * part, 0)
        top = higher
    safe = tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * d_v + value_dims, (acc / safe).to(out_ptr.dtype.element_ty), mask=value_dims < d_v)
    tl.store(whole_lse_ptr + row, tl.where(total == 0.0, float("-inf"), (top + tl.log2(safe)) * unit))


@triton.jit
def last_to_finish(ticket_ptr, splits):
    """Whether all other programs of the group have written what they had to; puts the ticket back if so."""
    # All threads have written when one of them takes the ticket, which releases their writes and acquires those of
    # the programs before.
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last


@triton.jit
def weigh(s, v, top, total, acc, GUARDED: tl.constexpr):
    """The running maximum, sum and sum of values (M, V) with a tile more, of base-2 logits s (M, N) and values v.

    GUARDED where a row may have no key: it keeps −inf, and 0 stands in for that so that no inf − inf arises.
    """
    higher = tl.maximum(top, tl.max(s, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher) if GUARDED else higher
    p = tl.exp2(s - level[:, None])
    fade = tl.exp2(top - level)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return higher, total, acc


@triton.jit
def store_part(part_ptr, lse_ptr, places, top, total, acc, live, value_dims, d_v):
    """Write a part's outputs (M, V) and base-2 log-sum-exps (M,) to their places; zeros and −inf for an empty one."""
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    tl.store(lse_ptr + places, tl.where(empty, float("-inf"), top + tl.log2(safe)), mask=live)
    ptrs = part_ptr + places[:, None] * d_v + value_dims[None, :]
    # Where no key is visible, what stands at hidden keys may not be a number.
    out = tl.where(empty[:, None], 0.0, acc / safe[:, None])
    tl.store(ptrs, out, mask=live[:, None] & (value_dims < d_v)[None, :])


# The cache grows by a token each step: a kernel must not be compiled anew for every length.
@triton.jit(do_not_specialize=("n_q", "n_k", "span"))
def _decode_kernel(
    part_ptr, lse_ptr, ticket_ptr, out_ptr, whole_lse_ptr, span, n_key_heads, n_k, d, d_v, scale, rate_unit, unit,
    q_ptr, k_ptr, v_ptr, gate_ptr, landmark_ptr, amplitude_ptr, qp_ptr, kp_ptr, qd_ptr, kd_ptr, mask_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, gate_b, gate_h, gate_n, mark_b, mark_h, mark_n, amp_h,
    qp_b, qp_n, kp_b, kp_n, qd_b, qd_n, kd_b, kd_n, mask_b, mask_h, mask_m, mask_n,
    groups, n_q,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr, MERGE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Partial outputs (B·Hq·Nq, splits, Dv) and base-2 log-sum-exps (B·Hq·Nq, splits), float32, contiguous.

    A split without keys writes zeros and −inf. Under MERGE the last program of a group of splits merges them; tickets
    (B, Hk, row tiles) are int32, zero before and after.
    """
    # A compiler may pass Python's floats in double precision.
    scale, rate_unit, unit = tl.cast(scale, tl.float32), tl.cast(rate_unit, tl.float32), tl.cast(unit, tl.float32)
    batch = (tl.program_id(1) // n_key_heads).to(tl.int64)
    key_head = (tl.program_id(1) % n_key_heads).to(tl.int64)
    split, splits = tl.program_id(0), tl.num_programs(0)
    # Row r is query r mod Nq of the group's head r div Nq.
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < groups * n_q
    m = rows % n_q
    head = key_head * groups + rows // n_q
    first_row = tl.program_id(1).to(tl.int64) * groups * n_q
    places = (first_row + rows) * splits + split
    dims, value_dims, near = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_N)

    first = n_k - n_q
    low, high = split * span, tl.minimum(split * span + span, n_k)
    whole = low
    if not HAS_POSITIONS and not HAS_DOCUMENTS and not HAS_MASK:
        # Tiles that every query sees in full need no look at single pairs.
        sure = high
        if CAUSAL:
            sure = tl.minimum(high, first + 1)
        whole = low + tl.maximum((sure - low) // BLOCK_N, 0) * BLOCK_N

    q_ptr += batch * q_b
    q = tl.load(
        q_ptr + (head * q_h + m * q_n)[:, None] + (dims * q_d)[None, :],
        mask=live[:, None] & (dims < d)[None, :],
        other=0.0,
    )
    gate = tl.load(gate_ptr + batch * gate_b + head * gate_h + m * gate_n, mask=live, other=0.0)
    c = gate * tl.load(amplitude_ptr + head * amp_h, mask=live, other=0.0) * rate_unit
    # In index order queries are few and near each other: counted from the first of them, floats hold them exactly.
    i = m.to(tl.float32)
    if HAS_POSITIONS:
        position = tl.load(qp_ptr + batch * qp_b + m * qp_n, mask=live, other=0)
    q_doc = m
    if HAS_DOCUMENTS:
        q_doc = tl.load(qd_ptr + batch * qd_b + m * qd_n, mask=live, other=0)
    mask_ptr += batch * mask_b
    # Within a tile offsets are small; only the place of the first one needs 64 bits.
    k_ptr += batch * k_b + key_head * k_h + low.to(tl.int64) * k_n
    v_ptr += batch * v_b + key_head * v_h + low.to(tl.int64) * v_n
    landmark_ptr += batch * mark_b + key_head * mark_h
    k_near = near[:, None] * k_n + dims[None, :] * k_d
    v_near = near[:, None] * v_n + value_dims[None, :] * v_d

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for CHECK in tl.static_range(2):
        begin, end = low, whole
        if CHECK:
            begin, end = whole, high
        for start in range(begin, end, BLOCK_N):
            offs = start + near
            inside = offs < high
            k = load_tile(k_ptr + k_near, inside, dims < d, CHECK, PARTIAL_D)
            v = load_tile(v_ptr + v_near, inside, value_dims < d_v, CHECK, PARTIAL_V)
            landmark = load_landmarks(landmark_ptr + offs.to(tl.int64) * mark_n, inside, CHECK)
            if HAS_POSITIONS:
                j = tl.load(kp_ptr + batch * kp_b + offs.to(tl.int64) * kp_n, mask=inside, other=0)
                distance = (position[:, None] - j[None, :]).to(tl.float32)
            else:
                distance = i[:, None] - (offs - first).to(tl.float32)[None, :]
            products = tl.dot(q, tl.trans(k), input_precision="ieee")
            s = products * scale - c[:, None] * ((1.0 - landmark)[None, :] * distance)
            if CHECK:
                pairs = live[:, None] & inside[None, :]
                if CAUSAL:
                    pairs = pairs & (distance >= 0)
                if HAS_DOCUMENTS:
                    k_doc = tl.load(kd_ptr + batch * kd_b + offs.to(tl.int64) * kd_n, mask=inside, other=0)
                    pairs = pairs & (q_doc[:, None] == k_doc[None, :])
                if HAS_MASK:
                    offsets = (head * mask_h + m * mask_m)[:, None] + (offs.to(tl.int64) * mask_n)[None, :]
                    pairs = pairs & (tl.load(mask_ptr + offsets, mask=pairs, other=0) != 0)
                s = tl.where(pairs, s, float("-inf"))
            top, total, acc = weigh(s, v, top, total, acc, CHECK)
            k_ptr += BLOCK_N * k_n
            v_ptr += BLOCK_N * v_n

    store_part(part_ptr, lse_ptr, places, top, total, acc, live, value_dims, d_v)
    # Two questions: with one, the second would be compiled where the first says no.
    if MERGE:  # noqa: SIM102
        if last_to_finish(ticket_ptr + tl.program_id(1) * tl.num_programs(2) + tl.program_id(2), splits):
            start = tl.program_id(2) * BLOCK_M
            for r in range(start, tl.minimum(start + BLOCK_M, groups * n_q)):
                merge_row(
                    part_ptr, lse_ptr, out_ptr, whole_lse_ptr, first_row + r, (first_row + r) * splits, splits, d_v,
                    unit, PARTS, BLOCK_V,
                )  # fmt: skip


@triton.jit(do_not_specialize=("splits",))
def _combine_kernel(
    part_ptr, lse_ptr, out_ptr, whole_lse_ptr, splits, d_v, unit, PARTS: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Outputs (B·Hq·Nq, Dv) and natural log-sum-exps (B·Hq·Nq), contiguous."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.cast(unit, tl.float32)
    merge_row(part_ptr, lse_ptr, out_ptr, whole_lse_ptr, row, row * splits, splits, d_v, unit, PARTS, BLOCK_V)
