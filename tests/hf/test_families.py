"""Every family, tiny and random: identity at the start, gates that learn, masks and caches that hold."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

import gape.hf
from tests.hf.tiny import FAMILIES, each_family, opened, same, tiny, tokens, train

#: Loads every directory that is named, in a process of its own.
FRESH = """
import sys
import torch
from transformers import AutoModelForCausalLM
import gape.hf
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    with torch.no_grad():
        torch.save(model(torch.load(name + "/ids.pt", weights_only=True)).logits, name + "/logits.pt")
"""


@each_family
def test_identity_start_keeps_the_logits_and_remove_restores_the_model(family):
    model = tiny(family)
    before, own = {k: v.clone() for k, v in model.state_dict().items()}, type(model)
    config, name = type(model.config), model.config._attn_implementation
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
        gape.hf.inject(model, context_length=16)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)
        gape.hf.remove(model)
        assert torch.equal(model(ids).logits, expected)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert (type(model), type(model.config), model.config._attn_implementation) == (own, config, name)
    assert not hasattr(model.config, "gape")


@each_family
def test_every_gate_parameter_moves_within_five_steps(family):
    model = gape.hf.inject(tiny(family), context_length=16, learn="gates")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    train(model, rate=1e-2)
    for name, parameter in model.named_parameters():
        if name in before:
            assert float((parameter - before[name]).detach().abs().min()) > 1e-4, name


@each_family
def test_trained_models_are_the_same_when_they_are_loaded(family, tmp_path):
    model = gape.hf.inject(tiny(family), context_length=16)
    train(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert same(family, loaded(tokens()).logits, model(tokens()).logits)


@pytest.mark.slow
@pytest.mark.families
def test_trained_models_are_the_same_in_a_fresh_process(tmp_path):
    ids, expected = tokens(), {}
    for family in FAMILIES:
        model = gape.hf.inject(tiny(family), context_length=16)
        train(model)
        model.save_pretrained(tmp_path / family)
        torch.save(ids, tmp_path / family / "ids.pt")
        with torch.no_grad():
            expected[family] = model(ids).logits
    names = [str(tmp_path / family) for family in FAMILIES]
    subprocess.run([sys.executable, "-c", FRESH, *names], check=True, timeout=240)
    for family, logits in expected.items():
        assert same(family, torch.load(tmp_path / family / "logits.pt", weights_only=True), logits), family


@each_family
def test_later_tokens_change_nothing_before_them(family):
    ids, changed = tokens(2, 20), tokens(2, 20)
    changed[:, 14:] = tokens(2, 6, seed=5)
    model = opened(tiny(family))
    for name in ("sdpa", "eager", "gape", "gape_split"):
        model.config._attn_implementation = name
        with torch.no_grad():
            for arguments in (dict, lambda: {"use_cache": False}, lambda: {"past_key_values": static(model, 24)}):
                first, second = (model(given, **arguments()).logits for given in (ids, changed))
                assert same(family, first[:, :14], second[:, :14]), (name, arguments())
                assert not torch.allclose(first[:, 14:], second[:, 14:])


@each_family
def test_cached_generation_equals_uncached(family):
    model, ids = opened(tiny(family)), tokens(2, 12)
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **settings)
    for cache in ("dynamic", "static"):
        cached = model.generate(ids, attention_mask=torch.ones_like(ids), cache_implementation=cache, **settings)
        assert torch.equal(cached.sequences, plain.sequences), cache
        torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits), atol=2e-5, rtol=1e-4)


@each_family
def test_a_ragged_left_padded_batch_equals_its_rows_alone(family):
    model = opened(tiny(family))
    rows = [tokens(1, 7, seed=1)[0], tokens(1, 12, seed=2)[0]]
    padded = torch.stack([torch.cat([torch.zeros(12 - len(row), dtype=torch.long), row]) for row in rows])
    mask = (torch.arange(12) >= torch.tensor([[12 - len(row)] for row in rows])).long()
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    together = model.generate(padded, attention_mask=mask, **settings)
    for number, row in enumerate(rows):
        alone = model.generate(row[None], attention_mask=torch.ones(1, len(row), dtype=torch.long), **settings)
        assert torch.equal(together.sequences[number, 12:], alone.sequences[0, len(row) :])
        actual = torch.stack(together.logits)[:, number]
        torch.testing.assert_close(actual, torch.stack(alone.logits)[:, 0], atol=2e-5, rtol=1e-4)


@each_family
def test_packed_documents_do_not_see_each_other(family):
    model = opened(tiny(family))
    a, b = tokens(1, 9, seed=1), tokens(1, 7, seed=2)
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    with torch.no_grad():
        packed = model(torch.cat([a, b], dim=1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(part, use_cache=False).logits for part in (a, b)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)
    embedded = model.get_input_embeddings()(torch.cat([a, b], dim=1)).detach().requires_grad_()
    model(inputs_embeds=embedded, position_ids=positions, use_cache=False).logits[:, 9:].sum().backward()
    assert embedded.grad is not None
    assert not embedded.grad[:, :9].any()


def test_a_static_cache_generates_the_same_text_in_a_compiled_model():
    from transformers import CompileConfig

    model, ids = opened(tiny("llama", num_hidden_layers=1)), tokens(1, 12)
    settings = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    config = CompileConfig(backend="eager", fullgraph=True)
    # Else transformers compiles on GPUs alone.
    config._compile_all_devices = True
    torch.compiler.reset()
    actual = model.generate(ids, cache_implementation="static", compile_config=config, **settings)
    assert torch.equal(actual, model.generate(ids, **settings))


def static(model, length):
    """A fresh static cache."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "starcoder2"])
def test_a_layer_with_a_window_does_not_attend_across_processes(family):
    """Some families have the window in the config alone."""
    model = gape.hf.inject(tiny(family), context_length=16)
    assert model.model.layers[0].self_attn.not_plain_attention == "has a sliding window"
    # The other layer of Qwen2 sees everything.
    assert (model.model.layers[1].self_attn.not_plain_attention is None) == (family == "qwen2")
