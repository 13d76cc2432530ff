"""What has been given up so far, and what more may be: the account behind the promise of a forgetting cache.

A key that has gone could still have had some weight, at most a number that its distance makes smaller with every token.
The ledger holds the sum of these numbers for each query head and never lets it exceed eps, whatever the length becomes.
Keys are booked by their exposure u, in octaves, because that is the speed at which they fade.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gape.models.forgetting_limits import Limits

#: Octaves of exposure that are told apart; what is less exposed counts as never fading.
_OCTAVES = 20


@dataclass(frozen=True)
class Verdict:
    """What a key head of each sample could spare, N columns in all.

    Attributes:
        order: int64 (B, N), columns from the one that is missed least.
        cost: float64 (B, G, N) in that order, the most weight that a query may miss; inf for keys that have to stay.
        octave, norm: (B, N) in that order.
        spared: int64 (B,), how many of the first columns may go.
    """

    order: Tensor
    cost: Tensor
    octave: Tensor
    norm: Tensor
    spared: Tensor


class Ledger:
    """Weight given up, for B samples, Hk key heads and the G query heads of each.

    Args:
        eps: what no query may miss more of.
        sizes: B, Hk and G.
        device: of everything.
    """

    def __init__(self, eps: float, sizes: tuple[int, int, int], device: torch.device) -> None:
        self.eps = eps
        self._sizes = sizes
        self._mass = torch.zeros(*sizes, _OCTAVES, dtype=torch.float64, device=device)
        self._longest = torch.zeros(sizes[:2], dtype=torch.float64, device=device)
        self._least = 2.0 ** -torch.arange(1, _OCTAVES + 1, dtype=torch.float64, device=device)
        self._least[-1] = 0.0
        self.at: Tensor | None = None
        self._rate = self._reach = self._own = self._longest

    def bring(self, limits: Limits, first: Tensor) -> None:
        """Account for queries from positions `first` (B,) on, under limits (Hq,) that may have become wider."""
        rate, reach, own = (
            x.to(self._mass.device).view(self._sizes[1:]) for x in (limits.rate, limits.reach, limits.own)
        )
        if self.at is not None:
            wider = (reach - self._reach).clamp(min=0) * self._longest.unsqueeze(-1) + (own - self._own)
            # In logarithms: nothing times an overflow is nothing.
            self._mass = (self._mass.log() + wider.unsqueeze(-1)).exp() * self._faded(first[:, None])[..., 0, :]
        self.at, self._rate, self._reach, self._own = first, rate, reach, own

    def judge(self, head: int, norm: Tensor, landmark: Tensor, positions: Tensor) -> Verdict:
        """Which keys of a head no query will miss, from where :meth:`bring` has brought the ledger.

        Args:
            head: the key head.
            norm, landmark, positions: (B, N), the norm of the content of each key, its landmark, its position.
        """
        assert self.at is not None
        rate, reach, own = (x[head][:, None] for x in (self._rate, self._reach, self._own))
        exposure, norm = 1 - landmark.double(), norm.double()
        distance = (self.at[:, None] - positions).double()
        lost = reach * norm[:, None] + own - rate * (exposure * distance)[:, None]
        # Half of what keys that come one by one and fade at this speed may take without ever exceeding eps.
        share = torch.log(-0.5 * self.eps * torch.expm1(-rate * exposure[:, None]))
        cost = lost.exp().masked_fill(~(lost <= share).all(1, keepdim=True), torch.inf)
        order = cost.amax(1).argsort(-1)
        cost = cost.gather(2, order[:, None].expand_as(cost))
        spent = self._mass[:, head].sum(-1, keepdim=True) + cost.cumsum(-1)
        octave = (-torch.log2(exposure)).floor().clamp(0, _OCTAVES - 1).nan_to_num(_OCTAVES - 1).long()
        return Verdict(order, cost, octave.gather(1, order), norm.gather(1, order), (spent <= self.eps).all(1).sum(-1))

    def charge(self, head: int, verdict: Verdict, count: int) -> None:
        """Book the first `count` keys of a verdict as gone."""
        if not count:
            return
        octave, cost = verdict.octave[:, None, :count], verdict.cost[..., :count]
        self._mass[:, head].scatter_add_(-1, octave.expand_as(cost), cost)
        self._longest[:, head] = torch.maximum(self._longest[:, head], verdict.norm[:, :count].amax(-1))

    def uncertain(self, reach: Tensor, own: Tensor, positions: Tensor) -> Tensor:
        """How many queries may miss more than eps, judged by their own numbers; int64, one number.

        Args:
            reach, own: (B, Hq, n), softmax scale times norm of each query, and its logit for its own key.
            positions: (B, n) of the queries.
        """
        batch, kv_heads, groups = self._sizes
        reach, own = (x.view(batch, kv_heads, groups, -1) for x in (reach, own))
        if self.at is None:
            return torch.zeros((), dtype=torch.int64, device=reach.device)
        mass = (self._mass.unsqueeze(-2) * self._faded(positions)).sum(-1)
        longer = (reach - self._reach.unsqueeze(-1)).clamp(min=0) * self._longest[..., None, None]
        return (mass.log() + longer - own - self._own.unsqueeze(-1) > math.log(self.eps)).sum()

    def _faded(self, positions: Tensor) -> Tensor:
        """What is left at positions (B, n) of what was booked at `at`, (B, Hk, G, n, octaves)."""
        assert self.at is not None
        passed = (positions - self.at[:, None]).double()[:, None, None, :, None]
        return (-self._rate[..., None, None] * passed * self._least).exp()
