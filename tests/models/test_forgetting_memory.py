"""How a forgetting cache holds its keys: in few bytes, few launches, and shelves that heads can share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gape.cache.forgetting_shelf import grouped
from torch.utils._python_dispatch import TorchDispatchMode

from gape.cache.kv import ForgettingCache
from tests.models.tiny import model, tokens
from tests.models.witness import FLOOR, decoded, witnessed


@pytest.mark.parametrize("told", [{}, {"reserve": 0}], ids=["carried", "beside"])
def test_heads_that_lie_in_another_order_get_their_own_answers(told: dict[str, Any]) -> None:
    floors = [48.0, 48.0, 6.0, 6.0, 48.0, 48.0]
    options = {"gate_floor": floors, "init_landmark_bias": -9.0}
    gpt = model(n_head=6, n_kv_head=3, n_embd=96, options=options, **told)
    cache = ForgettingCache(gpt, eps=1e-3)
    with witnessed(cache) as witnesses:
        decoded(gpt, cache, tokens(2, 200), 150, chunk=25)
    assert all(kept[0] == kept[2] < kept[1] for kept in cache.kept)
    assert max(witness.judged()[1] for witness in witnesses) <= 1e-9


def test_bytes_stop_growing_where_everything_fades() -> None:
    gpt = model(options={"gate_floor": 48.0, "init_landmark_bias": -9.0})
    cache, ids, held = ForgettingCache(gpt, eps=1e-3), tokens(2, 4000), []
    with torch.no_grad():
        for chunk in ids.split(25, dim=1):
            gpt(chunk, cache=cache)
            held.append(cache.nbytes)
    assert max(held[80:]) <= 1.05 * max(held[:80])
    full = gpt.new_cache()
    decoded(gpt, full, ids[:, :400], 400, chunk=400)
    assert cache.nbytes < full.nbytes / 2


def test_heads_lie_together_while_that_wastes_little() -> None:
    assert grouped([100, 100, 100], [50, 52, 51]) == [[0, 1, 2]]
    assert grouped([100, 100, 100], [100, 20, 22]) == [[0], [1, 2]]
    # A head that holds less than another needs cannot lie beside it.
    assert grouped([100, 60, 60], [61, 58, 60]) == [[0], [1, 2]]
    # Half of a group is not worth a shelf where it is little beside the rest.
    assert grouped([128] * 8, [1, 2, 4, 8, 16, 32, 64, 128]) == [[0, 1, 2, 3], [4, 5], [6], [7]]
    assert grouped([5, 5], [0, 0]) == [[0, 1]]


@pytest.mark.parametrize("explicit", [False, True])
@torch.no_grad()
def test_keys_can_be_dropped_before_more_tokens_come(explicit: bool) -> None:
    """And what follows is as near as the promise says, at the earliest position that may follow, too."""
    gpt, ids = model(options=FLOOR), tokens(2, 301)
    told = {"positions": torch.arange(300)} if explicit else {}
    cache = ForgettingCache(gpt, eps=1e-6)
    cache.forget()
    gpt(ids[:, :300], cache=cache, **told)
    full, looks = cache.nbytes, cache.looks
    cache.forget()
    assert cache.nbytes < full / 2
    assert cache.looks == looks + 2
    assert 0 < cache.due <= 32
    with pytest.raises(ValueError, match="dropped"):
        cache.truncate(299)
    found = gpt(ids[:, 300:], positions=torch.tensor([299]), cache=cache).logits
    whole = gpt.new_cache()
    gpt(ids[:, :300], cache=whole)
    expected = gpt(ids[:, 300:], positions=torch.tensor([299]), cache=whole).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_another_cache_of_the_same_weights_takes_their_limits() -> None:
    gpt, ids = model(options=FLOOR), tokens(2, 200)
    used = ForgettingCache(gpt, eps=0.5)
    decoded(gpt, used, ids, 100, chunk=50)
    fresh = used.fresh(eps=1e-6)
    assert all(a._fixed is b._fixed for a, b in zip(fresh.layers, used.layers, strict=True))
    assert fresh.length == fresh.nbytes == 0
    found = decoded(gpt, fresh, ids, 100, chunk=50)
    assert torch.equal(found, decoded(gpt, ForgettingCache(gpt, eps=1e-6), ids, 100, chunk=50))
    with pytest.raises(ValueError, match="eps"):
        used.fresh(eps=1.0)


class Launches(TorchDispatchMode):
    """Counts what a GPU would run: operators that are neither views nor mere allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        free = ("empty", "detach", "promote_types", "can_cast")
        self.count += not (func.is_view or any(word in func.__name__ for word in free))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bounds", ["weights", "queries"])
@torch.no_grad()
def test_a_token_launches_no_more_than_with_a_full_cache(bounds: str) -> None:
    """Of a layer whose heads lie together; decoding is a matter of launches."""
    gpt, ids = model(options=FLOOR), tokens(2, 103)
    counts = []
    for cache in (ForgettingCache(gpt, eps=1e-3, bounds=bounds), gpt.new_cache(103)):
        for part in ids.split([100, 1, 1, 1], dim=1):
            with Launches() as launches:
                gpt(part, cache=cache)
        counts.append(launches.count)
    assert counts[0] <= counts[1]


def test_tokens_can_be_taken_back_as_far_as_nothing_was_dropped_for_them() -> None:
    gpt, ids = model(options=FLOOR), tokens(2, 300)
    cache = ForgettingCache(gpt, eps=1e-3)
    decoded(gpt, cache, ids[:, :290], 250, chunk=50)
    first = decoded(gpt, cache, ids[:, 290:], 0)
    with pytest.raises(ValueError, match=r"length: .* dropped"):
        cache.truncate(100)
    assert cache.length == 300
    cache.truncate(297)
    torch.testing.assert_close(decoded(gpt, cache, ids[:, 297:], 0), first[:, 7:], atol=1e-4, rtol=0)
    # Keys were dropped for tokens from there on, so none may be before it.
    judged = cache.layers[0]._judged
    cache.truncate(judged)
    with pytest.raises(ValueError, match="go back"), torch.no_grad():
        gpt(ids[:, :1], positions=torch.tensor([judged - 1]), cache=cache)
    assert decoded(gpt, cache, ids[:, :0], 0).shape[1] == 0
    cache.truncate(0)
    assert cache.nbytes == 0
