"""Heads of a layer that rotate in different ways, and scores that grow: cached, saved and bounded as any other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache

import gape.hf
from gape import GPT, GPTConfig
from gape.cache.bounds import limits_of_weights
from gape.cache.eviction import EvictionRule
from gape.hf import ForgettingCache, FullCache
from gape.hf.attention import InjectedAttention, first_row
from gape.hf.bounds import layer_specs
from gape.positions import angles, build
from tests.hf.tiny import FLOOR, opened, ours, tiny, tokens
from tests.models.tiny import model as gpt

#: Of two layers with two key heads each.
HEADS = {"head_positions": [["rope", "hope"], ["nope", "rope"]], "log_scale": [[False, True], [True, False]]}
CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: DynamicCache(),
    "full": FullCache,
    "forgetting": lambda model: ForgettingCache(model, eps=1e-12),
    "queries": lambda model: ForgettingCache(model, eps=1e-12, bounds="queries"),
}


def mixed(name: str = "llama", **changes: Any) -> Any:
    """A model whose training length is 16 tokens."""
    if name == "gape":
        return ours(position="rope+gape", options={**FLOOR, **HEADS})
    return gape.hf.inject(
        tiny(name, **changes), context_length=16, position="rope+gape", start="paper", gates=FLOOR, **HEADS
    )


@pytest.mark.parametrize(("name", "kind"), [("gape", "full"), ("qwen3", "queries"), *(("llama", x) for x in CACHES)])
@torch.no_grad()
def test_cached_tokens_have_the_logits_of_the_whole_text(name: str, kind: str) -> None:
    model, ids = mixed(name).double(), tokens(2, 60)
    cache = CACHES[kind](model)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([50, *[1] * 10], dim=1)]
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-9, rtol=1e-9)


def test_each_head_of_each_layer_rotates_as_it_was_told() -> None:
    model, positions = mixed(), torch.arange(100, 140)
    modules = [module for module in model.modules() if isinstance(module, InjectedAttention)]
    q, k = torch.randn(1, 4, 40, 8), torch.randn(1, 2, 40, 8)
    for module, names, grows in zip(modules, HEADS["head_positions"], HEADS["log_scale"], strict=True):
        got_q, got_k, *_ = module.rotate(q, k, positions, q, None)
        for head, (name, growing) in enumerate(zip(names, grows, strict=True)):
            alone = build(name, n_heads=4, n_kv_heads=2, head_dim=8, context_length=16)
            factor = (positions.log() / math.log(16)).view(-1, 1) if growing else 1.0
            queries = slice(2 * head, 2 * head + 2)
            torch.testing.assert_close(got_q[:, queries], factor * alone.queries(q, positions)[0][:, queries])
            torch.testing.assert_close(got_k[:, head], alone.keys(k, positions)[0][:, head])


def test_layers_of_a_captured_step_with_one_row_share_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cached while a graph is captured, but for positions of the step itself."""
    monkeypatch.setattr(angles, "cacheable", lambda device: False)
    positions, sizes = torch.tensor([[7]]), {"n_heads": 4, "head_dim": 8, "context_length": 16}
    angles.share_angles(positions)
    one, other = (build("rope", **sizes).angles(first_row(positions)) for _ in range(2))
    assert one[0] is other[0]


@torch.no_grad()
def test_the_own_rotation_in_every_head_keeps_the_logits() -> None:
    plain, ids = tiny("llama"), tokens(2, 40)
    expected = plain(ids).logits
    same = gape.hf.inject(tiny("llama"), context_length=16, position="rope+gape", head_positions=["rope", "rope"])
    torch.testing.assert_close(same(ids).logits, expected, atol=2e-5, rtol=1e-4)
    other = gape.hf.inject(tiny("llama"), context_length=16, position="rope+gape", head_positions=["rope", "nope"])
    assert not torch.allclose(other(ids).logits, expected, atol=1e-2)


@torch.no_grad()
def test_saved_and_loaded_with_the_same_logits(tmp_path: Any) -> None:
    model, ids = opened(tiny("llama"), position="rope+gape", **HEADS), tokens(2, 40)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["gape"]["options"] == HEADS
    other = gape.hf.inject(tiny("llama"), context_length=16, position="rope+gape", head_positions=["rope", "hope"])
    with pytest.raises(ValueError, match="options"):
        other.load_state_dict(model.state_dict())


@torch.no_grad()
def test_a_gpt_is_made_again_from_its_configuration() -> None:
    made, ids = gpt("rope+gape", options=HEADS), tokens(2, 40) % 27
    again = GPT(GPTConfig.from_dict(json.loads(json.dumps(made.config.to_dict())))).double().eval()
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(ids).logits, made(ids).logits)
    plain = gpt("rope+gape")
    plain.load_state_dict(made.state_dict())
    assert not torch.allclose(plain(ids).logits, made(ids).logits)


@torch.no_grad()
def test_bounds_hold_for_queries_at_the_last_position() -> None:
    """Norms before rotation, times the growth at the largest position of a page."""
    block = next(gpt("rope+gape", options=HEADS).blocks())
    attention, norm = block.attention, block.attention_norm
    x = norm(100 * torch.randn(1, 2000, 48, dtype=torch.float64))
    limits = limits_of_weights(attention, norm)
    q, k, _ = attention.project(x)
    for position in (5, 10_000, 2**31 - 1):
        places = torch.full((2000,), position)
        turned, keys = attention.scheme.queries(q, places)[0], attention.scheme.keys(k, places)[0]
        own = (turned * keys.repeat_interleave(2, 1)).sum(-1)
        assert (attention.scale * turned.norm(dim=-1).amax((0, 2)) <= limits.reach).all()
        assert (-attention.scale * own.amin((0, 2)) <= limits.own).all()
    spec, plain = (
        layer_specs(model, EvictionRule(eps=1e-3))[0].limits.reach
        for model in (mixed(), gape.hf.inject(tiny("llama"), context_length=16, start="paper", gates=FLOOR))
    )
    torch.testing.assert_close(spec / plain, torch.tensor([1, 1, *[math.log(2**31 - 1) / math.log(16)] * 2]).double())


def test_what_a_family_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^head_positions: .*position="):
        gape.hf.inject(tiny("llama"), context_length=16, head_positions=["rope", "hope"])
    with pytest.raises(ValueError, match=r"^head_positions: .*2 layers"):
        gape.hf.inject(tiny("llama"), context_length=16, position="rope+gape", head_positions=[["rope", "hope"]] * 3)
    with pytest.raises(ValueError, match=r"^log_scale: layer 1 has no rotation"):
        gape.hf.inject(tiny("smollm3"), context_length=16, position="rope+gape", log_scale=True)
