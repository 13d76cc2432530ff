"""Our GPT as a model of transformers: the same numbers, its caches, its files."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

import gape.hf
from gape.hf import GapeConfig, GapeForCausalLM, LanguageModel
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from tests.hf.tiny import tokens, train

SIZES = {"vocab_size": 64, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "context_length": 16}


def made(position: str = "p-rope+gape", **changes) -> GapeForCausalLM:
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**{**SIZES, "position": position, **changes}))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return GapeForCausalLM.from_gpt(gpt.eval())


@pytest.fixture
def one_thread():
    """Several cut a product of many rows into other sums than one of few."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("position", ["p-rope+gape", "nope+gape", "rope", "t5", "grape", "swan", "fox"])
def test_logits_are_those_of_the_gpt(position):
    model, ids = made(position), tokens()
    with torch.no_grad():
        expected = model.gpt(ids).logits
        for name in ("sdpa", "eager", "gape", "gape_split"):
            model.config._attn_implementation = name
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-3)
        kept = model(ids, logits_to_keep=3, use_cache=False).logits
        assert torch.equal(kept, model(ids, use_cache=False).logits[:, -3:])


@pytest.mark.parametrize("position", ["p-rope+gape", "rope", "t5", "swan"])
def test_caches_padding_and_packing_change_nothing(position):
    model, ids = made(position), tokens(2, 12)
    settings = {"max_new_tokens": 7, "do_sample": False}
    mask = torch.ones_like(ids)
    plain = model.generate(ids, attention_mask=mask, use_cache=False, **settings)
    for cache in ("dynamic", "static"):
        assert torch.equal(model.generate(ids, attention_mask=mask, cache_implementation=cache, **settings), plain)
    assert torch.equal(plain[:, 12:], model.gpt.generate(ids, 7, temperature=0)[:, 12:])
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    real = torch.cat([torch.zeros(2, 3, dtype=torch.long), mask], dim=1)
    assert torch.equal(model.generate(padded, attention_mask=real, **settings)[:, 15:], plain[:, 12:])
    with torch.no_grad():
        positions = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(part).logits for part in (ids[:, :5], ids[:, 5:])], dim=1)
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)
        cached = model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=20)).logits
        torch.testing.assert_close(cached, model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["context_length", "max_position_embeddings"])
def test_another_t_on_loading_is_an_error(tmp_path, name):
    made().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="context_length"):
        AutoModelForCausalLM.from_pretrained(tmp_path, **{name: 64})


def test_fox_says_that_it_runs_without_a_cache():
    model, ids = made("fox"), tokens(1, 6)
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=2)
    assert model.generate(ids, max_new_tokens=2, use_cache=False).shape == (1, 8)


def test_it_trains_with_checkpointed_activations_and_comes_back_to_the_bit(tmp_path):
    model = made()
    model.gradient_checkpointing_enable()
    before = [p.detach().clone() for p in model.parameters()]
    losses = train(model, rate=1e-2)
    assert losses[-1] < losses[0]
    assert all(bool((p != b).any()) for p, b in zip(model.parameters(), before, strict=True))
    model.save_pretrained(tmp_path)
    assert "p-rope+gape" in (tmp_path / "README.md").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, GapeForCausalLM)
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["gpt.layers.0.attention.scheme.gates.raw_amplitude"].add_(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="checksum"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    del tensors["gpt.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_config_is_that_of_the_gpt_and_refuses_what_it_refuses(tmp_path):
    config = GapeConfig(**SIZES, position="nope+gape", options={"gate_floor": 1.0})
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.gpt() == config.gpt()
    assert (loaded.hidden_size, loaded.num_key_value_heads, loaded.head_dim) == (32, 2, 8)
    with pytest.raises(ValueError, match="n_embd"):
        GapeConfig(**{**SIZES, "n_embd": 33})
    model = AutoModelForCausalLM.from_config(config)
    model.resize_token_embeddings(70)
    assert model(torch.tensor([[69, 3]])).logits.shape == (1, 2, 70)


@torch.no_grad()
def test_another_output_layer_is_saved_and_resized(tmp_path):
    """Also where the embedding was that before: a config that still said so would drop it on loading."""
    model, ids = made("rope"), tokens(2, 8)
    width = model.config.n_embd
    with pytest.raises(ValueError, match=r"^value: "):
        model.set_output_embeddings(torch.nn.Linear(width, model.config.vocab_size))
    model.set_output_embeddings(torch.nn.Linear(width, model.config.vocab_size, bias=False))
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(tmp_path)
    loaded = GapeForCausalLM.from_pretrained(tmp_path)
    assert not loaded.gpt.config.tied
    torch.testing.assert_close(loaded.eval()(ids).logits, model.eval()(ids).logits)
    assert loaded(ids).logits.size(-1) == loaded.config.vocab_size == loaded.gpt.config.vocab_size


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"position": "rope"}])
@torch.no_grad()
def test_as_a_language_model_it_says_what_the_gpt_says(changes):
    model, ids = made(**changes), tokens(2, 24)
    reader, gpt, targets = LanguageModel(model), model.gpt, tokens(2, 24, seed=1)
    close = {"atol": 1e-4, "rtol": 1e-3}
    torch.testing.assert_close(reader(ids, logits_to_keep=2).logits, gpt(ids, logits_to_keep=2).logits, **close)
    torch.testing.assert_close(reader(ids, targets).loss, gpt(ids, targets).loss, **close)
    cache = reader.new_cache()
    x = torch.cat([reader.hidden(part, cache=cache) for part in ids.split(9, dim=1)], dim=1)
    torch.testing.assert_close(reader.token_losses(x, targets), gpt.token_losses(gpt.hidden(ids), targets), **close)
    assert cache.nbytes > 0
    assert [(number, id(gates)) for number, gates in reader.gates()] == [(n, id(gates)) for n, gates in gpt.gates()]


def test_its_gates_are_parameters_that_may_learn_alone():
    model = made()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    gates, more = ({names[id(p)] for p in gape.hf.parameters(model, which)} for which in ("gates", "gates+qk"))
    assert gates == {name for name in names.values() if ".gates." in name}
    assert more - gates == {name for name in names.values() if ".qkv." in name}
    with pytest.raises(ValueError, match=r"^model: .* with gates"):
        gape.hf.parameters(made("rope"))


def test_layers_are_kept_only_where_they_are_asked_for():
    model, ids = made(), tokens()
    assert model(ids).hidden_states is None
    actual = model(ids, output_hidden_states=True)
    assert len(actual.hidden_states) == SIZES["n_layer"] + 1
    torch.testing.assert_close(model.gpt.logits(actual.hidden_states[-1]), actual.logits)
