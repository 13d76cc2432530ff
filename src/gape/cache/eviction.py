"""Which keys may be evicted, and the account of what that has cost.

An evicted key could still have had some weight: at most a number that its distance makes smaller with every token. The
account holds the sum of these numbers for each query head. With a tolerance eps it never lets the sum exceed eps; with
a budget of keys it reports how large the sum became. `docs/results/proofs.md` has the proof.

Shapes: B rows, Hk key heads, G query heads of each, Hq = Hk · G, N keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gape.cache.bounds import Limits

#: Evicted keys are grouped by octaves of their exposure u, which says how fast they fade. The last octave never fades.
_OCTAVES = 20
#: By how much measured numbers are widened, so that not every new largest query counts.
_MARGIN = 0.125


@dataclass(frozen=True)
class Candidates:
    """Keys that may be evicted, N for each of H key heads.

    Attributes:
        heads: int64 (H,), the key heads.
        norm, exposure: (B, H, N), the norm of each key and its u.
        positions: integer, broadcastable to (B, H, N).
        valid: bool (B, H, N), False where there is no key.
    """

    heads: Tensor
    norm: Tensor
    exposure: Tensor
    positions: Tensor
    valid: Tensor


class Account:
    """Bounds on the attention that queries of one layer have lost to eviction.

    Args:
        eps: what no query may lose more of; None where a budget of keys decides.
        sizes: B, Hk and G.
        device: of everything.

    Attributes:
        realised_eps: float64 (B, Hk, G), the most that any query so far can have lost.
    """

    def __init__(self, eps: float | None, sizes: tuple[int, int, int], device: torch.device) -> None:
        self.eps, self._sizes = eps, sizes
        self._mass = torch.zeros(*sizes, _OCTAVES, dtype=torch.float64, device=device)
        self._longest = torch.zeros(sizes[:2], dtype=torch.float64, device=device)
        self._least = 2.0 ** -torch.arange(1, _OCTAVES + 1, dtype=torch.float64, device=device)
        self._least[-1] = 0.0
        self._at: Tensor | None = None
        self._limits: tuple[Tensor, Tensor, Tensor] | None = None
        self.realised_eps = torch.zeros(sizes, dtype=torch.float64, device=device)

    def advance(self, limits: Limits, first: Tensor) -> None:
        """Account for queries from positions `first` (B,) on, under limits (Hq,) that may have become wider."""
        rate, reach, own = (
            x.to(self._mass.device).view(self._sizes[1:]) for x in (limits.rate, limits.reach, limits.own)
        )
        if self._at is not None:
            # Queries since the last time may have been as large as the limits are now.
            self.realised_eps = self.realised_under(limits)
            passed = (first - self._at).double()[:, None, None, None]
            self._mass = (self._log_mass(reach, own) - rate.unsqueeze(-1) * passed * self._least).exp()
        # A copy: whoever counts positions goes on counting in the same tensor.
        self._at, self._limits = first.clone(), (rate, reach, own)

    def realised_under(self, limits: Limits) -> Tensor:
        """`realised_eps` if queries since the last eviction were as large as limits (Hq,) allow."""
        reach, own = (x.to(self._mass.device).view(self._sizes[1:]) for x in (limits.reach, limits.own))
        return torch.maximum(self.realised_eps, self._log_mass(reach, own).exp().sum(-1).clamp(max=1.0))

    def _log_mass(self, reach: Tensor, own: Tensor) -> Tensor:
        """Logarithms of the mass, (B, Hk, G, octaves), under limits (Hk, G) that may be wider than those it has."""
        if self._limits is None:
            return self._mass.log()
        _, old_reach, old_own = self._limits
        wider = (reach - old_reach).clamp(min=0) * self._longest.unsqueeze(-1) + (own - old_own).clamp(min=0)
        # Not a product: nothing times an overflow is nothing.
        return self._mass.log() + wider.unsqueeze(-1)

    def evict(self, keys: Candidates, excess: Tensor | None = None) -> Tensor:
        """Choose keys to evict, charge them, and return those that stay, bool (B, H, N).

        Args:
            keys: the candidates; :meth:`advance` has been called for the queries to come.
            excess: int64 (B,), how many of a row's keys have to go whatever they cost; None goes by eps.
        """
        logs = self._log_costs(keys)
        gone = self._within_eps(keys, logs) if excess is None else _cheapest(logs.amax(2), keys.valid, excess)
        self._charge(keys, logs, gone)
        return keys.valid & ~gone

    def _log_costs(self, keys: Candidates) -> Tensor:
        """Logarithms of the most weight that each key can have for a query of each head, (B, H, G, N)."""
        assert self._at is not None and self._limits is not None  # noqa: PT018
        rate, reach, own = (x[keys.heads][..., None] for x in self._limits)
        exposure, norm = keys.exposure.double(), keys.norm.double()
        distance = (self._at[:, None, None] - keys.positions).double()
        return reach * norm.unsqueeze(2) + own - rate * (exposure * distance).unsqueeze(2)

    def _within_eps(self, keys: Candidates, logs: Tensor) -> Tensor:
        """The cheapest keys whose costs together, with what was evicted before, stay within eps, bool (B, H, N)."""
        assert self.eps is not None and self._limits is not None  # noqa: PT018
        rate = self._limits[0][keys.heads][..., None]
        # Half of what keys that come one by one and fade at this speed may take without ever exceeding eps.
        share = -0.5 * self.eps * torch.expm1(-rate * keys.exposure.double().unsqueeze(2))
        cost = logs.exp()
        may_go = (cost < share).all(2, keepdim=True) & keys.valid.unsqueeze(2)
        cost = cost.masked_fill(~may_go, torch.inf)
        order = cost.amax(2).argsort(-1)
        spent = self._mass[:, keys.heads].sum(-1, keepdim=True)
        spent = spent + cost.gather(3, order.unsqueeze(2).expand_as(cost)).cumsum(-1)
        return torch.zeros_like(keys.valid).scatter(-1, order, (spent <= self.eps).all(2))

    def _charge(self, keys: Candidates, logs: Tensor, gone: Tensor) -> None:
        """Add the costs of evicted keys to the account."""
        # No key can have more than all of the attention.
        cost = logs.clamp(max=0).exp().masked_fill(~gone.unsqueeze(2), 0.0)
        octave = (-torch.log2(keys.exposure.double())).floor().clamp(0, _OCTAVES - 1).nan_to_num(_OCTAVES - 1).long()
        charged = torch.zeros_like(self._mass[:, keys.heads])
        charged.scatter_add_(-1, octave.unsqueeze(2).expand_as(cost), cost)
        longest = keys.norm.double().masked_fill(~gone, 0.0).amax(-1)
        self._mass = self._mass.index_add(1, keys.heads, charged)
        self._longest = self._longest.index_copy(1, keys.heads, torch.maximum(self._longest[:, keys.heads], longest))
        self.realised_eps = torch.maximum(self.realised_eps, self._mass.sum(-1).clamp(max=1.0))


def _cheapest(cost: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """Of each row the `count` (B,) cheapest of cost (B, H, N), whatever head they belong to, bool (B, H, N)."""
    flat = cost.masked_fill(~valid, torch.inf).flatten(1)
    rank = flat.argsort(-1).argsort(-1)
    return (rank < count[:, None]).view_as(valid) & valid


class QueryRange:
    """Running bounds on the queries that a layer has produced: the largest so far.

    Args:
        rate: float64 (Hq,), what no query's rate falls below.
        buffers: float32 (2, Hq): the largest scale · ‖q‖, and the largest −(logit of the own key).
    """

    def __init__(self, rate: Tensor, buffers: Tensor) -> None:
        self._rate, self.buffers = rate, buffers
        buffers[0], buffers[1] = 0.0, -torch.inf

    def include(self, q: Tensor, k: Tensor, scale: float, real: Tensor | None) -> None:
        """Take in queries (B, Hq, n, D) with their own keys (B, Hk, n, D), where `real` (B, n) says so."""
        wide = torch.promote_types(q.dtype, torch.float32)
        reach = scale * torch.linalg.vector_norm(q, dim=-1, dtype=wide)
        groups = q.size(1) // k.size(1)
        own = -scale * (q.to(wide) * k.to(wide).repeat_interleave(groups, dim=1)).sum(-1)
        if real is not None:
            reach, own = (x.masked_fill(~real[:, None], -torch.inf) for x in (reach, own))
        largest = torch.stack([reach.amax((0, 2)), own.amax((0, 2))])
        torch.maximum(self.buffers, largest.to(self.buffers.dtype), out=self.buffers)

    def limits(self) -> Limits:
        """The bounds, widened by an eighth."""
        reach, own = self.buffers.double().unbind()
        own = own + _MARGIN * own.abs()
        rate = self._rate.to(reach.device)
        return Limits(rate=rate, reach=reach * (1 + _MARGIN), own=own, jitter=own.abs())


def widened(limits: Limits, dtype: torch.dtype, device: torch.device) -> Limits:
    """Limits with room for the rounding of a dtype, on a device."""
    limits = limits.rounded(dtype)
    return replace(limits, **{name: getattr(limits, name).to(device) for name in ("rate", "reach", "own", "jitter")})
