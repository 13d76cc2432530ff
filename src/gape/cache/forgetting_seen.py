"""What is seen of the queries of a layer, in the place of bounds.

A token is only noted when it comes, since a measurement takes ten launches for one as for a thousand. A recorded step
notes it by itself, in room that is made ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gape.cache.forgetting_ledger import Ledger
from gape.cache.forgetting_limits import Attends, Limits
from gape.cache.forgetting_shelf import STRIDE
from gape.cache.slots import Notes

#: By how much measured numbers are widened, so that not every new record counts.
_MARGIN = 0.125

#: q, k, g, and positions (B, n), or the first where they are counted.
Note = tuple[Tensor, Tensor, Tensor, Tensor | int]


class Seen:
    """Running numbers over the queries of a layer.

    Args:
        attention: the layer.
        floors: rates (Hq,) that are bounds all the same, or None to measure them as well: then the mean counts.
    """

    def __init__(self, attention: Attends, floors: Tensor | None) -> None:
        self._attention, self._floors = attention, floors
        self._notes: list[Note] = []
        # What recorded steps have noted: where, the first position, and how many.
        self._room: Notes | None = None
        self._first = self._replayed = 0
        self._beyond: int | Tensor = 0
        self._total: Tensor | None = None
        self._count = 0
        self._reach = self._own = torch.tensor(-torch.inf)

    def beyond(self, ledger: Ledger | None) -> int:
        """Queries noted so far that may have missed more than eps: see :meth:`measure`."""
        self.measure(ledger)
        return int(self._beyond)

    def note(self, q: Tensor, k: Tensor, gate: Tensor, positions: Tensor | int, ledger: Ledger | None) -> None:
        """Remember queries, or measure them at once where they are many.

        Args:
            q, k, gate: (B, Hq, n, d), (B, Hk, n, d) and (B, Hq, n), as they came.
            positions: int64 (B, n), or the first of them where they are counted.
            ledger: what was given up when they were asked.
        """
        if not q.size(2):
            return
        alike = self._notes and type(self._notes[0][3]) is type(positions)
        if q.size(2) > 1 or not alike or self._replayed:
            self.measure(ledger)
        self._notes.append((q.detach(), k.detach(), gate.detach(), positions))
        if q.size(2) > 1 or len(self._notes) >= STRIDE:
            self.measure(ledger)

    def room(self, k: Tensor) -> Notes:
        """Where recorded steps note queries, for a batch whose keys are stored as k (B, …)."""
        layer, kind = self._attention, (k.size(0), k.dtype, k.device)
        if self._room is None or (self._room.k.size(0), self._room.k.dtype, self._room.k.device) != kind:
            # Written to for as long as there is a graph, under inference_mode or not.
            with torch.inference_mode(False):
                self._room = Notes(
                    *(
                        k.new_zeros(k.size(0), heads, STRIDE, layer.content_dim)
                        for heads in (layer.n_heads, layer.n_kv_heads)
                    )
                )
        return self._room

    def replayed(self, position: int, ledger: Ledger | None) -> None:
        """Count a query at a position that a recorded step has noted; once the room is full all are measured."""
        if not self._replayed:
            self._first = position
        # By its position, which comes again where a count has broken off.
        self._replayed = position - self._first + 1
        if self._replayed == STRIDE:
            self.measure(ledger)

    def measure(self, ledger: Ledger | None) -> None:
        """Measure the queries noted, and count those that may have missed more than eps by a ledger.

        It has to come before anything more is given up.
        """
        if self._replayed:
            assert self._room is not None
            positions = torch.arange(self._first, self._first + self._replayed, device=self._room.q.device)
            q, k = (x.index_select(2, positions % STRIDE) for x in self._room)
            self._measure(q, k, None, positions.expand(q.size(0), -1), ledger)
            # Not before: what breaks off above is measured another time.
            self._replayed = 0
        if self._notes:
            asked = zip(*((q, k, gate) for q, k, gate, _ in self._notes), strict=True)
            q, k, gate = (torch.cat(parts, dim=2) for parts in asked)
            positions, self._notes = self._positions(), []
            if gate.numel():
                self._measure(q, k, gate, positions, ledger)

    def _measure(self, q: Tensor, k: Tensor, gate: Tensor | None, positions: Tensor, ledger: Ledger | None) -> None:
        """Measure queries; without their gates where floors are known."""
        scale, gates = self._attention.scale, self._attention.gates
        assert gates is not None
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        reach = (scale * wide.norm(dim=-1)).double()
        own = (scale * (wide * k.repeat_interleave(q.size(1) // k.size(1), dim=1)).sum(-1)).double()
        longest, lowest = reach.amax((0, 2)), (-own).amax((0, 2))
        self._reach = torch.maximum(self._reach.to(longest), longest)
        self._own = torch.maximum(self._own.to(lowest), lowest)
        if self._floors is None:
            # Where rates are measured, too, nothing is promised.
            assert gate is not None
            rate = gates.amplitude.detach()[:, None] * gate / self._attention.context_length
            total = rate.double().sum((0, 2))
            self._total = total if self._total is None else self._total + total
            self._count += rate.size(0) * rate.size(2)
        elif ledger is not None:
            self._beyond = self._beyond + ledger.uncertain(reach, own, positions)

    def _positions(self) -> Tensor:
        """Positions of the queries noted, (B, n)."""
        firsts = [first for *_, first in self._notes if isinstance(first, int)]
        if not firsts:
            return torch.cat([told for *_, told in self._notes if isinstance(told, Tensor)], dim=1)
        q = self._notes[0][0]
        # Many queries are alone; others come one by one, and need not follow one another.
        many = len(firsts) == 1
        found = torch.arange(firsts[0], firsts[0] + q.size(2)) if many else torch.tensor(firsts)
        return found.to(q.device).expand(q.size(0), -1)

    def limits(self) -> Limits:
        """What was measured, widened by an eighth."""
        rate = self._floors
        if rate is None:
            assert self._total is not None
            rate = self._total / self._count
        reach, own = self._reach * (1 + _MARGIN), self._own + _MARGIN * self._own.abs()
        return Limits(rate=rate.to(reach.device), reach=reach, own=own, jitter=own.abs())
