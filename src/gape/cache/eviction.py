"""Which keys may be evicted, and the account of what that has cost.

An evicted key could still have had some weight: at most a number that its distance makes smaller with every token. The
account holds the sum of these numbers for each query head. With a tolerance eps it never lets the sum exceed eps; with
a budget of keys it reports how large the sum became. `docs/results/proofs.md` has the proof.

Shapes: S sequences, the keys of one layer, row and key head each; G query heads that share a key head; N keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gape.utils.validation import finite, flag, invalid_argument, whole

#: What bounds on future queries may come from.
BOUNDS = ("weights", "queries")
#: Evicted keys are grouped by octaves of their exposure u, which says how fast they fade. The last octave never fades.
_OCTAVES = 20
#: Parts of the keys that are summed by octave apart from each other, so that few sums are written to at once.
_PARTS = 64


@dataclass(frozen=True, kw_only=True)
class EvictionRule:
    """When keys are evicted.

    Attributes:
        eps: the attention that a query may lose, above 0 and below 1. Exactly one of these three is given.
        max_keys: keys of a key head at most, on average over the heads of a layer.
        max_bytes: bytes of the cache at most.
        bounds: what is known of future queries. "weights" bounds them by the weights and is proven for all inputs.
            "queries" takes the largest query so far and an eighth more; `realised_eps` says what that came to.
        partial: allow heads without a floor and layers without gates, whose keys are all kept under eps.

    Raises:
        ValueError: a value is out of range; names it.
    """

    eps: float | None = None
    max_keys: int | None = None
    max_bytes: int | None = None
    bounds: str = "weights"
    partial: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("eps", "max_keys", "max_bytes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"eps, max_keys, max_bytes: got {', '.join(given) or 'none'}, expected exactly one")
        if self.eps is not None and not 0 < finite("eps", self.eps, "a number above 0 and below 1") < 1:
            raise invalid_argument("eps", self.eps, "a number above 0 and below 1")
        for name in ("max_keys", "max_bytes"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 128)
        flag("partial", self.partial)
        if self.bounds not in BOUNDS:
            raise invalid_argument("bounds", self.bounds, f"one of {BOUNDS}")

    def __str__(self) -> str:
        name = next(name for name in ("eps", "max_keys", "max_bytes") if getattr(self, name) is not None)
        return f"{name} = {getattr(self, name):,}, bounds by {self.bounds}"


class Bounds(NamedTuple):
    """Bounds on the queries of sequences, each (S, G) in float64; :class:`gape.cache.bounds.Limits` says what they are.

    Attributes:
        rate, reach, own: the least rate, the largest scale · ‖q‖, the largest −(logit of the own key).
    """

    rate: Tensor
    reach: Tensor
    own: Tensor


@dataclass(frozen=True)
class Candidates:
    """Keys of some sequences that may be evicted, s of the S.

    Attributes:
        sequences: int64 (s,), which they are.
        norm, exposure: (s, N), the norm of each key and its u.
        positions: integer, broadcastable to (s, N).
        valid: bool (s, N), False where there is no key.
    """

    sequences: Tensor
    norm: Tensor
    exposure: Tensor
    positions: Tensor
    valid: Tensor


class Account:
    """Bounds on the attention that queries have lost to eviction.

    Args:
        eps: what no query may lose more of; None where a budget of keys decides.
        sequences, groups: S and G.
        device: of everything.

    Attributes:
        realised_eps: float64 (S, G), the most that any query so far can have lost.
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

        Args:
            keys: the candidates; :meth:`advance` has been called for the queries to come.
            excess: int64 (s / heads,), how many keys of each layer and row have to go whatever they cost: its
                sequences follow one another. None goes by eps.
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


def _cheapest(cost: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """Of each group of sequences the `count` cheapest of cost (s, N), whatever sequence they are of, bool (s, N)."""
    # What is not a number would come behind keys that are not there.
    flat = cost.nan_to_num(torch.finfo(cost.dtype).max).masked_fill(~valid, torch.inf).view(count.numel(), -1)
    rank = flat.argsort(-1).argsort(-1)
    return (rank < count[:, None]).view_as(valid) & valid
