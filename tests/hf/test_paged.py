"""Caches in pages for models of transformers: the same text as DynamicCache, whatever `generate` is asked for."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

import gape.hf
from gape.hf import ForgettingCache, FullCache
from gape.hf.families import CACHE_POSITIONS, TRANSFORMERS_4
from tests.cache.witness import witnessed
from tests.hf.tiny import FAMILIES, FLOOR, MIXTURES, broken_off, injected, made, ours, tiny, tokens

#: One of each kind of attention; others are like one of these.
QUICK = ("gape", "gpt2", "llama")
RARE = [pytest.mark.slow, pytest.mark.families]
each_model = pytest.mark.parametrize("name", ["gape", "llama"])
CACHES: dict[str, Callable[[Any], Any]] = {
    "full": FullCache,
    "forgetting": lambda model: ForgettingCache(model, eps=1e-12),
    "queries": lambda model: ForgettingCache(model, eps=1e-12, bounds="queries"),
}
each_cache = pytest.mark.parametrize("kind", CACHES)
EXACT = {"atol": 1e-9, "rtol": 1e-9}


def padded(length: int = 60, pads: int = 25) -> dict[str, torch.Tensor]:
    """Two prompts, the first shorter."""
    ids = tokens(2, length)
    ids[0, :pads] = 0
    return {"input_ids": ids, "attention_mask": (torch.arange(length) >= torch.tensor([[pads], [0]])).long()}


@each_cache
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=RARE) for name in FAMILIES if name not in QUICK)])
def test_greedy_text_is_that_of_a_dynamic_cache(name: str, kind: str) -> None:
    if (name, kind) == ("cohere", "forgetting"):
        pytest.skip("its norms have no bounds from weights")
    # Experts of transformers work in float32 at most.
    model, prompts = made(name).to(torch.float32 if name in MIXTURES else torch.float64), padded()
    cache = CACHES[kind](model)
    settings = {"max_new_tokens": 16, "do_sample": False}
    actual = model.generate(**prompts, past_key_values=cache, **settings)
    assert torch.equal(actual, model.generate(**prompts, past_key_values=DynamicCache(), **settings))
    assert cache.get_seq_length() == 75
    assert (max(max(keys) for keys in cache.num_keys) < 75) == (kind != "full")
    assert cache.nbytes > 0
    assert cache.realised_eps <= 1e-12
    assert "cpu" in cache.explain()


SETTINGS: dict[str, dict[str, Any]] = {
    "in chunks": {"prefill_chunk_size": 13},
    "token by token": {"prefill_chunk_size": 1},
    "states": {"output_hidden_states": True, "output_logits": True, "return_dict_in_generate": True},
    "several of each": {"do_sample": True, "num_return_sequences": 2, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize(("name", "kind"), [("gape", "full"), ("llama", "forgetting")])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_generate_change_nothing(name: str, kind: str, settings: dict[str, Any]) -> None:
    model, outputs = made(name).double(), []
    # Before 5.4, pads count as positions in all chunks of a prompt but the last, which is refused.
    prompts = padded(28, pads=0 if CACHE_POSITIONS and "prefill_chunk_size" in settings else 15)
    for cache in (CACHES[kind](model), DynamicCache()):
        torch.manual_seed(7)
        given = {"max_new_tokens": 8, "do_sample": False} | settings
        outputs.append(model.generate(**prompts, past_key_values=cache, **given))
    if not isinstance(outputs[0], torch.Tensor):
        for actual, expected in zip(outputs[0].logits, outputs[1].logits, strict=True):
            torch.testing.assert_close(actual, expected, **EXACT)
        real = prompts["attention_mask"].bool()
        for step, (actual, expected) in enumerate(zip(*(each.hidden_states for each in outputs), strict=True)):
            for one, other in zip(actual, expected, strict=True):
                rows = real if step == 0 else slice(None)
                torch.testing.assert_close(one[rows], other[rows], **EXACT)
        outputs = [each.sequences for each in outputs]
    assert torch.equal(*outputs)


@each_model
def test_assisted_decoding_takes_tokens_back(name: str) -> None:
    model, ids = made(name).double(), tokens(1, 40)
    # Before 5.4 prompts are looked up only where a text can end, and may go beyond the last token; 0 is a pad.
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
    expected, most = model.generate(ids, **settings), 60 if CACHE_POSITIONS else None
    assert expected.size(1) == 60
    for more in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": made(name, **_other(name)).double()}):
        cache = FullCache(model)
        assert torch.equal(model.generate(ids, past_key_values=cache, **more, **settings)[:, :most], expected)
        assert cache.num_keys == [[cache.get_seq_length()] * 2] * 2


def _other(name: str) -> dict[str, Any]:
    """Changes that make another model of the same vocabulary."""
    return {"n_layer": 1} if name == "gape" else {"num_hidden_layers": 1}


@each_model
def test_a_text_goes_on_in_a_second_call(name: str) -> None:
    model, prompts = made(name).double(), padded()
    for new in CACHES.values():
        cache, settings = new(model), {"do_sample": False}
        first = model.generate(**prompts, past_key_values=cache, max_new_tokens=5, **settings)
        more = torch.cat([first, tokens(2, 7, seed=9)], dim=1)
        mask = torch.nn.functional.pad(prompts["attention_mask"], (0, 12), value=1)
        given = {"input_ids": more, "attention_mask": mask, "max_new_tokens": 6, **settings}
        assert torch.equal(model.generate(**given, past_key_values=cache), model.generate(**given))


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        *[("gape", "weights"), ("gpt2", "queries")],
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in [("gpt2", "weights"), ("phi3", "queries"), ("qwen3", "weights")]
        ),
    ],
)
def test_no_query_loses_more_than_eps(name: str, bounds: str) -> None:
    model = made(name, **({"options": FLOOR | {"gate_floor": 12.0}} if name == "gape" else {})).double()
    cache = ForgettingCache(model, eps=1e-2, bounds=bounds)
    with witnessed(cache.pages) as witnesses:
        model.generate(**padded(50), past_key_values=cache, max_new_tokens=75, do_sample=False)
    judged = [witness.judged() for witness in witnesses]
    assert max(each.error for each in judged) <= 1e-9
    assert max(each.lost for each in judged) <= cache.realised_eps
    assert bounds == "queries" or cache.realised_eps <= 1e-2
    assert max(max(keys) for keys in cache.num_keys) < 124


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
@torch.no_grad()
def test_the_body_of_a_model_may_be_called(name: str) -> None:
    """With the mask that transformers makes of pads; a token behind them, too."""
    model, prompts = made(name).double(), padded(30, 8)
    mask = prompts["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    more = {"input_ids": tokens(2, 1), "attention_mask": torch.nn.functional.pad(mask, (0, 1), value=1)}
    more["position_ids"] = positions[:, -1:] + 1
    states = []
    for cache in (FullCache(model), DynamicCache()):
        body = model.base_model
        first = body(**prompts, position_ids=positions, past_key_values=cache).last_hidden_state
        states.append((first[mask.bool()], body(**more, past_key_values=cache).last_hidden_state))
    for actual, expected in zip(*states, strict=True):
        torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize(("name", "positions"), [("gape", False), ("llama", True), ("body", False)])
@torch.no_grad()
def test_a_row_may_begin_with_pads_that_come_one_by_one(name: str, positions: bool) -> None:
    """Given to a model, or to its body with the mask that transformers makes."""
    model, prompts = made("llama" if name == "body" else name).double(), padded(12, 5)
    mask, outputs = prompts["attention_mask"], []
    places = (mask.cumsum(1) - 1).clamp(min=0)
    for cache in (FullCache(model), DynamicCache()):
        parts = []
        for at in range(12):
            token = slice(at, at + 1)
            given = {"position_ids": places[:, token]} if positions else {}
            given |= {"attention_mask": mask[:, : at + 1], "past_key_values": cache}
            called = model.model if name == "body" else model
            parts.append(called(prompts["input_ids"][:, token], **given)[0])
        outputs.append(torch.cat(parts, dim=1)[mask.bool()])
    torch.testing.assert_close(*outputs, **EXACT)


@torch.no_grad()
def test_positions_and_angles_of_a_call_are_freed_behind_it() -> None:
    """Both are looked up by layers through attributes of tensors, which must not keep one another alive."""
    model, positions = injected("llama"), torch.arange(9)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, 9, 32), positions)
    given = {"position_ids": positions, "position_embeddings": (cos, sin), "past_key_values": FullCache(model)}
    model.model.layers[0].self_attn(torch.zeros(1, 9, 32), attention_mask=None, **given)
    gone = [weakref.ref(positions), weakref.ref(cos)]
    del positions, cos, sin, given
    assert [ref() for ref in gone] == [None, None]


@torch.no_grad()
def test_rows_of_our_gpt_count_from_their_first_token() -> None:
    model, prompts = ours().double(), padded(30, 8)
    cache = FullCache(model)
    model(**prompts, past_key_values=cache)
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, 1), value=1)
    model(tokens(2, 1), attention_mask=mask, past_key_values=cache)
    assert [row.tolist() for row in cache.pages.positions(1, 0)] == [list(range(23)), list(range(31))]


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_adapters_are_cached_alike(family: str) -> None:
    peft = pytest.importorskip("peft")
    base = injected(family).double()
    model = peft.get_peft_model(base, gape.hf.lora_config(base, r=2)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    settings = {"max_new_tokens": 14, "do_sample": False}
    expected = model.generate(**padded(), **settings)
    for new in CACHES.values():
        assert torch.equal(model.generate(**padded(), past_key_values=new(model), **settings), expected)
    with model.disable_adapter():
        cache = FullCache(model)
        actual = model.generate(**padded(), past_key_values=cache, **settings)
        assert torch.equal(actual, model.generate(**padded(), **settings))
    assert not torch.equal(actual, expected)


def test_layers_without_gates_keep_everything_on_request() -> None:
    model = gape.hf.inject(tiny("llama"), context_length=16, start="paper", gates=FLOOR, layers=[1]).double()
    with pytest.raises(ValueError, match="layer 0 has no gates"):
        ForgettingCache(model, eps=1e-3)
    settings = {"max_new_tokens": 14, "do_sample": False}
    expected = model.generate(**padded(), **settings)
    for cache in (FullCache(model), ForgettingCache(model, eps=1e-12, partial=True)):
        assert torch.equal(model.generate(**padded(), past_key_values=cache, **settings), expected)
        assert cache.layers[0].keys.size(2) == 73
        assert len(cache.num_keys) == 1
    assert max(cache.num_keys[0]) < 73
    assert cache.nbytes > cache.pages.nbytes
    cache.reset()
    assert torch.equal(model.generate(**padded(), past_key_values=cache, **settings), expected)


@each_model
@torch.no_grad()
def test_tokens_are_taken_back(name: str) -> None:
    model, ids = made(name).double(), tokens(1, 100)
    for kind, new in CACHES.items():
        cache = new(model)
        model(ids[:, :24], past_key_values=cache)
        for count, left in ((-4, 20), (torch.tensor(18), 18), (40, 18), (0, 0 if TRANSFORMERS_4 else 18)):
            cache.crop(count)
            assert {layer.get_seq_length() for layer in cache.layers} == {left}
        left = cache.get_seq_length()
        actual = model(ids[:, left:30], past_key_values=cache).logits
        torch.testing.assert_close(actual, model(ids[:, :30], use_cache=False).logits[:, left:], **EXACT)
        for part in ids[:, 30:].split([60, 10], dim=1):
            model(part, past_key_values=cache)
        if kind != "full":
            with pytest.raises(ValueError, match="keys were evicted"):
                cache.crop(-80)
            assert {layer.get_seq_length() for layer in cache.layers} == {100}


@each_cache
@each_model
@torch.no_grad()
def test_a_copy_and_a_fresh_cache_go_on_by_themselves(name: str, kind: str) -> None:
    model, ids = made(name).double(), tokens(1, 100)
    cache = CACHES[kind](model)
    model(ids[:, :12], past_key_values=cache)
    copied = copy.deepcopy(cache)
    model(tokens(1, 20, seed=5), past_key_values=cache)
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids[:, 12:], past_key_values=copied).logits, expected[:, 12:], **EXACT)
    others = [cache] if kind == "full" else [cache, cache.fresh(), cache.fresh(eps=1e-10)]
    cache.reset()
    for other in others:
        assert (other.get_seq_length(), other.nbytes) == (0, 0)
        parts = [model(part, past_key_values=other).logits for part in ids.split([70, 20, 10], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kind", "new"), [("full", 1), ("queries", 3)])
@each_model
@torch.no_grad()
def test_a_cache_that_a_call_left_uneven_is_refused(name: str, kind: str, new: int) -> None:
    model = made(name).double()
    for mend in (lambda cache: cache.crop(12), lambda cache: cache.reset()):
        cache = CACHES[kind](model)
        broken_off(model, cache, new)
        with pytest.raises(ValueError, match="broke off"):
            model(tokens(1, 1), past_key_values=cache)
        mend(cache)
        left = cache.get_seq_length()
        ids = torch.cat([tokens(1, 12), tokens(1, 6, seed=4)], dim=1)
        actual = model(ids[:, left:], past_key_values=cache).logits
        torch.testing.assert_close(actual, model(ids, use_cache=False).logits[:, left:], **EXACT)


@torch.no_grad()
def test_a_cache_of_another_model_is_refused() -> None:
    llama = injected("llama")
    others = (injected("llama", seed=1), injected("llama", num_hidden_layers=3), tiny("llama"))
    for one, other in (*((llama, other) for other in others), (ours(), ours())):
        for cache in (FullCache(one), ForgettingCache(one, eps=1e-3)):
            with pytest.raises(ValueError, match="past_key_values"):
                other(tokens(1, 12), past_key_values=cache)


@each_model
@torch.no_grad()
def test_masks_that_hide_more_than_pads_on_the_left_are_refused(name: str) -> None:
    model, ids = made(name), tokens(1, 12)
    behind = torch.ones_like(ids)
    behind[0, 5] = 0
    whole = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    for mask in (behind, behind.roll(6), whole, whole.triu(-3)):
        with pytest.raises(ValueError, match=r"^attention_mask: "):
            model(ids, attention_mask=mask, past_key_values=FullCache(model))
    if name != "gape":
        with pytest.raises(ValueError, match="hides more than pads"):
            model.model(ids, attention_mask=whole.triu(-3), past_key_values=FullCache(model))
    with pytest.raises(ValueError, match="attention_mask"):
        model.generate(ids, attention_mask=behind, past_key_values=FullCache(model), max_new_tokens=2)
    cache, pads = FullCache(model), torch.ones_like(ids)
    model(ids[:, :8], past_key_values=cache)
    pads[0, :3] = 0
    with pytest.raises(ValueError, match=r"^attention_mask: hides cached tokens"):
        model(ids[:, 8:], attention_mask=pads, past_key_values=cache)
    with pytest.raises(ValueError, match=r"^attention_mask: .* 12\)"):
        model(ids[:, 8:], attention_mask=pads[:, :4], past_key_values=cache)


@each_model
@torch.no_grad()
def test_a_single_token_may_have_labels(name: str) -> None:
    model, ids = made(name).double(), tokens(2, 9)
    cache = FullCache(model)
    model(ids[:, :8], past_key_values=cache)
    output = model(ids[:, 8:], past_key_values=cache, labels=ids[:, 8:], shift_labels=ids[:, 8:])
    expected = torch.nn.functional.cross_entropy(output.logits[:, 0].float(), ids[:, 8])
    torch.testing.assert_close(output.loss.float(), expected)


def test_beams_are_refused() -> None:
    model = made("llama")
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(tokens(1, 12), num_beams=2, max_new_tokens=4, past_key_values=FullCache(model))
    for change in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
        with pytest.raises(ValueError, match="pages"):
            getattr(FullCache(model), change)(torch.tensor([1, 0]))


@pytest.mark.parametrize(
    ("model", "arguments", "match"),
    [
        (lambda: ours(options={}), {}, "layer 0, head 0"),
        (lambda: ours(position="rope", options={}), {}, "gates"),
        (lambda: tiny("llama"), {}, "one with gates"),
        (lambda: injected("llama", {}), {}, "layer 0, head 0"),
        (lambda: gape.hf.inject(tiny("llama"), context_length=16, gates=FLOOR), {}, "amplitude above 0"),
        (lambda: injected("mistral"), {}, "layer 0 has a sliding window"),
        (lambda: injected("gemma2", implementation="eager"), {}, "layer 0 caps its logits"),
        (lambda: injected("cohere"), {}, "norm: got CohereLayerNorm"),
        (lambda: injected("phi"), {}, "q_layernorm"),
        (ours, {"eps": 0.0}, "eps"),
        (ours, {"bounds": "hopes"}, "bounds"),
    ],
)
def test_what_cannot_be_promised_is_refused(model: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ForgettingCache(model(), **({"eps": 1e-3} | arguments))


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows_and_caps_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"layer 0 (has a sliding window|caps its logits)"):
        FullCache(injected(family, implementation="eager"))
