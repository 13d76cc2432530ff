"""Kernels of the paged KV cache: attention over pages, and keys written to pages and read back.

:mod:`gape.ops.paged` has the contract. A program of the attention has some pages of one sequence and a tile of its
queries: those of all query heads that share the key head are stacked. Distances are integers before they are floats,
counted from the earliest query of the tile, so that what is rounded is small beside the distance. The bias is float32.

Sizes of launches depend on shapes alone, so that every launch can be captured in a CUDA graph. How many keys there are
is read on the device: programs share the pages that a sequence has, and those without a share return at once.

Parts of a sequence are merged by the last of its programs to finish, or by a second kernel where there are many. The
first program starts from `prior`, so that it is merged like any other part.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops import paged
from gape.ops.limits import DECODE_QUERIES
from gape.ops.paged import PageLayout, Pages
from gape.ops.triton.configs import Tile, fitting_tile, multiprocessors, power_of_two, shared_memory, width_kind
from gape.ops.triton.custom_ops import Launch, direct
from gape.ops.triton.decode import (
    MERGE_STEPS,
    last_to_finish,
    load_tile,
    merge_row,
    store_part,
    stream_tickets,
    weigh,
)
from gape.ops.triton.tiles import LOG2E, SLACK, same_in_all, single

#: Keys of a page.
PAGE = tl.constexpr(paged.PAGE)

#: What turns natural logarithms into those in base 2, and what a norm in float32 may have been rounded down by.
UNIT = tl.constexpr(LOG2E)
STRETCH = tl.constexpr(SLACK)

#: Fewest pages that a program has while others have some.
LEAST = tl.constexpr(4)

#: Pages that are judged at once where some may be skipped.
JUDGED = tl.constexpr(32)

#: Programs for each multiprocessor, and pages that a program of few queries has at most: sequences differ in length.
PROGRAMS, MOST_PAGES = 4, 32

#: Numbers of the parts that are merged at once.
MERGED = 4096

#: Keys of a program that writes or reads them.
TOKENS = 32


#: Half precision with heads of up to 64, of up to 128, wider, and float32. Keys are at most those of a page.
TILES = {
    "narrow": Tile(64, 64, 4, 3),
    "wide": Tile(128, 64, 8, 3),
    "widest": Tile(64, 32, 8, 3),
    "float32": Tile(16, 16, 4, 2),
}

#: Rows up to which four warps are enough.
FEW_ROWS = 32

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def address_tile(address, first, ROWS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers (ROWS, WIDTH) to rows from `first` on of a matrix (PAGE, ROW) that begins at an address."""
    rows, dims = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    ptrs = address.to(tl.pointer_type(DTYPE)) + (rows[:, None] * ROW + dims[None, :])
    # Nothing is known of an address: parts of a page and their rows begin with 16 bytes.
    return tl.multiple_of(ptrs, (1, 16))


