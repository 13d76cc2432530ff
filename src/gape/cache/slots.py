"""A cache as a recorded step finds it: buffers of fixed size, and on the device how many of their columns count.

What a step launches must be the same for every token. So keys and values are written where a counter on the device
says, and attention goes over whole buffers, of which another number on the device says how much is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gape.cache.forgetting_shelf import STRIDE, Order, taken
from gape.ops import limits
from gape.ops.plain import newest_attention

if TYPE_CHECKING:
    from gape.ops.triton.decode_apart import Apart
    from gape.ops.triton.decode_grouped import Grouped
    from gape.ops.triton.deposit import Deposit


class Block(NamedTuple):
    """Key heads of a layer that hold equally many columns.

    Attributes:
        start: the first of them, in the order in which the layer's heads lie.
        k, v: buffers (B, heads, room, D) and (B, heads, room, Dv).
        width: columns that count.
    """

    start: int
    k: Tensor
    v: Tensor
    width: int


class Notes(NamedTuple):
    """Where a step puts down queries and their own keys for a cache that measures them, each at its position modulo
    STRIDE.

    Attributes:
        q, k: (B, Hq, STRIDE, d) and (B, Hk, STRIDE, d), the coordinates of content alone.
    """

    q: Tensor
    k: Tensor

    def write(self, q: Tensor, k: Tensor, column: Tensor) -> None:
        """Put down q (B, Hq, 1, D) and k (B, Hk, 1, D) in a column, int64 (1,)."""
        content = self.q.size(-1)
        self.q.index_copy_(2, column, q[..., :content])
        self.k.index_copy_(2, column, k[..., :content])


class Held(NamedTuple):
    """All that a layer holds, the order in which its heads lie, and where it wants queries noted, if it does."""

    blocks: list[Block]
    order: Order
    notes: Notes | None = None

    @property
    def heads(self) -> list[list[int]]:
        """The key heads of each block, as they lie; waits for the device."""
        count = sum(block.k.size(1) for block in self.blocks)
        heads = range(count) if self.order.keys is None else self.order.keys.tolist()
        return [list(heads[block.start : block.start + block.k.size(1)]) for block in self.blocks]


class Slot:
    """The cache of one layer for single tokens, each the newest.

    Args:
        held: what the layer holds.
        heads: the key heads of each of its blocks.
        columns: int64 (Hk,), the column of each key head that a token goes to.
        lengths: int64 (Hk, B), how many of its columns count once it is there.
        tickets: int32 zeros for kernels to finish by, one for each sample and key head.
        noted: int64 (1,), the column of its notes that a query goes to.
    """

    #: The scheme's number per cached key; schemes that have one cannot be recorded.
    side: None = None

    def __init__(
        self, held: Held, heads: list[list[int]], columns: Tensor, lengths: Tensor, tickets: Tensor, noted: Tensor
    ) -> None:
        self._held, self._heads = held, heads
        self._columns, self._lengths, self._tickets, self._noted = columns, lengths, tickets, noted
        self._apart, self._grouped, self._deposit = _launches(held, heads)
        self.length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Add a token and attend to everything held: one launch where each key head has a query in half precision, two
        where several queries share it.

        Args:
            q, k, v: (B, Hq, 1, D), (B, Hk, 1, D) and (B, Hk, 1, Dv), ready for the dot product.
            scale: the softmax scale.

        Returns:
            (B, Hq, 1, Dv).
        """
        if self._apart is not None and self._apart.takes(q, k, v):
            self._note(q, k)
            return self._apart.attend(q, k, v, self._columns, self._tickets, scale=scale)
        if self._deposit is not None and not torch.compiler.is_compiling():
            self._deposit.write(q, k, v, self._columns, self._noted)
        else:
            self._note(q, k)
            self._write_one_by_one(k, v)
        if self._grouped is not None and self._grouped.takes(q):
            return self._grouped.attend(q, self._columns, self._tickets, scale=scale)
        return self._attend_one_by_one(q, scale)

    def _note(self, q: Tensor, k: Tensor) -> None:
        if self._held.notes is not None:
            self._held.notes.write(q, k, self._noted)

    def _write_one_by_one(self, k: Tensor, v: Tensor) -> None:
        """A block after the other, where no kernel writes to all."""
        order = self._held.order
        k, v = taken(k, order.keys), taken(v, order.keys)
        for block, (first, *_) in zip(self._held.blocks, self._heads, strict=True):
            heads, column = block.k.size(1), self._columns[first : first + 1]
            block.k.index_copy_(2, column, k.narrow(1, block.start, heads))
            block.v.index_copy_(2, column, v.narrow(1, block.start, heads))

    def _attend_one_by_one(self, q: Tensor, scale: float) -> Tensor:
        """A block after the other, to what is written."""
        order, groups = self._held.order, q.size(1) // self._columns.numel()
        q, outs = taken(q, order.queries), []
        for block, (first, *_) in zip(self._held.blocks, self._heads, strict=True):
            own = q.narrow(1, block.start * groups, block.k.size(1) * groups)
            lengths, tickets = self._lengths[first], self._tickets
            outs.append(newest_attention(own, block.k, block.v, lengths, scale=scale, tickets=tickets))
        return taken(outs[0] if len(outs) == 1 else torch.cat(outs, dim=1), order.back)


