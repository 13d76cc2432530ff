"""KV caches in pages: one that keeps everything, and one that evicts keys which no future query can attend to.

A prompt is attended to as it comes, among its own tokens, by the kernel that skips; what was cached before is read from
pages, and both parts are merged. Then its keys are written to pages once, without those that can be evicted at once.
A single token is written first and reads pages only.

Shapes: B rows, Hq / Hk query / key heads, n new tokens, D and Dv widths of keys and values.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gape.cache.bounds import Limits
from gape.cache.eviction import Account, Candidates, QueryRange, widened
from gape.cache.pages import PagedStorage
from gape.ops.api import gated_attention
from gape.ops.paged import PAGE, PageLayout, causal_attention, paged_attention, write_keys
from gape.ops.plain import attention
from gape.utils.validation import finite, invalid_argument, whole

if TYPE_CHECKING:
    from gape.models.cuda_graphs import CapturedStep

#: What bounds on future queries may come from.
BOUNDS = ("weights", "queries")
#: New tokens from which keys are judged before they are stored, and not at the next eviction.
_JUDGED_AT_ONCE = 256
#: Tokens between evictions at least, and the share of the cached keys that may come in between.
_LEAST_INTERVAL = 64
_INTERVAL_SHARE = 16
#: Attention that a full cache may lose to skipped tiles, by dtype: far below what rounding does to it.
_FULL_EPS = {torch.bfloat16: 2.0**-20, torch.float16: 2.0**-20, torch.float32: 2.0**-30}


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSpec:
    """An attention layer as its cache sees it.

    Attributes:
        owner: the module that the cache serves; no other may use it.
        n_heads, n_kv_heads: Hq and Hk.
        scale: softmax scale.
        least_rate: float64 (Hq,), what no query's rate falls below; None without gates.
        limits: bounds on its queries from weights; None where they are measured.
        impl: the implementation of the operator that the layer uses where no kernel of the cache runs.
    """

    owner: Any
    n_heads: int
    n_kv_heads: int
    scale: float
    least_rate: Tensor | None = None
    limits: Limits | None = None
    impl: str = "auto"


@dataclass(frozen=True, kw_only=True)
class EvictionRule:
    """When keys are evicted.

    Attributes:
        eps: the attention that a query may lose, above 0 and below 1; None goes by a budget.
        max_keys: keys of a key head at most, on average over the heads of a layer; None goes by eps.
        max_bytes: bytes of the cache at most; None for the others.
        bounds: where bounds on future queries come from, one of BOUNDS.
    """

    eps: float | None = None
    max_keys: int | None = None
    max_bytes: int | None = None
    bounds: str = "weights"

    def __post_init__(self) -> None:
        given = [name for name in ("eps", "max_keys", "max_bytes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"eps, max_keys, max_bytes: got {', '.join(given) or 'none'}, expected exactly one")
        if self.eps is not None and not 0 < finite("eps", self.eps, "a number above 0 and below 1") < 1:
            raise invalid_argument("eps", self.eps, "a number above 0 and below 1")
        for name in ("max_keys", "max_bytes"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 2 * PAGE)
        if self.bounds not in BOUNDS:
            raise invalid_argument("bounds", self.bounds, f"one of {BOUNDS}")


class PagedLayer:
    """The cache of one attention layer.

    Attributes:
        length: tokens that have come, cached or not.
    """

    #: Gated schemes have no numbers of earlier keys to read.
    side: None = None

    def __init__(self, cache: PagedCache, index: int, spec: LayerSpec) -> None:
        self._cache, self.index, self.spec = weakref.proxy(cache), index, spec
        self.length = 0
        self.account: Account | None = None
        self.query_range: QueryRange | None = None

    def attend(
        self,
        owner: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rate: Tensor | None,
        landmark: Tensor | None,
        positions: Tensor,
        real: Tensor | None = None,
    ) -> Tensor:
        """Add tokens and attend to them and to everything cached.

        Args:
            owner: the module that attends.
            q, k, v: (B, Hq, n, D), (B, Hk, n, D) and (B, Hk, n, Dv), rotated, in the dtype of the cache.
            rate, landmark: (B, Hq, n), the rate c_i, and (B, Hk, n); None without gates.
            positions: integer (n,) or (B, n); of a row they rise by one.
            real: bool (B, n), False for pads, which stand on the left; None where there are none.

        Returns:
            (B, Hq, n, Dv).

        Raises:
            ValueError: another module or batch, positions that go back, or an earlier call that broke off.
        """
        if owner is not self.spec.owner:
            raise ValueError("cache: made for another model, expected one of this layer")
        cache, n = self._cache, q.size(2)
        if rate is None or landmark is None:
            # Without gates nothing fades.
            rate, landmark = q.new_zeros(q.shape[:3], dtype=_side(q)), k.new_zeros(k.shape[:3], dtype=_side(k))
        if cache.capturing:
            return self._decode(q, k, v, rate, 1 - landmark, positions, counted=False)
        storage = cache.prepare(self, k, v, positions, real)
        if self.query_range is not None:
            self.query_range.include(q, k, self.spec.scale, real)
        if n == 1 and real is None:
            storage.reserve(self.index, 1)
            out = self._decode(q, k, v, rate, 1 - landmark, positions, counted=True)
        else:
            out = self._prefill(q, k, v, rate, landmark, positions, real)
        self.length += n
        return out

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, exposure: Tensor, positions: Tensor, *, counted: bool
    ) -> Tensor:
        """Write one token and attend to all of the pages; a captured step counts the token for all layers at its end."""
        storage = self._cache.storage
        pages = storage.pages(self.index)
        write_keys(pages, k, v, exposure, positions)
        out, _ = paged_attention(q, rate, positions, pages, scale=self.spec.scale, new=1)
        if counted:
            storage.lengths[self.index] += 1
            storage.counts[self.index] += 1
        return out

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, landmark: Tensor, positions: Tensor, real: Tensor | None
    ) -> Tensor:
        """Attend among new tokens and to the pages, and store the new keys."""
        if real is None:
            out = self._attend_prompt(q, k, v, rate, landmark, positions)
            self._store(k, v, 1 - landmark, positions, None)
            return out
        # Pads last: then causality hides them, and no mask is needed.
        to_front, back = _rolls(real)
        q, k, v, rate, landmark = (_rolled(x, to_front) for x in (q, k, v, rate, landmark))
        positions = positions.expand(real.shape).gather(1, to_front)
        out = self._attend_prompt(q, k, v, rate, landmark, positions)
        self._store(k, v, 1 - landmark, positions, real.gather(1, to_front))
        return _rolled(out, back)

    def _attend_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, landmark: Tensor, positions: Tensor
    ) -> Tensor:
        cache, spec = self._cache, self.spec
        storage, eps = cache.storage, cache.skip_eps
        if not storage.in_kernels and not storage.counts[self.index].any():
            if spec.least_rate is None:
                return attention(q, k, v, scale=spec.scale)
            ones = rate.new_ones(q.size(1))
            return gated_attention(q, k, v, rate, landmark, ones, context_length=1, scale=spec.scale, impl=spec.impl)
        out, lse = causal_attention(q, k, v, rate, 1 - landmark, scale=spec.scale, eps=eps / 2)
        if not storage.counts[self.index].any():
            return out
        pages = storage.pages(self.index)
        return paged_attention(q, rate, positions, pages, scale=spec.scale, prior=(out, lse), eps=eps / 2)[0]

    def _store(self, k: Tensor, v: Tensor, exposure: Tensor, positions: Tensor, real: Tensor | None) -> None:
        """Write new keys, without pads and without those that can be evicted at once."""
        cache, n = self._cache, k.size(2)
        rule, storage = cache.rule, cache.storage
        keep = None if real is None else real[:, None].expand(-1, k.size(1), -1)
        at_once = rule is not None and n >= _JUDGED_AT_ONCE
        if at_once and rule.eps is not None and self.heads.numel():
            keep = torch.ones_like(k[..., 0], dtype=torch.bool) if keep is None else keep.clone()
            norm = torch.linalg.vector_norm(k, dim=-1, dtype=_side(k))
            places = positions if positions.dim() == 1 else positions[:, None]
            parts = (norm, exposure, places.expand_as(norm), keep)
            candidates = Candidates(self.heads, *(part.index_select(1, self.heads) for part in parts))
            keep[:, self.heads] = self._choose(candidates, cache.next_position)
        storage.append(self.index, k, v, exposure, positions, keep)
        if at_once and rule.eps is None:
            self.evict(cache.next_position)

    @property
    def heads(self) -> Tensor:
        """Key heads that keys may be evicted from, int64 (H,): those that fade, or all under a budget."""
        cache = self._cache
        groups = self.spec.n_heads // self.spec.n_kv_heads
        if self.spec.least_rate is None:
            return torch.empty(0, dtype=torch.int64, device=cache.storage.device)
        fades = (self.spec.least_rate > 0).view(-1, groups).all(1)
        if cache.rule.eps is None:
            fades = torch.ones_like(fades)
        return torch.nonzero(fades).flatten().to(cache.storage.device)

    def evict(self, first: Tensor) -> None:
        """Evict keys that queries from positions `first` (B,) on can do without, and move the others together."""
        storage, heads = self._cache.storage, self.heads
        if not heads.numel() or not storage.counts[self.index].any():
            return
        k, v, exposure, positions = storage.read(self.index, heads)
        lengths = storage.lengths[self.index].index_select(1, heads)
        valid = torch.arange(k.size(2), device=k.device) < lengths.unsqueeze(-1)
        norm = torch.linalg.vector_norm(k, dim=-1, dtype=_side(k))
        keep = self._choose(Candidates(heads, norm, exposure, positions, valid), first)
        storage.rewrite(self.index, heads, (k, v, exposure, positions), keep)

    def _choose(self, candidates: Candidates, first: Tensor) -> Tensor:
        """The candidates that stay, bool (B, H, N); what goes is charged to the account."""
        cache, spec = self._cache, self.spec
        batch, device = candidates.valid.size(0), candidates.valid.device
        if self.account is None:
            sizes = (batch, spec.n_kv_heads, spec.n_heads // spec.n_kv_heads)
            eps = None if cache.rule.eps is None else cache.rule.eps / 2
            self.account = Account(eps, sizes, device)
        limits = spec.limits if self.query_range is None else self.query_range.limits()
        assert limits is not None
        self.account.advance(widened(limits, cache.storage.layout.dtype, device), first)
        if cache.rule.eps is not None:
            return self.account.evict(candidates)
        budget = (cache.max_keys - cache.interval) * spec.n_kv_heads
        return self.account.evict(candidates, (candidates.valid.sum((1, 2)) - budget).clamp(min=0))


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
        self.uncaptured: str | None = "no single token has come yet"
        self._storage: PagedStorage | None = None
        self._forget_tokens()

    def _forget_tokens(self) -> None:
        self.interval, self._since, self._evicted_at = _LEAST_INTERVAL, 0, 0
        self.max_keys: int = 0
        self.next_position = torch.empty(0)
        for layer in self.layers:
            layer.length, layer.account, layer.query_range = 0, None, None

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        clone = copy(self)
        clone._storage = deepcopy(self._storage, memo)
        clone.layers = []
        for layer in self.layers:
            twin = copy(layer)
            twin._cache = weakref.proxy(clone)
            twin.account, twin.query_range = deepcopy(layer.account, memo), deepcopy(layer.query_range, memo)
            clone.layers.append(twin)
        return clone

    def fresh(self) -> PagedCache:
        """An empty cache of the same model and rule. Bounds are not worked out again: weights have to be the same."""
        clone = copy(self)
        clone._storage, clone.capturing = None, False
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
    def length(self) -> int:
        """Tokens that have come, cached or not.

        Raises:
            ValueError: the layers have different numbers, since an earlier call broke off.
        """
        lengths = sorted({layer.length for layer in self.layers})
        if len(lengths) != 1:
            raise ValueError(
                f"cache: layers have from {lengths[0]} to {lengths[-1]} tokens, expected as many in each; "
                "a call broke off, begin again with an empty cache"
            )
        return lengths[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use, room for the next tokens included."""
        return 0 if self._storage is None else self._storage.nbytes

    @property
    def num_keys(self) -> list[list[int]]:
        """Keys that each layer and key head has cached, the largest number of any row."""
        if self._storage is None:
            return [[0] * layer.spec.n_kv_heads for layer in self.layers]
        largest: list[list[int]] = self._storage.counts.max(1).tolist()
        return largest

    @property
    def realised_eps(self) -> float:
        """The most attention that any query of any layer and head can have lost to eviction; nan where unbounded."""
        accounts = [layer.account for layer in self.layers if layer.account is not None]
        return max((float(account.realised_eps.max()) for account in accounts), default=0.0)

    @property
    def skip_eps(self) -> float:
        """The attention that queries of a prompt may lose to skipped tiles: half of eps, the other half is eviction's."""
        if self.rule is None or self.rule.eps is None:
            return _FULL_EPS.get(self.storage.layout.dtype, 0.0)
        return self.rule.eps / 2

    def positions(self, layer: int, head: int) -> list[Tensor]:
        """Positions of the keys that a key head of a layer has cached, int32, one tensor for each row."""
        heads = torch.tensor([head], device=self.storage.device)
        *_, positions = self.storage.read(layer, heads)
        return [row[0, :count] for row, count in zip(positions, self.storage.counts[layer][:, head], strict=True)]

    def enter(self, model: Any) -> None:
        """Refuse a model other than the one the cache was made for.

        Raises:
            ValueError: the model is another one, or an earlier call broke off.
        """
        if self._model() is not model:
            raise ValueError("cache: made for another model, expected its own")
        _ = self.length

    def prepare(self, layer: PagedLayer, k: Tensor, v: Tensor, positions: Tensor, real: Tensor | None) -> PagedStorage:
        """The pages for new tokens of a layer; the first layer of a call evicts for all where that is due.

        Raises:
            ValueError: another batch or dtype than cached, positions that go back, or an earlier call broke off.
        """
        if self._storage is None:
            self._open(k, v)
        storage = self.storage
        if k.size(0) != storage.lengths.size(1) or k.dtype != storage.layout.dtype:
            raise invalid_argument("k", k, f"a batch of {storage.lengths.size(1)} in {storage.layout.dtype}, as cached")
        if layer.index == 0:
            self._begin(k.size(2), positions, real)
        return storage

    def _begin(self, n: int, positions: Tensor, real: Tensor | None) -> None:
        """Take new tokens of a call into account: evict where that is due, and remember the next position."""
        batch = self.storage.lengths.size(1)
        _ = self.length
        if not n:
            return
        rows = positions.to(torch.int64).expand(batch, n)
        if self.rule is not None:
            if bool((rows[:, -1] < self.next_position).any()):
                raise ValueError("positions: got some that go back, expected each behind those that are cached")
            if self.layers[0].length and self._since + min(n, _JUDGED_AT_ONCE) > self.interval:
                self.evict(torch.maximum(rows[:, 0], self.next_position))
        last = rows[:, -1] + 1
        self.next_position.copy_(last if real is None else torch.where(real[:, -1], last, self.next_position))
        self._since += n

    def evict(self, first: Tensor | None = None) -> None:
        """Evict now what queries from positions `first` (B,) on can do without; by default those that come next."""
        if self._storage is None or self.rule is None:
            return
        first = self.next_position.clone() if first is None else first
        for layer in self.layers:
            layer.evict(first)
        self._evicted_at, self._since = self.length, 0
        self.storage.settle(self._room())

    def _room(self) -> int:
        """The interval to the next eviction, set anew: a share of what is cached."""
        if self.rule is not None and self.rule.eps is not None:
            fading = [self.storage.counts[layer.index][:, layer.heads.cpu().numpy()] for layer in self.layers]
            counts = np.concatenate([part.flatten() for part in fading])
            mean = int(counts.mean()) if counts.size else 0
            self.interval = max(_LEAST_INTERVAL, mean // _INTERVAL_SHARE // PAGE * PAGE)
        return self.interval

    def ready_for_step(self, positions: Tensor) -> None:
        """Make sure that a captured step can add one token: room everywhere, eviction where it is due."""
        if self.rule is not None and self._since + 1 > self.interval:
            self.evict(positions[:, 0].to(torch.int64))
        if self.storage.room() < 1:
            self.storage.settle(max(self.interval, 4 * PAGE))

    def count_step(self) -> None:
        """Count a token that a captured step has added."""
        self.storage.advance()
        for layer in self.layers:
            layer.length += 1
        self._since += 1

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: length is negative or beyond what has come, or keys were evicted that a token there could see.
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
        for layer in self.layers:
            # A call that broke off left some layers with more.
            self.storage.drop_last(layer.index, layer.length - length)
            layer.length = length
        self.next_position -= current - length

    def reset(self) -> None:
        """Forget everything and give the pages back."""
        if self._storage is not None:
            self._storage.clear()
        self._forget_tokens()

    def _open(self, k: Tensor, v: Tensor) -> None:
        """Make the pages for a batch like k and v."""
        raise NotImplementedError


def _side(x: Tensor) -> torch.dtype:
    """The dtype of rates and exposures beside keys."""
    return torch.promote_types(x.dtype, torch.float32)


def _rolls(real: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (B, n) that bring the tokens of each row to its front and pads to its end, and those that undo it."""
    n = real.size(1)
    pads = n - real.sum(1, keepdim=True)
    places = torch.arange(n, device=real.device)
    return (places + pads) % n, (places - pads) % n


def _rolled(x: Tensor, index: Tensor) -> Tensor:
    """x (B, H, n, …) with the tokens of each row in the order of index (B, n)."""
    index = index[:, None] if x.dim() == 3 else index[:, None, :, None]
    return x.gather(2, index.expand(x.shape))
