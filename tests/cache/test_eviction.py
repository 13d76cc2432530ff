"""The account of evicted keys against attention in float64: what queries lose is never more than it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gape.cache.bounds import Limits
from gape.cache.eviction import Account, Candidates, QueryRange

ROWS, HEADS, GROUPS, WIDTH = 2, 3, 2, 4
DEVICE = torch.device("cpu")
EVERY = torch.arange(HEADS)


class Keys:
    """Keys of random directions, norms and exposures, those that are evicted, and queries that ask for them."""

    def __init__(self, n: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        sizes = (ROWS, HEADS, n)
        direction = torch.nn.functional.normalize(self.normal(*sizes, WIDTH), dim=-1)
        self.k = direction * 3 * self.uniform(*sizes)[..., None]
        # A tenth are landmarks, with an exposure of any size down to nothing.
        strong = self.uniform(*sizes) < 0.1
        self.exposure = torch.where(strong, 10 ** (-8 * self.uniform(*sizes)), 0.2 + 0.8 * self.uniform(*sizes))
        self.exposure[..., ::17] = 0.0
        self.gone = torch.zeros(sizes, dtype=torch.bool)

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.random, dtype=torch.float64)

    def uniform(self, *sizes: int) -> Tensor:
        return torch.rand(sizes, generator=self.random, dtype=torch.float64)

    def limits(self) -> Limits:
        rate, reach, own = (self.uniform(HEADS * GROUPS) for _ in range(3))
        return Limits(rate=0.05 + 0.3 * rate, reach=0.2 + reach, own=own - 0.5, jitter=own)

    def candidates(self, count: int) -> Candidates:
        norm = self.k.norm(dim=-1)
        valid = ~self.gone & (torch.arange(norm.size(-1)) < count)
        return Candidates(EVERY, norm, self.exposure, torch.arange(norm.size(-1)), valid)

    def evict(self, account: Account, count: int, excess: Tensor | None = None) -> None:
        keys = self.candidates(count)
        self.gone |= keys.valid & ~account.evict(keys, excess)

    def turn(self) -> None:
        """Point evicted keys one way and the others the opposite way; norms are all that an account knows."""
        along = torch.where(self.gone, 1.0, -1.0) * self.k.norm(dim=-1)
        self.k = torch.nn.functional.pad(along[..., None], (0, WIDTH - 1))

    def lost(self, limits: Limits, position: int, count: int) -> Tensor:
        """Attention to evicted keys of queries at a position, (B, Hk, G, 20): the largest allowed, and random ones."""
        rate, reach, own = (x.view(HEADS, GROUPS)[None, :, :, None] for x in (limits.rate, limits.reach, limits.own))
        directions = torch.nn.functional.normalize(self.normal(ROWS, HEADS, GROUPS, 20, WIDTH), dim=-1)
        # Half of the queries ask for an evicted key, where there is one.
        wanted = (self.gone.double() + 1e-9).flatten(0, 1).multinomial(GROUPS * 10, True, generator=self.random)
        at = wanted.view(ROWS, HEADS, -1, 1).expand(-1, -1, -1, WIDTH)
        chosen = torch.nn.functional.normalize(self.k.gather(2, at), dim=-1)
        directions[..., :10, :] = chosen.view(ROWS, HEADS, GROUPS, 10, WIDTH)
        q = directions * reach[..., None]
        q[..., 5:, :] *= self.uniform(ROWS, HEADS, GROUPS, 15, 1)
        distance = position - torch.arange(count)
        faded = (self.exposure[..., :count] * distance)[:, :, None, None]
        logits = torch.einsum("bhgqd,bhnd->bhgqn", q, self.k[:, :, :count]) - rate[..., None] * faded
        own = -own.expand(ROWS, HEADS, GROUPS, 20) + 0.2 * self.uniform(ROWS, HEADS, GROUPS, 20).round()
        weights = torch.cat([logits, own[..., None]], dim=-1).softmax(-1)[..., :-1]
        return (weights * self.gone[:, :, None, None, :count]).sum(-1)


@pytest.mark.parametrize("eps", [0.3, 1e-2, 1e-5])
@pytest.mark.parametrize("seed", range(3))
def test_evicted_keys_together_have_at_most_eps(eps: float, seed: int) -> None:
    keys = Keys(400, seed)
    limits, account = keys.limits(), Account(eps, (ROWS, HEADS, GROUPS), DEVICE)
    worst = 0.0
    for count in range(40, 400, 40):
        account.advance(limits, torch.tensor([count, count + 5]))
        keys.evict(account, count)
        for position in range(count + 5, count + 40, 7):
            lost = keys.lost(limits, position, count).amax(-1)
            assert (lost <= account.realised_eps).all()
            worst = max(worst, float(lost.max()))
    assert 0 < worst <= float(account.realised_eps.max()) <= eps
    assert keys.gone.float().mean() > 0.2
    assert not keys.gone[keys.exposure < 1e-6].any()


@pytest.mark.parametrize(("error", "least", "most"), [(0.0, 0.1, 1.0), (3.0, 1.0, 30.0)])
def test_eps_is_nearly_used_up_where_every_bound_is_attained(error: float, least: float, most: float) -> None:
    """All queries point to evicted keys and away from the others; an account with wrong limits would exceed eps."""
    keys, eps = Keys(300, 0), 1e-3
    keys.exposure[:] = 1.0
    one = torch.ones(HEADS * GROUPS, dtype=torch.float64)
    limits, account = Limits(rate=0.1 * one, reach=5 * one, own=one, jitter=one), Account(eps, (ROWS, 3, 2), DEVICE)
    keys.k = torch.nn.functional.normalize(keys.k, dim=-1)
    account.advance(replace(limits, own=limits.own - error), torch.tensor([300, 300]))
    keys.evict(account, 300)
    keys.turn()
    assert least * eps < float(keys.lost(limits, 300, 300).max()) <= most * eps


@pytest.mark.parametrize("seed", range(3))
def test_queries_beyond_the_limits_so_far_show_in_what_is_realised(seed: int) -> None:
    keys, eps = Keys(200, seed), 1e-2
    limits, account = keys.limits(), Account(1e-2, (ROWS, HEADS, GROUPS), DEVICE)
    account.advance(limits, torch.tensor([150, 150]))
    keys.evict(account, 150)
    keys.turn()
    wider = replace(limits, reach=3 * limits.reach, own=limits.own + 3)
    lost = keys.lost(wider, 152, 150).amax(-1)
    assert float(lost.max()) > eps
    assert (lost <= account.realised_under(wider)).all()
    account.advance(wider, torch.tensor([153, 153]))
    assert (lost <= account.realised_eps).all()
    before = keys.gone.clone()
    # Nothing more goes while more than eps is gone.
    keys.evict(account, 153)
    full = (account.realised_eps > eps).any(-1)
    assert torch.equal(keys.gone[full], before[full])


@pytest.mark.parametrize("seed", range(3))
def test_a_budget_takes_the_cheapest_and_says_what_it_cost(seed: int) -> None:
    keys, excess = Keys(300, seed), torch.tensor([37, 0])
    limits, account = keys.limits(), Account(None, (ROWS, HEADS, GROUPS), DEVICE)
    for count in range(60, 300, 60):
        before = keys.gone.sum((1, 2))
        account.advance(limits, torch.tensor([count, count]))
        keys.evict(account, count, excess)
        assert torch.equal(keys.gone.sum((1, 2)) - before, excess)
        for position in range(count, count + 60, 13):
            assert (keys.lost(limits, position, count).amax(-1) <= account.realised_eps).all()
    assert float(account.realised_eps[1].max()) == 0.0
    assert not keys.gone[:, :, ::17].any()


def test_a_shared_key_goes_when_every_query_head_can_do_without() -> None:
    keys = Keys(100, 0)
    keys.exposure[:] = 1.0
    limits = keys.limits()
    slow = limits.rate.view(HEADS, GROUPS).clone()
    slow[1, 1] = 1e-3
    account = Account(1e-2, (ROWS, HEADS, GROUPS), DEVICE)
    account.advance(replace(limits, rate=slow.flatten()), torch.tensor([100, 100]))
    keys.evict(account, 100)
    assert keys.gone.any(-1).tolist() == [[True, False, True]] * ROWS


def test_queries_are_measured_alike_one_by_one_and_together() -> None:
    keys = Keys(1, 0)
    q, k = keys.normal(ROWS, HEADS * GROUPS, 9, WIDTH), keys.normal(ROWS, HEADS, 9, WIDTH)
    rate = torch.ones(HEADS * GROUPS, dtype=torch.float64)
    real = torch.arange(9) >= torch.tensor([[3], [0]])
    together, single = (QueryRange(rate, torch.empty(2, HEADS * GROUPS, dtype=torch.float64)) for _ in range(2))
    together.include(q, k, 0.5, real)
    for at in range(9):
        one = slice(at, at + 1)
        single.include(q[:, :, one], k[:, :, one], 0.5, real[:, one])
    reach, own = 0.5 * q.norm(dim=-1), -0.5 * (q * k.repeat_interleave(GROUPS, 1)).sum(-1)
    for measured in (together, single):
        limits = measured.limits()
        for found, x in ((limits.reach, reach), (limits.own, own)):
            largest = x.masked_fill(~real[:, None], -torch.inf).amax((0, 2))
            torch.testing.assert_close(found, largest + largest.abs() / 8)
