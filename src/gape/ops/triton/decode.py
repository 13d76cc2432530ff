"""A few queries against many keys, at the speed of memory: keys are split over programs, the parts then merged.

One program reads a run of the keys of one key head once, for all query heads that share it: their rows are stacked
into one tile, which also gives the matrix units the 16 rows they want. Each program leaves a normalised partial output
and the base-2 log-sum-exp of its logits; the parts are then weighed by those, in their order, so that two runs give
the same bits. Few parts are merged by the last program of a key head to finish, which it knows by a ticket; many by a
kernel of their own, a program for each row.

Distances are integers before they are floats, the bias −c·u·(i − j) is float32, and the landmark is read as it is
cached: nothing is computed over the whole cache beforehand. Everything is in base 2: `scale` and `rate_unit` come
multiplied by log₂e. `gape::decode` is the operator that a compiler sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gape.ops.inputs import Problem
from gape.ops.triton.configs import multiprocessors, power_of_two, width_kind
from gape.ops.triton.custom_ops import direct, operator, traceable
from gape.ops.triton.tiles import LOG2E, Layout, layout_of, strides_of

#: Steps of merging up to which the last program to finish takes them; above, a second kernel shares them out.
MERGE_STEPS = 8

#: Parts of a row that are merged at once.
PARTS = 32

#: A split shorter than this many tiles costs more in the merging than it wins.
LEAST_TILES = 4


class Tile(NamedTuple):
    """How one program works.

    Attributes:
        keys: that it reads at once.
        warps, stages: launch options.
        programs: per multiprocessor, as many as are resident at once, so that there is one wave and none is left over.
        rows: that it has at most, as many as stay in registers.
    """

    keys: int
    warps: int
    stages: int
    programs: int
    rows: int = 32


#: Half precision with heads of up to 64, of up to 128, wider, and float32.
TILES = {
    "narrow": Tile(128, 4, 3, 2),
    "wide": Tile(64, 4, 3, 2),
    "widest": Tile(32, 4, 2, 2),
    "float32": Tile(16, 4, 2, 3, rows=16),
}


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


def run(problem: Problem, *, splits: int | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of a few queries over many keys, without gradients.

    Args:
        problem: q, k, v in bfloat16, float16 or float32, every layout; any number of queries, meant for few.
        splits: parts that the keys are cut into; by default enough to fill the device.

    Returns:
        (B, Hq, Nq, Dv) in q's dtype and float32 (B, Hq, Nq), natural logarithms; zero and −inf for an empty row.
    """
    tensors = (problem.q, problem.k, problem.v, problem.gate, problem.landmark, problem.amplitude)
    layout, numbers = layout_of(problem), (problem.scale, problem.context_length, splits)
    if torch.compiler.is_compiling() or isinstance(problem.q, FakeTensor):
        traced: tuple[Tensor, Tensor] = torch.ops.gape.decode(*tensors, *layout, *numbers)
        return traced
    # A captured graph may run beside others: it cannot count on tickets that outlive a call.
    capturing = problem.q.is_cuda and torch.cuda.is_current_stream_capturing()
    return _launch(direct, tensors, layout, *numbers, tickets=not capturing)


@operator("gape::decode")
def decode(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, landmark: Tensor, amplitude: Tensor,
    q_positions: Tensor | None, k_positions: Tensor | None, q_documents: Tensor | None, k_documents: Tensor | None,
    mask: Tensor | None, causal: bool, scale: float, context_length: float, splits: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`run` as compilers see it."""
    layout = Layout(q_positions, k_positions, q_documents, k_documents, mask, causal)
    return _launch(traceable, (q, k, v, gate, landmark, amplitude), layout, scale, context_length, splits)


def _launch(
    form: Callable[[Any], Any], tensors: tuple[Tensor, ...], layout: Layout, scale: float, context_length: float,
    splits: int | None, *, tickets: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and log-sum-exps by kernels in a `form` to launch; a second one merges the parts without tickets."""
    q, v = tensors[0], tensors[2]
    (batch, n_heads, n_q, d), (_, n_key_heads, n_k, d_v) = q.shape, v.shape
    out = torch.empty(batch, n_heads, n_q, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, n_heads, n_q, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or n_k == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    tile, rows = _tile_for(q, v, layout), n_heads // n_key_heads * n_q
    block_m = min(tile.rows, max(16, power_of_two(rows)))
    row_tiles, tiles = -(-rows // block_m), -(-n_k // tile.keys)
    if splits is None:
        # As many as fill the device without becoming too short. Rounded down: a last wave of a few programs would
        # double the time of short ones.
        wanted = tile.programs * multiprocessors(q.device) // (batch * n_key_heads * row_tiles)
        splits = max(1, min(wanted, tiles // LEAST_TILES))
    span = -(-tiles // splits) * tile.keys
    merge = tickets and min(rows, block_m) * -(-splits // PARTS) <= MERGE_STEPS
    splits = -(-n_k // span)
    parts = torch.empty(batch * n_heads * n_q, splits, d_v, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(batch * n_heads * n_q, splits, dtype=torch.float32, device=q.device)
    # A pointer that is never followed stands in for what is not there.
    ticket = stream_tickets(batch * n_key_heads * row_tiles, q.device) if merge else lse
    width, value_width = (max(16, power_of_two(x)) for x in (d, d_v))
    form(_decode_kernel)[(splits, batch * n_key_heads, row_tiles)](
        # Logits are in base 2.
        parts, part_lse, ticket, out, lse, span, n_key_heads, n_k, d, d_v,
        scale * LOG2E, LOG2E / context_length, 1 / LOG2E, *tensors, *(q if x is None else x for x in layout[:5]),
        *(stride for x in tensors for stride in x.stride()), *strides_of(*layout[:4]),
        *strides_of(layout.mask, axes=4), n_heads // n_key_heads, n_q,
        **layout.flags, PARTIAL_D=d != width, PARTIAL_V=d_v != value_width, MERGE=merge, PARTS=PARTS,
        BLOCK_M=block_m, BLOCK_N=tile.keys, BLOCK_D=width, BLOCK_V=value_width,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if not merge:
        form(_combine_kernel)[(batch * n_heads * n_q,)](
            parts, part_lse, out, lse, splits, d_v, 1 / LOG2E, PARTS=PARTS, BLOCK_V=value_width, num_warps=4
        )
    return out, lse


def _tile_for(q: Tensor, v: Tensor, layout: Layout) -> Tile:
    tile = TILES["float32" if q.dtype == torch.float32 else width_kind(q.size(3), v.size(3))]
    # Where pairs lie in a mask, each takes registers of its own.
    return tile if layout.mask is None else tile._replace(keys=max(16, tile.keys // 2))


_tickets: dict[tuple[torch.device, int], Tensor] = {}


def stream_tickets(count: int, device: torch.device) -> Tensor:
    """At least `count` zeros, int32, which kernels leave as zeros; each stream has its own.

    Calls on one stream come one after another. A kernel that breaks off takes the whole context with it, so none is
    left with a ticket that was not given back.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    tickets = _tickets.get((device, stream))
    if tickets is None or tickets.numel() < count:
        tickets = torch.zeros(max(1024, power_of_two(count)), dtype=torch.int32, device=device)
        _tickets[device, stream] = tickets
    return tickets
