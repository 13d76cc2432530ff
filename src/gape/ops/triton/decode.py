"""A few queries against a long cache, at the speed of memory: keys are split over programs, the parts then combined.

One program reads a run of the keys of one key head once, for all query heads that share it: their rows are stacked
into one tile, which also gives the matrix units the 16 rows they want. Each program leaves a normalised partial output
and the base-2 log-sum-exp of its logits; the second kernel weighs the parts by those.

Distances are integers before they are floats, the bias −c·u·(i − j) is float32, and the landmark is read as it is
cached: nothing is computed over the whole cache beforehand. Everything is in base 2: `scale` and `rate_unit` come
multiplied by log₂e.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops import checks
from gape.ops.problem import Problem

LOG2E = math.log2(math.e)

#: Programs per multiprocessor, as many as are resident at once, so that there is one wave and none is left over.
PROGRAMS_PER_SM = 2

#: A split shorter than this many tiles costs more in the combination than it wins.
LEAST_TILES = 4

#: Keys of a tile, warps and stages: half precision with heads of up to 64, of up to 128, wider, and float32.
TILES = {"narrow": (64, 2, 4), "wide": (64, 4, 3), "widest": (32, 4, 2), "float32": (32, 4, 2)}


@triton.jit
def load_tile(where, rows, columns, CHECK_ROWS: tl.constexpr, CHECK_COLUMNS: tl.constexpr):
    """A tile of the cache, zero where `rows` or `columns` say no; a check that is not needed costs nothing."""
    if CHECK_ROWS and CHECK_COLUMNS:
        return tl.load(where, mask=rows[:, None] & columns[None, :], other=0.0)
    if CHECK_ROWS:
        return tl.load(where, mask=rows[:, None], other=0.0)
    if CHECK_COLUMNS:
        return tl.load(where, mask=columns[None, :], other=0.0)
    return tl.load(where)


# The cache grows by a token each step: a kernel must not be compiled anew for every length.
@triton.jit(do_not_specialize=("n_q", "n_k", "span"))
def partial(
    q_ptr, k_ptr, v_ptr, gate_ptr, landmark_ptr, amplitude_ptr, lengths_ptr, qp_ptr, kp_ptr, qd_ptr, kd_ptr, mask_ptr,
    part_ptr, lse_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, gate_b, gate_h, gate_n, mark_b, mark_h, mark_n, amp_h,
    qp_b, qp_n, kp_b, kp_n, qd_b, qd_n, kd_b, kd_n, mask_b, mask_h, mask_m, mask_n,
    n_key_heads, groups, n_q, n_k, d, d_v, span, scale, rate_unit,
    CAUSAL: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_MASK: tl.constexpr, PARTIAL_D: tl.constexpr, PARTIAL_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Partial outputs (B·Hq·Nq, splits, Dv) and base-2 log-sum-exps (B·Hq·Nq, splits), float32, contiguous.

    A split without keys writes −inf as its log-sum-exp and leaves its output unwritten.
    """
    batch = (tl.program_id(1) // n_key_heads).to(tl.int64)
    key_head = (tl.program_id(1) % n_key_heads).to(tl.int64)
    split, splits = tl.program_id(0), tl.num_programs(0)
    # Row r is query r mod Nq of the group's head r div Nq.
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < groups * n_q
    m = rows % n_q
    head = key_head * groups + rows // n_q
    places = ((batch * n_key_heads + key_head) * groups * n_q + rows) * splits + split
    dims, value_dims, near = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_N)

    length = n_k
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(lengths_ptr + batch).to(tl.int32), n_k)
    first = length - n_q
    low, high = split * span, tl.minimum(split * span + span, length)
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
            if CHECK:
                landmark = tl.load(landmark_ptr + offs.to(tl.int64) * mark_n, mask=inside, other=0.0)
            else:
                landmark = tl.load(landmark_ptr + offs.to(tl.int64) * mark_n)
            if HAS_POSITIONS:
                j = tl.load(kp_ptr + batch * kp_b + offs.to(tl.int64) * kp_n, mask=inside, other=0)
                distance = (position[:, None] - j[None, :]).to(tl.float32)
            else:
                distance = i[:, None] - (offs - first).to(tl.float32)[None, :]
            products = tl.dot(q, tl.trans(k), input_precision="ieee")
            s = products * scale - c[:, None] * ((1.0 - landmark)[None, :] * distance)
            if CHECK:
                seen = live[:, None] & inside[None, :]
                if CAUSAL:
                    seen = seen & (distance >= 0)
                if HAS_DOCUMENTS:
                    k_doc = tl.load(kd_ptr + batch * kd_b + offs.to(tl.int64) * kd_n, mask=inside, other=0)
                    seen = seen & (q_doc[:, None] == k_doc[None, :])
                if HAS_MASK:
                    where = (head * mask_h + m * mask_m)[:, None] + (offs.to(tl.int64) * mask_n)[None, :]
                    seen = seen & (tl.load(mask_ptr + where, mask=seen, other=0) != 0)
                s = tl.where(seen, s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            # A row that has seen nothing yet keeps −inf; 0 stands in for it so that no inf − inf arises.
            level = tl.where(higher == float("-inf"), 0.0, higher) if CHECK else higher
            p = tl.exp2(s - level[:, None])
            fade = tl.exp2(top - level)
            total = total * fade + tl.sum(p, 1)
            acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = higher
            k_ptr += BLOCK_N * k_n
            v_ptr += BLOCK_N * v_n

    empty = total == 0.0
    tl.store(lse_ptr + places, tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total))), mask=live)
    out = acc / tl.where(empty, 1.0, total)[:, None]
    where = part_ptr + places[:, None] * d_v + value_dims[None, :]
    tl.store(where, out, mask=(live & ~empty)[:, None] & (value_dims < d_v)[None, :])


