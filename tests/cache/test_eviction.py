"""The account of evicted keys against attention in float64: what queries lose is never more than it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gape.cache.eviction import Account, Bounds, Candidates, EvictionRule

S, G, WIDTH = 6, 2, 4
EVERY = torch.arange(S)


class Keys:
    """Keys of random directions, norms and exposures, those that are evicted, and queries that ask for them."""

    def __init__(self, n: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        sizes = (S, n)
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

    def bounds(self) -> Bounds:
        rate, reach, own = (self.uniform(S, G) for _ in range(3))
        return Bounds(rate=0.05 + 0.3 * rate, reach=0.2 + reach, own=own - 0.5)

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

    def lost(self, bounds: Bounds, position: int, count: int) -> Tensor:
        """Attention to evicted keys of queries at a position, (S, G, 20): the largest allowed, and random ones."""
        rate, reach, own = (x.unsqueeze(-1) for x in bounds)
        directions = torch.nn.functional.normalize(self.normal(S, G, 20, WIDTH), dim=-1)
        # Half of the queries ask for an evicted key, where there is one.
        wanted = (self.gone.double() + 1e-9).multinomial(G * 10, True, generator=self.random)
        chosen = self.k.gather(1, wanted.unsqueeze(-1).expand(-1, -1, WIDTH))
        directions[..., :10, :] = torch.nn.functional.normalize(chosen, dim=-1).view(S, G, 10, WIDTH)
        q = directions * reach[..., None]
        q[..., 5:, :] *= self.uniform(S, G, 15, 1)
        faded = (self.exposure[:, :count] * (position - torch.arange(count)))[:, None, None]
        logits = torch.einsum("sgqd,snd->sgqn", q, self.k[:, :count]) - rate[..., None] * faded
        own = -own.expand(S, G, 20) + 0.2 * self.uniform(S, G, 20).round()
        weights = torch.cat([logits, own[..., None]], dim=-1).softmax(-1)[..., :-1]
        return (weights * self.gone[:, None, None, :count]).sum(-1)


def account_of(eps: float | None) -> Account:
    return Account(eps, S, G, torch.device("cpu"))


@pytest.mark.parametrize("eps", [0.3, 1e-2, 1e-5])
@pytest.mark.parametrize("seed", range(3))
def test_evicted_keys_together_have_at_most_eps(eps: float, seed: int) -> None:
    keys = Keys(400, seed)
    bounds, account = keys.bounds(), account_of(eps)
    worst = 0.0
    for count in range(40, 400, 40):
        account.advance(bounds, count + EVERY, EVERY)
        keys.evict(account, count)
        for position in range(count + S, count + 40, 7):
            lost = keys.lost(bounds, position, count).amax(-1)
            assert (lost <= account.realised_eps).all()
            worst = max(worst, float(lost.max()))
    assert 0 < worst <= float(account.realised_eps.max()) <= eps
    assert keys.gone.float().mean() > 0.2
    assert not keys.gone[keys.exposure < 1e-6].any()


@pytest.mark.parametrize(("error", "least", "most"), [(0.0, 0.1, 1.0), (3.0, 1.0, 30.0)])
def test_eps_is_nearly_used_up_where_every_bound_is_attained(error: float, least: float, most: float) -> None:
    """All queries point to evicted keys and away from the others; an account with wrong bounds would exceed eps."""
    keys, eps = Keys(300, 0), 1e-3
    keys.exposure[:] = 1.0
    one = torch.ones(S, G, dtype=torch.float64)
    bounds, account = Bounds(rate=0.1 * one, reach=5 * one, own=one), account_of(eps)
    keys.k = torch.nn.functional.normalize(keys.k, dim=-1)
    account.advance(bounds._replace(own=bounds.own - error), torch.full((S,), 300), EVERY)
    keys.evict(account, 300)
    keys.turn()
    assert least * eps < float(keys.lost(bounds, 300, 300).max()) <= most * eps


@pytest.mark.parametrize("seed", range(3))
def test_queries_beyond_the_bounds_so_far_show_in_what_is_realised(seed: int) -> None:
    keys, eps = Keys(200, seed), 1e-2
    bounds, account = keys.bounds(), account_of(1e-2)
    account.advance(bounds, torch.full((S,), 150), EVERY)
    keys.evict(account, 150)
    keys.turn()
    wider = bounds._replace(reach=3 * bounds.reach, own=bounds.own + 3)
    lost = keys.lost(wider, 152, 150).amax(-1)
    assert float(lost.max()) > eps
    assert (lost <= account.realised_under(wider)).all()
    account.advance(wider, torch.full((S,), 153), EVERY)
    assert (lost <= account.realised_eps).all()
    before = keys.gone.clone()
    # Nothing more goes while more than eps is gone.
    keys.evict(account, 153)
    full = (account.realised_eps > eps).any(-1)
    assert torch.equal(keys.gone[full], before[full])


@pytest.mark.parametrize("seed", range(3))
def test_a_budget_takes_the_cheapest_and_says_what_it_cost(seed: int) -> None:
    # Of two layers, with three heads each.
    keys, excess = Keys(300, seed), torch.tensor([37, 0])
    bounds, account = keys.bounds(), account_of(None)
    for count in range(60, 300, 60):
        before = keys.gone.view(2, -1).sum(1)
        account.advance(bounds, torch.full((S,), count), EVERY)
        keys.evict(account, count, excess)
        assert torch.equal(keys.gone.view(2, -1).sum(1) - before, excess)
        for position in range(count, count + 60, 13):
            assert (keys.lost(bounds, position, count).amax(-1) <= account.realised_eps).all()
    assert float(account.realised_eps[3:].max()) == 0.0
    assert not keys.gone[:, ::17].any()


def test_a_shared_key_goes_when_every_query_head_can_do_without() -> None:
    keys = Keys(100, 0)
    keys.exposure[:] = 1.0
    bounds, account = keys.bounds(), account_of(1e-2)
    bounds.rate[:] = 0.3
    bounds.rate[1, 1] = 1e-3
    account.advance(bounds, torch.full((S,), 100), EVERY)
    keys.evict(account, 100)
    assert keys.gone.any(-1).tolist() == [True, False, True, True, True, True]


def test_some_sequences_are_judged_as_they_are_among_all() -> None:
    together, apart = Keys(100, 0), Keys(100, 0)
    bounds, some = together.bounds(), torch.tensor([1, 4])
    accounts = account_of(1e-2), account_of(1e-2)
    for account, sequences in zip(accounts, (EVERY, some), strict=True):
        account.advance(bounds, torch.full((len(sequences),), 100), sequences)
    together.evict(accounts[0], 100)
    keys = apart.candidates(100)
    parts = (keys.norm[some], keys.exposure[some], keys.positions, keys.valid[some])
    assert torch.equal(~accounts[1].evict(Candidates(some, *parts)), together.gone[some])
    assert torch.equal(accounts[1].realised_eps[some], accounts[0].realised_eps[some])
    assert float(accounts[1].realised_eps[[0, 2, 3, 5]].max()) == 0.0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "eps, max_keys, max_bytes"),
        ({"eps": 0.1, "max_keys": 200}, "eps, max_keys, max_bytes"),
        ({"eps": 0.0}, "eps"),
        ({"eps": 1}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"max_keys": 127}, "max_keys"),
        ({"max_keys": 200.0}, "max_keys"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"eps": 0.1, "bounds": "hopes"}, "bounds"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        EvictionRule(**arguments)
