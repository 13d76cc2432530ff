"""Presses of kvpress on models with gates, where that package is installed (it needs transformers before 5.3)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("kvpress")

import kvpress
from kvpress.presses.scorer_press import ScorerPress
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import gape.hf
from gape.hf.cache import unpack
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


@pytest.mark.parametrize("position", [None, "hope+gape"])
def test_a_question_behind_a_pressed_context_reads_as_token_by_token(position):
    model, ids = opened(tiny("llama"), position=position), tokens(1, LENGTH + 20)
    logits = []
    for step in (20, 1):
        cache = DynamicCache()
        with GatedPress(PRESSES["snapkv"]())(model), torch.no_grad():
            model(ids[:, :LENGTH], past_key_values=cache)
        parts = []
        for start in range(LENGTH, LENGTH + 20, step):
            places = torch.arange(start, start + step)[None]
            with torch.no_grad():
                parts.append(model(ids[:, start : start + step], past_key_values=cache, position_ids=places).logits)
        logits.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


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


class Probe(ScorerPress):
    """Stores what a press is shown, and scores by the place of a key."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        self.shown = module, hidden_states, keys, kwargs["position_embeddings"], module.rotary_emb
        return torch.arange(keys.size(2)).expand(keys.shape[:3]).float()


@pytest.mark.parametrize("position", ["hope+gape", "nope+gape", "yarn+gape", "yarn"])
def test_a_press_is_shown_the_rotation_and_the_keys_of_the_layer(position):
    model, ids = tiny("llama"), tokens(1, LENGTH)
    gape.hf.inject(model, context_length=16, position=position, **({"start": "paper"} if "+" in position else {}))
    if position == "hope+gape":
        assert gape.hf.center_keys(model, tokens(2, 30, seed=5))
    probe = Probe(0.5)
    with GatedPress(probe)(model), torch.no_grad():
        model(ids, past_key_values=DynamicCache())
    module, hidden, keys, (cos, sin), rotary = probe.shown
    q, k, _ = module.gape_wiring.family.layout.project(module, hidden)
    scheme = module.gape_wiring.scheme
    expected = scheme.queries(q, torch.arange(LENGTH))[0]
    torch.testing.assert_close(apply_rotary_pos_emb(q, k, cos, sin)[0], expected, atol=1e-5, rtol=1e-5)
    # Keys as the projection gives them, not about their mean.
    torch.testing.assert_close(keys, scheme.keys(k, torch.arange(LENGTH))[0], atol=1e-5, rtol=1e-5)
    far = rotary(q, torch.arange(100, 104)[None])
    torch.testing.assert_close(
        apply_rotary_pos_emb(q[:, :, :4], k[:, :, :4], *far)[0],
        scheme.queries(q[:, :, :4], torch.arange(100, 104))[0], atol=1e-5, rtol=1e-5,
    )  # fmt: skip
    assert module.rotary_emb is model.model.rotary_emb


def test_a_press_is_shown_that_a_layer_does_not_rotate():
    model = tiny("smollm3")
    gape.hf.inject(model, context_length=16, start="paper")
    unrotated = [layer.self_attn for layer in model.model.layers if not layer.self_attn.use_rope]
    shown = []

    class Shown(Probe):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            if module in unrotated:
                shown.append((kwargs["position_embeddings"], module.rotary_emb(keys, torch.arange(100, 104)[None])))
            return super().score(module, hidden_states, keys, values, attentions, kwargs)

    with GatedPress(Shown(0.5))(model), torch.no_grad():
        model(tokens(1, LENGTH), past_key_values=DynamicCache())
    assert len(shown) == len(unrotated) > 0
    for embeddings in shown:
        for cos, sin in embeddings:
            assert torch.equal(cos, torch.ones_like(cos))
            assert not sin.any()


@pytest.mark.parametrize("position", [None, "hope+gape"])
@pytest.mark.parametrize("name", ["snapkv", "tova"])
def test_presses_that_score_by_attention_see_gates_under_every_implementation(name, position):
    kept = {}
    for implementation in ("eager", "sdpa"):
        model = opened(tiny("llama", implementation), position=position)
        cache, *_ = pressed(model, GatedPress(PRESSES[name]()), tokens(1, LENGTH + 1))
        width = model.config.head_dim
        kept[implementation] = [unpack(layer.keys, width, by_head=True)[2] for layer in cache.layers]
    assert all(torch.equal(a, b) for a, b in zip(*kept.values(), strict=True))


def test_heads_that_rotate_in_several_ways_are_refused():
    model = tiny("llama")
    gape.hf.inject(model, context_length=16, position="rope+gape", start="paper", head_positions=["rope", "hope"])
    with pytest.raises(ValueError, match="several ways"), GatedPress(PRESSES["expected"]())(model):
        model(tokens(1, LENGTH), past_key_values=DynamicCache())
