"""Which models' single-token steps are captured: what stands in the way is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from gape.hf.paged import model_obstacle
from tests.hf.tiny import MIXTURES, injected, tokens


class Adapter(torch.nn.Linear):
    """Of another package, which may wait for the host."""


def few_bits(model: Any) -> None:
    class Bits(torch.nn.Parameter):
        """Weights of a kind of their own."""

    model.lm_head.weight = Bits(model.lm_head.weight.data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: None, None),
        (lambda model: setattr(model.model.layers[0].mlp, "up_proj", Adapter(32, 48).eval()), "a Adapter"),
        (lambda model: setattr(model.model.norm, "forward", torch.abs), "forward of a module"),
        (lambda model: model.model.norm.register_forward_hook(lambda *_: None), "hooks"),
        (lambda model: model.model.layers[0].compile(), "compiled"),
        (few_bits, "Bits"),
        (lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"), "dynamic read positions"),
        (lambda model: model.model.rotary_emb.to("meta"), "on cpu and meta"),
        (lambda model: model.train(), "training mode"),
        (lambda model: model.float(), "works in torch.float32"),
    ],
    ids=["nothing", "adapter", "forward", "hook", "compiled", "few bits", "rotation", "elsewhere", "training", "wide"],
)
def test_models_whose_steps_cannot_be_captured_are_told_apart(change: Any, reason: str | None) -> None:
    model = injected("llama").bfloat16()
    change(model)
    actual = model_obstacle(model)
    assert actual is None if reason is None else reason in str(actual)


def test_hidden_states_of_an_earlier_call_are_no_obstacle() -> None:
    """Transformers leaves hooks behind, which do nothing in other calls."""
    model = injected("llama").bfloat16()
    model(tokens(1, 5), output_hidden_states=True)
    assert model_obstacle(model) is None


@pytest.mark.parametrize("family", ["gpt2", *MIXTURES])
def test_families_that_are_not_captured_are_named(family: str) -> None:
    assert f"of type {family}" in str(model_obstacle(injected(family).bfloat16()))
