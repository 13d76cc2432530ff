"""Decoding with q and k prepared in one launch: the same logits as step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import gape
from gape.cache.kv import ForgettingCache, ModelCache
from gape.models import attention as layer
from gape.ops import limits
from tests.models.tiny import model, tokens

pytest.importorskip("triton")
from gape.ops.triton import split_bias

FLOOR = {"options": {"gate_floor": 2.0}}
CACHES: dict[str, Callable[[gape.GPT], ModelCache]] = {
    "full": lambda gpt: gpt.new_cache(4),
    "forgetting": lambda gpt: ForgettingCache(gpt, eps=1e-2),
    "forgetting by queries": lambda gpt: ForgettingCache(gpt, eps=1e-2, bounds="queries"),
    "forgetting by gates": lambda gpt: ForgettingCache(gpt, eps=1e-2, bounds="gates"),
}


@contextmanager
def in_one_step() -> Iterator[list[Any]]:
    """Steps are taken by the kernel without a GPU too, where there are few tokens; each is noted."""
    taken: list[Any] = []
    run = split_bias.step_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "steps", lambda q, k: q.size(2) <= k.size(2) <= limits.DECODE_QUERIES)
        patch.setattr(
            split_bias, "step_rows", lambda q, k, step, **how: (taken.append(step), run(q, k, step, **how))[1]
        )
        yield taken


@contextmanager
def step_by_step() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "steps", lambda q, k: False)
        yield


def decoded(gpt: gape.GPT, cache: ModelCache, chunks: list[int], **told: torch.Tensor) -> torch.Tensor:
    """Logits of two texts that come in chunks, one behind the other."""
    ids, at, outs = tokens(2, sum(chunks)), 0, []
    for size in chunks:
        part = {name: x[:, at : at + size] for name, x in told.items()}
        outs.append(gpt(ids[:, at : at + size], cache=cache, logits_to_keep=min(size, 2), **part).logits)
        at += size
    return torch.cat(outs, dim=1)


@torch.no_grad()
def test_no_landmark_is_left_of_an_earlier_call() -> None:
    gpt = model(dtype=torch.float16, **FLOOR)
    attention, cache = next(gpt.blocks()).attention, gpt.new_cache(4)
    attention.keep_landmark = True
    gpt(tokens(2, 20), cache=cache)
    assert attention.landmark_mean is not None
    attention.keep_landmark = False
    with in_one_step() as taken:
        gpt(tokens(2, 1), cache=cache)
    assert taken
    assert attention.landmark_mean is None


@pytest.mark.parametrize("padded", [False, True], ids=["counted", "padded"])
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@torch.no_grad()
def test_logits_are_those_of_the_steps(cache: Callable[[gape.GPT], ModelCache], padded: bool) -> None:
    """A prompt too long for a step, chunks of which only the last tokens are asked for, and single tokens."""
    gpt, chunks = model(dtype=torch.float16, **FLOOR), [20, 3, 1, 1]
    told = {}
    if padded:
        real = torch.arange(sum(chunks)) >= torch.tensor([[4], [0]])
        told = {"positions": (real.cumsum(1) - 1).clamp(min=0), "documents": real.long()}
    with step_by_step():
        expected = decoded(gpt, cache(gpt), chunks, **told)
    with in_one_step() as taken:
        got = decoded(gpt, cache(gpt), chunks, **told)
    assert taken
    assert float((got - expected).norm() / expected.norm()) < 2**-9


@pytest.mark.parametrize("bounds", ["weights", "queries"])
@torch.no_grad()
def test_keys_that_were_dropped_are_missing_in_a_step_too(bounds: str) -> None:
    """Heads that forget at different speeds lie apart, so each has to find its own keys."""
    gpt = model(dtype=torch.float16, options={"gate_floor": [48.0, 48.0, 6.0, 6.0], "init_landmark_bias": -9.0})
    logits, kept = [], []
    for way in (step_by_step, in_one_step):
        cache = ForgettingCache(gpt, eps=1e-2, bounds=bounds)
        with way():
            decoded(gpt, cache, [60])
            cache.forget()
            logits.append(decoded(gpt, cache, [3, 1, 1]))
        kept.append(cache.kept)
    assert kept[0] == kept[1]
    assert all(fast < slow for fast, slow in kept[1])
    assert float((logits[1] - logits[0]).norm() / logits[0].norm()) < 2**-9


@torch.no_grad()
def test_what_is_measured_is_what_the_steps_measure() -> None:
    gpt = model(dtype=torch.float16, **FLOOR)
    limits = []
    for way in (step_by_step, in_one_step):
        cache = ForgettingCache(gpt, eps=1e-2, bounds="gates")
        with way():
            decoded(gpt, cache, [1, 2])
        cache.forget()
        limits.append(cache.layers[1]._seen.limits())
    for name in ("rate", "reach", "own"):
        torch.testing.assert_close(getattr(limits[1], name), getattr(limits[0], name), atol=1e-3, rtol=1e-2)


def stepwise(gpt: gape.GPT) -> None:
    for block in gpt.blocks():
        block.attention.stepwise = True


OTHERS: dict[str, tuple[dict[str, Any], Callable[[gape.GPT], object]]] = {
    "others listen": ({}, stepwise),
    "landmarks are kept": ({}, gape.GPT.keep_landmarks),
    "no gates": ({"position": "p-rope"}, lambda gpt: None),
    "no room for the bias": ({"reserve": 0}, lambda gpt: None),
    "two coordinates": ({"reserve": 2, "impl": "rank2"}, lambda gpt: None),
}


@pytest.mark.parametrize(("changed", "prepare"), OTHERS.values(), ids=OTHERS)
@torch.no_grad()
def test_others_go_step_by_step(changed: dict[str, Any], prepare: Callable[[gape.GPT], object]) -> None:
    gpt = model(dtype=torch.float16, **changed)
    prepare(gpt)
    with in_one_step() as taken:
        decoded(gpt, gpt.new_cache(), [3, 1])
    assert not taken


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [CACHES["full"], CACHES["forgetting by queries"]], ids=["full", "forgetting"])
@torch.no_grad()
def test_a_gpu_decodes_the_same_in_one_step(cache: Callable[[gape.GPT], ModelCache]) -> None:
    gpt = model(n_embd=256, dtype=torch.bfloat16, **FLOOR).cuda()
    logits, ids = [], tokens(2, 96).cuda()
    for steps in (layer.steps, lambda q, k: False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer, "steps", steps)
            remembered = cache(gpt)
            gpt(ids[:, :32], cache=remembered)
            found = [gpt(ids[:, at : at + 1], cache=remembered).logits for at in range(32, 96)]
            logits.append(torch.cat(found, dim=1).float())
    assert not torch.isnan(logits[0]).any()
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 2**-6
