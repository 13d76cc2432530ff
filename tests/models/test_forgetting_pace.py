"""The layers of a forgetting cache look through their keys together, however much each of them holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gape.cache.forgetting_shelf import slack

import gape
from gape.cache.kv import ForgettingCache
from tests.models.tiny import model, tokens

#: The first layer forgets at once, the second hardly ever.
APART = {"gate_floor": [[400.0], [0.2]], "init_landmark_bias": -9.0}


@pytest.fixture
def gpt() -> gape.GPT:
    return model(options=APART)


def rooms(cache: ForgettingCache) -> list[int]:
    return [block.k.size(2) - block.width for layer in cache.layers for block in layer.held().blocks]


@torch.no_grad()
def test_all_layers_look_at_the_same_token(gpt: gape.GPT) -> None:
    cache, ids, looks = ForgettingCache(gpt, eps=0.5).fresh(1e-3), tokens(1, 1200), []
    for chunk in (ids[:, :1000], *ids[:, 1000:].split(1, dim=1)):
        gpt(chunk, cache=cache)
        looks.append([layer.looks for layer in cache.layers])
    assert all(first == second for first, second in looks)
    first, second = (sum(kept) / len(kept) for kept in cache.kept)
    assert 8 * first < second
    # One for the prompt, one for want of room, and then one for every sixteenth of what both hold, not of the least.
    assert 2 <= looks[-1][0] <= 3 + 200 // slack(int(first + second) // 2)


@pytest.mark.parametrize(
    "sizes", [[1000, *[1] * 200], [25] * 56, [400, *[7, 40, 1] * 20]], ids=["whole", "chunks", "any"]
)
@torch.no_grad()
def test_a_layer_with_little_room_calls_those_before_it_too(sizes: list[int]) -> None:
    """The second layer makes the least room: it knows of itself and of the first, and the third holds most."""
    gpt = model(n_layer=3, options={"gate_floor": [[0.7], [400.0], [0.1]], "init_landmark_bias": -9.0})
    cache, looked = ForgettingCache(gpt, eps=1e-3), [0]
    for chunk in tokens(1, sum(sizes)).split(sizes, dim=1):
        before = [layer.looks for layer in cache.layers]
        gpt(chunk, cache=cache)
        new = {layer.looks - count for layer, count in zip(cache.layers, before, strict=True)}
        assert len(new) == 1
        looked += [cache.length] * new.pop()
        assert cache.spare <= min(rooms(cache))
    assert len(looked) > 3
    assert min(later - sooner for sooner, later in pairwise(looked)) >= slack(0)


@torch.no_grad()
def test_chunks_are_no_reason_to_look_sooner() -> None:
    gpt = model(options={"gate_floor": 48.0, "init_landmark_bias": -9.0})
    cache = ForgettingCache(gpt, eps=1e-3)
    for chunk in tokens(1, 1000).split(25, dim=1):
        gpt(chunk, cache=cache)
    # 32 tokens are two chunks, and the last two wait for more.
    assert [layer.looks for layer in cache.layers] == [1000 // 50 - 1] * 2
    assert max(rooms(cache)) == 0


@torch.no_grad()
def test_after_a_look_at_all_there_is_room_until_the_next(gpt: gape.GPT) -> None:
    cache = ForgettingCache(gpt, eps=1e-3)
    gpt(tokens(1, 2000), cache=cache)
    cache.forget()
    held = [count for kept in cache.kept for count in kept]
    assert cache.spare == cache.due == min(rooms(cache)) == slack(sum(held) // len(held)) > slack(min(held))
    looks = cache.looks
    for chunk in tokens(1, cache.due).split(1, dim=1):
        gpt(chunk, cache=cache)
    assert (cache.looks, cache.due) == (looks, 0)


@torch.no_grad()
def test_room_is_a_sixteenth_of_what_is_held(gpt: gape.GPT) -> None:
    cache = ForgettingCache(gpt, eps=1e-3)
    gpt(tokens(1, 2000), cache=cache)
    cache.forget()
    held = sum(block.k[:, :, : block.width].nbytes for layer in cache.layers for block in layer.held().blocks)
    whole = sum(block.k.nbytes for layer in cache.layers for block in layer.held().blocks)
    assert whole <= (1 + 1 / 16) * held


@torch.no_grad()
def test_fresh_and_emptied_caches_keep_a_pace_of_their_own(gpt: gape.GPT) -> None:
    cache, ids = ForgettingCache(gpt, eps=1e-3), tokens(1, 1500)
    other = cache.fresh(1e-3)
    gpt(ids, cache=cache)
    gpt(ids[:, :20], cache=other)
    cache.forget()
    assert (cache.looks, other.looks) == (2, 0)
    assert (cache.due > slack(0), other.due) == (True, slack(0) - 20)
    cache.truncate(0)
    assert cache.due == slack(0)


@pytest.mark.parametrize("length", [1000, 0])
@torch.no_grad()
def test_layers_go_on_together_after_a_call_that_broke_off(gpt: gape.GPT, length: int) -> None:
    cache, ids = ForgettingCache(gpt, eps=1e-3), tokens(1, 1100)
    gpt(ids[:, :1000], cache=cache)
    second = list(gpt.blocks())[1]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with second.attention.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        gpt(ids[:, 1000:1001], cache=cache)
    cache.truncate(length)
    gpt(ids[:, length:1000], cache=cache)
    assert [layer.looks for layer in cache.layers] == [1, 0]
    first, other = cache.layers
    for at in range(1000, 1100):
        gpt(ids[:, at : at + 1], cache=cache)
        assert (first.looks - (length == 0), first.due) == (other.looks, other.due)
    assert other.looks > 1
