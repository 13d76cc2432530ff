"""The cache of a layer that lets go of keys which no future query can give weight; proof: `docs/results/proofs.md`.

Shapes: B batch, Hq query heads, Hk key heads, G = Hq / Hk, n new tokens, D and Dv widths of cached keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from gape.cache import forgetting_limits as limits
from gape.cache.forgetting_ledger import Ledger, Verdict
from gape.cache.forgetting_pace import Pace
from gape.cache.forgetting_rack import Rack, moved
from gape.cache.forgetting_seen import Seen
from gape.cache.forgetting_shelf import Shelf, plans
from gape.cache.slots import Held
from gape.ops.carried import Rows, carried_form, carry
from gape.ops.columns import SHORT_BITS, significand_bits
from gape.utils.validation import invalid_argument, whole

if TYPE_CHECKING:
    from gape.models.attention import GAPEAttention

#: Positions are kept in 32 bits.
_LAST_POSITION = 2**31 - 1


class ForgettingLayer:
    """The cache of one gated layer. What it drops is missed by no query at all, up to eps of its attention.

    Args:
        attention: the layer, with its weights as they are.
        norm: the LayerNorm or RMSNorm that the layer reads from, or the limits themselves; only `bounds` from weights
            need either.
        eps: the attention that a query may miss, above 0 and below 1.
        bounds: what is known of future queries, as in :class:`gape.cache.kv.ForgettingCache`.
        pace: that of all layers of a cache; None makes one of its own.

    Attributes:
        length: tokens that have come, kept or not.
        looks: how many times all keys were looked through.

    Raises:
        ValueError: the layer has no gates, or `norm` bounds nothing.
    """

    #: The scheme's number per cached key; gated schemes look at no earlier ones.
    side: None = None

    def __init__(
        self,
        attention: limits.Attends,
        norm: nn.Module | limits.Limits | None,
        *,
        eps: float,
        bounds: str = "weights",
        pace: Pace | None = None,
    ) -> None:
        floors = limits.least_rates(attention)
        self.eps, self.bounds = eps, bounds
        self.length = self.looks = 0
        self._attention = attention
        if bounds == "weights" and not isinstance(norm, limits.Limits):
            norm = limits.of_weights(cast("GAPEAttention", attention), cast(nn.Module, norm))
        self._fixed = norm if isinstance(norm, limits.Limits) and bounds == "weights" else None
        self._seen = Seen(attention, floors if bounds == "queries" else None)
        self._pace = Pace() if pace is None else pace
        self._share = self._pace.joined()
        self._reset()

    def _reset(self) -> None:
        self._rack: Rack | None = None
        self._ledger: Ledger | None = None
        # Whether tokens came with positions of their own, and then the last of them.
        self._explicit = False
        self._last: Tensor | None = None
        # Tokens since keys were last looked at.
        self._since = 0
        self._pace.reset(self._share)
        # Tokens that had come when keys were last dropped, and the first position for which they were judged.
        self._judged = 0
        self._judged_at: Tensor | None = None

    def fresh(self, eps: float, pace: Pace | None = None) -> ForgettingLayer:
        """An empty one of the same layer and bounds, whose limits are not worked out again."""
        return ForgettingLayer(self._attention, self._fixed, eps=eps, bounds=self.bounds, pace=pace)

    @property
    def _shelves(self) -> list[Shelf]:
        return [] if self._rack is None else self._rack.shelves

    @property
    def nbytes(self) -> int:
        """Bytes that are held, room to grow included; queries noted until they are measured are not in it."""
        return sum(shelf.nbytes for shelf in self._shelves)

    @property
    def beyond(self) -> int:
        """Queries, counted once for each head, that may have missed more than eps: 0 under bounds from weights.

        Under measured gates nothing is known, and nothing counted.
        """
        return self._seen.beyond(self._ledger)

    @property
    def kept(self) -> list[int]:
        """Keys that each key head holds, of every sample."""
        widths = {head: shelf.width for shelf in self._shelves for head in shelf.heads}
        return [widths.get(head, 0) for head in range(self._attention.n_kv_heads)]

    @property
    def due(self) -> int:
        """Tokens that may come before keys are looked through again."""
        return self._pace.due(self._share, self._since)

    @property
    def spare(self) -> int:
        """Tokens that may come, one by one, before anything moves or keys are looked through."""
        return self.due if self._shelves else 0

    @property
    def unrecordable(self) -> str | None:
        """Why a token cannot be added by a recorded graph; None where it can."""
        if self.bounds == "gates":
            return "bounds by gates look at every gate"
        if self._explicit:
            return "tokens came with positions of their own"
        if self._rack is not None and (self._rack.form is None or "documents" in self._shelves[0].names()):
            return "the cache holds more than keys and values"
        return None

    def held(self) -> Held:
        """Keys and values as a recorded graph writes and reads them, and where it notes queries to be measured."""
        assert self._rack is not None
        held = self._rack.held()
        return held if self._fixed is not None else held._replace(notes=self._seen.room(held.blocks[0].k))

    def count(self) -> None:
        """Count a token that was written to what is held."""
        if self._fixed is None:
            self._seen.replayed(self.length, self._ledger)
        for shelf in self._shelves:
            shelf.width += 1
        self.length, self._since = self.length + 1, self._since + 1

    def positions(self, head: int) -> Tensor:
        """Positions of the keys that a key head holds, int32 (B, kept).

        Raises:
            ValueError: nothing is cached, or there is no such head.
        """
        for shelf in self._shelves:
            if head in shelf.heads:
                return shelf.view("positions")[:, shelf.heads.index(head)]
        raise invalid_argument(
            "head", head, f"a key head from 0 to {self._attention.n_kv_heads - 1}, and tokens in the cache"
        )

    def check_length(self, length: int) -> None:
        """Refuse a length that :meth:`truncate` cannot go back to.

        Raises:
            ValueError: length is negative or beyond what has come, or keys were dropped that a token there could see.
        """
        if whole("length", length, 0) > self.length:
            raise invalid_argument("length", length, f"a whole number from 0 to {self.length}, the tokens cached")
        if 0 < length < self._judged:
            raise invalid_argument(
                "length", length, f"0, or at least {self._judged}: keys were dropped for tokens from there on"
            )

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: as :meth:`check_length`.
        """
        self.check_length(length)
        removed = self.length - length
        if removed:
            # Before others come to stand where these stood.
            self._seen.measure(self._ledger)
        if length == 0:
            self._reset()
        elif removed:
            for shelf in self._shelves:
                shelf.width -= removed
            self._since = max(0, self._since - removed)
            if self._explicit:
                newest = [shelf.view("positions")[:, 0, -1:].long() for shelf in self._shelves if shelf.width]
                self._last = torch.cat(newest, dim=1).amax(1) if newest else self._judged_at
        self.length = length

    def forget(self) -> None:
        """Drop now what can go, and not with the next tokens: a prompt is held in full until then."""
        if self.length:
            self._forget(self._latest(), 0)

    def attend(
        self,
        attention: limits.Attends,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None,
        landmark: Tensor | None,
        where: Tensor,
        seen: dict[str, Tensor | None],
    ) -> Tensor:
        """Add tokens and attend to everything kept.

        Args:
            attention: the layer that asks.
            q, k, v: (B, Hq, n, d), (B, Hk, n, d) and (B, Hk, n, Dv), q and k turned.
            gate, landmark: (B, Hq, n) and (B, Hk, n).
            where: positions (n,) or (B, n); they never go back.
            seen: q_positions (None where tokens are counted), q_documents and attn_mask, which has to be None.

        Returns:
            (B, Hq, n, Dv).

        Raises:
            ValueError: another layer, a mask, positions that go back, or tokens that do not go with the cached ones.
        """
        if gate is None or landmark is None:
            raise ValueError("cache: made for another model, expected one of this layer")
        positions, form = self._admitted(attention, k, where, seen), self._form(k)
        keys = {"k": k, "landmark": landmark}
        if form is not None:
            length, width = attention.context_length, attention.head_dim
            keys = {"k": carry(k, landmark, where, form=form, context_length=length, width=width)}
        rack = self._added(keys | {"v": v}, (q, k, gate), positions, form, seen)
        documents = seen["q_documents"]
        skips = q.size(2) > 1 and documents is None and not self._explicit and "eps" in attention.how(q.size(2))
        # The kernel that skips counts positions itself, so nothing may be missing.
        if skips and min(self.kept) == self.length:
            return rack.skipping(q, gate)
        return rack.attend(q, gate, where, documents, counted=not self._explicit)

    def attend_rows(
        self, attention: limits.Attends, rows: Rows, v: Tensor, where: Tensor, seen: dict[str, Tensor | None]
    ) -> Tensor:
        """The same with q and k that carry the bias already, in the form "split", and gates where these are measured.

        Raises:
            ValueError: as :meth:`attend`.
        """
        positions, form = self._admitted(attention, rows.keys, where, seen), self._form(rows.keys)
        content = attention.content_dim
        asked = None if rows.gate is None else (rows.queries[..., :content], rows.keys[..., :content], rows.gate)
        rack = self._added({"k": rows.keys, "v": v}, asked, positions, form, seen)
        return rack.attend(rows.queries, None, where, seen["q_documents"], counted=not self._explicit)

    def _admitted(
        self, attention: limits.Attends, k: Tensor, where: Tensor, seen: dict[str, Tensor | None]
    ) -> Tensor | None:
        """Explicit positions of tokens with keys k, as :meth:`_told` has them, if these may come."""
        if attention is not self._attention:
            raise ValueError("cache: made for another model, expected one of this layer")
        if seen["attn_mask"] is not None:
            raise invalid_argument(
                "attn_mask", seen["attn_mask"], "None: a mask that hides the own key would void the proof"
            )
        return self._told(where, k.size(0), explicit=seen["q_positions"] is not None)

    def _added(
        self,
        parts: dict[str, Tensor],
        asked: tuple[Tensor, Tensor, Tensor] | None,
        positions: Tensor | None,
        form: str | None,
        seen: dict[str, Tensor | None],
    ) -> Rack:
        """What is held when tokens have come: their keys and all that is stored with them, and their q, k and gate."""
        documents = seen["q_documents"]
        if documents is not None:
            parts["documents"] = documents[:, None].expand(-1, parts["k"].size(1), -1)
        if self._rack is not None:
            self._rack.check(parts, self.length)
        if self._fixed is None:
            assert asked is not None
            self._seen.note(*asked, self.length if positions is None else positions, self._ledger)
        return self._append(parts, positions, form)

    def _form(self, k: Tensor) -> str | None:
        """The form in which keys like `k` carry the bias; None where they do not."""
        layer = self._attention
        form = carried_form(layer.impl, layer.reserve, k)
        if form == "rank2" and significand_bits(k) <= SHORT_BITS:
            raise invalid_argument("impl", layer.impl, f"'split' or 'auto', since rank2 rounds the bias in {k.dtype}")
        if self._rack is not None and form != self._rack.form:
            raise invalid_argument(
                "impl", layer.impl, f"the one for which the {self.length} tokens already cached were made"
            )
        return form

    def _told(self, where: Tensor, batch: int, *, explicit: bool) -> Tensor | None:
        """Explicit positions as int64 (B, n), if they never go back; None where tokens are counted."""
        if not explicit:
            if self._explicit:
                raise ValueError("positions: got None, expected positions, since cached tokens have explicit ones")
            return None
        positions = where.to(torch.int64).expand(batch, where.size(-1))
        if positions.numel():
            last = self._latest() if self.length else positions[:, 0]
            if last.size(0) != batch:
                raise invalid_argument("positions", where, f"those of a batch of {last.size(0)}, as cached")
            if bool((torch.cat([last[:, None], positions], dim=1).diff(dim=1) < 0).any()):
                raise ValueError("positions: got some that go back, expected each at or behind the one before it")
            if bool((positions >= _LAST_POSITION).any()):
                raise invalid_argument("positions", where, f"positions below {_LAST_POSITION}")
        return positions

    def _latest(self) -> Tensor:
        """No later token may be before it, int64 (B,): the last that has come, or where keys were judged for."""
        last = self._at(self.length - 1) if self._last is None else self._last
        return last if self._judged_at is None else torch.maximum(last, self._judged_at)

    def _at(self, position: int) -> Tensor:
        """A position of every sample, int64 (B,)."""
        k = self._shelves[0].view("k")
        return torch.full((k.size(0),), position, dtype=torch.int64, device=k.device)

    def _append(self, parts: dict[str, Tensor], positions: Tensor | None, form: str | None) -> Rack:
        """Make room, by forgetting where that is due, and write."""
        added = parts["k"].size(2)
        if self._rack is None:
            heads, counted = list(range(parts["k"].size(1))), None if self._explicit else self.length
            self._put([Shelf(heads, parts, room=self._pace.room(added), counted=counted)], form)
        if added and not self.due:
            self._forget(self._at(self.length) if positions is None else positions[:, 0], added)
        if any(shelf.width + added > shelf.room for shelf in self._shelves):
            self.make_room(added)
        rack = cast(Rack, self._rack)
        if positions is not None and added:
            parts = parts | {"positions": positions[:, None].expand(-1, parts["k"].size(1), -1)}
            # Columns to come are no longer those that were numbered.
            self._explicit = True
        rack.write(parts)
        # Nothing counts before this: a call that breaks off above leaves what was there.
        for shelf in rack.shelves:
            shelf.width += added
        self.length, self._since = self.length + added, self._since + added
        if positions is not None and added:
            self._last = positions[:, -1]
        return rack

    def _forget(self, first: Tensor, added: int) -> None:
        """Drop what no query at positions `first` (B,) or behind can miss, where that is worth moving the rest."""
        rack, ledger = self._rack, self._brought(first)
        assert rack is not None
        self._since, self.looks = 0, self.looks + 1
        self._pace.look(self._share)
        verdicts = [self._judge(ledger, rack, shelf) for shelf in rack.shelves]
        spared = iter(torch.cat([verdict.spared.amin(0) for verdict in verdicts]).tolist())
        held = self.kept
        spares = {head: next(spared) for shelf in rack.shelves for head in shelf.heads}
        least = [held[head] - spares[head] for head in range(len(held))]
        planned = plans(rack.shelves, held, least)
        self._share.columns, self._share.heads = sum(plan.columns for plan in planned), len(held)
        room, shelves = self._pace.room(added), []
        for plan in planned:
            if plan.stays is not None:
                shelves.append(self._roomy(plan.stays, room))
                continue
            judged = zip(rack.shelves, verdicts, strict=True)
            shelves.append(moved(ledger, judged, plan, room, None if self._explicit else self.length))
            self._judged, self._judged_at = self.length, first
        self._put(shelves, rack.form)

    def make_room(self, added: int = 0) -> None:
        """Room for all tokens from a look to the next, `added` at a time, of which other layers have decided since."""
        if self._rack is not None:
            self._put([self._roomy(shelf, self._pace.room(added)) for shelf in self._shelves], self._rack.form)

    def _put(self, shelves: list[Shelf], form: str | None) -> None:
        """Hold these shelves from now on, and say how much room they have."""
        self._rack = Rack(self._attention, shelves, form)
        self._pace.settle(self._share, self._since + min(shelf.room - shelf.width for shelf in shelves))

    def _roomy(self, shelf: Shelf, room: int) -> Shelf:
        """A shelf, or one with room for so many more columns where it has less."""
        counted = None if self._explicit else self.length
        return shelf if shelf.room - shelf.width >= room else shelf.grown(room, counted)

    def _brought(self, first: Tensor) -> Ledger:
        """The ledger as it is for queries from positions `first` (B,) on."""
        layer, k = self._attention, self._shelves[0].view("k")
        if self._ledger is None:
            sizes = (first.size(0), layer.n_kv_heads, layer.n_heads // layer.n_kv_heads)
            self._ledger = Ledger(self.eps, sizes, first.device)
        self._seen.measure(self._ledger)
        known = self._seen.limits() if self._fixed is None else self._fixed
        self._ledger.bring(known.rounded(k.dtype), first)
        return self._ledger

    def _judge(self, ledger: Ledger, rack: Rack, shelf: Shelf) -> Verdict:
        """What the heads of a shelf can spare."""
        k = shelf.view("k")
        content = k[..., : self._attention.content_dim]
        norm = torch.linalg.vector_norm(content, dim=-1, dtype=torch.promote_types(k.dtype, torch.float32))
        heads = torch.tensor(shelf.heads, device=k.device)
        return ledger.judge(heads, norm, rack.exposure(shelf), shelf.view("positions"))
