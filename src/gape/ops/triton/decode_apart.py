"""A token more for key heads whose caches lie apart: written and attended to in one launch, however many lie where.

Each key head has a buffer with room of its own, somewhere in memory, and holds a number of keys of its own. A table on
the device says where: offsets from the first head's buffer, in pieces of 16 bytes. Programs are dealt out to heads by
their room, so that a head with many keys has many; another table says which program has which share of which head.

The token's own key and value come with the query. The program of a head's first share attends to them and writes them
behind the others, where no program of this launch reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gape.ops.limits import HALVES, MOST_PROGRAMS
from gape.ops.triton.custom_ops import direct
from gape.ops.triton.decode import ALONE
from gape.ops.triton.decode_kernels import last_to_finish, merge_row
from gape.ops.triton.decode_lone import PIECE, TILES_UNDER_WAY, as_pairs, attend_to_share
from gape.ops.triton.decode_plan import (
    LONE_DIMS,
    LONE_PARTS,
    LONE_PROGRAMS,
    LONE_STEPS,
    LONE_TILE,
    dealt,
    in_pieces,
    multiprocessors,
)
from gape.ops.triton.tiles import LOG2E, single
from gape.utils.validation import invalid_argument

#: Numbers that the table has of a head: where keys and values begin, from sample to sample, room, and its shares.
COLUMNS = tl.constexpr(6)

#: Elements in half precision of one piece.
PIECE_ELEMENTS = tl.constexpr(PIECE)


# Layers have their counters side by side: those of some begin with 16 bytes, those of others do not.
@triton.jit(do_not_specialize_on_alignment=("columns_ptr",))
def partial_apart(
    part_ptr, lse_ptr, ticket_ptr, out_ptr, whole_lse_ptr, n_heads, scale, unit,
    q_ptr, k_ptr, v_ptr, kept_k_ptr, kept_v_ptr, columns_ptr, heads_ptr, programs_ptr,
    q_b, q_h, k_b, k_h, v_b, v_h, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Outputs (B·H, D) by way of parts (B, programs, D) and their base-2 log-sum-exps (B, programs), float32.

    q, k, v: (B, H, D), rows of neighbours. kept_k, kept_v: the buffers that offsets are counted from, in half
    precision. columns: int64 (H,), keys that a head holds, where its new one goes. heads: int64 (H, COLUMNS).
    programs: int32 (programs, 2), a program's head and share.
    """
    scale, unit = single(scale), single(unit)
    batch, place = tl.program_id(1).to(tl.int64), tl.program_id(0)
    head, split = tl.load(programs_ptr + 2 * place), tl.load(programs_ptr + 2 * place + 1)
    row = batch * n_heads + head
    table = heads_ptr + head * COLUMNS
    k_at = tl.load(table) + batch * tl.load(table + 2)
    v_at = tl.load(table + 1) + batch * tl.load(table + 3)
    room, splits = tl.load(table + 4), tl.load(table + 5).to(tl.int32)
    column = tl.load(columns_ptr + head)
    q_ptr += batch * q_b + head * q_h
    k_ptr += batch * k_b + head * k_h
    v_ptr += batch * v_b + head * v_h
    own = batch * tl.num_programs(0) + place
    BF16: tl.constexpr = kept_k_ptr.dtype.element_ty == tl.bfloat16
    PAIRS: tl.constexpr = BLOCK_D // 2
    attend_to_share(
        part_ptr, lse_ptr, own, as_pairs(kept_k_ptr, k_at), as_pairs(kept_v_ptr, v_at), q_ptr, 0, q_ptr, 1,
        q_ptr, q_ptr, scale, 0.0, tl.minimum(column, room).to(tl.int32), split, splits, k_ptr, v_ptr,
        False, True, PAIRS, PAIRS, BF16, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    # A buffer that is full keeps what it has: behind it lies something else.
    fits = dims < tl.where((split == 0) & (column < room), BLOCK_D, 0)
    tl.store(kept_k_ptr + (k_at * PIECE_ELEMENTS + column * BLOCK_D) + dims, tl.load(k_ptr + dims), mask=fits)
    tl.store(kept_v_ptr + (v_at * PIECE_ELEMENTS + column * BLOCK_D) + dims, tl.load(v_ptr + dims), mask=fits)
    if last_to_finish(ticket_ptr + row, splits):
        merge_row(
            part_ptr, lse_ptr, out_ptr, whole_lse_ptr, row, own - split, splits, BLOCK_D, unit, PARTS, BLOCK_D
        )  # fmt: skip


def lie_apart(keys: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether :class:`Apart` takes buffers like these: half precision, rows of neighbours, all of one width."""
    first = keys[0]
    if first.dtype not in HALVES or first.size(2) not in LONE_DIMS or first.size(0) > MOST_PROGRAMS:
        return False
    return all(
        x.dtype == first.dtype and x.size(2) == x.stride(1) == first.size(2) and in_pieces(x) for x in (*keys, *values)
    )


class Apart:
    """The caches of a layer's key heads, each in a buffer of its own, as a kernel finds them.

    Made once for buffers that stay where they are; they have to outlive it.

    Args:
        keys, values: (B, room, D) for each key head, for which :func:`lie_apart` says yes; rooms may differ.
        programs: for each sample, about; by default enough to fill the device.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], *, programs: int | None = None) -> None:
        self._k, self._v = keys[0], values[0]
        rooms, device = [x.size(1) for x in keys], self._k.device
        if programs is None:
            programs = LONE_PROGRAMS * multiprocessors(device) // self._k.size(0)
        shares = shares_of(rooms, self._k.size(2), programs)
        columns = (
            [pieces_between(self._k, k) for k in keys],
            [pieces_between(self._v, v) for v in values],
            [k.stride(0) // PIECE for k in keys],
            [v.stride(0) // PIECE for v in values],
            rooms,
            shares,
        )
        self._heads = torch.tensor(list(zip(*columns, strict=True)), dtype=torch.int64, device=device)
        dealt = [(head, split) for head, share in enumerate(shares) for split in range(share)]
        self._programs = torch.tensor(dealt, dtype=torch.int32, device=device)

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether q, k and v (B, H, 1, D) are rows for these buffers: one query for each key head.

        Never for a compiler: it may hand a copy of the first buffer to the kernel, and others are counted from there.
        """
        if torch.compiler.is_compiling():
            return False
        shape = (self._k.size(0), self._heads.size(0), 1, self._k.size(2))
        return all(x.shape == shape and x.dtype == self._k.dtype for x in (q, k, v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, columns: Tensor, tickets: Tensor, *, scale: float) -> Tensor:
        """Add a token to every head and attend to all that it holds then.

        Args:
            q, k, v: (B, H, 1, D), for which :meth:`takes` says yes.
            columns: int64 (H,), contiguous: keys that each head holds so far. A buffer that has no room for one more
                is left as it is; the query sees the token all the same.
            tickets: at least B · H zeros, int32, which are zeros again afterwards. No other launch that might run at
                the same time may have them.
            scale: the softmax scale.

        Returns:
            (B, H, 1, D).

        Raises:
            ValueError: too few tickets.
        """
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        (batch, n_heads, _, width), n_programs = q.shape, self._programs.size(0)
        if tickets.numel() < batch * n_heads:
            raise invalid_argument("tickets", tickets, f"at least {batch * n_heads} zeros in int32")
        out = torch.empty(batch, n_heads, 1, width, dtype=q.dtype, device=q.device)
        parts = torch.empty(batch, n_programs, width, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(batch, n_programs, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, n_heads, dtype=torch.float32, device=q.device)
        direct(partial_apart)[(n_programs, batch)](
            parts, part_lse, tickets, out, lse, n_heads, scale * LOG2E, 1 / LOG2E, q, k, v, self._k, self._v,
            columns, self._heads, self._programs, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            PARTS=LONE_PARTS // width, BLOCK_N=LONE_TILE // width, BLOCK_D=width, num_warps=4, num_stages=1,
        )  # fmt: skip
        return out


def shares_of(rooms: Sequence[int], width: int, programs: int) -> list[int]:
    """How many programs each head has, of about so many in all, by the room of its buffer.

    None has shorter shares than are worth a program, nor more than its last one merges alone.
    """
    steps = [-(-room // (TILES_UNDER_WAY * (LONE_TILE // width))) for room in rooms]
    return dealt(steps, programs, least=LONE_STEPS, most=ALONE * (LONE_PARTS // width))


def pieces_between(one: Tensor, other: Tensor) -> int:
    """From the beginning of one buffer to that of another, in pieces of PIECE numbers: 16 bytes in half precision."""
    return (other.data_ptr() - one.data_ptr()) // (PIECE * one.element_size())