class Slots:
    """The caches of all layers, with counters that a step reads and then moves on.

    Args:
        held: what each layer holds.
        length: tokens that have come: the position of the next one.
        batch: samples.
        device: where all of it is.
    """

    def __init__(self, held: Sequence[Held], length: int, batch: int, device: torch.device) -> None:
        self.length = 0
        heads = [layer.heads for layer in held]
        widths = [_widths(*each) for each in zip(held, heads, strict=True)]
        flat = [width for layer in widths for width in layer]
        # Side by side, so that one launch moves them all on: the position, columns, and lengths for every sample.
        lengths = [width + 1 for width in flat for _ in range(batch)]
        self._start = torch.tensor([length, *flat, *lengths], dtype=torch.int64, device=device)
        self._counters = self._start.clone()
        sizes = [len(layer) for layer in widths]
        columns = torch.split(self._counters[1 : 1 + len(flat)], sizes)
        counted = torch.split(self._counters[1 + len(flat) :].view(-1, batch), sizes)
        # Of this graph alone, whose launches come one after another: all layers may have the same.
        tickets = torch.zeros(batch * max(sizes), dtype=torch.int32, device=device)
        self._noting = any(layer.notes is not None for layer in held)
        self._noted = torch.zeros(1, dtype=torch.int64, device=device)
        self.layers = [Slot(*each, tickets, self._noted) for each in zip(held, heads, columns, counted, strict=True)]

    def begin(self) -> Tensor:
        """The position of the next token, (1,). It is never written to again."""
        position = self._counters[:1].clone()
        if self._noting:
            torch.remainder(position, STRIDE, out=self._noted)
        return position

    def end(self) -> None:
        """A token has come."""
        self._counters += 1

    def reset(self) -> None:
        """Back to where it began: what was written meanwhile does not count."""
        self._counters.copy_(self._start)


def _widths(held: Held, heads: list[list[int]]) -> list[int]:
    """Columns that count, of each key head in their own order."""
    of = {head: block.width for block, some in zip(held.blocks, heads, strict=True) for head in some}
    return [of[head] for head in sorted(of)]


def _launches(held: Held, heads: list[list[int]]) -> tuple[Apart | None, Grouped | None, Deposit | None]:
    """What attends to all key heads in one launch, for one query each and for several, and what writes to all before
    the latter; None for what cannot run.
    """
    if not limits.HAS_TRITON:
        return None, None, None
    from gape.ops.triton.decode_apart import Apart, lie_apart  # noqa: PLC0415
    from gape.ops.triton.decode_grouped import Grouped, lie_grouped  # noqa: PLC0415
    from gape.ops.triton.deposit import Deposit, deposits  # noqa: PLC0415

    rows = [
        (head, block.k[:, row], block.v[:, row])
        for block, some in zip(held.blocks, heads, strict=True)
        for row, head in enumerate(some)
    ]
    _, keys, values = zip(*sorted(rows, key=lambda each: each[0]), strict=True)
    grouped = Grouped(keys, values) if lie_grouped(keys, values) else None
    if grouped is not None and len(held.blocks) == 1 and not grouped.fills:
        # One block takes one launch either way, and the other splits keys among as many programs as there are.
        grouped = None
    return (
        Apart(keys, values) if lie_apart(keys, values) else None,
        grouped,
        Deposit(keys, values, held.notes) if deposits(keys[0].device) else None,
    )
