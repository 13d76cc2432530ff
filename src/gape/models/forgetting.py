"""The cache of a layer that lets go of keys which no future query can give weight; `docs/forgetting.md` has the proof.

Shapes: B batch, Hq query heads, Hk key heads, G = Hq / Hk, n new tokens, D and Dv widths of cached keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gape.models import forgetting_limits as limits
from gape.models.forgetting_ledger import Ledger, Verdict
from gape.models.forgetting_shelf import PART, Shelf, grouped, slack
from gape.ops import gated_attention
from gape.ops.carried import carried_attention, carried_form, carry
from gape.ops.checks import described, refuse
from gape.ops.columns import SHORT_BITS
from gape.ops.rounding import significand_bits

if TYPE_CHECKING:
    from gape.models.attention import GAPEAttention

#: Positions are kept in 32 bits.
_LAST_POSITION = 2**31 - 1

#: What decides whether a key may go.
_JUDGED = ("k", "landmark", "positions")


class ForgettingLayer:
    """The cache of one gated layer. What it drops is missed by no query at all, up to eps of its attention.

    Args:
        attention: the layer.
        norm: the LayerNorm or RMSNorm that the layer reads from, or the limits themselves.
        eps: the attention that a query may miss, above 0 and below 1.
        bounds: what is known of future queries, as in :class:`gape.models.cache.ForgettingCache`.

    Attributes:
        length: tokens that have come, kept or not.

    Raises:
        ValueError: the layer has no gates, or `norm` bounds nothing.
    """

    #: The scheme's number per cached key; gated schemes look at no earlier ones.
    side: None = None

    def __init__(
        self, attention: limits.Attends, norm: nn.Module | limits.Limits, *, eps: float, bounds: str = "weights"
    ) -> None:
        floors = limits.least_rates(attention)
        self.eps = eps
        self.length = 0
        self._attention = attention
        if isinstance(norm, nn.Module) and bounds == "weights":
            norm = limits.of_weights(cast("GAPEAttention", attention), norm)
        self._fixed = norm if isinstance(norm, limits.Limits) and bounds == "weights" else None
        self._measured = limits.Measured(floors if bounds == "queries" else None)
        self._counts_beyond = bounds == "queries"
        self._beyond: int | Tensor = 0
        self._noted: list[tuple[Tensor, ...]] = []
        self._reset()

    def _reset(self) -> None:
        self._shelves: list[Shelf] = []
        self._ledger: Ledger | None = None
        self._last: Tensor | None = None
        # Whether the tokens came with positions of their own.
        self._explicit = False
        # Tokens since keys were last looked at.
        self._since = 0
        # Tokens that had come when keys were last dropped, and the first position for which they were judged.
        self._judged = 0
        self._judged_at: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are held, room to grow included."""
        return sum(shelf.nbytes for shelf in self._shelves)

    @property
    def beyond(self) -> int:
        """Queries, counted once for each head, that may have missed more than eps: 0 under bounds from weights.

        Under measured gates nothing is known, and nothing counted.
        """
        self._measure()
        return int(self._beyond)

    @property
    def kept(self) -> list[int]:
        """Keys that each key head holds, of every sample."""
        widths = {head: shelf.width for shelf in self._shelves for head in shelf.heads}
        return [widths.get(head, 0) for head in range(self._attention.n_kv_heads)]

    def positions(self, head: int) -> Tensor:
        """Positions of the keys that a key head holds, int32 (B, kept).

        Raises:
            ValueError: nothing is cached, or there is no such head.
        """
        for shelf in self._shelves:
            if head in shelf.heads:
                return shelf.view("positions")[:, shelf.heads.index(head)]
        raise refuse("head", head, f"a key head from 0 to {self._attention.n_kv_heads - 1}, and tokens in the cache")

    def check_length(self, length: int) -> None:
        """Refuse a length that :meth:`truncate` cannot go back to.

        Raises:
            ValueError: length is negative or beyond what has come, or keys were dropped that a token there could see.
        """
        if not 0 <= length <= self.length:
            raise refuse("length", length, f"a whole number from 0 to {self.length}, the tokens cached")
        if 0 < length < self._judged:
            raise refuse("length", length, f"0, or at least {self._judged}: keys were dropped for tokens from there on")

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: as :meth:`check_length`.
        """
        self.check_length(length)
        removed = self.length - length
        if length == 0:
            self._measure()
            self._reset()
        elif removed:
            for shelf in self._shelves:
                shelf.width -= removed
            self._since = max(0, self._since - removed)
            newest = [shelf.view("positions")[:, 0, -1:].long() for shelf in self._shelves if shelf.width]
            before = [] if self._judged_at is None else [self._judged_at[:, None]]
            self._last = torch.cat([*newest, *before], dim=1).amax(1)
        self.length = length

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
        gates, documents = attention.gates, seen["q_documents"]
        if attention is not self._attention or gates is None or gate is None or landmark is None:
            raise ValueError("cache: made for another model, expected one of this layer")
        if seen["attn_mask"] is not None:
            raise refuse("attn_mask", seen["attn_mask"], "None: a mask that hides the own key would void the proof")
        explicit = seen["q_positions"] is not None
        positions = self._ordered(where, k.size(0), explicit=explicit)
        form, keys = self._carried(k, landmark, where)
        beside = {"positions": positions.to(torch.int32)} | ({} if documents is None else {"documents": documents})
        heads = {name: x[:, None].expand(-1, k.size(1), -1) for name, x in beside.items()}
        parts = {"k": keys, "v": v, "landmark": landmark} | heads
        self._check(parts)
        strength = gates.amplitude[:, None] * gate
        if self._fixed is None:
            self._note(q, k, strength / attention.context_length, positions)
        self._append(parts, positions)
        self._explicit = explicit
        return self._attended(form, q, strength, positions, documents)

    def _carried(self, k: Tensor, landmark: Tensor, where: Tensor) -> tuple[str | None, Tensor]:
        """Keys as they are stored, with the form in which they carry the bias; None where they do not."""
        layer = self._attention
        form = carried_form(layer.impl, layer.reserve, k)
        if form == "rank2" and significand_bits(k) <= SHORT_BITS:
            raise refuse("impl", layer.impl, f"'split' or 'auto', since rank2 rounds the bias in {k.dtype}")
        if form is None:
            return None, k
        return form, carry(k, landmark, where, form=form, context_length=layer.context_length, width=layer.head_dim)

    def _ordered(self, where: Tensor, batch: int, *, explicit: bool) -> Tensor:
        """Positions as int64 (B, n), if they never go back."""
        positions = where.to(torch.int64).expand(batch, where.size(-1))
        if not explicit and self._explicit:
            raise ValueError("positions: got None, expected positions, since cached tokens have explicit ones")
        if explicit and positions.numel():
            last = positions[:, :1] if self._last is None else self._last[:, None]
            if last.size(0) != batch:
                raise refuse("positions", where, f"those of a batch of {last.size(0)}, as cached")
            if bool((torch.cat([last, positions], dim=1).diff(dim=1) < 0).any()):
                raise ValueError("positions: got some that go back, expected each at or behind the one before it")
            if bool((positions >= _LAST_POSITION).any()):
                raise refuse("positions", where, f"positions below {_LAST_POSITION}")
        return positions

    def _note(self, q: Tensor, k: Tensor, rate: Tensor, positions: Tensor) -> None:
        """Remember what is to be measured of queries (B, Hq, n, d), until the ledger changes."""
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        own = (wide * k.repeat_interleave(q.size(1) // k.size(1), dim=1)).sum(-1)
        scale = self._attention.scale
        self._noted.append((scale * wide.norm(dim=-1), scale * own, rate, positions))

    def _measure(self) -> None:
        """Measure the queries noted, and count those that are beyond what was assumed of them."""
        if not self._noted:
            return
        reach, own, rate, positions = (torch.cat(parts, dim=-1) for parts in zip(*self._noted, strict=True))
        self._noted = []
        if positions.numel():
            reach, own = reach.double(), own.double()
            self._measured.see(reach, own, rate)
            if self._ledger is not None and self._counts_beyond:
                self._beyond = self._beyond + self._ledger.uncertain(reach, own, positions)

    def _append(self, parts: dict[str, Tensor], positions: Tensor) -> None:
        """Make room, by forgetting where that is due, and write."""
        added = positions.size(1)
        if not self._shelves:
            self._shelves = [Shelf(list(range(parts["k"].size(1))), parts, added + slack(added))]
        widths = [shelf.width * len(shelf.heads) for shelf in self._shelves]
        if added and self._since >= slack(sum(widths) // self._attention.n_kv_heads):
            self._forget(positions[:, 0], added)
        for index, shelf in enumerate(self._shelves):
            if shelf.width + added > shelf.room:
                self._shelves[index] = shelf.grown(added + slack(shelf.width + added))
        for shelf in self._shelves:
            shelf.write(parts)
        # Nothing counts before this: a call that breaks off above leaves what was there.
        for shelf in self._shelves:
            shelf.width += added
        self.length, self._since = self.length + added, self._since + added
        if added:
            self._last = positions[:, -1]

    def _check(self, parts: dict[str, Tensor]) -> None:
        """Refuse tokens that do not go with those cached."""
        if not self._shelves:
            return
        shelf = self._shelves[0]
        for name in sorted(shelf.names() ^ set(parts)):
            came = "given" if name in parts else "left out"
            raise ValueError(f"{name}: {came}, expected as for the {self.length} tokens already cached")
        for name, part in parts.items():
            if not shelf.fits(name, part):
                raise refuse(name, part, f"to go on from {described(shelf.view(name))}")

    def _forget(self, first: Tensor, added: int) -> None:
        """Drop what no query at positions `first` (B,) or behind can miss, where that is worth moving the rest."""
        groups = self._attention.n_heads // self._attention.n_kv_heads
        if self._ledger is None:
            self._ledger = Ledger(self.eps, (first.size(0), self._attention.n_kv_heads, groups), first.device)
        self._measure()
        known = self._measured.limits() if self._fixed is None else self._fixed
        self._ledger.bring(known.rounded(self._shelves[0].view("k").dtype), first)
        self._since = 0
        held, owner = self.kept, {head: shelf for shelf in self._shelves for head in shelf.heads}
        verdicts = [self._judge(self._ledger, owner[head], head) for head in range(len(held))]
        spared = torch.stack([verdict.spared.amin() for verdict in verdicts]).tolist()
        least = [width - count for width, count in zip(held, spared, strict=True)]
        shelves = []
        for heads in grouped(held, least):
            shelf, width = owner[heads[0]], max(least[head] for head in heads)
            if shelf.heads == heads and shelf.width - width < max(1, shelf.width // PART):
                shelves.append(shelf)
                continue
            kept = [verdicts[head].order[:, held[head] - width :].sort(-1).values for head in heads]
            rows = [(owner[head], head, columns) for head, columns in zip(heads, kept, strict=True)]
            shelves.append(Shelf.gathered(rows, added + slack(width)))
            for head in heads:
                self._ledger.charge(head, verdicts[head], held[head] - width)
            self._judged, self._judged_at = self.length, first
        self._shelves = shelves

    def _judge(self, ledger: Ledger, shelf: Shelf, head: int) -> Verdict:
        """What a key head of a shelf can spare."""
        k, landmark, positions = (shelf.view(name)[:, shelf.heads.index(head)] for name in _JUDGED)
        content = k[..., : self._attention.content_dim]
        norm = torch.linalg.vector_norm(content, dim=-1, dtype=torch.promote_types(k.dtype, torch.float32))
        return ledger.judge(head, norm, landmark, positions)

    def _attended(
        self, form: str | None, q: Tensor, strength: Tensor, positions: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Attention of q (B, Hq, n, d) with Γ·g = strength (B, Hq, n), shelf by shelf, (B, Hq, n, Dv)."""
        if documents is None and not self._explicit and "eps" in self._attention.how(q.size(2)) and self._whole:
            return self._skipping(q, strength)
        batch, _, n, _ = q.shape
        sizes = (batch, self._attention.n_kv_heads, q.size(1) // self._attention.n_kv_heads, n)
        q, strength = q.reshape(*sizes, q.size(-1)), strength.reshape(sizes)
        y = q.new_empty(*q.shape[:4], self._shelves[0].view("v").size(-1))
        for shelf in self._shelves:
            # Heads become samples: each has keys of its own, with their own positions and documents.
            rows = len(shelf.heads)
            where, seen = positions.repeat_interleave(rows, dim=0), dict[str, Any]()
            if form is None or (self._explicit and n > 1):
                seen = {"q_positions": where, "k_positions": shelf.view("positions").flatten(0, 1)}
                # A single query is the latest: it sees whatever is held, and positions then cost no mask.
                seen |= {"is_causal": False} if n == 1 else {}
            if documents is not None:
                seen["q_documents"] = documents.repeat_interleave(rows, dim=0)
                seen["k_documents"] = shelf.view("documents").flatten(0, 1)
            asked, rates = q[:, shelf.pick].flatten(0, 1), strength[:, shelf.pick].flatten(0, 1)
            out = self._over(shelf, form, asked, rates, where, seen)
            y[:, shelf.pick] = out.view(batch, rows, *out.shape[1:])
        return y.flatten(1, 2)

    @property
    def _whole(self) -> bool:
        """Whether nothing was dropped yet: the keys lie in one shelf, in index order."""
        return len(self._shelves) == 1 and self._shelves[0].width == self.length

    def _skipping(self, q: Tensor, strength: Tensor) -> Tensor:
        """The same over all keys in index order, by the kernel that leaves tiles away."""
        attention, shelf = self._attention, self._shelves[0]
        unit = torch.ones(q.size(1), dtype=strength.dtype, device=q.device)
        k = shelf.view("k")[..., : attention.content_dim]
        return gated_attention(
            q, k, shelf.view("v"), strength, shelf.view("landmark"), unit,
            context_length=attention.context_length, scale=attention.scale, **attention.how(q.size(2)),
        )  # fmt: skip

    def _over(
        self, shelf: Shelf, form: str | None, q: Tensor, strength: Tensor, where: Tensor, seen: dict[str, Any]
    ) -> Tensor:
        """Attention over a shelf whose B·H rows are samples of one key head: q (B·H, G, n, d) → (B·H, G, n, Dv)."""
        attention = self._attention
        k, v = (shelf.view(name).flatten(0, 1).unsqueeze(1) for name in ("k", "v"))
        # The amplitude is in the gate already, for it differs from row to row.
        unit = torch.ones(q.size(1), dtype=strength.dtype, device=q.device)
        given: dict[str, Any] = {"context_length": attention.context_length, "scale": attention.scale, **seen}
        if form is not None:
            return carried_attention(q, k, v, strength, unit, where, form=form, **given)
        landmark = shelf.view("landmark").flatten(0, 1).unsqueeze(1)
        return gated_attention(q, k, v, strength, landmark, unit, impl=attention.impl, **given)
