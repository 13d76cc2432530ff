"""Single queries that share key heads whose caches lie apart: attended to in one launch, however many lie where.

As :mod:`decode_apart` finds its keys by a table on the device, so does this; as :func:`decode_kernels.partial` stacks
the queries of a key head into one tile, so does this too. Keys and values may differ in width. The newest key has been
written before: :mod:`deposit` has how.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.limits import HALVES, MOST_PROGRAMS, TRITON_WIDTH
from gape.ops.triton.custom_ops import INTERPRETED, direct
from gape.ops.triton.decode_apart import pieces_between
from gape.ops.triton.decode_kernels import last_to_finish, load_tile, merge_row, store_part, weigh
from gape.ops.triton.decode_lone import PIECE, share_of
from gape.ops.triton.decode_plan import (
    LEAST_TILES,
    LONE_PARTS,
    dealt,
    in_pieces,
    multiprocessors,
    power_of_two,
    tile_for,
)
from gape.ops.triton.tiles import LOG2E, single
from gape.utils.validation import invalid_argument

#: Queries of a key head at most: the rows that matrix units want at least.
ROWS = 16

#: Steps in which the last program of a head merges the parts of one row, at most.
MERGING = 2

#: Numbers that the table has of a program: where its head's keys and values begin, from sample to sample, room, the
#: head, its share and their number.
COLUMNS = tl.constexpr(8)

#: Elements that offsets are counted in.
PIECE_ELEMENTS = tl.constexpr(PIECE)


# Layers have their counters side by side: those of some begin with 16 bytes, those of others do not.
@triton.jit(do_not_specialize=("q_b", "q_h"), do_not_specialize_on_alignment=("q_ptr", "columns_ptr"))
def partial_grouped(
    part_ptr, lse_ptr, ticket_ptr, out_ptr, whole_lse_ptr, n_heads, scale, unit,
    q_ptr, kept_k_ptr, kept_v_ptr, columns_ptr, programs_ptr, q_b, q_h,
    GROUPS: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Outputs (B·Hk·GROUPS, V_WIDTH) by way of parts (B, programs · GROUPS, V_WIDTH) and their base-2 log-sum-exps,
    float32; those of a row lie side by side.

    q: (B, Hk · GROUPS, K_WIDTH), rows of neighbours. kept_k, kept_v: the buffers that offsets are counted from.
    columns: int64 (Hk,), a head's newest key. programs: int64 (programs, COLUMNS).
    """
    scale, unit = single(scale), single(unit)
    batch, place = tl.program_id(1).to(tl.int64), tl.program_id(0)
    table = programs_ptr + place * COLUMNS
    k_at = tl.load(table) + batch * tl.load(table + 2)
    v_at = tl.load(table + 1) + batch * tl.load(table + 3)
    room, head = tl.load(table + 4), tl.load(table + 5)
    split, splits = tl.load(table + 6).to(tl.int32), tl.load(table + 7).to(tl.int32)
    length = tl.minimum(tl.load(columns_ptr + head) + 1, room).to(tl.int32)
    low, high = share_of(length, split, splits, BLOCK_N)
    # Tiles that are full need no look at single keys.
    whole = low + tl.maximum(high - low, 0) // BLOCK_N * BLOCK_N
    rows, near = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    live = rows < GROUPS
    q = tl.load(
        q_ptr + batch * q_b + ((head * GROUPS + rows) * q_h)[:, None] + dims[None, :],
        mask=live[:, None] & (dims < K_WIDTH)[None, :],
        other=0.0,
    )
    # Within a tile offsets are small; only the place of the first one needs 64 bits.
    k_ptr = kept_k_ptr + k_at * PIECE_ELEMENTS + low.to(tl.int64) * K_WIDTH
    v_ptr = kept_v_ptr + v_at * PIECE_ELEMENTS + low.to(tl.int64) * V_WIDTH
    k_near = near[:, None] * K_WIDTH + dims[None, :]
    v_near = near[:, None] * V_WIDTH + value_dims[None, :]

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for CHECK in tl.static_range(2):
        begin, end = low, whole
        if CHECK:
            begin, end = whole, high
        for start in range(begin, end, BLOCK_N):
            inside = start + near < high
            k = load_tile(k_ptr + k_near, inside, dims < K_WIDTH, CHECK, K_WIDTH != BLOCK_D)
            v = load_tile(v_ptr + v_near, inside, value_dims < V_WIDTH, CHECK, V_WIDTH != BLOCK_V)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CHECK:
                s = tl.where(inside[None, :], s, float("-inf"))
            # Keys are made of anything, so that whole tiles may have no logit but −inf.
            top, total, acc = weigh(s, v, top, total, acc, True)
            k_ptr += BLOCK_N * K_WIDTH
            v_ptr += BLOCK_N * V_WIDTH

    first = (batch * tl.num_programs(0) + place - split) * GROUPS
    places = first + rows * splits + split
    store_part(part_ptr, lse_ptr, places, top, total, acc, live, value_dims, V_WIDTH)
    row = batch * n_heads + head
    if last_to_finish(ticket_ptr + row, splits):
        for each in range(GROUPS):
            merge_row(
                part_ptr, lse_ptr, out_ptr, whole_lse_ptr, row * GROUPS + each, first + each * splits, splits, V_WIDTH,
                unit, PARTS, BLOCK_V,
            )  # fmt: skip


