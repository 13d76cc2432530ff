"""The cache of one attention layer, in pages: attend to new tokens and to cached keys, store, evict.

A prompt is attended to as it comes, among its own tokens, by the kernel that skips; what was cached before is read from
pages, and both parts are merged. Then its keys are written to pages once, without those that can be evicted at once.
A single token is written first and reads pages only.

Shapes: B rows, Hq / Hk query / key heads, n new tokens, D and Dv widths of keys and values.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gape.cache.bounds import Limits
from gape.cache.eviction import Account, Candidates, QueryRange, widened
from gape.ops.api import gated_attention
from gape.ops.causal import causal_attention
from gape.ops.paged import paged_attention, write_keys
from gape.ops.plain import attention

if TYPE_CHECKING:
    from gape.cache.paged import PagedCache

#: New tokens from which keys are judged before they are stored, and not at the next eviction.
JUDGED_AT_ONCE = 256


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
        """Write one token and attend to all pages; a captured step counts the token for all layers at its end."""
        storage = self._cache.storage
        pages = storage.pages(self.index)
        write_keys(pages, k, v, exposure, positions)
        out, _ = paged_attention(q, rate, positions, pages, scale=self.spec.scale, new=1, tickets=storage.tickets)
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
        at_once = rule is not None and n >= JUDGED_AT_ONCE
        if at_once and rule.eps is not None and self.heads.numel():
            keep = torch.ones_like(k[..., 0], dtype=torch.bool) if keep is None else keep.clone()
            norm = torch.linalg.vector_norm(k, dim=-1, dtype=_side(k))
            places = positions if positions.dim() == 1 else positions[:, None]
            parts = (norm, exposure, places.expand_as(norm), keep)
            candidates = Candidates(self.heads, *(part.index_select(1, self.heads) for part in parts))
            keep[:, self.heads] = self._choose(candidates, cache.storage.next_position)
        storage.append(self.index, k, v, exposure, positions, keep)
        if at_once and rule.eps is None:
            self.evict(storage.next_position)
            storage.settle(cache.interval, self.index)

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
        budget = (cache.max_keys - cache.incoming) * spec.n_kv_heads
        return self.account.evict(candidates, (candidates.valid.sum((1, 2)) - budget).clamp(min=0))


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
