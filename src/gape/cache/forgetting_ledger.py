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

from gape.cache.forgetting_limits import Limits

#: Octaves of exposure that are told apart; what is less exposed counts as never fading.
_OCTAVES = 20


@dataclass(frozen=True)
class Verdict:
    """What some key heads of each sample could spare, N columns each.

    Attributes:
        heads: int64 (H,), the key heads.
        order: int64 (B, H, N), columns from the one that is missed least.
        cost: float64 (B, H, G, N) in that order, the most weight that a query may miss; inf for keys that have to stay.
        exposure, norm: float64 (B, H, N), of the columns as they lie.
        spared: int64 (B, H), how many of the first columns may go.
    """

    heads: Tensor
    order: Tensor
    cost: Tensor
    exposure: Tensor
    norm: Tensor
    spared: Tensor

    def of(self, rows: Tensor) -> Verdict:
        """The same of some of its heads, int64 (R,) numbers of theirs."""
        parts = (self.order, self.cost, self.exposure, self.norm, self.spared)
        return Verdict(self.heads[rows], *(part.index_select(1, rows) for part in parts))


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
        # Written to for as long as there is a ledger, under inference_mode or not.
        with torch.inference_mode(False):
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

    def judge(self, heads: Tensor, norm: Tensor, exposure: Tensor, positions: Tensor) -> Verdict:
        """Which keys of some heads no query will miss, from where :meth:`bring` has brought the ledger.

        Args:
            heads: int64 (H,), the key heads.
            norm, exposure, positions: (B, H, N), the norm of the content of each key, its u, its position.
        """
        assert self.at is not None
        rate, reach, own = (x[heads][..., None] for x in (self._rate, self._reach, self._own))
        exposure, norm = exposure.double(), norm.double()
        distance = (self.at[:, None, None] - positions).double()
        lost = reach * norm.unsqueeze(2) + own - rate * (exposure * distance).unsqueeze(2)
        # Half of what keys that come one by one and fade at this speed may take without ever exceeding eps.
        share = -0.5 * self.eps * torch.expm1(-rate * exposure.unsqueeze(2))
        cost = lost.exp_()
        cost = cost.masked_fill_(~(cost < share).all(2, keepdim=True), torch.inf)
        order = cost.amax(2).argsort(-1)
        cost = cost.gather(3, order.unsqueeze(2).expand_as(cost))
        spent = self._mass[:, heads].sum(-1, keepdim=True) + cost.cumsum(-1)
        return Verdict(heads, order, cost, exposure, norm, (spent <= self.eps).all(2).sum(-1))

    def charge(self, verdict: Verdict, count: int) -> None:
        """Book the first `count` keys of each head of a verdict as gone."""
        if not count:
            return
        gone, cost = verdict.order[..., :count], verdict.cost[..., :count]
        exposure = verdict.exposure.gather(-1, gone)
        octave = (-torch.log2(exposure)).floor().clamp(0, _OCTAVES - 1).nan_to_num(_OCTAVES - 1).long()
        booked = torch.zeros_like(self._mass[:, verdict.heads])
        booked.scatter_add_(-1, octave.unsqueeze(2).expand_as(cost), cost)
        longest = verdict.norm.gather(-1, gone).amax(-1)
        self._mass.index_add_(1, verdict.heads, booked)
        self._longest[:, verdict.heads] = torch.maximum(self._longest[:, verdict.heads], longest)

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
