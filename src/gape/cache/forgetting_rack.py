"""All shelves of a layer that forgets, and attention over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gape.cache.forgetting_ledger import Ledger, Verdict
from gape.cache.forgetting_limits import Attends
from gape.cache.forgetting_shelf import Order, Plan, Shelf, taken
from gape.cache.slots import Block, Held
from gape.ops import attention as plain_attention
from gape.ops import gated_attention
from gape.ops.carried import carried_queries
from gape.ops.columns import UNIT
from gape.ops.inputs import bias_dtype
from gape.utils.validation import described, invalid_argument

#: u of keys (B, H, N, D) with so many coordinates of content, as attention reads it, by the form of the keys.
_EXPOSURES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "split": lambda k, content: k[..., content].double() / UNIT,
    "rank2": lambda k, content: 1 - k[..., content + 1].double(),
}


class Rack:
    """The shelves of a layer.

    Args:
        attention: the layer, with its weights as they are.
        shelves: every key head is on one of them.
        form: the form in which keys carry the bias; None where landmarks and positions lie beside them.

    Attributes:
        shelves: in the order in which heads lie.
    """

    def __init__(self, attention: Attends, shelves: list[Shelf], form: str | None) -> None:
        gates = attention.gates
        assert gates is not None
        self.shelves = sorted(shelves, key=lambda shelf: shelf.heads)
        self.form = form
        self._attention = attention
        self._groups = attention.n_heads // attention.n_kv_heads
        self._amplitude = gates.amplitude.detach()
        self._order = Order.of(self.shelves, self._groups, self._amplitude.device)

    def held(self) -> Held:
        """Keys and values as a recorded graph writes and reads them."""
        return Held(
            [Block(each.start, each.buffer("k"), each.buffer("v"), each.width) for each in self.shelves], self._order
        )

    def check(self, parts: dict[str, Tensor], length: int) -> None:
        """Refuse columns (B, Hk, n, …) that do not go with those of the `length` tokens that have come.

        Raises:
            ValueError: something is given or left out as it was not for these, or has another size or dtype.
        """
        shelf = self.shelves[0]
        for name in sorted(shelf.names() ^ {*parts, "positions"}):
            came = "given" if name in parts else "left out"
            raise ValueError(f"{name}: {came}, expected as for the {length} tokens already cached")
        for name, part in parts.items():
            if not shelf.fits(name, part):
                raise invalid_argument(name, part, f"to go on from {described(shelf.view(name))}")

    def write(self, parts: dict[str, Tensor]) -> None:
        """Put columns (B, Hk, n, …) on the shelves; they count once widths say so."""
        laid = {name: taken(part, self._order.keys) for name, part in parts.items()}
        for shelf in self.shelves:
            shelf.write(laid)

    def exposure(self, shelf: Shelf) -> Tensor:
        """u of the keys of a shelf, float64 (B, H, width)."""
        if self.form is None:
            return 1 - shelf.view("landmark").double()
        return _EXPOSURES[self.form](shelf.view("k"), self._attention.content_dim)

    def attend(
        self, q: Tensor, gate: Tensor | None, where: Tensor, documents: Tensor | None, *, counted: bool
    ) -> Tensor:
        """Attention of the newest tokens to everything held.

        Args:
            q: (B, Hq, n, d), or as wide as the keys where it carries the bias already.
            gate: (B, Hq, n), or None where q carries the bias.
            where: positions of these tokens, (n,) or (B, n).
            documents: of these tokens, (B, n), or None.
            counted: whether all tokens were counted, so that columns are in the order of their positions.

        Returns:
            (B, Hq, n, Dv).
        """
        attention = self._attention
        if gate is not None and self.form is not None:
            q = carried_queries(
                q, gate, self._amplitude, where, form=self.form,
                context_length=attention.context_length, scale=attention.scale, width=attention.head_dim,
            )  # fmt: skip
            gate = None
        # Amplitudes go into the gates, for heads may become samples.
        strength = None if gate is None else taken(self._amplitude[:, None] * gate, self._order.queries)
        q = taken(q, self._order.queries)
        alike = strength is None and documents is None and (counted or q.size(2) == 1)
        outs = []
        for shelf in self.shelves:
            heads = (1, shelf.start * self._groups, len(shelf.heads) * self._groups)
            own = q if heads[2] == q.size(1) else q.narrow(*heads)
            if alike:
                # The newest columns are the queries' own: nothing else has to be known.
                outs.append(plain_attention(own, shelf.view("k"), shelf.view("v"), scale=attention.scale))
            else:
                part = None if strength is None else strength.narrow(*heads)
                outs.append(self._apart(shelf, own, part, where, documents))
        return taken(outs[0] if len(outs) == 1 else torch.cat(outs, dim=1), self._order.back)

    def skipping(self, q: Tensor, gate: Tensor) -> Tensor:
        """The same by the kernel that leaves tiles away, where nothing was dropped and tokens were counted."""
        attention, (shelf,) = self._attention, self.shelves
        k = shelf.view("k")
        landmark = (1 - self.exposure(shelf)).to(bias_dtype(k.dtype))
        return gated_attention(
            q, k[..., : attention.content_dim], shelf.view("v"), gate, landmark, self._amplitude,
            context_length=attention.context_length, scale=attention.scale, **attention.how(q.size(2)),
        )  # fmt: skip

    def _apart(
        self, shelf: Shelf, q: Tensor, strength: Tensor | None, where: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Heads become samples: each has keys of its own, with their own positions and documents."""
        attention, rows, (batch, _, n, _) = self._attention, len(shelf.heads), q.shape
        where = where.expand(batch, n).repeat_interleave(rows, dim=0)
        seen: dict[str, Any] = {"q_positions": where, "k_positions": shelf.view("positions").flatten(0, 1)}
        # A single query is the latest: it sees whatever is held, and positions then cost no mask.
        seen |= {"is_causal": False} if n == 1 else {}
        if documents is not None:
            seen["q_documents"] = documents.repeat_interleave(rows, dim=0)
            seen["k_documents"] = shelf.view("documents").flatten(0, 1)
        q = q.reshape(batch * rows, self._groups, n, q.size(-1))
        k, v = (shelf.view(name).flatten(0, 1).unsqueeze(1) for name in ("k", "v"))
        if strength is None:
            out = plain_attention(q, k, v, scale=attention.scale, **seen)
        else:
            strength = strength.reshape(batch * rows, self._groups, n)
            landmark = shelf.view("landmark").flatten(0, 1).unsqueeze(1)
            unit = torch.ones(self._groups, dtype=strength.dtype, device=q.device)
            seen |= {"context_length": attention.context_length, "scale": attention.scale}
            out = gated_attention(q, k, v, strength, landmark, unit, impl=attention.impl, **seen)
        return out.reshape(batch, rows * self._groups, n, out.size(-1))


def moved(ledger: Ledger, judged: Iterable[tuple[Shelf, Verdict]], plan: Plan, room: int, counted: int | None) -> Shelf:
    """A shelf of heads as planned, and what they lose is booked.

    Args:
        ledger: of the layer.
        judged: its shelves, and what the heads of each can spare.
        plan: of the new one.
        room, counted: as in :class:`gape.cache.forgetting_shelf.Shelf`.
    """
    sources, charges = [], []
    for shelf, verdict in judged:
        some = [head for head in shelf.heads if head in plan.heads]
        if some:
            rows = torch.tensor([shelf.heads.index(head) for head in some], device=verdict.order.device)
            own, count = verdict if some == shelf.heads else verdict.of(rows), shelf.width - plan.width
            sources.append((shelf, some, own.order[..., count:].sort(-1).values))
            charges.append((own, count))
    made = Shelf.gathered(plan.heads, sources, room, counted)
    for verdict, count in charges:
        ledger.charge(verdict, count)
    return made