@triton.jit(do_not_specialize=("splits",))
def combine(
    part_ptr, lse_ptr, out_ptr, whole_lse_ptr, splits, d_v, unit,
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Outputs (B·Hq·Nq, Dv) and natural log-sum-exps (B·Hq·Nq), contiguous; zeros and −inf where nothing was seen."""
    row = tl.program_id(0).to(tl.int64)
    value_dims, all_splits = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    lse_ptr += row * splits
    part_ptr += row * splits * d_v
    lse = tl.load(lse_ptr + all_splits, mask=all_splits < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    level = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - level), 0)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, splits, BLOCK_T):
        some = start + tl.arange(0, BLOCK_T)
        weight = tl.exp2(tl.load(lse_ptr + some, mask=some < splits, other=float("-inf")) - level)
        # A part of no weight may never have been written.
        there = (weight > 0.0)[:, None] & (value_dims < d_v)[None, :]
        part = tl.load(part_ptr + some[:, None] * d_v + value_dims[None, :], mask=there, other=0.0)
        acc += tl.sum(weight[:, None] * part, 0)
    safe = tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * d_v + value_dims, (acc / safe).to(out_ptr.dtype.element_ty), mask=value_dims < d_v)
    tl.store(whole_lse_ptr + row, tl.where(total == 0.0, float("-inf"), (level + tl.log2(safe)) * unit))


def run(problem: Problem, *, lengths: Tensor | None = None, splits: int | None = None) -> Tensor:
    """The operator without gradients, (B, Hq, Nq, Dv) in q's dtype; see :func:`attend`."""
    return attend(problem, lengths=lengths, splits=splits)[0]


def attend(problem: Problem, *, lengths: Tensor | None = None, splits: int | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of a few queries over a long cache.

    Args:
        problem: q, k, v in bfloat16, float16 or float32, every layout; any number of queries, meant for few.
        lengths: integer (B,): sample b has keys 0 … lengths[b] − 1, and its queries are the last of those; what lies
            beyond is not read, nor what lies beyond Nk. Without explicit positions, documents or mask.
        splits: parts that the keys are cut into; by default enough to fill the device.

    Returns:
        (B, Hq, Nq, Dv) in q's dtype and float32 (B, Hq, Nq), natural logarithms; zero and −inf for an empty row.

    Raises:
        ValueError: float64, something that needs a gradient, lengths that do not fit; names the argument.
    """
    _refuse(problem, lengths)
    q, k, v = problem.q, problem.k, problem.v
    batch, n_heads, n_q, d = q.shape
    n_key_heads, n_k, d_v = k.size(1), k.size(2), v.size(3)
    out = torch.empty(batch, n_heads, n_q, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, n_heads, n_q, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or n_k == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    plan = planned(problem, splits)
    parts = torch.empty(batch * n_heads * n_q, plan.splits, d_v, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(batch * n_heads * n_q, plan.splits, dtype=torch.float32, device=q.device)
    tensors, strides, flags = _arguments(problem, lengths)
    tile = plan.options
    partial[(plan.splits, batch * n_key_heads, plan.row_tiles)](
        *tensors, parts, part_lse, *strides,
        n_key_heads, n_heads // n_key_heads, n_q, n_k, d, d_v, plan.span,
        problem.scale * LOG2E, LOG2E / problem.context_length,
        **flags, PARTIAL_D=d != tile["BLOCK_D"], PARTIAL_V=d_v != tile["BLOCK_V"], **tile,
    )  # fmt: skip
    combine[(batch * n_heads * n_q,)](
        parts, part_lse, out, lse, plan.splits, d_v, 1 / LOG2E,
        BLOCK_S=_power_of_two(plan.splits), BLOCK_T=min(32, _power_of_two(plan.splits)), BLOCK_V=tile["BLOCK_V"],
        num_warps=4,
    )  # fmt: skip
    return out, lse


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the work is cut.

    Attributes:
        splits: programs along the keys, each of
        span: keys, a multiple of a tile's.
        row_tiles: programs along the rows of a group.
        options: tile sizes and launch options of the kernel.
    """

    splits: int
    span: int
    row_tiles: int
    options: dict[str, int]


def planned(problem: Problem, splits: int | None = None) -> Plan:
    """The cut for a problem: `splits` parts, or as many as fill the device without becoming too short."""
    q, k, v = problem.q, problem.k, problem.v
    width, value_width = (max(16, _power_of_two(x.size(-1))) for x in (q, v))
    widest = max(width, value_width)
    kind = "narrow" if widest <= 64 else "wide" if widest <= 128 else "widest"
    keys, warps, stages = TILES["float32" if q.dtype == torch.float32 else kind]
    rows = q.size(1) // k.size(1) * q.size(2)
    block_m = min(64, max(16, _power_of_two(rows)))
    row_tiles = -(-rows // block_m)
    tiles = -(-k.size(2) // keys)
    if splits is None:
        # Rounded down: a last wave of a few programs would double the time of short ones.
        wanted = PROGRAMS_PER_SM * _multiprocessors(q.device) // (q.size(0) * k.size(1) * row_tiles)
        splits = max(1, min(wanted, tiles // LEAST_TILES))
    span = -(-tiles // splits) * keys
    options = {"BLOCK_M": block_m, "BLOCK_N": keys, "BLOCK_D": width, "BLOCK_V": value_width}
    return Plan(
        splits=-(-k.size(2) // span),
        span=span,
        row_tiles=row_tiles,
        options=options | {"num_warps": warps, "num_stages": stages},
    )


def _arguments(problem: Problem, lengths: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, bool]]:
    """Tensors, strides and flags of the kernel, in its order."""
    seen, q = problem.seen, problem.q
    batch = q.size(0)
    mask = None if seen.attn_mask is None else seen.attn_mask.expand(batch, q.size(1), seen.n_q, seen.n_k)
    sides = [
        None if x is None else x.expand(batch, -1)
        for x in (seen.q_positions, seen.k_positions, seen.q_documents, seen.k_documents)
    ]
    tensors = (q, problem.k, problem.v, problem.gate, problem.landmark, problem.amplitude)
    strides = [s for x in tensors for s in x.stride()]
    for side in sides:
        strides += (0, 0) if side is None else side.stride()
    strides += (0, 0, 0, 0) if mask is None else mask.stride()
    flags = {
        "CAUSAL": seen.is_causal,
        "HAS_LENGTHS": lengths is not None,
        "HAS_POSITIONS": seen.q_positions is not None,
        "HAS_DOCUMENTS": seen.q_documents is not None,
        "HAS_MASK": mask is not None,
    }
    # A pointer that is never followed stands in for what is not there.
    optional = tuple(q if x is None else x for x in (lengths, *sides, mask))
    return (*tensors, *optional), tuple(strides), flags


def _refuse(problem: Problem, lengths: Tensor | None) -> None:
    tensors = (problem.q, problem.k, problem.v, problem.gate, problem.landmark, problem.amplitude)
    if problem.q.dtype == torch.float64:
        raise checks.refuse("q", problem.q, "bfloat16, float16 or float32 for the decode kernel")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("q: something needs a gradient, expected none for the decode kernel: use torch.no_grad()")
    if lengths is None:
        return
    seen = problem.seen
    shape = (problem.q.size(0),)
    if lengths.dtype not in checks.INTEGERS or lengths.shape != shape or lengths.device != problem.q.device:
        raise checks.refuse("lengths", lengths, f"integers {shape} on {problem.q.device}")
    if seen.q_positions is not None or seen.q_documents is not None or seen.attn_mask is not None:
        raise ValueError("lengths: given together with positions, documents or a mask, expected one or the other")


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _multiprocessors(device: Any) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
