"""Queries of recorded steps are measured as those of launched ones: once, where they stood, by the same ledger."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from gape.cache.forgetting_ledger import Ledger
from torch import Tensor

from gape.cache import forgetting_seen, forgetting_shelf, slots
from gape.cache.kv import ForgettingCache
from gape.models import cuda_graphs
from gape.models.cuda_graphs import Captured

pytest.importorskip("triton")
from tests.models.played import playing
from tests.models.test_captured import small

Measured = dict[Ledger, list[tuple[Tensor, Tensor, Tensor]]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """What ledgers are asked, and for which queries they stood then."""
    heard: Measured = defaultdict(list)
    uncertain = Ledger.uncertain

    def hear(self: Ledger, reach: Tensor, own: Tensor, positions: Tensor) -> Tensor:
        at = torch.tensor([-1]) if self.at is None else self.at[:1]
        heard[self].append((torch.stack([reach, own]), positions[:1], at.expand(1, positions.size(1))))
        return uncertain(self, reach, own, positions)

    monkeypatch.setattr(Ledger, "uncertain", hear)
    return heard


@pytest.mark.slow
@torch.no_grad()
def test_replayed_queries_are_measured_as_launched_ones(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the room for notes and past a look, taken back, and with one token or more launched in between."""
    graphs = playing(monkeypatch, cuda_graphs)
    for each, stride in ((forgetting_shelf, 16), (forgetting_seen, 4), (slots, 4)):
        monkeypatch.setattr(each, "STRIDE", stride)
    model, ids = small(kv_heads=2, groups=2, gate_floor=40.0), torch.randint(50, (2, 100))
    for block in model.blocks():
        block.attention.qkv.weight.mul_(16)
    ids[:, :60] = 1
    plain, cache = (ForgettingCache(model, eps=1e-2, bounds="queries") for _ in range(2))
    step = Captured(model, cache)
    for first, stop in ((60, 67), (66, 68), (69, 73), (75, 82)):
        back = cache.length > first
        for each in (plain, cache):
            each.truncate(min(first, each.length))
            model(ids[:, each.length : first], cache=each)
        if back:
            # It writes where the next query goes, and where one stood that was taken back.
            step.record(ids[:, :1])
        for token in ids[:, first:stop].split(1, dim=1):
            step(token)
            model(token, cache=plain)
    assert sum(graph.replays for graph in graphs) > 12
    assert cache.looks == plain.looks > 2
    assert cache.beyond == plain.beyond > 0
    assert cache.kept == plain.kept
    for one, other in zip(cache.layers, plain.layers, strict=True):
        found, expected = (
            [torch.cat(x, -1) for x in zip(*measured[each._ledger], strict=True)] for each in (one, other)
        )
        for numbers in (found, expected):
            order = numbers[1][0].argsort(stable=True)
            numbers[:] = [x[..., order] for x in numbers]
        assert torch.equal(torch.cat(found[1:]), torch.cat(expected[1:]))
        # Small ones among them are differences of large products, summed in another order.
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
        for each, own in zip(*(vars(layer._seen.limits()).values() for layer in (one, other)), strict=True):
            torch.testing.assert_close(each, own, rtol=1e-5, atol=1e-5)
        # Before anything was given up for later ones.
        assert bool((expected[2] <= expected[1]).all())
