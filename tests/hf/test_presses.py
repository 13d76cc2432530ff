"""Presses of kvpress on models with gates, where that package is installed (it needs transformers before 5.3)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("kvpress")

import kvpress
from transformers import DynamicCache

from gape.hf.presses import GatedPress
from tests.hf.tiny import last_logits_without, opened, tiny, tokens

LENGTH = 40
PRESSES = {
    "knorm": lambda: kvpress.KnormPress(0.5),
    "random": lambda: kvpress.RandomPress(0.5),
    "streaming": lambda: kvpress.StreamingLLMPress(0.5),
    "snapkv": lambda: kvpress.SnapKVPress(0.5, window_size=8),
    "tova": lambda: kvpress.TOVAPress(0.5),
    "expected": lambda: kvpress.ExpectedAttentionPress(0.5),
    "keydiff": lambda: kvpress.KeyDiffPress(0.5),
    "lagkv": lambda: kvpress.LagKVPress(0.5),
    "observed": lambda: kvpress.ObservedAttentionPress(0.5),
    "leverage": lambda: kvpress.LeverageScorePress(0.5),
    "noncausal": lambda: kvpress.NonCausalAttnPress(0.5),
    "cur": lambda: kvpress.CURPress(0.5),
}


def pressed(model, press, ids):
    """The cache behind all tokens but the last, and the last one's logits."""
    cache = DynamicCache()
    with press(model), torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        count = cache.get_seq_length()
        last = torch.tensor([[ids.size(1) - 1]])
        return cache, count, model(ids[:, -1:], past_key_values=cache, position_ids=last).logits[:, -1]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", PRESSES)
def test_a_press_drops_half_of_the_keys_and_the_rest_attend_as_under_a_mask(name, family):
    model = opened(tiny(family, "eager" if name == "observed" else None))
    ids = tokens(1, LENGTH + 1)
    torch.manual_seed(0)
    cache, count, logits = pressed(model, GatedPress(PRESSES[name]()), ids)
    assert count == LENGTH // 2
    expected = last_logits_without(model, cache, ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_press_of_nothing_changes_nothing():
    model, ids = opened(tiny("llama")), tokens(1, LENGTH + 1)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    torch.testing.assert_close(pressed(model, GatedPress(kvpress.KnormPress(0.0)), ids)[2], expected)


def test_generate_runs_under_a_press_and_further_tokens_are_cached():
    model, ids = opened(tiny("llama")), tokens(1, LENGTH)
    cache = DynamicCache()
    with GatedPress(kvpress.SnapKVPress(0.5, window_size=8))(model):
        out = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert out.shape == (1, LENGTH + 6)
    assert cache.get_seq_length() == LENGTH // 2 + 5


@pytest.mark.parametrize("name", ["knorm", "snapkv", "tova", "expected"])
def test_without_the_wrapper_a_press_is_an_error_and_not_other_numbers(name):
    with pytest.raises((RuntimeError, ValueError)):
        pressed(opened(tiny("llama")), PRESSES[name](), tokens(1, LENGTH + 1))


def test_masks_by_head_are_an_error_and_not_ignored():
    with pytest.raises(ValueError, match="GatedPress"):
        pressed(opened(tiny("llama")), kvpress.AdaKVPress(kvpress.KnormPress(0.5)), tokens(1, LENGTH + 1))


@pytest.mark.parametrize(
    "press", [lambda: kvpress.ThinKPress(), lambda: kvpress.KeyRerotationPress(kvpress.KnormPress(0.5))]
)
def test_presses_that_rewrite_keys_are_refused(press):
    with pytest.raises(ValueError, match="press"):
        GatedPress(press())


def test_pads_are_refused():
    model, mask = opened(tiny("llama")), torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :5] = 0
    with pytest.raises(ValueError, match="attention_mask"), GatedPress(kvpress.KnormPress(0.5))(model):
        model(tokens(2, LENGTH), attention_mask=mask, past_key_values=DynamicCache())


def test_positions_counted_from_the_shortened_cache_are_refused():
    model, ids, cache = opened(tiny("llama")), tokens(1, LENGTH + 1), DynamicCache()
    with GatedPress(kvpress.KnormPress(0.5))(model):
        model(ids[:, :-1], past_key_values=cache)
    with pytest.raises(ValueError, match="position_ids"):
        model(ids[:, -1:], past_key_values=cache)