def lie_grouped(keys: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether :class:`Grouped` takes buffers like these: in whole pieces, rows of neighbours, of one width each."""
    first = keys[0]
    if first.size(0) > MOST_PROGRAMS or not (first.is_cuda or INTERPRETED):
        return False
    # Products in bfloat16 are wrong in the interpreter.
    if first.dtype not in (*HALVES, torch.float32) or (INTERPRETED and first.dtype == torch.bfloat16):
        return False
    return all(
        x.dtype == first.dtype and x.size(2) == x.stride(1) == same[0].size(2) <= TRITON_WIDTH and in_pieces(x)
        and (x.data_ptr() - same[0].data_ptr()) % (PIECE * x.element_size()) == 0
        for same in (keys, values) for x in same
    )  # fmt: skip


class Grouped:
    """The caches of a layer's key heads, each in a buffer of its own, as a kernel finds them for queries that share.

    Made once for buffers that stay where they are; they have to outlive it.

    Args:
        keys, values: (B, room, D) and (B, room, Dv) for each key head, for which :func:`lie_grouped` says yes; rooms
            may differ.
        programs: for each sample, about; by default enough to fill the device.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], *, programs: int | None = None) -> None:
        self._k, self._v, self._n_heads = keys[0], values[0], len(keys)
        self._width, self._value_width = (max(16, power_of_two(x.size(2))) for x in (self._k, self._v))
        self._tile = tile_for(self._k.dtype, max(self._width, self._value_width))
        self._parts = max(1, LONE_PARTS // self._value_width)
        if programs is None:
            programs = self._tile.programs * multiprocessors(self._k.device) // self._k.size(0)
        tiles = [-(-k.size(1) // self._tile.keys) for k in keys]
        most = MERGING * self._parts
        shares = dealt(tiles, programs, least=LEAST_TILES, most=most)
        #: Whether no multiprocessor is left idle because a head has all the programs that its last one can merge.
        self.fills = max(shares) < most or sum(shares) * self._k.size(0) >= multiprocessors(self._k.device)
        table = []
        for head, (k, v, splits) in enumerate(zip(keys, values, shares, strict=True)):
            # Once for each head: a recording makes such a table for every layer.
            where = (
                pieces_between(self._k, k), pieces_between(self._v, v), k.stride(0) // PIECE, v.stride(0) // PIECE,
                k.size(1), head,
            )  # fmt: skip
            table += [(*where, split, splits) for split in range(splits)]
        self._programs = torch.tensor(table, dtype=torch.int64, device=self._k.device)

    def takes(self, q: Tensor) -> bool:
        """Whether q (B, Hq, 1, D) are rows for these buffers: up to ROWS for each key head.

        Never for a compiler: it may hand a copy of the first buffer to the kernel, and others are counted from there.
        """
        if torch.compiler.is_compiling() or q.dim() != 4 or q.size(1) not in self._counts():
            return False
        return q.dtype == self._k.dtype and (q.size(0), *q.shape[2:]) == (self._k.size(0), 1, self._k.size(2))

    def attend(self, q: Tensor, columns: Tensor, tickets: Tensor, *, scale: float) -> Tensor:
        """Attend to all that every head holds.

        Args:
            q: (B, Hq, 1, D), for which :meth:`takes` says yes.
            columns: int64 (Hk,), contiguous: the newest key of each head. Of a buffer that has no such column all are
                seen.
            tickets: at least B · Hk zeros, int32, which are zeros again afterwards. No other launch that might run at
                the same time may have them.
            scale: the softmax scale.

        Returns:
            (B, Hq, 1, Dv).

        Raises:
            ValueError: too few tickets.
        """
        q = q if q.stride(3) == 1 else q.contiguous()
        (batch, n_queries, _, width), n_programs, value_width = q.shape, self._programs.size(0), self._v.size(2)
        if tickets.numel() < batch * self._n_heads:
            raise invalid_argument("tickets", tickets, f"at least {batch * self._n_heads} zeros in int32")
        groups = n_queries // self._n_heads
        out = torch.empty(batch, n_queries, 1, value_width, dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, n_queries, dtype=torch.float32, device=q.device)
        parts = torch.empty(batch, n_programs * groups, value_width, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(batch, n_programs * groups, dtype=torch.float32, device=q.device)
        direct(partial_grouped)[(n_programs, batch)](
            parts, part_lse, tickets, out, lse, self._n_heads, scale * LOG2E, 1 / LOG2E, q, self._k, self._v, columns,
            self._programs, *q.stride()[:2], GROUPS=groups, K_WIDTH=width, V_WIDTH=value_width, PARTS=self._parts,
            BLOCK_M=ROWS, BLOCK_N=self._tile.keys, BLOCK_D=self._width, BLOCK_V=self._value_width,
            num_warps=self._tile.warps, num_stages=self._tile.stages,
        )  # fmt: skip
        return out

    def _counts(self) -> range:
        """Numbers of query heads that share these key heads."""
        return range(self._n_heads, ROWS * self._n_heads + 1, self._n_heads)
