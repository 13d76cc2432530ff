"""Which keys may be evicted, what that has cost, and their eviction from the pages of all layers.

An evicted key could still have had some weight: at most a number that its distance makes smaller with every token. The
account holds the sum of these numbers for each query head. With a tolerance eps it never lets the sum exceed eps; with
a budget of keys it reports how large the sum became. `docs/results/proofs.md` has the proof.

Shapes: L layers, B rows, Hq / Hk query / key heads, G = Hq / Hk, S = L · B · Hk sequences, N keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gape.cache.bounds import Limits
from gape.cache.pages import PagedStorage
from gape.ops.paged import PAGE
from gape.ops.query_range import measure_queries
from gape.utils.validation import finite, flag, invalid_argument, whole

if TYPE_CHECKING:
    from gape.cache.layer import LayerSpec

#: What bounds on future queries may come from.
BOUNDS = ("weights", "queries")
#: Evicted keys are grouped by octaves of their exposure u, which says how fast they fade. The last octave never fades.
_OCTAVES = 20
#: Parts of the keys that are summed by octave apart from each other, so that few sums are written to at once.
_PARTS = 64
#: By how much measured bounds are widened, so that not every new largest query counts.
_MARGIN = 0.125
#: Tokens between evictions at least, and the share of the cached keys that may come in between.
_LEAST_INTERVAL = 64
_INTERVAL_SHARE = 16
#: Bytes of keys that are read at once.
_BYTES_AT_ONCE = 2**27


@dataclass(frozen=True, kw_only=True)
class EvictionRule:
    """When keys are evicted: by exactly one of `eps`, `max_keys` and `max_bytes`.

    Attributes:
        eps: the attention that a query may lose, above 0 and below 1.
        max_keys: keys of a key head at most, on average over the heads of a layer.
        max_bytes: bytes of the cache at most.
        bounds: what is known of future queries. "weights" bounds them by the weights and is proven for all inputs.
            "queries" takes the largest query so far and an eighth more; `realised_eps` says what that came to.
        partial: allow heads without a floor and layers without gates, whose keys are all kept under eps.
    """

    eps: float | None = None
    max_keys: int | None = None
    max_bytes: int | None = None
    bounds: str = "weights"
    partial: bool = False

    def __post_init__(self) -> None:
        if len(limits := self._limits()) != 1:
            raise ValueError(f"eps, max_keys, max_bytes: got {', '.join(limits) or 'none'}, expected exactly one")
        if self.eps is None:
            whole(*next(iter(limits.items())), 128)
        elif not 0 < finite("eps", self.eps, "a number above 0 and below 1") < 1:
            raise invalid_argument("eps", self.eps, "a number above 0 and below 1")
        flag("partial", self.partial)
        if self.bounds not in BOUNDS:
            raise invalid_argument("bounds", self.bounds, f"one of {BOUNDS}")

    def _limits(self) -> dict[str, Any]:
        limits = {"eps": self.eps, "max_keys": self.max_keys, "max_bytes": self.max_bytes}
        return {name: value for name, value in limits.items() if value is not None}

    def __str__(self) -> str:
        ((name, value),) = self._limits().items()
        return f"{name} = {value:,}, bounds by {self.bounds}"


class Bounds(NamedTuple):
    """Of sequences, (S, G) in float64: the least rate, the largest scale · ‖q‖, the largest −(logit of the own key)."""

    rate: Tensor
    reach: Tensor
    own: Tensor


@dataclass(frozen=True)
class Candidates:
    """Keys of s of the S sequences that may be evicted: which sequences, int64 (s,), and of each key (s, N) its norm,
    its exposure u, its position and whether there is a key at all.
    """

    sequences: Tensor
    norm: Tensor
    exposure: Tensor
    positions: Tensor
    valid: Tensor


class Account:
    """Bounds on the attention that queries have lost to eviction.

    `eps` is what no query may lose more of, None where a budget of keys decides; `realised_eps`, float64 (S, G), the
    most that any query so far can have lost.
    """

    def __init__(self, eps: float | None, sequences: int, groups: int, device: torch.device) -> None:
        self.eps = eps

        def zeros(*size: int) -> Tensor:
            # Calls with and without inference_mode write to these alike.
            with torch.inference_mode(False):
                return torch.zeros(*size, dtype=torch.float64, device=device)

        self._mass = zeros(sequences, groups, _OCTAVES)
        self._longest, self._at = zeros(sequences, 1), zeros(sequences)
        self._least = 2.0 ** -torch.arange(1, _OCTAVES + 1, dtype=torch.float64, device=device)
        self._least[-1] = 0.0
        self._bounds = Bounds(zeros(sequences, groups), zeros(sequences, groups), zeros(sequences, groups))
        self.realised_eps = zeros(sequences, groups)

    def advance(self, bounds: Bounds, first: Tensor, sequences: Tensor) -> None:
        """Account for queries from positions `first` (s,) on, under bounds (S, G) that may have become wider."""
        # Queries since the last time may have been as large as the bounds are now.
        self.realised_eps = self.realised_under(bounds)
        mass, new = self._log_mass(bounds)[sequences], Bounds(*(x[sequences] for x in bounds))
        passed = (first - self._at[sequences])[:, None, None]
        self._mass[sequences] = (mass - new.rate.unsqueeze(-1) * passed * self._least).exp().nan_to_num(1.0)
        self._at[sequences] = first.double()
        for stored, part in zip(self._bounds, new, strict=True):
            stored[sequences] = part

    def realised_under(self, bounds: Bounds) -> Tensor:
        """`realised_eps` if queries since the last eviction were as large as bounds (S, G) allow."""
        # Of a query that is not a number nothing is known.
        return torch.maximum(self.realised_eps, self._log_mass(bounds).exp().sum(-1).nan_to_num(1.0).clamp(max=1.0))

    def _log_mass(self, bounds: Bounds) -> Tensor:
        """Logarithms of the mass, (S, G, octaves), under bounds that may be wider than those it has."""
        reach, own = bounds.reach - self._bounds.reach, bounds.own - self._bounds.own
        wider = reach.clamp(min=0) * self._longest + own.clamp(min=0)
        # Not a product: nothing times an overflow is nothing.
        return self._mass.log() + wider.unsqueeze(-1)

    def evict(self, keys: Candidates, excess: Tensor | None = None) -> Tensor:
        """Choose keys to evict, charge them, and return those that stay, bool (s, N).

        :meth:`advance` has been called for the queries to come. `excess`, int64 (s / heads,), says how many keys of
        each layer and row have to go whatever they cost: its sequences follow one another. None goes by eps.
        """
        logs = self._log_costs(keys)
        evicted = self._within_eps(keys, logs) if excess is None else _cheapest(logs.amax(1), keys.valid, excess)
        self._charge(keys, logs, evicted)
        return keys.valid & ~evicted

    def _log_costs(self, keys: Candidates) -> Tensor:
        """Logarithms of the most weight that each key can have for a query of each head, (s, G, N)."""
        rate, reach, own = (x[keys.sequences].unsqueeze(-1) for x in self._bounds)
        distance = self._at[keys.sequences, None] - keys.positions
        fading = (keys.exposure.double() * distance).unsqueeze(1)
        logs: Tensor = reach * keys.norm.double().unsqueeze(1) + own - rate * fading
        return logs

    def _within_eps(self, keys: Candidates, logs: Tensor) -> Tensor:
        """The cheapest keys whose costs together, with what was evicted before, stay within eps, bool (s, N)."""
        assert self.eps is not None
        rate = self._bounds.rate[keys.sequences].unsqueeze(-1)
        # Half of what keys that come one by one and fade at this speed may take without ever exceeding eps.
        share = -0.5 * self.eps * torch.expm1(-rate * keys.exposure.double().unsqueeze(1))
        cost = logs.exp()
        may_go = (cost < share).all(1, keepdim=True) & keys.valid.unsqueeze(1)
        cost = cost.masked_fill(~may_go, torch.inf)
        order = cost.amax(1).argsort(-1)
        spent = self._mass[keys.sequences].sum(-1, keepdim=True)
        spent = spent + cost.gather(2, order.unsqueeze(1).expand_as(cost)).cumsum(-1)
        return torch.zeros_like(keys.valid).scatter(-1, order, (spent <= self.eps).all(1))

    def _charge(self, keys: Candidates, logs: Tensor, evicted: Tensor) -> None:
        """Add the costs of evicted keys to the account."""
        chosen, n = keys.sequences, evicted.size(-1)
        # No key can have more than all of the attention.
        cost = logs.clamp(max=0).exp().nan_to_num(1.0).masked_fill(~evicted.unsqueeze(1), 0.0)
        octave = (-torch.log2(keys.exposure.double())).floor().clamp(0, _OCTAVES - 1).nan_to_num(_OCTAVES - 1).long()
        place = octave + _OCTAVES * (torch.arange(n, device=evicted.device) % _PARTS)
        sums = cost.new_zeros(*cost.shape[:2], _PARTS * _OCTAVES)
        sums.scatter_add_(-1, place.unsqueeze(1).expand_as(cost), cost)
        self._mass[chosen] += sums.view(*cost.shape[:2], _PARTS, _OCTAVES).sum(-2)
        longest = keys.norm.double().masked_fill(~evicted, 0.0).amax(-1, keepdim=True)
        self._longest[chosen] = torch.maximum(self._longest[chosen], longest)
        self.realised_eps = torch.maximum(self.realised_eps, self._mass.sum(-1).clamp(max=1.0))


def _norm(x: Tensor) -> Tensor:
    """The norm of vectors (..., D), (...) in float32 at least."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm


