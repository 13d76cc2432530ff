"""A KV cache in pages for all layers of a model: it keeps everything, or evicts by a rule.

:mod:`gape.cache.gpt` has those of a GPT. Shapes: B rows, Hk key heads, n new tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gape.cache.eviction import EvictionRule, Evictor
from gape.cache.layer import LayerSpec, PagedLayer, gate_readings
from gape.cache.pages import PagedStorage, idle_pages, park
from gape.ops.inputs import working_dtype
from gape.ops.paged import PAGE, PageLayout, page_layout
from gape.ops.prologue import GateReading
from gape.utils.validation import invalid_argument, whole

#: Tokens of a row, and of all rows together, from which keys of a call are evicted before they are stored, and not at
#: the next eviction: that takes time in each layer, and saves the memory of a whole prompt.
EARLY_TOKENS = 32_768
EARLY_TOKENS_OF_BATCH = 131_072
#: Positions are stored as int32.
_POSITIONS_END = 2**31
#: Attention that a full cache may lose to skipped tiles, by dtype: far below what rounding does to it.
_FULL_EPS = {torch.bfloat16: 2.0**-20, torch.float16: 2.0**-20, torch.float32: 2.0**-30}


class Call(NamedTuple):
    """A call that adds n tokens, pads included, to each row of all layers.

    `next_position`, int64 (B,), is behind the last token of each row. `early`: keys are evicted before they are stored.
    `together`: the pages count its tokens at its end, for all layers at once.
    """

    n: int
    next_position: Tensor
    early: bool
    together: bool


class PagedCache:
    """The caches of a model's layers, in pages.

    Args:
        model: whose tokens are cached; no other may use the cache.
        specs: called as specs(model, rule), gives the layers, first to last, with bounds for weights as they are.
        rule: when keys are evicted; None keeps everything.

    Attributes:
        layers: one cache for each layer.
        call: the call that is adding tokens, None between calls.
        capturing: whether a step is being captured: then nothing is counted on the host.
        uncaptured: why the last single token was not replayed from a captured graph; None if it was.
    """

    def __init__(
        self, model: Any, specs: Callable[[Any, EvictionRule | None], list[LayerSpec]], rule: EvictionRule | None = None
    ) -> None:
        self.rule, self._specs = rule, specs
        self._model = weakref.ref(model)
        self.layers = [PagedLayer(self, index, spec) for index, spec in enumerate(specs(model, rule))]
        self.capturing = False
        self.uncaptured: str | None = "there was no single token yet"
        self._forget_tokens()

    def _forget_tokens(self) -> None:
        self.call: Call | None = None
        self._readings: list[GateReading] | None = None
        self._broken = False
        #: Tokens since the last eviction, and tokens that it was for.
        self._since = self._evicted_at = 0
        self._storage: PagedStorage | None = None
        self._evictor: Evictor | None = None
        self._give_back: Any = None
        for layer in self.layers:
            layer.length = layer.stored = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        clone = copy(self)
        clone._storage, clone._give_back = deepcopy(self._storage, memo), None
        if clone._storage is not None and self._evictor is not None:
            clone._evictor = self._evictor.copied(clone._storage)
        clone.layers = []
        for layer in self.layers:
            twin = PagedLayer(clone, layer.index, layer.spec)
            twin.length, twin.stored = layer.length, layer.stored
            clone.layers.append(twin)
        return clone

    def fresh(self, eps: float | None = None) -> PagedCache:
        """An empty cache of the same model, with bounds for its weights as they are now, and another eps if given."""
        rule = self.rule
        if eps is not None:
            rule = EvictionRule(eps=eps) if rule is None else replace(rule, eps=eps, max_keys=None, max_bytes=None)
        clone = copy(self)
        if (model := self._model()) is None:
            raise ValueError("cache: its model is gone")
        PagedCache.__init__(clone, model, self._specs, rule)
        return clone

    @property
    def storage(self) -> PagedStorage:
        """The pages; a ValueError while the cache is empty."""
        if self._storage is None:
            raise ValueError("cache: it is empty")
        return self._storage

    def layout(self, k: Tensor, v: Tensor) -> PageLayout:
        """Of the pages; of those for k and v (B, Hk, n, width) while the cache is empty."""
        storage = self._storage
        return page_layout(k.size(-1), v.size(-1), working_dtype(k)) if storage is None else storage.layout

    @property
    def evictor(self) -> Evictor:
        """What evicts keys; a ValueError while the cache is empty, or where it keeps everything."""
        if self._evictor is None:
            raise ValueError("cache: it is empty, or keeps everything")
        return self._evictor

    @property
    def measures(self) -> bool:
        """Whether bounds come from the queries, which are measured."""
        return self.rule is not None and self.rule.bounds == "queries"

    @property
    def length(self) -> int:
        """Tokens so far, cached or evicted; a ValueError where an earlier call broke off."""
        if self._broken or len({layer.length for layer in self.layers}) != 1:
            raise self._broken_off()
        return self.layers[0].length

    def _broken_off(self) -> ValueError:
        few, many = (choose(layer.length for layer in self.layers) for choose in (min, max))
        expected = "expected a cache that is whole, reset() empties it"
        return ValueError(f"cache: a call broke off, and layers have from {few} to {many} tokens; {expected}")

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use, room for the next tokens included."""
        return 0 if self._storage is None else self._storage.nbytes

    @property
    def num_keys(self) -> list[list[int]]:
        """Keys that each layer and key head has cached, the largest number of any row."""
        if self._storage is None:
            return [[0] * layer.spec.n_kv_heads for layer in self.layers]
        self._storage.read_counts()
        return self._storage.counts.max(1).tolist()  # type: ignore[no-any-return]

    @property
    def realised_eps(self) -> float:
        """The most attention that any query of any layer and head can have lost to eviction; 1: nothing is known."""
        return 0.0 if self._evictor is None else self._evictor.realised_eps

    @property
    def skip_eps(self) -> float:
        """The attention that queries of a prompt may lose to skipped tiles: half of eps, the other is eviction's."""
        if self.rule is None or self.rule.eps is None:
            return _FULL_EPS.get(self.storage.layout.dtype, 0.0)
        return self.rule.eps / 2

    def positions(self, layer: int, head: int) -> list[Tensor]:
        """Positions of the keys that a key head of a layer has cached, int32, one tensor for each row."""
        _, batch, heads = self.storage.shape
        sequences = (layer * batch + torch.arange(batch, device=self.storage.device)) * heads + head
        *_, positions, valid = self.storage.read(sequences)
        return [row[mask] for row, mask in zip(positions, valid, strict=True)]

    def enter(self, model: Any) -> None:
        """Refuse a model other than the one that the cache serves, and a call after one that broke off."""
        if self._model() is not model:
            raise ValueError("cache: made for another model, expected its own")
        _ = self.length

    def begin(self, k: Tensor, v: Tensor, positions: Tensor, real: Tensor | None) -> None:
        """Get ready for the tokens of a call, which the first layer announces: evict where that is due, make room.

        k (B, Hk, n, D) and v (B, Hk, n, Dv) are those of the first layer; the rest as in :meth:`PagedLayer.attend`.

        A ValueError refuses tokens that do not go on from those cached.
        """
        if self._storage is None:
            self._open(k, v)
        batch, n, length = k.size(0), k.size(2), self.length
        if batch != self.storage.shape[1] or working_dtype(k) != self.storage.layout.dtype:
            expected = f"a batch of {self.storage.shape[1]} in {self.storage.layout.dtype}, as cached"
            raise invalid_argument("k", k, expected)
        if not n:
            return
        cached = self.storage.next_position
        rows = positions.to(torch.int64).expand(batch, n)
        first, last = rows[:, 0], rows[:, -1] + 1
        if real is not None:
            tokens = real.sum(1)
            first, last = (torch.where(tokens > 0, x, cached) for x in (last - tokens, last))
        self._check_positions(rows, first, real)
        early = self._evicts_early(n)
        if self.rule is not None and length and self._since + min(n, 4 * PAGE) > self.evictor.interval:
            self.evict(torch.maximum(first, cached), incoming=0 if early else n)
        if early:
            self._evicted_at = length + n
        self.call, self._readings = Call(n, last, early, together=real is None and not early), None
        if self.call.together and self.storage.room() < n:
            # Room for tokens to come, too, where they come one by one.
            self.storage.reserve(max(n, self._room) if n == 1 else n)

    def reading(self, layer: int) -> GateReading:
        """What kernels read the gates of a layer by in the current call."""
        if self._readings is None:
            self._readings = gate_readings([each.spec for each in self.layers])
        return self._readings[layer]

    @property
    def _room(self) -> int:
        """Keys that pages are reserved for where tokens come one by one."""
        return 4 * PAGE if self._evictor is None else min(4 * PAGE, self._evictor.interval)

    def end(self, layer: PagedLayer) -> None:
        """Count the tokens of a call for a layer that has written them; the last layer counts for all."""
        call = self.call
        assert call is not None
        if layer is not self.layers[-1]:
            layer.length += call.n
            return
        with self.writing():
            layer.length += call.n
            self.storage.next_position.copy_(call.next_position)
            if call.together:
                self.storage.advance(call.n)
                for each in self.layers:
                    each.stored += call.n
            self._since, self.call = 0 if call.early else self._since + call.n, None

    def _check_positions(self, rows: Tensor, first: Tensor, real: Tensor | None) -> None:
        """Refuse positions (B, n) that do not rise by one or are not behind those cached, and pads behind a token."""
        cached = self.storage.next_position
        uneven = rows.diff(dim=1) != 1
        wrong = {
            "positions: got some that go back, expected each behind those that are cached": first < cached,
            "positions: got some of 2³¹ or more, expected less with a cache in pages": rows[:, -1] >= _POSITIONS_END,
            "positions: expected those of a call to rise by one in every row": (
                uneven if real is None else uneven & real[:, :-1]
            ),
        }
        if real is not None:
            before = torch.cat([cached[:, None] > 0, real[:, :-1]], dim=1)
            wrong["documents: got pads behind a token, expected padding on the left"] = before & ~real
        # Read together, for the device has to be waited for.
        for message, applies in zip(wrong, torch.stack([x.any() for x in wrong.values()]).tolist(), strict=True):
            if applies:
                raise ValueError(message)

    def _evicts_early(self, n: int) -> bool:
        """Whether keys of n tokens are evicted before they are stored: many, or more than a budget has room for."""
        if self.rule is None:
            return False
        many = n >= EARLY_TOKENS or self.storage.shape[1] * n >= EARLY_TOKENS_OF_BATCH
        return many if self.rule.eps is not None else n > self.evictor.interval

    def evict(self, first: Tensor | None = None, incoming: int = 0) -> None:
        """Evict now what queries from positions `first`, int64 (B,), can do without; by default the next ones.

        `incoming` keys are about to come, for which a budget leaves room.
        """
        if self._evictor is None:
            return
        cached, length = self.storage.next_position, self.length
        with self.writing():
            if first is not None:
                torch.maximum(cached, first, out=cached)
            self._evictor.evict(cached, max(incoming, self._evictor.interval))
            self._evicted_at, self._since = length, 0

    def ready_for_step(self, positions: Tensor) -> None:
        """Make sure that a captured step can add one token: room everywhere, eviction where it is due."""
        if self._evictor is not None and self._since + 1 > self._evictor.interval:
            self.evict(positions[:, 0].to(torch.int64))
        if self.storage.room() < 1:
            self.storage.settle(self._room)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context that changes what is cached; if it breaks off, the cache has to be emptied."""
        self._broken = True
        yield
        self._broken = False

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which a captured step adds one token; if it breaks off, the cache has to be emptied."""
        with self.writing():
            yield
            self.storage.counts += 1
            for layer in self.layers:
                layer.length, layer.stored = layer.length + 1, layer.stored + 1
            self._since += 1

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; a ValueError where keys that these could see are gone."""
        if whole("length", length, 0) > (current := min(layer.length for layer in self.layers)):
            raise invalid_argument("length", length, f"a whole number from 0 to {current}, the tokens cached")
        if length == 0:
            self.reset()
            return
        if length < self._evicted_at:
            expected = f"0, or at least {self._evicted_at}: keys were evicted for tokens from there on"
            raise invalid_argument("length", length, expected)
        if self._broken:
            raise self._broken_off()
        with self.writing():
            # The last layer has the tokens of whole calls alone.
            removed = self.layers[-1].length - length
            for layer in self.layers:
                # A call that broke off left some layers with tokens that the pages do not count.
                self.storage.drop_last(layer.index, max(0, layer.stored - length))
                layer.length = layer.stored = length
            self.storage.next_position.sub_(removed).clamp_(min=0)
            self._since, self.call = max(0, self._since - removed), None

    def reset(self) -> None:
        """Forget everything, give the pages back, and work out bounds for weights as they are now."""
        if self._give_back is not None:
            self._give_back()
        self._forget_tokens()
        if (model := self._model()) is not None and self.rule is not None:
            for layer, spec in zip(self.layers, self._specs(model, self.rule), strict=True):
                layer.spec = spec

    def _open(self, k: Tensor, v: Tensor) -> None:
        """Make the pages for a batch like k and v, or take those that an earlier cache of the model has left."""
        layout, spec, model = self.layout(k, v), self.layers[0].spec, self._model()
        shape, device = (len(self.layers), k.size(0), spec.n_kv_heads), k.device
        storage = None if model is None else idle_pages(model)
        if storage is None or (storage.shape, storage.layout, storage.device) != (shape, layout, device):
            storage = PagedStorage(*shape, spec.n_heads, layout, device)
        if self.rule is not None:
            self._evictor = Evictor(self.rule, [layer.spec for layer in self.layers], storage)
        self._storage = storage
        self._give_back = weakref.finalize(self, park, self._model, storage)
        self._give_back.atexit = False