@triton.jit
def attend_to_page(
    q, c, i, anchor, address, first, left, scale, top, total, acc,
    CHECK: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and sum of values with BLOCK_N keys more, from key `first` of a page on.

    CHECK: only the first `left` keys of the page are there.
    """
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VALUES_AT: tl.constexpr = PAGE * KEY_WIDTH * SIZE
    EXPOSURES_AT: tl.constexpr = VALUES_AT + PAGE * VALUE_WIDTH * SIZE
    near = first + tl.arange(0, BLOCK_N)
    valid = near < left
    k = load_tile(
        address_tile(address, first, BLOCK_N, KEY_WIDTH, BLOCK_D, DTYPE),
        valid, tl.arange(0, BLOCK_D) < KEY_WIDTH, CHECK, KEY_WIDTH != BLOCK_D,
    )  # fmt: skip
    v = load_tile(
        address_tile(address + VALUES_AT, first, BLOCK_N, VALUE_WIDTH, BLOCK_V, DTYPE),
        valid, tl.arange(0, BLOCK_V) < VALUE_WIDTH, CHECK, VALUE_WIDTH != BLOCK_V,
    )  # fmt: skip
    u_ptr = (address + EXPOSURES_AT).to(tl.pointer_type(tl.float32)) + near
    j_ptr = (address + EXPOSURES_AT + PAGE * 4).to(tl.pointer_type(tl.int32)) + near
    if CHECK:
        u, position = tl.load(u_ptr, mask=valid, other=0.0), tl.load(j_ptr, mask=valid, other=0)
    else:
        u, position = tl.load(u_ptr), tl.load(j_ptr)
    j = (position - anchor).to(tl.float32)
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    # u·(i − j): neither term is of the other sign, so that nothing cancels.
    s = products * scale - c[:, None] * (i[:, None] * u[None, :] - (u * j)[None, :])
    if CHECK:
        s = tl.where(valid[None, :], s, float("-inf"))
    return weigh(s, v, top, total, acc, True)


@triton.jit
def pages_to_visit(
    visit_ptr, addresses_ptr, count, reach, c, anchor, limit, live, EXPOSURES_AT: tl.constexpr
):  # fmt: skip
    """Write the addresses of those among `count` whole pages that may matter to a query; returns how many.

    A page may be skipped where reach_i − c_i·min_j u_j·(i₀ − j) ≤ limit for each query i of the tile, i₀ the earliest.
    """
    near, visited = tl.arange(0, PAGE), 0
    for start in range(0, count, JUDGED):
        pages = start + tl.arange(0, JUDGED)
        inside = pages < count
        address = tl.load(addresses_ptr + pages, mask=inside, other=0)
        u_ptr = (address + EXPOSURES_AT).to(tl.pointer_type(tl.float32))[:, None] + near[None, :]
        j_ptr = (address + EXPOSURES_AT + PAGE * 4).to(tl.pointer_type(tl.int32))[:, None] + near[None, :]
        u = tl.load(tl.multiple_of(u_ptr, (1, 16)), mask=inside[:, None], other=0.0)
        j = tl.load(tl.multiple_of(j_ptr, (1, 16)), mask=inside[:, None], other=0)
        loss = u * (anchor - j).to(tl.float32)
        # A minimum would lose what is not a number, and a key that holds it must keep its page.
        least = tl.min(tl.where(u >= 0.0, loss, float("-inf")), 1)
        bound = reach[:, None] - c[:, None] * least[None, :]
        # What is not a number shows nothing: such a page is visited.
        wanted = tl.max(tl.where((bound <= limit) | ~live[:, None], 0, 1), 0)
        keep = tl.where(inside, wanted, 0)
        tl.store(visit_ptr + visited + tl.cumsum(keep, 0) - keep, address, mask=keep > 0)
        visited += tl.sum(keep, 0)
    # Threads read what others wrote.
    tl.debug_barrier()
    return same_in_all(visited)


@triton.jit
def share_of(length, splits):
    """Pages that each program of a sequence has, and programs that have some, at least one."""
    pages = tl.cdiv(length, PAGE)
    each = tl.maximum(tl.cdiv(pages, splits), LEAST)
    return each, tl.maximum(tl.cdiv(pages, each), 1)


@triton.jit
def length_of(lengths_ptr, sequence, new, room):
    """Keys of a sequence, no more than its pages have room for."""
    return same_in_all(tl.minimum(tl.load(lengths_ptr + sequence) + new, room * PAGE))


# Neither sizes that grow with the cache or the prompt, nor where a layer's numbers begin, may compile a kernel anew.
@triton.jit(
    do_not_specialize=("n_q", "room", "splits", "row_tiles", "new"),
    do_not_specialize_on_alignment=("rate_ptr", "positions_ptr", "addresses_ptr", "lengths_ptr", "norm_ptr"),
)
def _paged_attention_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, ticket_ptr, visit_ptr,
    q_ptr, rate_ptr, positions_ptr, addresses_ptr, lengths_ptr, norm_ptr, prior_ptr, prior_lse_ptr,
    q_b, q_h, q_n, rate_b, rate_h, rate_n, positions_b, positions_n, prior_b, prior_h, prior_n, prior_d,
    prior_lse_b, prior_lse_h, prior_lse_n,
    n_key_heads, groups, n_q, room, splits, row_tiles, new, d, d_prior, scale, log_eps,
    SPLIT: tl.constexpr, MERGE: tl.constexpr, HAS_PRIOR: tl.constexpr, SKIP: tl.constexpr, PARTS: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Outputs (B, Hq, n, VALUE_WIDTH) and natural log-sum-exps (B, Hq, n), contiguous.

    Under SPLIT by way of parts (B·Hq·n, splits, VALUE_WIDTH) and their base-2 log-sum-exps, float32, and under MERGE
    merged here, by tickets (B, Hk, row tiles) in int32 that are zero before and after. visit: int64 (B, Hk, row tiles,
    room), room for addresses of pages, under SKIP.
    """
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    scale = single(scale) * UNIT
    split, tile = tl.program_id(0) % splits, (tl.program_id(0) // splits) % row_tiles
    sequence = (tl.program_id(0) // (splits * row_tiles)).to(tl.int64)
    length = length_of(lengths_ptr, sequence, new, room)
    each, used = share_of(length, splits)
    if split >= used:
        return
    batch, key_head = sequence // n_key_heads, sequence % n_key_heads
    # Row r is query r mod n of the group's head r div n.
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < groups * n_q
    m, head = rows % n_q, key_head * groups + rows // n_q
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q_ptr += batch * q_b
    q = tl.load(
        q_ptr + (head * q_h + m.to(tl.int64) * q_n)[:, None] + dims[None, :],
        mask=live[:, None] & (dims < d)[None, :],
        other=0.0,
    )
    c = tl.load(rate_ptr + batch * rate_b + head * rate_h + m * rate_n, mask=live, other=0.0).to(tl.float32) * UNIT
    position = tl.load(positions_ptr + batch * positions_b + m * positions_n, mask=live, other=2147483647)
    position = position.to(tl.int32)
    anchor = same_in_all(tl.min(position, 0))
    i = tl.where(live, position - anchor, 0).to(tl.float32)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    reach = top
    if HAS_PRIOR:
        at = batch * prior_lse_b + head * prior_lse_h + m.to(tl.int64) * prior_lse_n
        known = tl.load(prior_lse_ptr + at, mask=live, other=float("-inf")).to(tl.float32) * UNIT
        if split == 0:
            at = batch * prior_b + head * prior_h + m.to(tl.int64) * prior_n
            filled = (live & (known != float("-inf")))[:, None] & (value_dims < d_prior)[None, :]
            ptrs = prior_ptr + at[:, None] + (value_dims * prior_d)[None, :]
            acc = tl.load(ptrs, mask=filled, other=0.0).to(tl.float32)
            top, total = known, tl.where(known == float("-inf"), 0.0, 1.0)
        if SKIP:
            size = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1))
            reach = scale * size * tl.load(norm_ptr + sequence) * STRETCH - known

    begin = split * each
    end = tl.minimum(begin + each, tl.cdiv(length, PAGE))
    whole = tl.minimum(end, length // PAGE)
    addresses_ptr += sequence * room + begin
    steps, visited_ptr = tl.maximum(whole - begin, 0) * STEPS, addresses_ptr
    if SKIP:
        visited_ptr = visit_ptr + (sequence * row_tiles + tile) * room + begin
        limit = single(log_eps) - tl.log2(tl.maximum(length, 1).to(tl.float32))
        EXPOSURES_AT: tl.constexpr = PAGE * (KEY_WIDTH + VALUE_WIDTH) * (DTYPE.primitive_bitwidth // 8)
        steps = STEPS * pages_to_visit(
            visited_ptr, addresses_ptr, tl.maximum(whole - begin, 0), reach, c, anchor, limit, live, EXPOSURES_AT
        )
    # Each address is asked for a turn ahead: loads that wait for another are not pipelined.
    address = tl.load(visited_ptr, mask=steps > 0, other=0)
    for step in range(0, steps):
        following = tl.load(visited_ptr + (step + 1) // STEPS, mask=step + 1 < steps, other=0)
        top, total, acc = attend_to_page(
            q, c, i, anchor, address, (step % STEPS) * BLOCK_N, PAGE, scale, top, total, acc,
            False, KEY_WIDTH, VALUE_WIDTH, DTYPE, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
        address = following
    # The last page of the sequence, which has room left. Where it is one turn, buffers for more would be wasted.
    LAST_STAGES: tl.constexpr = 1 if STEPS == 1 else 2
    left = length - whole * PAGE
    for first in tl.range(0, tl.where(whole < end, left, 0), BLOCK_N, num_stages=LAST_STAGES):
        address = tl.load(addresses_ptr + (whole - begin))
        top, total, acc = attend_to_page(
            q, c, i, anchor, address, first, left, scale, top, total, acc,
            True, KEY_WIDTH, VALUE_WIDTH, DTYPE, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip

    first_row = sequence * groups * n_q
    if SPLIT:
        places = (first_row + rows) * splits + split
        store_part(part_ptr, part_lse_ptr, places, top, total, acc, live, value_dims, VALUE_WIDTH)
        # Two questions: with one, the second would be compiled where the first says no.
        if MERGE:  # noqa: SIM102
            if last_to_finish(ticket_ptr + sequence * row_tiles + tile, used):
                for r in range(tile * BLOCK_M, tl.minimum(tile * BLOCK_M + BLOCK_M, groups * n_q)):
                    merge_row(
                        part_ptr, part_lse_ptr, out_ptr, lse_ptr, first_row + r, (first_row + r) * splits, used,
                        VALUE_WIDTH, 1.0 / UNIT, PARTS, BLOCK_V,
                    )  # fmt: skip
    else:
        empty = total == 0.0
        safe = tl.where(empty, 1.0, total)
        natural = tl.where(empty, float("-inf"), (top + tl.log2(safe)) / UNIT)
        tl.store(lse_ptr + first_row + rows, natural, mask=live)
        ptrs = out_ptr + (first_row + rows)[:, None] * VALUE_WIDTH + value_dims[None, :]
        out = (acc / safe[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(ptrs, out, mask=live[:, None] & (value_dims < VALUE_WIDTH)[None, :])


@triton.jit(do_not_specialize=("rows", "room", "splits", "new"), do_not_specialize_on_alignment=("lengths_ptr",))
def _merge_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, lengths_ptr, rows, room, splits, new,
    PARTS: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Outputs and natural log-sum-exps from parts, a program for each row; `rows` of a sequence."""
    row = tl.program_id(0).to(tl.int64)
    _, used = share_of(length_of(lengths_ptr, row // rows, new, room), splits)
    merge_row(
        part_ptr, part_lse_ptr, out_ptr, lse_ptr, row, row * splits, used, VALUE_WIDTH, 1.0 / UNIT, PARTS, BLOCK_V
    )  # fmt: skip


@triton.jit
def slot_addresses(addresses_ptr, sequence, slot, inside, room):
    """The page of each slot, and whether there is one; `inside`: which slots count."""
    inside = inside & (slot >= 0) & (slot < room * PAGE)
    address = tl.load(addresses_ptr + sequence * room + slot // PAGE, mask=inside, other=0)
    return address, inside & (address != 0)


@triton.jit
def slot_tile(address, place, ROW: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers (T, WIDTH) to rows `place` of matrices (PAGE, ROW) that begin at addresses (T,)."""
    rows = address.to(tl.pointer_type(DTYPE)) + place * ROW
    return tl.multiple_of(rows[:, None] + tl.arange(0, WIDTH)[None, :], (1, 16))


@triton.jit(
    do_not_specialize=("n", "room", "tiles"),
    do_not_specialize_on_alignment=("exposure_ptr", "positions_ptr", "addresses_ptr", "lengths_ptr", "norm_ptr"),
)
def _write_kv_kernel(
    k_ptr, v_ptr, exposure_ptr, positions_ptr, slots_ptr, addresses_ptr, lengths_ptr, norm_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n, exposure_b, exposure_h, exposure_n, positions_b, positions_h, positions_n,
    slots_b, slots_h, slots_n, n_key_heads, n, room, tiles, d, d_v,
    HAS_SLOTS: tl.constexpr, DTYPE: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Keys (B, Hk, n, d) and values (B, Hk, n, d_v) to their pages, a program for T of a sequence."""
    VALUES_AT: tl.constexpr = PAGE * KEY_WIDTH * (DTYPE.primitive_bitwidth // 8)
    EXPOSURES_AT: tl.constexpr = VALUES_AT + PAGE * VALUE_WIDTH * (DTYPE.primitive_bitwidth // 8)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = sequence // n_key_heads, sequence % n_key_heads
    tokens = (tl.program_id(0) % tiles).to(tl.int64) * T + tl.arange(0, T)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + batch * slots_b + head * slots_h + tokens * slots_n, mask=tokens < n, other=-1)
    else:
        slot = tl.load(lengths_ptr + sequence) + tokens.to(tl.int32)
    address, valid = slot_addresses(addresses_ptr, sequence, slot, tokens < n, room)
    place = slot % PAGE
    dims, value_dims = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_V)[None, :]
    k_ptr += batch * k_b + head * k_h
    k = tl.load(k_ptr + tokens[:, None] * k_n + dims, mask=valid[:, None] & (dims < d), other=0.0).to(DTYPE)
    tl.store(slot_tile(address, place, KEY_WIDTH, BLOCK_D, DTYPE), k, mask=valid[:, None] & (dims < KEY_WIDTH))
    v_ptr += batch * v_b + head * v_h
    v = tl.load(v_ptr + tokens[:, None] * v_n + value_dims, mask=valid[:, None] & (value_dims < d_v), other=0.0)
    v_out = slot_tile(address + VALUES_AT, place, VALUE_WIDTH, BLOCK_V, DTYPE)
    tl.store(v_out, v.to(DTYPE), mask=valid[:, None] & (value_dims < VALUE_WIDTH))
    at = batch * exposure_b + head * exposure_h + tokens * exposure_n
    u = tl.load(exposure_ptr + at, mask=valid, other=0.0)
    tl.store((address + EXPOSURES_AT).to(tl.pointer_type(tl.float32)) + place, u.to(tl.float32), mask=valid)
    at = batch * positions_b + head * positions_h + tokens * positions_n
    j = tl.load(positions_ptr + at, mask=valid, other=0)
    tl.store((address + EXPOSURES_AT + PAGE * 4).to(tl.pointer_type(tl.int32)) + place, j.to(tl.int32), mask=valid)
    tl.atomic_max(norm_ptr + sequence, tl.max(tl.where(valid, norm_of(k), 0.0), 0))


@triton.jit
def norm_of(x):
    """Norms (T,) of rows, infinite where one is not a number: a maximum would lose that."""
    x = x.to(tl.float32)
    norm = tl.sqrt(tl.sum(x * x, 1))
    return tl.where(norm >= 0.0, norm, float("inf"))


@triton.jit(do_not_specialize=("m", "room", "tiles"), do_not_specialize_on_alignment=("addresses_ptr",))
def _read_kv_kernel(
    k_ptr, v_ptr, exposure_ptr, positions_ptr, slots_ptr, addresses_ptr, slots_b, slots_h, slots_n,
    n_key_heads, m, room, tiles,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Keys, values, exposures and positions (B, Hk, m, …), contiguous, zeros where a slot has none."""
    DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    VALUES_AT: tl.constexpr = PAGE * KEY_WIDTH * (DTYPE.primitive_bitwidth // 8)
    EXPOSURES_AT: tl.constexpr = VALUES_AT + PAGE * VALUE_WIDTH * (DTYPE.primitive_bitwidth // 8)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = sequence // n_key_heads, sequence % n_key_heads
    tokens = (tl.program_id(0) % tiles).to(tl.int64) * T + tl.arange(0, T)
    live = tokens < m
    slot = tl.load(slots_ptr + batch * slots_b + head * slots_h + tokens * slots_n, mask=live, other=-1)
    address, valid = slot_addresses(addresses_ptr, sequence, slot, live, room)
    place, rows = slot % PAGE, sequence * m + tokens
    dims, value_dims = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_V)[None, :]
    k_in = slot_tile(address, place, KEY_WIDTH, BLOCK_D, DTYPE)
    k = tl.load(k_in, mask=valid[:, None] & (dims < KEY_WIDTH), other=0.0)
    tl.store(k_ptr + rows[:, None] * KEY_WIDTH + dims, k, mask=live[:, None] & (dims < KEY_WIDTH))
    v_in = slot_tile(address + VALUES_AT, place, VALUE_WIDTH, BLOCK_V, DTYPE)
    v = tl.load(v_in, mask=valid[:, None] & (value_dims < VALUE_WIDTH), other=0.0)
    tl.store(v_ptr + rows[:, None] * VALUE_WIDTH + value_dims, v, mask=live[:, None] & (value_dims < VALUE_WIDTH))
    u_ptr = (address + EXPOSURES_AT).to(tl.pointer_type(tl.float32)) + place
    tl.store(exposure_ptr + rows, tl.load(u_ptr, mask=valid, other=0.0), mask=live)
    j_ptr = (address + EXPOSURES_AT + PAGE * 4).to(tl.pointer_type(tl.int32)) + place
    tl.store(positions_ptr + rows, tl.load(j_ptr, mask=valid, other=0), mask=live)


def paged_attention(
    q: Tensor, rate: Tensor, positions: Tensor, pages: Pages, *, scale: float, new: int = 0,
    prior: tuple[Tensor, Tensor] | None = None, eps: float = 0.0, tickets: Tensor | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`gape.ops.paged.paged_attention` by kernels; `splits` programs at most for a sequence and tile of rows."""
    batch, heads, n, d = q.shape
    _, key_heads, room = pages.addresses.shape
    out = torch.empty(batch, heads, n, pages.layout.value_width, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
    if not lse.numel():
        return out, lse
    rows = heads // key_heads * n
    flags, row_tiles = _sizes(pages, rows)
    count, per_step = batch * key_heads * row_tiles, MERGED // flags["BLOCK_V"]
    splits = _splits(count, room, n, per_step, q.device) if splits is None else splits
    # No room where there is one part.
    in_parts = lse.numel() if splits > 1 else 0
    parts = torch.empty(in_parts, splits, out.size(-1), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(in_parts, splits, dtype=torch.float32, device=q.device)
    few = splits > 1 and min(rows, flags["BLOCK_M"]) * -(-splits // per_step) <= MERGE_STEPS
    tickets = _tickets(count, q.device, tickets) if few else None
    visit = torch.empty(count, room, dtype=torch.int64, device=q.device) if eps else lse
    # What is never read stands in for what is not there.
    known, known_lse = (lse.unsqueeze(-1), lse) if prior is None else prior
    q, positions = q if q.stride(-1) == 1 else q.contiguous(), integers(positions)
    direct(_paged_attention_kernel)[(splits * count,)](
        out, lse, parts, part_lse, lse if tickets is None else tickets, visit,
        q, rate, positions, pages.addresses, pages.lengths, pages.key_norm, known, known_lse,
        *q.stride()[:3], *rate.stride(), 0 if positions.dim() == 1 else positions.stride(0), positions.stride(-1),
        *known.stride(), *known_lse.stride(),
        key_heads, heads // key_heads, n, room, splits, row_tiles, new, d, known.size(-1),
        float(scale), math.log2(eps) if eps else 0.0,
        SPLIT=splits > 1, MERGE=tickets is not None, HAS_PRIOR=prior is not None, SKIP=eps > 0, PARTS=per_step, **flags,
    )  # fmt: skip
    if splits > 1 and tickets is None:
        direct(_merge_kernel)[(lse.numel(),)](
            out, lse, parts, part_lse, pages.lengths, rows, room, splits, new,
            PARTS=per_step, VALUE_WIDTH=out.size(-1), BLOCK_V=flags["BLOCK_V"], num_warps=4,
        )  # fmt: skip
    return out, lse


def write_keys(
    pages: Pages, k: Tensor, v: Tensor, exposure: Tensor, positions: Tensor, slots: Tensor | None = None
) -> None:
    """:func:`gape.ops.paged.write_keys` in one launch."""
    if not k.shape[:3].numel():
        return
    room = pages.addresses.size(-1)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    positions = integers(positions)
    # What is never read stands in for slots that are not there.
    tensors = (k, v, exposure, positions, positions if slots is None else slots)
    forms = tuple((x.shape, x.stride(), x.dtype) for x in tensors)
    _write_launch(pages.layout, room, k.device, forms, slots is not None)(
        *tensors, pages.addresses, pages.lengths, pages.key_norm
    )


@functools.lru_cache(maxsize=256)
def _write_launch(
    layout: PageLayout, room: int, device: torch.device,
    forms: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...], has_slots: bool,
) -> Launch:  # fmt: skip
    """The launch of :func:`write_keys` for tensors of these shapes, strides and dtypes; `device` tells them apart."""
    (shape, k_strides, _), (v_shape, v_strides, _), (_, exposure, _), (of_positions, strides, _), (_, slots, _) = forms
    batch, heads, n, width = shape
    # Positions (n,), (B, n) or (B, Hk, n): what is not there does not differ.
    positions = (*(0, 0, *strides)[-3:-1], strides[-1]) if len(of_positions) != 2 else (strides[0], 0, strides[1])
    tokens = min(TOKENS, power_of_two(n))
    tiles = -(-n // tokens)
    numbers = (
        *k_strides[:3], *v_strides[:3], *exposure, *positions, *(slots if has_slots else (0, 0, 0)),
        heads, n, room, tiles, width, v_shape[-1],
    )  # fmt: skip
    flags = {"HAS_SLOTS": has_slots, "DTYPE": DTYPES[layout.dtype], "T": tokens, "num_warps": 4, **tile_widths(layout)}
    return Launch(_write_kv_kernel, (batch * heads * tiles,), numbers, flags)


def read_keys(pages: Pages, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`gape.ops.paged.read_keys` in one launch."""
    layout, (batch, heads, m), room = pages.layout, slots.shape, pages.addresses.size(-1)
    k = torch.empty(*slots.shape, layout.key_width, dtype=layout.dtype, device=slots.device)
    v = torch.empty(*slots.shape, layout.value_width, dtype=layout.dtype, device=slots.device)
    exposure = torch.empty(slots.shape, dtype=torch.float32, device=slots.device)
    positions = torch.empty(slots.shape, dtype=torch.int32, device=slots.device)
    tokens = min(TOKENS, power_of_two(max(1, m)))
    tiles = -(-m // tokens)
    if slots.numel():
        direct(_read_kv_kernel)[(batch * heads * tiles,)](
            k, v, exposure, positions, slots, pages.addresses, *slots.stride(),
            heads, m, room, tiles, T=tokens, **tile_widths(pages.layout), num_warps=4,
        )  # fmt: skip
    return k, v, exposure, positions


def integers(positions: Tensor) -> Tensor:
    """Positions in a dtype that the kernels read."""
    return positions if positions.dtype in (torch.int32, torch.int64) else positions.int()


@functools.cache
def tile_widths(layout: PageLayout) -> dict[str, int]:
    """Widths of keys and values, and those of their tiles: powers of two of at least 16, which matrix units want."""
    return {
        "KEY_WIDTH": layout.key_width, "VALUE_WIDTH": layout.value_width,
        "BLOCK_D": max(16, power_of_two(layout.key_width)), "BLOCK_V": max(16, power_of_two(layout.value_width)),
    }  # fmt: skip


def _sizes(pages: Pages, rows: int) -> tuple[dict[str, Any], int]:
    """Sizes and launch options of the attention for so many rows of a sequence, and the tiles of them."""
    widths = tile_widths(pages.layout)
    kind = "float32" if pages.layout.dtype == torch.float32 else width_kind(widths["BLOCK_D"], widths["BLOCK_V"])
    tile, limit = TILES[kind], shared_memory()
    if limit is not None:
        read = widths["BLOCK_D"], widths["BLOCK_V"]
        tile = fitting_tile(tile, "fwd", read, pages.layout.dtype.itemsize, limit)
    block_m = min(tile.rows, max(16, power_of_two(rows)))
    warps = min(4, tile.warps) if block_m <= FEW_ROWS else tile.warps
    options = {"BLOCK_M": block_m, "BLOCK_N": tile.columns, "STEPS": paged.PAGE // tile.columns}
    options |= {"num_warps": warps, "num_stages": tile.stages}
    return widths | options, -(-rows // block_m)


def _splits(programs: int, room: int, n: int, per_step: int, device: torch.device) -> int:
    """Programs that share the pages of a sequence: enough to fill the device, and none with very few pages."""
    wanted = PROGRAMS * multiprocessors(device) // programs
    if n <= DECODE_QUERIES:
        wanted = max(wanted, -(-room // MOST_PAGES))
    splits = max(1, min(wanted, -(-room // LEAST.value)))
    # No step of the merging is for a few parts only.
    return splits - splits % per_step if splits > per_step else splits


def _tickets(count: int, device: torch.device, own: Tensor | None) -> Tensor | None:
    """Those of the caller where there are enough, else those of the stream, which a captured graph cannot count on."""
    if own is not None and own.numel() >= count:
        return own
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return None if capturing else stream_tickets(count, device)