def _cheapest(cost: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """Of each group of sequences the `count` cheapest of cost (s, N), whatever sequence they are of, bool (s, N)."""
    # What is not a number would come behind keys that are not there.
    flat = cost.nan_to_num(torch.finfo(cost.dtype).max).masked_fill(~valid, torch.inf).view(count.numel(), -1)
    rank = flat.argsort(-1).argsort(-1)
    return (rank < count[:, None]).view_as(valid) & valid


class Evictor:
    """Evicts keys of layers from pages by a rule.

    Attributes:
        interval: tokens that come between evictions.
        max_keys: the budget of a key head; 0 where eps decides.
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
        parts = [(x.rate, x.reach, x.own, x.jitter) for spec in self._specs if (x := spec.limits) is not None]
        return Limits(*(torch.stack(each).to(self._storage.device) for each in zip(*parts, strict=True)))

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
        measure_queries(q, k, *self._storage.query_range[layer].unbind(), scale=scale, real=real)

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

        k (B, Hk, n, D), exposure (B, Hk, n), positions (n,) or (B, n); `keep`, bool (B, Hk, n), is False for pads.
        """
        chosen = self._of_layer[layer]
        if not chosen.numel():
            return keep
        _, batch, heads = self._storage.shape
        within = chosen - layer * batch * heads
        places = positions.expand(batch, -1)[:, None].expand(-1, heads, -1)
        norm, exposure, places, valid = (x.flatten(0, 1)[within] for x in (_norm(k), exposure, places, keep))
        self._account.advance(self._bounds(), first.repeat_interleave(heads)[within], chosen)
        stays = self._account.evict(Candidates(chosen, norm, exposure, places, valid))
        return keep.flatten(0, 1).index_copy(0, within, stays).view(keep.shape)

    def evict(self, first: Tensor, incoming: int, layer: int | None = None) -> None:
        """Evict keys that queries from positions `first`, int64 (B,), can do without, of one layer or of all.

        `incoming` keys come before the next eviction; a budget leaves room for them.
        """
        storage, groups = self._storage, self._groups() if layer is None else [[layer]]
        for group in groups:
            chosen = torch.cat([self._of_layer[number] for number in group])
            if chosen.numel():
                self._evict(chosen, first, incoming)
        storage.read_counts(layer)
        if self.rule.eps is not None:
            counts = storage.counts.reshape(-1)[torch.cat(self._of_layer).cpu().numpy()]
            mean = int(np.mean(counts)) if counts.size else 0
            self.interval = max(_LEAST_INTERVAL, mean // _INTERVAL_SHARE // PAGE * PAGE)
        storage.settle(min(4 * PAGE, self.interval), layer)

    def _groups(self) -> list[list[int]]:
        """Layers in groups whose keys may be read at once."""
        counts, each = self._storage.counts.reshape(-1), self._storage.layout.nbytes // PAGE
        groups: list[list[int]] = [[]]
        total = 0
        for layer, chosen in enumerate(self._of_layer):
            nbytes = int(counts[chosen.cpu().numpy()].max(initial=0)) * chosen.numel() * each
            if groups[-1] and total + nbytes > _BYTES_AT_ONCE:
                groups.append([])
                total = 0
            groups[-1].append(layer)
            total += nbytes
        return groups

    def _evict(self, chosen: Tensor, first: Tensor, incoming: int) -> None:
        storage = self._storage
        _, batch, heads = storage.shape
        k, v, exposure, positions, valid = storage.read(chosen)
        self._account.advance(self._bounds(), first[chosen // heads % batch], chosen)
        excess = None
        if self.rule.eps is None:
            total = valid.view(-1, heads * valid.size(-1)).sum(-1)
            excess = (total - (self.max_keys - incoming) * heads).clamp(min=0)
        keep = self._account.evict(Candidates(chosen, _norm(k), exposure, positions, valid), excess)
        storage.rewrite(chosen, (k, v, exposure, positions), keep)
