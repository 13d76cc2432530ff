"""KV caches in pages for all layers of a model: one that keeps everything, one that evicts.

Shapes: B rows, Hk key heads, n new tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gape.cache.bounds import least_rates, limits_of_weights
from gape.cache.eviction import BOUNDS, EvictionRule
from gape.cache.evictor import Evictor
from gape.cache.layer import LayerSpec, PagedLayer
from gape.cache.pages import PagedStorage
from gape.ops.paged import PAGE, page_layout
from gape.utils.validation import flag, invalid_argument, whole

if TYPE_CHECKING:
    from gape.models.gpt import GPT

#: Tokens of a row, and of all rows together, from which keys are judged before they are stored, and not at the next
#: eviction: that costs time for each layer, and saves the memory of a whole prompt.
JUDGED_AT_ONCE = 32_768
JUDGED_TOGETHER = 131_072
_NO_TOKEN = "no single token has come yet"
#: Attention that a full cache may lose to skipped tiles, by dtype: far below what rounding does to it.
_FULL_EPS = {torch.bfloat16: 2.0**-20, torch.float16: 2.0**-20, torch.float32: 2.0**-30}


class PagedCache:
    """The caches of a model's layers, in pages.

    Args:
        specs: the layers, first to last.
        model: whose tokens are cached; no other may use the cache.
        rule: when keys are evicted; None keeps everything.

    Attributes:
        rule: as given.
        layers: one cache for each layer.
    """

    def __init__(self, specs: Sequence[LayerSpec], model: Any, rule: EvictionRule | None = None) -> None:
        self.rule = rule
        self._model = weakref.ref(model)
        self.layers = [PagedLayer(self, index, spec) for index, spec in enumerate(specs)]
        #: Whether a step is being captured: then nothing is counted on the host.
        self.capturing = False
        #: Why the last single token was not replayed from a captured graph; None if it was.
        self.uncaptured: str | None = _NO_TOKEN
        self._storage: PagedStorage | None = None
        self._evictor: Evictor | None = None
        self._give_back: Any = None
        self._forget_tokens()

    def _forget_tokens(self) -> None:
        #: Tokens since the last eviction, tokens that it was for, and tokens that the next positions count: more than
        #: layers have where a call broke off.
        self._since = self._evicted_at = self._begun = 0
        self._broken = False
        #: Whether the tokens of the current call are counted for all layers at its end.
        self.counts_together = True
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
        """An empty cache of the same model. Bounds are not worked out again: weights have to be the same.

        Args:
            eps: the attention that a query may lose; None keeps the rule.

        Raises:
            ValueError: eps is out of range.
        """
        clone = copy(self)
        if eps is not None:
            clone.rule = EvictionRule(eps=eps, bounds=BOUNDS[0] if self.rule is None else self.rule.bounds)
        clone._storage = clone._evictor = clone._give_back = None
        clone.capturing, clone.uncaptured = False, _NO_TOKEN
        clone.layers = [PagedLayer(clone, layer.index, layer.spec) for layer in self.layers]
        clone._forget_tokens()
        return clone

    @property
    def storage(self) -> PagedStorage:
        """The pages.

        Raises:
            ValueError: no token has come yet.
        """
        if self._storage is None:
            raise ValueError("cache: it is empty")
        return self._storage

    @property
    def evictor(self) -> Evictor:
        """What evicts keys.

        Raises:
            ValueError: no token has come yet, or nothing is ever evicted.
        """
        if self._evictor is None:
            raise ValueError("cache: it is empty, or keeps everything")
        return self._evictor

    @property
    def measures(self) -> bool:
        """Whether bounds come from the queries, which are measured as they come."""
        return self.rule is not None and self.rule.bounds == "queries"

    @property
    def length(self) -> int:
        """Tokens that have come, cached or not.

        Raises:
            ValueError: an earlier call broke off.
        """
        if self._broken or len({layer.length for layer in self.layers}) != 1:
            raise self._broken_off()
        return self.layers[0].length

    def _broken_off(self) -> ValueError:
        lengths = [layer.length for layer in self.layers]
        return ValueError(
            f"cache: a call broke off, and layers have from {min(lengths)} to {max(lengths)} tokens; "
            "expected a cache that is whole, reset() empties it"
        )

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
        largest: list[list[int]] = self._storage.counts.max(1).tolist()
        return largest

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
        return [row[there] for row, there in zip(positions, valid, strict=True)]

    def enter(self, model: Any) -> None:
        """Refuse a model other than the one the cache was made for.

        Raises:
            ValueError: the model is another one, or an earlier call broke off.
        """
        if self._model() is not model:
            raise ValueError("cache: made for another model, expected its own")
        _ = self.length

    def prepare(self, layer: PagedLayer, k: Tensor, v: Tensor, positions: Tensor, real: Tensor | None) -> None:
        """Get ready for new tokens of a layer; the first layer of a call evicts for all where that is due.

        Raises:
            ValueError: another batch or dtype than cached, positions that do not rise by one, or a call broke off.
        """
        if self._storage is None:
            self._open(k, v)
        rows, dtype = self.storage.shape[1], self.storage.layout.dtype
        if k.size(0) != rows or _dtype(k) != dtype:
            raise invalid_argument("k", k, f"a batch of {rows} in {dtype}, as cached")
        if layer.index == 0 and k.size(2):
            self._begin(k.size(2), positions, real)

    def _begin(self, n: int, positions: Tensor, real: Tensor | None) -> None:
        """Take the tokens of a call into account: evict where that is due, and remember the next position."""
        length, following = self.length, self.storage.next_position
        self._rewind(length)
        rows = positions.to(torch.int64).expand(following.size(0), n)
        last, first = rows[:, -1] + 1, rows[:, 0]
        if real is not None:
            tokens = real.sum(1)
            last, first = (torch.where(tokens > 0, x, following) for x in (last, last - tokens))
        self._check_positions(rows, first, real)
        at_once = self.judges_at_once(n)
        if self.rule is not None and length and self._since + min(n, 4 * PAGE) > self.evictor.interval:
            self.evict(torch.maximum(first, following), incoming=0 if at_once else n)
        following.copy_(last)
        self._begun, self._since = length + n, self._since + n
        if at_once:
            self._evicted_at, self._since = self._begun, 0
        self.counts_together = real is None and not at_once
        if self.counts_together and self.storage.room() < n:
            # Room for tokens to come, too, where they come one by one.
            self.storage.reserve(max(n, self._room) if n == 1 else n)

    @property
    def _room(self) -> int:
        """Keys that pages are reserved for where tokens come one by one."""
        return 4 * PAGE if self._evictor is None else self._evictor.interval

    def end(self, layer: PagedLayer, n: int) -> None:
        """Count the tokens of a call for a layer that has written them; the last layer counts for all."""
        layer.length += n
        if self.counts_together and layer is self.layers[-1]:
            with self.writing():
                self.storage.advance(n)
                for each in self.layers:
                    each.stored += n

    def _check_positions(self, rows: Tensor, first: Tensor, real: Tensor | None) -> None:
        """Refuse positions (B, n) that do not rise by one or go back behind those cached, and pads behind a token."""
        wrong = torch.zeros(3, dtype=torch.bool, device=rows.device)
        if self.rule is not None:
            wrong[0] = (first < self.storage.next_position).any()
        if rows.size(1) > 1:
            uneven = rows.diff(dim=1) != 1
            wrong[1] = (uneven if real is None else uneven & real[:, :-1]).any()
        if real is not None:
            wrong[2] = (real[:, :-1] & ~real[:, 1:]).any()
        # Asked together, for the device has to be waited for.
        back, uneven_rows, pads = wrong.tolist()
        if back:
            raise ValueError("positions: got some that go back, expected each behind those that are cached")
        if uneven_rows:
            raise ValueError("positions: expected those of a call to rise by one in every row")
        if pads:
            raise ValueError("documents: got pads behind a token, expected padding on the left")

    def _rewind(self, length: int) -> None:
        """Take positions back to so many tokens: of some that are dropped, or of a call that broke off."""
        taken_back = self._begun - length
        if taken_back and self._storage is not None:
            self.storage.next_position.sub_(taken_back).clamp_(min=0)
            self._since = max(0, self._since - taken_back)
        self._begun = length

    def judges_at_once(self, n: int) -> bool:
        """Whether the keys of n tokens are judged when they are stored: many, or more than a budget has room for."""
        if self.rule is None:
            return False
        many = n >= JUDGED_AT_ONCE or self.storage.shape[1] * n >= JUDGED_TOGETHER
        return many if self.rule.eps is not None else n > self.evictor.interval

    def evict(self, first: Tensor | None = None, incoming: int = 0) -> None:
        """Evict now what queries from positions `first` (B,) on can do without; by default those that come next.

        Args:
            first: int64 (B,).
            incoming: keys that are about to come, for which a budget leaves room.
        """
        if self._evictor is None:
            return
        first, length = self.storage.next_position if first is None else first, self.length
        with self.writing():
            self._evictor.evict(first, max(incoming, self._evictor.interval))
            self._evicted_at, self._since = length, 0

    def ready_for_step(self, positions: Tensor) -> None:
        """Make sure that a captured step can add one token: room everywhere, eviction where it is due."""
        self._rewind(self.length)
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
            self.storage.advance_host()
            for layer in self.layers:
                layer.length, layer.stored = layer.length + 1, layer.stored + 1
            self._since, self._begun = self._since + 1, self._begun + 1

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: length is negative or beyond what has come, keys were evicted that a token there could see, or a
                call broke off while it wrote.
        """
        current = min(layer.length for layer in self.layers)
        if whole("length", length, 0) > current:
            raise invalid_argument("length", length, f"a whole number from 0 to {current}, the tokens cached")
        if length == 0:
            self.reset()
            return
        if length < self._evicted_at:
            raise invalid_argument(
                "length", length, f"0, or at least {self._evicted_at}: keys were evicted for tokens from there on"
            )
        if self._broken:
            raise self._broken_off()
        with self.writing():
            for layer in self.layers:
                # A call that broke off left some layers with tokens that the pages do not count.
                self.storage.drop_last(layer.index, max(0, layer.stored - length))
                layer.length = layer.stored = length
            self._rewind(length)

    def reset(self) -> None:
        """Forget everything and give the pages back."""
        if self._give_back is not None:
            self._give_back()
        self._storage = self._evictor = self._give_back = None
        self._forget_tokens()

    def _open(self, k: Tensor, v: Tensor) -> None:
        """Make the pages for a batch like k and v, or take those that an earlier cache of the model has left."""
        layout = page_layout(k.size(-1), v.size(-1), _dtype(k))
        shape, device = (len(self.layers), k.size(0), self.layers[0].spec.n_kv_heads), k.device
        idle = _IDLE.pop(self._model(), None)
        fits = idle is not None and (idle.shape, idle.layout, idle.device) == (shape, layout, device)
        query_heads = self.layers[0].spec.n_heads
        storage = idle if idle is not None and fits else PagedStorage(*shape, query_heads, layout, device)
        if self.rule is not None:
            self._evictor = Evictor(self.rule, [layer.spec for layer in self.layers], storage)
        self._storage = storage
        self._give_back = weakref.finalize(self, _park, self._model, storage)
        self._give_back.atexit = False


