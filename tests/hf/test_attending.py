"""Caches serve the model they were made for, and no call goes on from one that broke off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, GenerationConfig, StaticCache

import gape.hf
from gape.hf.families import TRANSFORMERS_4
from tests.hf.test_forgetting import FLOOR, injected, made, ours
from tests.hf.tiny import opened, tiny, tokens

CACHES: dict[str, Callable[[Any], Any]] = {
    "forgetting": lambda model: gape.hf.ForgettingCache(model, eps=1e-3),
    "keeping": gape.hf.KeepingCache,
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: injected("llama"), lambda: injected("llama", seed=1)),
        (lambda: injected("llama"), lambda: injected("llama", num_hidden_layers=3)),
        (ours, ours),
    ],
)
@torch.no_grad()
def test_a_cache_of_another_model_is_refused(kind: str, one: Callable[[], Any], other: Callable[[], Any]) -> None:
    cache = CACHES[kind](one())
    with pytest.raises(ValueError, match="past_key_values"):
        other()(tokens(1, 12), past_key_values=cache)


@pytest.mark.parametrize("name", ["gape", "llama"])
@torch.no_grad()
def test_a_copy_of_a_cache_goes_on_from_the_same_tokens(name: str) -> None:
    model, ids = made(name), tokens(1, 20)
    cache = gape.hf.ForgettingCache(model, eps=1e-3)
    model(ids[:, :12], past_key_values=cache)
    copied = copy.deepcopy(cache)
    logits = [model(ids[:, 12:], past_key_values=each).logits for each in (cache, copied)]
    assert torch.equal(*logits)


def broken_off(model: Any, cache: Any, layer: Any) -> None:
    """Read twelve tokens, and three more that the second layer never gets."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    model(tokens(1, 12), past_key_values=cache)
    hook = layer.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(tokens(1, 3), past_key_values=cache)
    hook.remove()


@pytest.mark.parametrize(
    "kind",
    [
        lambda model: DynamicCache(),
        lambda model: StaticCache(config=model.config, max_cache_len=32),
        gape.hf.KeepingCache,
        CACHES["forgetting"],
    ],
)
@pytest.mark.parametrize("name", ["gape", "llama"])
@torch.no_grad()
def test_a_cache_that_a_call_left_uneven_is_refused(kind: Callable[[Any], Any], name: str) -> None:
    model = made(name)
    cache = kind(model)
    broken_off(model, cache, model.gpt.layers[1].attention_norm if name == "gape" else model.model.layers[1])
    with pytest.raises(ValueError, match="past_key_values"):
        model(tokens(1, 1), past_key_values=cache)


@torch.no_grad()
def test_a_layer_with_gates_notices_unevenness_of_others() -> None:
    model = gape.hf.inject(tiny("llama", num_hidden_layers=3), context_length=16, layers=[2], gates=FLOOR)
    cache = DynamicCache()
    broken_off(model, cache, model.model.layers[1])
    with pytest.raises(ValueError, match="past_key_values"):
        model(tokens(1, 1), past_key_values=cache)


def test_pads_inside_a_prompt_are_refused_by_name() -> None:
    model, ids = injected("llama"), tokens(1, 12)
    ids[0, 5] = 0
    settings = {"max_new_tokens": 2, "do_sample": False, "attention_mask": (ids != 0).long()}
    with pytest.raises(ValueError, match="attention_mask"):
        model.generate(ids, past_key_values=gape.hf.ForgettingCache(model, eps=1e-3), **settings)


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 refuses it by the name of the attention implementation")
@pytest.mark.parametrize("model", [lambda: opened(tiny("llama")), ours])
def test_pages_of_continuous_batching_are_refused(model: Callable[[], Any]) -> None:
    from transformers import ContinuousBatchingConfig

    arguments = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    prompts = tokens(2, 6).tolist()
    actual = model().generate_batch(prompts, arguments, continuous_batching_config=sizes, warmup=False)
    assert len(actual) == 2
    for result in actual.values():
        assert result.error.startswith("cache: ")
        assert result.generated_tokens == []


@pytest.mark.parametrize(
    "model",
    [
        lambda: gape.hf.inject(tiny("llama"), context_length=16, position="yarn", factor=2.0),
        lambda: gape.hf.inject(tiny("gemma2"), context_length=16, position="yarn", factor=2.0),
        lambda: ours(position="rope", options={}),
    ],
)
def test_keys_without_gates_are_cached_as_they_are(model: Callable[[], Any]) -> None:
    gpt, ids, cache = model(), tokens(2, 20), DynamicCache()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    actual = gpt.generate(ids, past_key_values=cache, **settings)
    assert torch.equal(actual, gpt.generate(ids, use_cache=False, **settings))
    assert {layer.keys.size(-1) for layer in cache.layers} == {8}
