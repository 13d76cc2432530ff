"""Keys about their mean: the same logits, tighter bounds, and fewer keys in a cache that evicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import gape.hf
from gape.cache.eviction import EvictionRule
from gape.hf.bounds import layer_specs
from gape.hf.sinks import SinkLandmarks, set_landmarks
from tests.hf.tiny import FLOOR, opened, tiny, tokens

#: Half of the heads turn, half do not.
MIXED = {"position": "rope+gape", "head_positions": ["rope", "nope"]}
POSITIONS: dict[str, dict[str, Any]] = {
    "hope": {"position": "hope+gape"}, "p-rope": {"position": "p-rope+gape", "fraction": 0.5},
    "nope": {"position": "nope+gape"}, "heads": MIXED,
}  # fmt: skip


def with_common_key(family: str = "qwen2") -> Any:
    """A model whose keys have much in common."""
    model = tiny(family, use_sliding_window=False, layer_types=None)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_(std=3.0, generator=torch.Generator().manual_seed(5))
    return model


def key_norm(model: Any, ids: torch.Tensor) -> float:
    """The longest key that a cache has seen, mean over layers and heads."""
    cache = gape.hf.FullCache(model)
    model(ids, past_key_values=cache)
    return float(cache.pages.storage.key_norm.mean())


@torch.no_grad()
@pytest.mark.parametrize("name", POSITIONS)
def test_logits_stay_and_keys_are_shorter(name: str) -> None:
    model = opened(with_common_key(), **POSITIONS[name]).double()
    ids = tokens(length=40)
    before, longest = model(ids).logits, key_norm(model, ids)
    assert gape.hf.center_keys(model, tokens(seed=2, length=64)) > 0
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=1e-10)
    assert key_norm(model, ids) < 0.95 * longest
    # Means are measured anew, not added up.
    gape.hf.center_keys(model, tokens(seed=4, length=64))
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "changes", "options"),
    # In transformers 4, sdpa does not cap logits.
    [("llama", {}, {}), ("gemma2", {"implementation": "eager"}, {"position": "nope+gape"})],
    ids=["every coordinate turns", "capped logits"],
)
def test_a_model_stays_as_it_is_where_moved_keys_would_change_it(family: str, changes: Any, options: Any) -> None:
    model = opened(tiny(family, **changes), **options)
    assert gape.hf.center_keys(model, tokens()) == 0
    assert "centered" not in [name for name, value in model.config.gape.items() if value is True]


def centered(**options: Any) -> Any:
    """A model with keys about their mean, and landmarks that read them."""
    model = opened(with_common_key(), **options)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.gape.landmark_projection.weight.normal_(generator=torch.Generator().manual_seed(7))
    gape.hf.center_keys(model, tokens(length=64))
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", [*POSITIONS, "layers"])
def test_saved_and_loaded_the_means_are_there(name: str, tmp_path: Path) -> None:
    # In the last case one layer has no coordinate that stays.
    options = POSITIONS.get(name) or {**MIXED, "head_positions": [["rope", "rope"], ["rope", "nope"]]}
    model = centered(**options)
    model.save_pretrained(tmp_path / "first")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first").eval()
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    assert key_norm(again, tokens()) == key_norm(model, tokens())
    other = opened(with_common_key(), **options)
    other.load_state_dict(model.state_dict())
    other.save_pretrained(tmp_path / "second")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second").eval()
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@torch.no_grad()
def test_layers_without_rotation_in_the_models_own_scheme_are_saved_too(tmp_path: Path) -> None:
    model = opened(tiny("smollm3"))
    assert gape.hf.center_keys(model, tokens(length=64)) > 0
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@torch.no_grad()
def test_an_adapter_brings_its_means_or_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = centered(**POSITIONS["hope"])
    model = peft.get_peft_model(base, gape.hf.lora_config(base, r=2)).eval()
    model.save_pretrained(tmp_path / "centered")
    loaded = gape.hf.load_adapter(with_common_key(), tmp_path / "centered").eval()
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    plain = opened(with_common_key(), **POSITIONS["hope"])
    peft.get_peft_model(plain, gape.hf.lora_config(plain, r=2)).save_pretrained(tmp_path / "plain")
    for name, other in (
        ("centered", opened(with_common_key(), **POSITIONS["hope"])), ("plain", centered(**POSITIONS["hope"]))
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^centered: "):
            peft.PeftModel.from_pretrained(other, tmp_path / name)
        with pytest.raises(ValueError, match=r"^centered: "):
            other.load_adapter(tmp_path / name, "second")


@torch.no_grad()
def test_landmarks_set_later_are_of_keys_as_they_are() -> None:
    landmarks = SinkLandmarks(torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(3)), torch.zeros(2, 2))
    models = [opened(with_common_key(), **POSITIONS["nope"]), centered(**POSITIONS["nope"])]
    for model in models:
        set_landmarks(model, landmarks)
    first, second = (model.double()(tokens()).logits for model in models)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_model_without_its_gates_has_its_own_keys() -> None:
    model = with_common_key().eval()
    before = model(tokens()).logits
    gape.hf.inject(model, context_length=16, **POSITIONS["nope"])
    gape.hf.center_keys(model, tokens(length=64))
    gape.hf.remove(model)
    assert torch.equal(model(tokens()).logits, before)


@torch.no_grad()
def test_a_cache_evicts_more_and_gives_the_same_text() -> None:
    def run() -> tuple[torch.Tensor, int]:
        cache = gape.hf.ForgettingCache(model, eps=1e-3, bounds="queries")
        text = model.generate(ids, past_key_values=cache, max_new_tokens=80, do_sample=False, pad_token_id=0)
        cache.evict()
        return text, sum(map(sum, cache.num_keys))

    model = gape.hf.inject(with_common_key(), context_length=16, start="paper", gates=FLOOR, position="nope+gape")
    ids = tokens(length=200)
    text, keys = run()
    gape.hf.center_keys(model, tokens(length=64))
    centered_text, fewer = run()
    assert torch.equal(text, centered_text)
    assert fewer < 0.9 * keys


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_bounds_from_weights_hold_for_centered_keys(family: str) -> None:
    model = with_common_key() if family == "qwen2" else tiny(family)
    gape.hf.inject(model, context_length=16, start="paper", gates=FLOOR, position="nope+gape")
    gape.hf.center_keys(model, tokens(length=64))
    spec, module = layer_specs(model, EvictionRule(eps=1e-3))[0], model.model.layers[0].self_attn
    x = 50 * torch.randn(1, 2000, 32, generator=torch.Generator().manual_seed(1)) + 20
    q, k, _ = module.project(model.model.layers[0].input_layernorm(x))
    own = -spec.scale * (q * k.repeat_interleave(2, dim=1)).sum(-1).amin((0, 2))
    assert (own <= spec.limits.own + 1e-4).all()


@pytest.mark.parametrize("ids", [torch.ones(2, 8, dtype=torch.int64), torch.ones(64, dtype=torch.int64)])
def test_texts_of_another_shape_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="ids"):
        gape.hf.center_keys(opened(tiny("llama")), ids)


def test_a_model_without_gates_is_refused() -> None:
    with pytest.raises(ValueError, match="model"):
        gape.hf.center_keys(tiny("llama"), tokens())
