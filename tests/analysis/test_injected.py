"""Gates and attention of a model of transformers that gates were put into, as `attended` shows them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from gape.analysis import attended
from gape.analysis.routing import routing_variables
from tests.hf.tiny import opened, tiny, tokens


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@torch.no_grad()
def test_weights_are_those_that_the_model_returns(family: str) -> None:
    model, ids = opened(tiny(family, "eager")), tokens()
    layers = attended(model, ids)
    expected = model(ids, output_attentions=True).attentions
    for layer, weights in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer.weights(0, ids.size(1)), weights, atol=1e-5, rtol=0)


@torch.no_grad()
def test_logits_stay_and_layers_are_left_as_they_were() -> None:
    model, ids = opened(tiny("llama")), tokens()
    before = model(ids).logits
    attended(model, ids)
    assert torch.equal(model(ids).logits, before)
    assert all("attend" not in vars(module) for module in model.modules())


def test_routing_variables_name_every_layer_and_head() -> None:
    rows = routing_variables(opened(tiny("llama")), tokens())
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in range(2) for head in range(4)]


@pytest.mark.parametrize(
    ("model", "match"), [(lambda: opened(tiny("gemma2")), "cap"), (lambda: tiny("llama"), "gates of gape.hf.inject")]
)
def test_models_whose_attention_is_not_known_are_refused(model, match) -> None:
    with pytest.raises(ValueError, match=match):
        attended(model(), tokens())
