"""Bounds on the queries of injected layers hold for any input, and are not so wide that they would say nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import gape.hf
from gape.cache.bounds import Limits
from gape.cache.eviction import EvictionRule
from gape.hf.bounds import layer_specs
from gape.hf.families import TRANSFORMERS_4
from tests.hf.tiny import FLOOR, injected, made, tiny

#: With a norm by the mean square, LayerNorm and biases, a joined projection, and norms of q and k, by head and of all.
FAMILIES = ("llama", "gpt2", "phi3", "qwen3", "olmo2")


def limits_of(model: Any) -> Limits:
    """Those of the first layer."""
    spec = layer_specs(model, EvictionRule(eps=1e-3))[0]
    assert spec.limits is not None
    return spec.limits


def extremes(model: Any) -> tuple[Any, Any]:
    """The largest reach and own of the first layer that inputs of all kinds lead to."""
    names = ("input_layernorm", "ln_1")
    norms = (getattr(m, name) for m in model.modules() for name in names if hasattr(m, name))
    norm = next(norms, torch.nn.Identity())
    module: Any = next(m for m in model.modules() if hasattr(m, "gape_wiring"))
    x = 50 * torch.randn(1, 4000, 32, generator=torch.Generator().manual_seed(1)) + 20
    with torch.no_grad():
        q, k, _ = module.project(norm(x.to(next(model.parameters()).dtype)))
        angles = model.model.rotary_emb(x, torch.arange(1)[None]) if hasattr(model, "model") else None
        q, k = (part.double() for part in module.rotate(q, k, torch.zeros(1, dtype=torch.int64), x, angles)[:2])
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    scale = module.gape_wiring.family.layout.scale(module)
    return scale * q.norm(dim=-1).amax((0, 2)), -scale * (q * k).sum(-1).amin((0, 2))


def shaken(model: Any, part: str, size: float) -> Any:
    """The model with noise in parameters whose name has this part."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name and "gape" not in name:
                parameter.add_(size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_no_input_exceeds_the_limits_of_a_layer(family: str) -> None:
    model = shaken(shaken(injected(family), "norm", 0.3), "bias", 0.3)
    limits, (reach, own) = limits_of(model), extremes(model)
    assert (reach <= limits.reach * (1 + 1e-4)).all()
    assert (own <= limits.own + 1e-4).all()
    assert (reach > 0.3 * limits.reach).all()


def test_weights_beside_large_biases_count_in_half_precision() -> None:
    exact, rough = (limits_of(shaken(made("qwen2"), "proj.bias", 100.0).to(x)) for x in (torch.float32, torch.bfloat16))
    torch.testing.assert_close(rough.reach, exact.reach, rtol=1e-2, atol=0.0)
    torch.testing.assert_close(rough.own, exact.own, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers[0].self_attn.q_proj.weight.mul_(2),
        lambda model: model.model.layers[0].input_layernorm.weight.mul_(2),
        lambda model: setattr(model.model.layers[0].self_attn.q_proj, "weight", torch.nn.Parameter(torch.ones(32, 32))),
        lambda model: model.model.layers[0].self_attn.q_proj.weight.data.mul_(2),
    ],
    ids=["written to", "its norm written to", "replaced", "data written to"],
)
@torch.no_grad()
def test_weights_that_change_have_other_limits(change: Any) -> None:
    model = injected("llama")
    before = limits_of(model).reach
    torch.testing.assert_close(limits_of(model).reach, before)
    change(model)
    reach, _ = extremes(model)
    assert (limits_of(model).reach > 1.5 * before).any()
    assert (reach <= limits_of(model).reach * (1 + 1e-4)).all()


def test_another_training_length_has_other_limits() -> None:
    """Gates that are put in again may have the same values as those that were taken out, at the same place."""
    model = injected("llama")
    before = limits_of(model).rate
    module = model.model.layers[0].self_attn
    module.gape_wiring = replace(module.gape_wiring, context_length=32)
    torch.testing.assert_close(limits_of(model).rate, before / 2)


@torch.no_grad()
def test_limits_are_those_with_the_adapters_that_are_active() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        injected("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"], lora_alpha=16)
    ).eval()
    without = limits_of(model).reach
    shaken(model, "lora_", 1.0)
    assert (limits_of(model).reach > 1.5 * without).all()
    with model.disable_adapter():
        torch.testing.assert_close(limits_of(model).reach, without)


def test_projections_in_four_bits_are_asked_in_their_own_dtype() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny("llama", hidden_size=64, head_dim=16)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj"):
            plain = getattr(layer.self_attn, name)
            packed = bitsandbytes.nn.Linear4bit(plain.in_features, plain.out_features, bias=False, quant_type="nf4")
            packed.load_state_dict(plain.state_dict())
            setattr(layer.self_attn, name, packed.to("cpu"))
    model = gape.hf.inject(model, context_length=16, start="paper", learn="gates", gates=FLOOR)
    plain = injected("llama", hidden_size=64, head_dim=16)
    torch.testing.assert_close(limits_of(model).reach, limits_of(plain).reach, rtol=0.1, atol=0.0)


YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "attention_factor": 2.0}
HALF = {**LONG, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.0], "long_factor": [1.0, 1.0]}


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 keeps rotations under other names")
@pytest.mark.parametrize(
    ("family", "rope"),
    [("llama", YARN), ("llama", {**YARN, "attention_factor": 0.5}), ("phi3", HALF), ("smollm3", YARN)],
)
@pytest.mark.parametrize("above", [False, True])
def test_a_rotation_that_stretches_is_allowed_for(family: str, rope: dict[str, Any], above: bool) -> None:
    """Also where every own key has a score above 0, or the halves of a head cancel unless one is stretched."""
    model = injected(family, rope_parameters=rope, attention_bias=above, no_rope_layers=[0, 1])
    module = model.model.layers[0].self_attn
    joined = getattr(module, "qkv_proj", None)
    q, k = (module.q_proj.weight, module.k_proj.weight) if joined is None else joined.weight.split([32, 16, 16])[:2]
    with torch.no_grad():
        sign = torch.tensor([1.0 if above else -1.0, 1.0])[:, None, None]
        q.view(4, 2, 4, 32)[:, 1] = q.view(4, 2, 4, 32)[:, 0]
        k.copy_((q.view(4, 2, 4, 32)[::2] * sign).reshape(16, 32))
        if above and joined is None:
            for projection in (module.q_proj, module.k_proj):
                projection.weight.mul_(0.01)
                projection.bias.fill_(1.0)
    limits, (reach, own) = limits_of(model), extremes(model)
    assert (reach <= limits.reach * (1 + 1e-4)).all()
    assert (own <= limits.own + 1e-4).all()
