"""Forgetting caches in models of transformers: the same text with fewer keys, and bounds that hold for any input."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from gape.hf.forgetting import ForgettingCache

import gape.hf
from gape.hf import forgetting
from gape.hf.families import TRANSFORMERS_4
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from tests.hf.tiny import tiny, tokens

FLOOR = {"gate_floor": 96.0, "init_landmark_bias": -9.0}
SIZES = {"vocab_size": 64, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "context_length": 16}
#: With a norm by the mean square, LayerNorm and biases, a joined projection, and norms of q and k.
FAMILIES = ("llama", "gpt2", "phi3", "qwen3")


def ours(**changes: Any) -> gape.hf.GapeForCausalLM:
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**{**SIZES, "options": FLOOR, **changes}))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return gape.hf.GapeForCausalLM.from_gpt(gpt.eval())


def injected(family: str, floor: dict[str, Any] = FLOOR, **changes: Any) -> Any:
    model = tiny(family, **changes)
    return gape.hf.inject(model, context_length=16, start="paper", gates=floor)


def made(name: str) -> Any:
    return ours() if name == "gape" else injected(name)


@pytest.mark.parametrize("name", ["gape", *FAMILIES])
def test_generation_says_the_same_with_fewer_keys(name: str) -> None:
    model, ids = made(name), tokens(2, 60)
    settings = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    cache = ForgettingCache(model, eps=1e-6)
    actual = model.generate(ids, past_key_values=cache, **settings)
    assert torch.equal(actual, model.generate(ids, **settings))
    assert cache.get_seq_length() == 79
    assert max(max(kept) for kept in cache.kept) < 75
    assert cache.nbytes > 0
    assert cache.beyond == 0


@pytest.mark.parametrize("name", ["gape", "llama"])
def test_left_padding_and_chunks(name: str) -> None:
    model, ids = made(name), tokens(2, 60)
    real = torch.ones_like(ids)
    real[0, :25] = 0
    settings = {"max_new_tokens": 10, "do_sample": False, "attention_mask": real}
    cache = ForgettingCache(model, eps=1e-6, bounds="queries")
    assert torch.equal(model.generate(ids, past_key_values=cache, **settings), model.generate(ids, **settings))
    assert max(max(kept) for kept in cache.kept) < 69
    cache = ForgettingCache(model, eps=1e-6)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split(13, dim=1)]
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_an_empty_one_for_another_text_and_keys_that_go_at_once() -> None:
    model, ids = gape.hf.inject(tiny("llama"), context_length=16, start="paper", gates=FLOOR, layers=[1]), tokens(2, 60)
    cache = ForgettingCache(model, eps=0.5, partial=True).fresh(eps=1e-6)
    model(ids, past_key_values=cache)
    assert (cache.kept, cache.looks) == ([[60, 60]], 0)
    cache.forget()
    assert max(cache.kept[0]) < 60
    assert cache.looks == 1
    assert cache.due == 32
    fresh = cache.fresh(eps=1e-3)
    assert fresh.get_seq_length() == 0


@pytest.mark.parametrize("name", ["gape", "llama"])
@torch.no_grad()
def test_all_layers_look_at_the_same_token(name: str) -> None:
    """Though one of them holds a few keys and the other nearly all."""
    apart = FLOOR | {"gate_floor": [[4000.0], [0.2]]}
    model = ours(options=apart) if name == "gape" else injected(name, apart)
    cache, ids = ForgettingCache(model, eps=1e-3), tokens(1, 1000)
    for each in (cache, cache.fresh(eps=1e-3)):
        for part in ids.split([900, *[1] * 100], dim=1):
            model(part, past_key_values=each)
            first, second = each.forgetting
            assert (first.looks, first.due) == (second.looks, second.due)
        assert max(first.kept) * 8 < min(second.kept)


@pytest.mark.parametrize("kind", [gape.hf.KeepingCache, ForgettingCache])
@torch.no_grad()
def test_tokens_are_taken_back(kind: Any) -> None:
    model, ids = injected("llama"), tokens(1, 30)
    cache = kind(model, **({"eps": 1e-3} if kind is ForgettingCache else {}))
    model(ids[:, :24], past_key_values=cache)
    for count, left in ((-4, 20), (18, 18), (40, 18), (0, 0 if TRANSFORMERS_4 else 18)):
        cache.crop(count)
        assert {layer.get_seq_length() for layer in cache.layers} == {left}


@torch.no_grad()
def test_a_call_that_broke_off_is_taken_back() -> None:
    """Some layers have its tokens, others do not; so it is with layers of transformers among them."""
    model = gape.hf.inject(tiny("llama"), context_length=16, layers=[1], start="paper", gates=FLOOR)
    cache = ForgettingCache(model, eps=1e-3, partial=True)
    model(tokens(1, 24), past_key_values=cache)
    cache.layers[1].held.truncate(22)
    cache.crop(20)
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]


@torch.no_grad()
def test_no_layer_is_cropped_where_another_refuses() -> None:
    model = injected("llama", FLOOR | {"gate_floor": [[0.001], [4000.0]]})
    cache = ForgettingCache(model, eps=1e-3)
    model(tokens(1, 90), past_key_values=cache)
    cache.forget()
    with pytest.raises(ValueError, match="keys were dropped"):
        cache.crop(-80)
    assert {layer.get_seq_length() for layer in cache.layers} == {90}


@pytest.mark.parametrize(("name", "impl"), [("gape", "auto"), ("gape_triton", "triton"), ("eager", "reference")])
@torch.no_grad()
def test_the_implementation_of_the_model_runs(name: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set()

    def heard(*tensors: Any, impl: str, **options: Any) -> torch.Tensor:
        taken.add(impl)
        return gape.gated_attention(*tensors, impl="auto", **options)

    monkeypatch.setattr("gape.cache.forgetting_rack.gated_attention", heard)
    model = injected("llama")
    model.config._attn_implementation = name
    model(tokens(1, 8), past_key_values=ForgettingCache(model, eps=1e-3))
    assert taken == {impl}


def limits_and_extremes(model: Any) -> tuple[Any, Any, Any]:
    """The limits of a model's first layer, and the largest reach and own that inputs of all kinds lead to."""
    seat, limits = forgetting.places_of(model, limited=True, carried=False)[0]
    parent = next(m for m in model.modules() if any(hasattr(m, n) for n in forgetting.NORMS))
    norm = next(getattr(parent, n) for n in forgetting.NORMS if hasattr(parent, n))
    module: Any = next(m for m in model.modules() if hasattr(m, "gape_wiring"))
    x = 50 * torch.randn(1, 4000, 32, generator=torch.Generator().manual_seed(1)) + 20
    with torch.no_grad():
        q, k, _ = module.project(norm(x.to(next(model.parameters()).dtype)))
        angles = model.model.rotary_emb(x, torch.arange(1)[None]) if hasattr(model, "model") else None
        q, k = (part.double() for part in module.rotate(q, k, torch.zeros(1, dtype=torch.int64), x, angles)[:2])
    k = k.repeat_interleave(seat.n_heads // seat.n_kv_heads, dim=1)
    return limits, seat.scale * q.norm(dim=-1).amax((0, 2)), -seat.scale * (q * k).sum(-1).amin((0, 2))


def shaken(model: Any, part: str, size: float) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name and "gape" not in name:
                parameter.add_(size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_no_input_exceeds_the_limits_of_a_layer(family: str) -> None:
    limits, reach, own = limits_and_extremes(shaken(shaken(injected(family), "norm", 0.3), "bias", 0.3))
    assert (reach <= limits.reach * (1 + 1e-4)).all()
    assert (own <= limits.own + 1e-4).all()
    # Not so wide that they would say nothing.
    assert (reach > 0.3 * limits.reach).all()


def test_weights_beside_large_biases_count_in_half_precision() -> None:
    arguments = {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 2}
    exact = limits_and_extremes(shaken(injected("qwen2", **arguments), "proj.bias", 100.0))[0]
    rough = limits_and_extremes(shaken(injected("qwen2", **arguments), "proj.bias", 100.0).to(torch.bfloat16))[0]
    torch.testing.assert_close(rough.reach, exact.reach, rtol=1e-2, atol=0.0)
    torch.testing.assert_close(rough.own, exact.own, rtol=1e-2, atol=0.0)


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
    reach = [forgetting.places_of(each, limited=True, carried=False)[0][1].reach for each in (model, plain)]
    torch.testing.assert_close(*reach, rtol=0.1, atol=0.0)


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
    limits, reach, own = limits_and_extremes(model)
    assert (reach <= limits.reach * (1 + 1e-4)).all()
    assert (own <= limits.own + 1e-4).all()


def test_layers_without_gates_keep_everything_on_request() -> None:
    model = gape.hf.inject(tiny("llama"), context_length=16, start="paper", gates=FLOOR, layers=[1])
    with pytest.raises(ValueError, match="layer 0"):
        ForgettingCache(model, eps=1e-3)
    cache, ids = ForgettingCache(model, eps=1e-6, partial=True), tokens(1, 60)
    settings = {"max_new_tokens": 10, "do_sample": False}
    assert torch.equal(model.generate(ids, past_key_values=cache, **settings), model.generate(ids, **settings))
    assert len(cache.kept) == 1
    assert cache.layers[0].keys.size(2) == 69


@pytest.mark.parametrize(
    ("model", "given", "match"),
    [
        (lambda: ours(options={}), {}, "layer 0, head 0"),
        (lambda: ours(position="rope", options={}), {}, "gates"),
        (lambda: tiny("llama"), {}, "one with gates"),
        (lambda: injected("llama", {}), {}, "layer 0, head 0"),
        (lambda: gape.hf.inject(tiny("llama"), context_length=16, gates=FLOOR), {}, "amplitude above 0"),
        (lambda: injected("mistral"), {}, "window"),
        (lambda: injected("gemma2", implementation="eager"), {}, "caps its logits"),
        (ours, {"eps": 0.0}, "eps"),
        (ours, {"bounds": "hopes"}, "bounds"),
    ],
)
def test_what_cannot_be_promised_is_refused(model: Any, given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ForgettingCache(model(), **({"eps": 1e-3} | given))


@pytest.mark.parametrize("name", ["forgetting", "hf"])
def test_examples_in_the_docs_run(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs/guide" / f"{name}.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, f"docs/guide/{name}.md", "exec"), names)
    assert names["cache"].get_seq_length() > 20


def test_what_would_void_the_proof_is_refused() -> None:
    model, ids = injected("llama"), tokens(1, 12)
    with torch.no_grad():
        window = torch.ones(12, 12, dtype=torch.bool).tril().triu(-3)[None, None]
        with pytest.raises(ValueError, match="hides more than pads"):
            model(ids, attention_mask=window, past_key_values=ForgettingCache(model, eps=1e-3))
        with pytest.raises(ValueError, match="num_beams"):
            model.generate(ids, num_beams=2, max_new_tokens=4, past_key_values=ForgettingCache(model, eps=1e-3))
        with pytest.raises(ValueError, match="serves the model"):
            tiny("llama")(ids, past_key_values=ForgettingCache(model, eps=1e-3))
