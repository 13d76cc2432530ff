"""A cache as a recorded step finds it: buffers of fixed size, and on the device how many of their columns count.

What a step launches must be the same for every token. So keys and values are written where a counter on the device
says, and attention goes over whole buffers, of which another number on the device says how much is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gape.models.forgetting_shelf import Order, taken
from gape.ops.plain import newest_attention


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


class Held(NamedTuple):
    """All that a layer holds, and the order in which its heads lie."""

    blocks: list[Block]
    order: Order


class Slot:
    """The cache of one layer for single tokens, each the newest.

    Args:
        held: what the layer holds.
        columns: int64 (blocks,), the column of each block that a token goes to.
        lengths: int64 (blocks, B), how many columns count once it is there.
    """

    #: The scheme's number per cached key; schemes that have one cannot be recorded.
    side: None = None

    def __init__(self, held: Held, columns: Tensor, lengths: Tensor) -> None:
        self._held, self._columns, self._lengths = held, columns, lengths
        self.length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Add a token and attend to everything held.

        Args:
            q, k, v: (B, Hq, 1, D), (B, Hk, 1, D) and (B, Hk, 1, Dv), ready for the dot product.
            scale: the softmax scale.

        Returns:
            (B, Hq, 1, Dv).
        """
        order, groups = self._held.order, q.size(1) // k.size(1)
        q, k, v = taken(q, order.queries), taken(k, order.keys), taken(v, order.keys)
        outs = []
        for index, block in enumerate(self._held.blocks):
            heads, column = block.k.size(1), self._columns[index : index + 1]
            block.k.index_copy_(2, column, k.narrow(1, block.start, heads))
            block.v.index_copy_(2, column, v.narrow(1, block.start, heads))
            own = q.narrow(1, block.start * groups, heads * groups)
            outs.append(newest_attention(own, block.k, block.v, self._lengths[index], scale=scale))
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
        self._held, self._batch = held, batch
        widths = [block.width for layer in held for block in layer.blocks]
        self._start = torch.tensor([length, *widths], dtype=torch.int64, device=device)
        self._counters = self._start.clone()
        self.layers: list[Slot] = []

    def begin(self) -> Tensor:
        """Make the layers of one step; the position of its token, (1,). A position is never written to again."""
        now = self._counters.clone()
        lengths = (now + 1)[:, None].expand(-1, self._batch).contiguous()
        self.layers, first = [], 1
        for held in self._held:
            own = slice(first, first + len(held.blocks))
            self.layers.append(Slot(held, now[own], lengths[own]))
            first = own.stop
        return now[:1]

    def end(self) -> None:
        """A token has come."""
        self._counters += 1

    def reset(self) -> None:
        """Back to where it began: what was written meanwhile does not count."""
        self._counters.copy_(self._start)
