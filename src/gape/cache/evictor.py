"""Eviction of keys from pages, for all layers of a cache.

Shapes: L layers, B rows, Hq / Hk query / key heads, G = Hq / Hk, S = L · B · Hk sequences, N keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy, deepcopy
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gape.cache.bounds import Limits
from gape.cache.eviction import Account, Bounds, Candidates, EvictionRule
from gape.cache.pages import PagedStorage
from gape.ops.paged import PAGE
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.cache.layer import LayerSpec

#: By how much measured bounds are widened, so that not every new largest query counts.
_MARGIN = 0.125
#: Tokens between evictions at least, and the share of the cached keys that may come in between.
_LEAST_INTERVAL = 64
_INTERVAL_SHARE = 16
#: Bytes of keys that are read at once.
_BYTES_AT_ONCE = 2**27


class Evictor:
    """Evicts keys from pages by a rule.

    Args:
        rule: when keys are evicted.
        specs: the layers.
        storage: the pages.

    Attributes:
        interval: tokens that come between evictions.
        max_keys: the budget of a key head; 0 where eps decides.

    Raises:
        ValueError: the budget is too small for this batch.
    """

    def __init__(self, rule: EvictionRule, specs: Sequence[LayerSpec], storage: PagedStorage) -> None:
        self.rule, self._storage, self._specs = rule, storage, specs
        if rule.bounds == "queries":
            storage.query_range[:, 0], storage.query_range[:, 1] = 0.0, -torch.inf
        self.interval, self.max_keys = _LEAST_INTERVAL, self._budget()
        if rule.eps is None:
            self.interval = max(1, min(4 * PAGE, self.max_keys // _INTERVAL_SHARE))

    def copied(self, storage: PagedStorage) -> Evictor:
        """A copy that evicts from a copy of the pages, with an account of its own."""
        clone = copy(self)
        clone._storage = storage
        if "_account" in vars(self):
            with torch.inference_mode(False):
                vars(clone)["_account"] = deepcopy(self._account)
        return clone

    @cached_property
    def _of_layer(self) -> list[Tensor]:
        """The sequences of each layer that keys may be evicted from, int64: those that fade, or all under a budget."""
        layers, batch, heads = self._storage.shape
        fades = (self._rates.cpu().view(layers, heads, -1) > 0).all(-1) | (self.rule.eps is None)
        every = torch.arange(layers * batch * heads).view(layers, batch, heads)
        chosen = [every[layer][:, fades[layer]].flatten() for layer in range(layers)]
        # One copy for all layers.
        return list(torch.split(torch.cat(chosen).to(self._storage.device), [part.numel() for part in chosen]))

    @cached_property
    def _rates(self) -> Tensor:
        """What no query's rate falls below, float64 (L, Hq)."""
        rates = [spec.least_rate for spec in self._specs if spec.least_rate is not None]
        return torch.stack(rates).to(self._storage.device)

    @cached_property
    def _fixed(self) -> Limits | None:
        """Bounds from weights, each (L, Hq); None where they are measured."""
        if self.rule.bounds != "weights":
            return None
        parts = [spec.limits for spec in self._specs if spec.limits is not None]
        names = ("rate", "reach", "own", "jitter")
        return Limits(
            *torch.stack([torch.stack([getattr(x, name) for x in parts]) for name in names]).to(self._storage.device)
        )

    @cached_property
    def _account(self) -> Account:
        eps = None if self.rule.eps is None else self.rule.eps / 2
        groups = self._specs[0].n_heads // self._specs[0].n_kv_heads
        return Account(eps, math.prod(self._storage.shape), groups, self._storage.device)

    def _budget(self) -> int:
        """Keys of a key head at most, on average; 0 without a budget."""
        rule, storage = self.rule, self._storage
        if rule.max_bytes is None:
            return rule.max_keys or 0
        sequences, nbytes = math.prod(storage.shape), storage.layout.nbytes
        # A sequence may leave a page half empty.
        keys = rule.max_bytes // (nbytes // PAGE * sequences) - PAGE
        if keys < 2 * PAGE:
            raise invalid_argument("max_bytes", rule.max_bytes, f"at least {3 * nbytes * sequences:,} for this batch")
        return keys

    @property
    def realised_eps(self) -> float:
        """The most attention that any query of any layer and head can have lost."""
        return float(self._account.realised_under(self._bounds()).max())

    def include(self, layer: int, q: Tensor, k: Tensor, scale: float, real: Tensor | None) -> None:
        """Measure queries (B, Hq, n, D) with their own keys (B, Hk, n, D), where `real` (B, n) says so."""
        wide = torch.promote_types(q.dtype, torch.float32)
        reach = scale * torch.linalg.vector_norm(q, dim=-1, dtype=wide)
        groups = q.size(1) // k.size(1)
        own = -scale * (q.to(wide) * k.to(wide).repeat_interleave(groups, dim=1)).sum(-1)
        if real is not None:
            reach, own = (x.masked_fill(~real[:, None], -torch.inf) for x in (reach, own))
        largest = torch.stack([reach.amax((0, 2)), own.amax((0, 2))])
        known = self._storage.query_range[layer]
        torch.maximum(known, largest.to(known.dtype), out=known)

    def _bounds(self) -> Bounds:
        """Bounds on the queries of all sequences, with room for rounding."""
        limits = self._fixed
        if limits is None:
            reach, own = self._storage.query_range.double().unbind(1)
            # Before its first query a layer has −inf.
            own = torch.where(own == -torch.inf, 0.0, own + _MARGIN * own.abs())
            limits = Limits(self._rates, reach * (1 + _MARGIN), own, own.abs())
        rounded = limits.rounded(self._storage.layout.dtype)
        layers, batch, heads = self._storage.shape
        rate, reach, own = (
            x.view(layers, 1, heads, -1).expand(-1, batch, -1, -1).flatten(0, 2)
            for x in (rounded.rate, rounded.reach, rounded.own)
        )
        return Bounds(rate, reach, own)

    def keys_to_store(
        self, layer: int, k: Tensor, exposure: Tensor, positions: Tensor, keep: Tensor, first: Tensor
    ) -> Tensor:
        """The new keys of a layer that have to be stored, bool (B, Hk, n), for queries from positions `first` (B,) on.

        Args:
            layer: its number.
            k, exposure: (B, Hk, n, D) and (B, Hk, n).
            positions: integer (n,) or (B, n).
            keep: bool (B, Hk, n), False for pads.
            first: int64 (B,).
        """
        chosen = self._of_layer[layer]
        if not chosen.numel():
            return keep
        _, batch, heads = self._storage.shape
        within = chosen - layer * batch * heads
        norm = torch.linalg.vector_norm(k, dim=-1, dtype=torch.promote_types(k.dtype, torch.float32))
        places = positions.expand(batch, -1)[:, None].expand(-1, heads, -1)
        norm, exposure, places, valid = (x.flatten(0, 1)[within] for x in (norm, exposure, places, keep))
        self._account.advance(self._bounds(), first.repeat_interleave(heads)[within], chosen)
        stays = self._account.evict(Candidates(chosen, norm, exposure, places, valid))
        return keep.flatten(0, 1).index_copy(0, within, stays).view(keep.shape)

    def evict(self, first: Tensor, incoming: int, layer: int | None = None) -> None:
        """Evict keys that queries from positions `first` (B,) on can do without: of one layer, or of all.

        Args:
            first: int64 (B,).
            incoming: keys that come before the next eviction, for which a budget leaves room.
            layer: its number; None evicts from all.
        """
        storage = self._storage
        for group in self._groups() if layer is None else [[layer]]:
            chosen = torch.cat([self._of_layer[number] for number in group])
            if chosen.numel():
                self._evict(chosen, first, incoming)
        storage.read_counts(layer)
        self._set_interval()
        storage.settle(self.interval, layer)

    def _groups(self) -> list[list[int]]:
        """Layers in groups whose keys may be read at once."""
        longest, each = self._longest(), self._storage.layout.nbytes // PAGE
        groups: list[list[int]] = [[]]
        total = 0
        for layer, chosen in enumerate(self._of_layer):
            nbytes = longest[layer] * chosen.numel() * each
            if groups[-1] and total + nbytes > _BYTES_AT_ONCE:
                groups.append([])
                total = 0
            groups[-1].append(layer)
            total += nbytes
        return groups

    def _longest(self) -> list[int]:
        """Keys of the longest sequence of each layer that keys may be evicted from."""
        counts = self._storage.counts.reshape(-1)
        return [int(counts[chosen.cpu().numpy()].max(initial=0)) for chosen in self._of_layer]

    def _evict(self, chosen: Tensor, first: Tensor, incoming: int) -> None:
        storage = self._storage
        _, batch, heads = storage.shape
        k, v, exposure, positions, valid = storage.read(chosen)
        norm = torch.linalg.vector_norm(k, dim=-1, dtype=torch.promote_types(k.dtype, torch.float32))
        self._account.advance(self._bounds(), first[chosen // heads % batch], chosen)
        excess = None
        if self.rule.eps is None:
            total = valid.view(-1, heads * valid.size(-1)).sum(-1)
            excess = (total - (self.max_keys - incoming) * heads).clamp(min=0)
        keep = self._account.evict(Candidates(chosen, norm, exposure, positions, valid), excess)
        storage.rewrite(chosen, (k, v, exposure, positions), keep)

    def _set_interval(self) -> None:
        if self.rule.eps is not None:
            counts = self._storage.counts.reshape(-1)[torch.cat(self._of_layer).cpu().numpy()]
            mean = int(np.mean(counts)) if counts.size else 0
            self.interval = max(_LEAST_INTERVAL, mean // _INTERVAL_SHARE // PAGE * PAGE)