class FullCache(PagedCache):
    """The cache of a GPT that keeps every key, in pages.

    Args:
        model: whose scheme rotates q and k, with gates or without.

    Raises:
        ValueError: the scheme has a bias of its own.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__(gpt_specs(model, None), model)


class ForgettingCache(PagedCache):
    """The cache of a GPT that evicts keys for good once no future query can attend to them: `docs/results/proofs.md`.

    Every query of every layer and head attends within eps, in total variation, of what it would with all keys. Made
    for one model and its weights as they are; for any batch size, chunked prefill and left padding. Positions may
    not go back, and there are no masks.

    Args:
        model: whose scheme has gates with a floor.
        eps: the attention that a query may lose, above 0 and below 1.
        bounds: what is known of future queries. "weights" bounds them by the weights and is proven for all inputs.
            "queries" takes the largest query so far and an eighth more; `realised_eps` says what that came to.
        partial: allow heads without a floor, whose keys are all kept.
        max_keys: in place of eps: keys of a key head at most, on average over the heads of a layer.
        max_bytes: in place of eps: bytes of the cache at most. `realised_eps` says what a budget cost.

    Raises:
        ValueError: an argument is out of range, the scheme has no gates, or a head has no floor (or none has, under
            `partial`); names layer and head.
    """

    def __init__(
        self,
        model: GPT,
        *,
        eps: float | None = None,
        bounds: str = "weights",
        partial: bool = False,
        max_keys: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        rule = EvictionRule(eps=eps, max_keys=max_keys, max_bytes=max_bytes, bounds=bounds)
        specs = gpt_specs(model, rule)
        refuse_without_floors(specs, rule, partial=flag("partial", partial))
        super().__init__(specs, model, rule)


def gpt_specs(model: GPT, rule: EvictionRule | None) -> list[LayerSpec]:
    """The layers of a GPT as a cache sees them, with the bounds that a rule needs."""
    specs = []
    for block in model.blocks():
        attention = block.attention
        if attention.has_own_bias:
            raise invalid_argument("model", attention.position, "a scheme that rotates q and k, with gates or without")
        gated = attention.gates is not None
        if rule is not None and not gated:
            raise invalid_argument("position", attention.position, "a scheme with gates, which alone fades")
        limited = rule is not None and rule.bounds == "weights"
        specs.append(
            LayerSpec(
                owner=attention, n_heads=attention.n_heads, n_kv_heads=attention.n_kv_heads, scale=attention.scale,
                least_rate=least_rates(attention) if gated else None, impl=attention.impl,
                limits=limits_of_weights(attention, block.attention_norm) if limited else None,
            )
        )  # fmt: skip
    return specs


def refuse_without_floors(specs: Sequence[LayerSpec], rule: EvictionRule, *, partial: bool) -> None:
    """Refuse layers whose keys never fade, where a tolerance should evict them.

    Raises:
        ValueError: a head has no floor, or none has, under `partial`; names layer and head.
    """
    if rule.eps is None:
        return
    rates = [torch.zeros(1) if spec.least_rate is None else spec.least_rate for spec in specs]
    bare = [(layer, head) for layer, each in enumerate(rates) for head in torch.nonzero(each <= 0).flatten().tolist()]
    if bare and not (partial and any(bool((each > 0).any()) for each in rates)):
        hint = "in some head" if partial else "in every head, or partial=True"
        raise ValueError(
            f"model: nothing fades in layer {bare[0][0]}, head {bare[0][1]}; expected gates with a gate_floor and an "
            f"amplitude above 0 {hint}"
        )


def _dtype(k: Tensor) -> torch.dtype:
    """What keys are cached in: their own dtype, or that of autocast."""
    kind = k.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else k.dtype


#: Pages of caches that are gone, one for each model: a new cache of the same batch takes them with their captured step.
_IDLE: weakref.WeakKeyDictionary[Any, PagedStorage] = weakref.WeakKeyDictionary()


def _park(model: Any, storage: PagedStorage) -> None:
    """Keep the tables and the captured step of a cache that is gone, and free its pages."""
    owner = model()
    storage.clear()
    if owner is not None:
        _IDLE[owner] = storage
