"""The layers of a forgetting cache look through their keys together, however much each of them holds."""

from __future__ import annotations

import pytest
import torch

import gape
from gape.models.cache import ForgettingCache
from gape.models.forgetting_shelf import slack
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
    cache, ids, looks = ForgettingCache(gpt, eps=1e-3), tokens(1, 1200), []
    for chunk in (ids[:, :1000], *ids[:, 1000:].split(1, dim=1)):
        gpt(chunk, cache=cache)
        looks.append([layer.looks for layer in cache.layers])
    assert all(first == second for first, second in looks)
    first, second = (sum(kept) / len(kept) for kept in cache.kept)
    assert 8 * first < second
    # One for the prompt, one for want of room, and then one for every sixteenth of what both hold, not of the least.
    assert 2 <= looks[-1][0] <= 3 + 200 // slack(int(first + second) // 2)


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
    for each in (cache, other):
        gpt(ids, cache=each)
    cache.forget()
    assert (cache.looks, other.looks) == (2, 0)
    assert cache.due > slack(0)
    cache.truncate(0)
    assert (cache.due, other.due) == (slack(0), 0)
