"""A whole model that leaves tiles of keys away: the same answers within what eps allows, with and without a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gape.cache.gpt import ForgettingCache, FullCache
from gape.cache.kv import ModelCache
from gape.cache.paged import PagedCache
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from gape.models.skipping import skip, skipping
from tests.ops.skipped import fractions

FLOOR = {"gate_floor": 96.0, "init_landmark_bias": -9.0}


def model(**changed: object) -> GPT:
    sizes = {"vocab_size": 17, "n_layer": 1, "n_head": 2, "n_embd": 32, "context_length": 64, "n_kv_head": 1}
    torch.manual_seed(0)
    return GPT(GPTConfig(**(sizes | {"options": FLOOR} | changed))).eval()


def tokens(n: int = 150) -> Tensor:
    return torch.randint(17, (1, n), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def read(gpt: GPT, ids: Tensor, cache: ModelCache | PagedCache | None = None, chunk: int = 150) -> Tensor:
    return torch.cat([gpt(part, cache=cache).logits for part in ids.split(chunk, dim=1)], dim=1)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The fraction of tiles that every call of the kernel has looked at."""
    return fractions(monkeypatch)


def test_a_model_skips_and_says_the_same(tiles: list[float]) -> None:
    gpt, ids = model(), tokens()
    dense = read(gpt, ids)
    assert not tiles
    with skipping(gpt, 1e-4):
        found = read(gpt, ids)
    assert max(tiles) < 0.9
    torch.testing.assert_close(found, dense, atol=1e-3, rtol=0)
    assert (read(gpt, ids) == dense).all()


@pytest.mark.parametrize("reserve", [None, pytest.param(0, marks=pytest.mark.slow)])
def test_chunks_with_a_cache_skip_too(tiles: list[float], reserve: int | None) -> None:
    gpt, ids = model(reserve=reserve), tokens()
    with skipping(gpt, 1e-4):
        found = read(gpt, ids, gpt.new_cache(), chunk=120)
    assert min(tiles) < 0.9
    torch.testing.assert_close(found, read(gpt, ids), atol=1e-3, rtol=0)


def test_a_step_of_decoding_skips_nothing(tiles: list[float]) -> None:
    gpt, ids = model(), tokens(40)
    cache = gpt.new_cache()
    read(gpt, ids, cache)
    with skipping(gpt, 0.5):
        read(gpt, ids[:, :1], cache)
    assert not tiles


def test_gradients_go_through(tiles: list[float]) -> None:
    gpt, ids = model().train(), tokens(100)
    grads = []
    for eps in (0.0, 1e-4):
        gpt.zero_grad()
        skip(gpt, eps)
        gpt(ids[:, :-1], targets=ids[:, 1:]).loss.backward()
        grads.append({name: p.grad.clone() for name, p in gpt.named_parameters()})
    assert min(tiles) < 0.9
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("changed", "given", "match"),
    [
        ({}, {"eps": 1.0}, "eps"),
        ({"position": "rope", "options": {}}, {"eps": 0.1}, "model: .*gates"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, object], given: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        skip(model(**changed), **given)


@pytest.mark.gpu
def test_a_long_text_is_read_alike_on_a_gpu(tiles: list[float]) -> None:
    """As it is measured: bfloat16, whole and in chunks, with every kind of cache."""
    device = torch.device("cuda")
    gpt = model(n_layer=2, n_embd=256, n_head=4, n_kv_head=4, context_length=1024, options={"gate_floor": 64.0}).to(
        device
    )
    ids = torch.randint(17, (1, 16384), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.autocast("cuda", torch.bfloat16):
        dense = read(gpt, ids, chunk=16384)
        # Caches in pages skip by an eps of their own.
        for cache in (None, gpt.new_cache(), FullCache(gpt), ForgettingCache(gpt, eps=1e-4)):
            with skipping(gpt, 1e-4):
                found = read(gpt, ids, cache, chunk=16384 if cache is None else 4096)
            torch.testing.assert_close(found.float(), dense.float(), atol=5e-2, rtol=0)
    assert min(tiles) < 0.7


@pytest.mark.gpu
def test_a_gpu_skips_the_same_in_one_pass(tiles: list[float]) -> None:
    """q and k made ready in one launch against the scheme's steps, which alone are counted."""
    gpt = model(n_layer=2, n_embd=256, n_head=4, n_kv_head=2, context_length=1024, options={"gate_floor": 64.0}).cuda()
    ids, logits = tokens(2049).cuda(), []
    with torch.autocast("cuda", torch.bfloat16), skipping(gpt, 1e-3):
        for stepwise in (False, True):
            for block in gpt.blocks():
                block.attention.stepwise = stepwise
            logits.append(read(gpt, ids, chunk=2049).float())
            assert len(tiles) == 2 * stepwise
    assert max(tiles) < 0.9
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 2**-6
