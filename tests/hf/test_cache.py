"""Landmarks and positions in cached keys come back exactly, and no call goes on from one that broke off."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

import gape.hf
from gape.hf.cache import KEYS_BY_HEAD, PackedKeys, extra_width, furthest, pack, refuse_uneven, unpack
from tests.hf.tiny import FLOOR, broken_off, last_logits_without, made, opened, ours, tiny, tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_is_packed_comes_back(dtype):
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 3, 50, 8, generator=generator).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    landmark = torch.rand(2, 3, 50, generator=generator).to(wide).requires_grad_()
    positions = torch.randint(-5, 4_000_000, (2, 50), generator=generator)
    packed = pack(k, landmark, positions)
    assert packed.shape == (2, 3, 50, 8 + extra_width(dtype))
    keys, actual, where = unpack(packed, 8)
    assert torch.equal(keys, k)
    assert torch.equal(where, positions)
    torch.testing.assert_close(actual, landmark, atol=6e-8 if dtype == torch.float16 else 0, rtol=0)
    actual.sum().backward()
    assert torch.equal(landmark.grad, torch.ones_like(landmark))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_positions_that_keys_cannot_carry_are_refused(dtype):
    k = torch.zeros(1, 1, 1, 8, dtype=dtype)
    last = torch.tensor([furthest(dtype)])
    assert torch.equal(unpack(pack(k, None, last), 8)[2], last[None])
    with pytest.raises(ValueError, match="positions"):
        pack(k, None, last + 1)


@pytest.mark.parametrize("batched", [pytest.param(False, marks=pytest.mark.slow), True])
def test_positions_that_keys_cannot_carry_are_nan_in_a_graph(batched):
    k = torch.zeros(2, 1, 2, 8, dtype=torch.bfloat16)
    positions = torch.tensor([furthest(k.dtype), furthest(k.dtype) + 1])
    packed = torch.compile(pack, backend="eager")(k, None, positions.expand(2, 2) if batched else positions)
    assert not packed[:, :, 0].isnan().any()
    assert packed[:, :, 1, :8].isnan().all()


def test_a_cache_does_not_round_the_gradients_of_gates_that_learn_alone():
    k, landmark = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16), torch.rand(1, 2, 3, requires_grad=True)
    assert PackedKeys(cache=DynamicCache(), layer=0).append(k, k, landmark, torch.arange(3)).side is landmark


def test_lengths_on_a_device_are_not_read():
    cache = SimpleNamespace(layers=[None] * 2, get_seq_length=lambda layer: torch.tensor(layer, device="meta"))
    refuse_uneven(cache, 0, 1)


@pytest.mark.parametrize("kind", [DynamicCache, lambda config: StaticCache(config=config, max_cache_len=32)])
@pytest.mark.parametrize("name", ["gape", "llama"])
@torch.no_grad()
def test_a_cache_that_a_call_left_uneven_is_refused(kind, name):
    model = made(name)
    cache = kind(config=model.config)
    broken_off(model, cache)
    with pytest.raises(ValueError, match="past_key_values"):
        model(tokens(1, 1), past_key_values=cache)


@torch.no_grad()
def test_a_layer_with_gates_notices_unevenness_of_others():
    model = gape.hf.inject(tiny("llama", num_hidden_layers=3), context_length=16, layers=[2], gates=FLOOR)
    cache = DynamicCache()
    broken_off(model, cache)
    with pytest.raises(ValueError, match="past_key_values"):
        model(tokens(1, 1), past_key_values=cache)


@pytest.mark.parametrize("model", [lambda: opened(tiny("llama")), ours])
def test_continuous_batching_is_refused_before_its_thread_begins(model):
    with pytest.raises(ValueError, match="continuous batching"):
        model().generate_batch(tokens(2, 6).tolist())


@pytest.mark.parametrize(
    "model",
    [
        lambda: gape.hf.inject(tiny("llama"), context_length=16, position="yarn", factor=2.0),
        lambda: gape.hf.inject(tiny("gemma2"), context_length=16, position="yarn", factor=2.0),
        lambda: ours(position="rope", options={}),
    ],
)
def test_keys_without_gates_are_cached_as_they_are(model):
    gpt, ids, cache = model(), tokens(2, 20), DynamicCache()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    actual = gpt.generate(ids, past_key_values=cache, **settings)
    assert torch.equal(actual, gpt.generate(ids, use_cache=False, **settings))
    assert {layer.keys.size(-1) for layer in cache.layers} == {8}


@torch.no_grad()
@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_heads_may_drop_keys_of_their_own(family, name):
    model, cache, ids = opened(tiny(family, name)), DynamicCache(), tokens(1, 33)
    model(ids[:, :-1], past_key_values=cache)
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        chosen = torch.rand(layer.keys.shape[:3], generator=generator).topk(12).indices.sort().values.unsqueeze(-1)
        layer.keys, layer.values = (
            x.gather(2, chosen.expand(-1, -1, -1, x.size(-1))) for x in (layer.keys, layer.values)
        )
        setattr(layer, KEYS_BY_HEAD, True)
    actual = model(ids[:, -1:], past_key_values=cache, position_ids=torch.tensor([[32]])).logits[:, -1]
    torch.testing.assert_close(actual, last_logits_without(model, cache, ids), atol=1e-5, rtol=1e-5)
