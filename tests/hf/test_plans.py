"""What an injected model is said to run is what it runs."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from transformers import DynamicCache

import gape.hf
from gape import explain
from gape.cache.layer import PagedLayer
from gape.hf import implementations
from tests.hf.tiny import tiny, tokens


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen2"])
def test_explain_says_what_generate_runs(family, monkeypatch):
    model, operator, plans = gape.hf.inject(tiny(family), context_length=16), implementations.gated_attention, {}

    def spy(q, *others, **arguments):
        plans.setdefault(q.size(2), []).append(str(explain(q, *others, **arguments)))
        return operator(q, *others, **arguments)

    monkeypatch.setattr(implementations, "gated_attention", spy)
    model.generate(tokens(1, 40), max_new_tokens=2, do_sample=False)
    stated = gape.hf.explain(model, tokens=40)
    for queries, sentences in ((40, stated.prefill), (1, stated.decode)):
        by_layer = {layer: sentence for sentence, layers in sentences.items() for layer in layers}
        assert [by_layer[layer] for layer in sorted(by_layer)] == plans[queries]


@pytest.mark.parametrize("evicts", [False, True])
def test_explain_says_what_generate_runs_with_pages(evicts, monkeypatch):
    model = gape.hf.inject(tiny("llama"), context_length=16, start="paper", gates={"gate_floor": 2.0})
    cache = gape.hf.ForgettingCache(model, eps=1e-2) if evicts else gape.hf.FullCache(model)
    attend, plans = PagedLayer.attend, {}

    def spy(layer, q, *others, **given):
        plans.setdefault(q.size(2), []).append(str(layer.explain(q, *others, **given)))
        return attend(layer, q, *others, **given)

    monkeypatch.setattr(PagedLayer, "attend", spy)
    before = gape.hf.explain(model, tokens=40, cache=cache)
    model.generate(tokens(1, 40), max_new_tokens=2, do_sample=False, past_key_values=cache)
    after = gape.hf.explain(model, tokens=40, cache=cache)
    for queries, sentences in ((40, before.prefill), (1, after.decode)):
        by_layer = {layer: sentence for sentence, layers in sentences.items() for layer in layers}
        assert [by_layer[layer] for layer in sorted(by_layer)] == plans[queries]
    assert before.decode == after.decode
    assert all("to the pages before it" in sentence for sentence in after.prefill)


def test_explain_names_layers_without_gates_and_the_dense_definition():
    model = gape.hf.inject(tiny("llama", "eager"), context_length=16, layers=[1])
    plan = gape.hf.explain(model, tokens=20)
    assert [layers for sentence, layers in plan.prefill.items() if sentence.startswith("no gates")] == [(0,)]
    assert [layers for sentence, layers in plan.decode.items() if "dense" in sentence] == [(1,)]
    assert "20 tokens, layers 1: the definition" in str(plan)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"tokens": 0}, "tokens: got"),
        ({"model": tiny("llama")}, "expected one with gates"),
        ({"cache": DynamicCache()}, "cache: got"),
    ],
)
def test_explain_refuses_what_it_cannot_explain(arguments, match):
    with pytest.raises(ValueError, match=match):
        gape.hf.explain(**({"model": gape.hf.inject(tiny("llama"), context_length=16)} | arguments))
