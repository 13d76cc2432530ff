"""Caches in pages on a GPU, where kernels read and write pages, against a model in float64 without a cache."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import gape
from gape.cache.gpt import ForgettingCache, FullCache
from tests.cache.witness import read, witnessed
from tests.models.tiny import on_gpu, tokens

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
#: By how much logits may be apart, beside the largest: what rounding comes to.
NEAR = {torch.float32: 1e-3, torch.bfloat16: 2**-4, torch.float16: 2**-6}


@torch.no_grad()
def exact(gpt: gape.GPT, ids: Tensor, pads: Tensor | None = None) -> list[Tensor]:
    """Logits of each row's tokens in float64, on the CPU."""
    twin = deepcopy(gpt).cpu().double()
    starts = [0] * ids.size(0) if pads is None else pads.tolist()
    return [twin(row[None, start:].cpu()).logits[0] for row, start in zip(ids, starts, strict=True)]


def check_near(gpt: gape.GPT, cache: Any, sizes: list[int], pads: Tensor | None, near: float) -> None:
    rows = 3
    ids = tokens(rows, sum(sizes)).to(DEVICE)
    logits = read(gpt, cache, ids, sizes, pads).double().cpu()
    for row, expected in zip(logits, exact(gpt, ids, pads), strict=True):
        actual = row[-len(expected) :]
        assert float((actual - expected).abs().max()) <= near * float(expected.abs().max())


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("position", ["p-rope+gape", "rope", "nope+gape", "yarn+gape"])
@pytest.mark.parametrize("reserve", [0, 6])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_are_those_of_float64(dtype: torch.dtype, position: str, reserve: int, padded: bool) -> None:
    """Chunks end inside pages and at their ends, and rows with pads end elsewhere."""
    gpt = on_gpu(position, dtype, reserve=reserve)
    pads = torch.tensor([0, 64, 131], device=DEVICE) if padded else None
    check_near(gpt, FullCache(gpt), [128, 64, 1, 1, 70, 20, *[1] * 80], pads, NEAR[dtype])


@pytest.mark.parametrize("bounds", ["weights", "queries"])
@pytest.mark.parametrize("padded", [False, True])
def test_eviction_changes_no_more_than_eps(bounds: str, padded: bool) -> None:
    gpt = on_gpu(dtype=torch.bfloat16, options={"gate_floor": [64.0, 64.0, 8.0, 8.0], "init_landmark_bias": -6.0})
    pads = torch.tensor([0, 64, 131], device=DEVICE) if padded else None
    cache = ForgettingCache(gpt, eps=1e-3, bounds=bounds)
    check_near(gpt, cache, [300, 100, *[1] * 150], pads, NEAR[torch.bfloat16])
    assert all(keys[0] < 300 for keys in cache.num_keys)


@pytest.mark.parametrize("bounds", ["weights", "queries"])
@pytest.mark.parametrize("at_once", [False, True])
def test_no_query_loses_more_than_eps(bounds: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gape.cache.paged.EARLY_TOKENS", 256 if at_once else 10**6)
    gpt = on_gpu(dtype=torch.bfloat16, options={"gate_floor": 32.0, "init_landmark_bias": -2.0})
    cache, pads = ForgettingCache(gpt, eps=1e-2, bounds=bounds), torch.tensor([0, 64, 131], device=DEVICE)
    with witnessed(cache) as witnesses:
        read(gpt, cache, tokens(3, 800).to(DEVICE), [300, 256, 44, *[1] * 200], pads)
    judged = [witness.judged() for witness in witnesses]
    assert max(each.lost for each in judged) <= min(5e-3, cache.realised_eps)
    # Beside rounding, outputs lack the tiles that were skipped.
    assert max(each.error for each in judged) <= 2e-2 * max(float(w.calls[0][2].abs().max()) for w in witnesses)


@torch.no_grad()
def test_nothing_is_skipped_in_a_prompt_within_the_trained_length() -> None:
    """Half of a query's attention may be lost, and in a longer prompt some is."""
    gpt = on_gpu(dtype=torch.bfloat16, options={"gate_floor": 256.0, "init_landmark_bias": -6.0})
    for n, alike in ((gpt.config.context_length, True), (16 * gpt.config.context_length, False)):
        ids = tokens(2, n).to(DEVICE)
        full, forgetting = (gpt(ids, cache=cache).logits for cache in (FullCache(gpt), ForgettingCache(gpt, eps=0.9)))
        assert torch.equal(full, forgetting) == alike


@pytest.mark.parametrize("budget", [{"max_keys": 128}, {"max_bytes": 1_000_000}])
@torch.no_grad()
def test_a_budget_holds_behind_every_call(budget: dict[str, int]) -> None:
    gpt = on_gpu(dtype=torch.bfloat16, options={"gate_floor": 32.0})
    cache, ids = ForgettingCache(gpt, **budget), tokens(3, 900).to(DEVICE)
    for part in ids.split([500, 200, *[1] * 200], dim=1):
        gpt(part, cache=cache)
        for layer in range(2):
            rows = zip(*(cache.positions(layer, head) for head in range(2)), strict=True)
            assert max(sum(map(len, row)) / 2 for row in rows) <= budget.get("max_keys", torch.inf)
        assert cache.nbytes <= budget.get("max_bytes", torch.inf)


@torch.no_grad()
def test_pages_in_several_slabs_are_read_alike() -> None:
    """Tables and slabs grow many times over."""
    gpt = on_gpu(dtype=torch.bfloat16)
    ids = tokens(1, 5000).to(DEVICE)
    cache = FullCache(gpt)
    logits = read(gpt, cache, ids, [100] * 49 + [1] * 100)
    expected = exact(gpt, ids)[0]
    assert float((logits[0].double().cpu() - expected).abs().max()) <= 2**-4 * float(expected.abs().max())
    copied = deepcopy(cache)
    following = tokens(1, 1, seed=9).to(DEVICE)
    first = gpt(following, cache=cache).logits
    assert torch.equal(gpt(following, cache=copied).logits, first)
