"""The analysis of a needle model: complete, storable, the same every time."""

from __future__ import annotations

import json

import pytest
import torch

import gape
from gape.analysis import attended
from gape.analysis.niah import KINDS, inspect_model
from gape.analysis.routing import score_bounds
from gape.tasks import niah

TASK = niah.NIAHConfig(length=32, n_needles=3, target="middle")


def model(position: str) -> gape.GPT:
    torch.manual_seed(0)
    config = gape.GPTConfig(
        vocab_size=niah.VOCAB_SIZE, n_layer=2, n_head=2, n_embd=32, context_length=32, position=position
    )
    return gape.GPT(config).eval()


def test_a_gated_model_is_described_by_sample_layer_and_head() -> None:
    actual = inspect_model(model("p-rope+gape"), TASK, factors=(1, 2), samples=3)
    assert json.loads(json.dumps(actual)) == actual
    assert [spread["length"] for spread in actual["spread"]] == [32, 64]
    for spread in actual["spread"]:
        assert torch.tensor(spread["entropy"]).shape == (3, 2, 2)
    gates = actual["gates"]
    assert all(torch.tensor(gates[name]).shape == (3, 2, 2) for name in ("query_gate", "required", "target_landmark"))
    assert set(gates["landmark"]) == set(KINDS)
    assert torch.tensor(actual["trace"]["landmark"]).shape == (2, 2, 32)


def test_the_landmark_that_a_needle_needs_is_that_of_the_paper() -> None:
    """Proposition 3 at the digit asked for, for the best score that the norms allow."""
    gpt, drawn = model("p-rope+gape"), niah.sample(TASK, 1, split="test")
    with torch.no_grad():
        for layer in gpt.layers:
            layer.attention.scheme.gates.gate_projection.weight.normal_(std=20.0)
            layer.attention.scheme.gates.gate_projection.bias.fill_(400.0)
    actual = inspect_model(gpt, TASK, factors=(1,), samples=1)
    gates = {name: torch.tensor(each) for name, each in actual["gates"].items() if name != "landmark"}
    torch.testing.assert_close(gates["rate"], gates["amplitude"] * gates["query_gate"] / 32, rtol=1e-4, atol=0)
    away = 31 - actual["trace"]["target_at"]
    bounds = torch.stack([score_bounds(layer)[:, :, -1] for layer in attended(gpt, drawn.ids)], dim=1)
    needed = (1 - 2 * bounds / (gates["rate"] * away)).clamp(min=0)
    assert bool((needed > 0).any())
    torch.testing.assert_close(gates["required"], needed, rtol=1e-3, atol=1e-4)


def test_landmarks_are_averaged_by_kind_of_token() -> None:
    gpt = model("nope+gape")
    with torch.no_grad():
        # Large enough that every token has a landmark of its own.
        gpt.layers[0].attention.scheme.gates.landmark_projection.weight.normal_(std=20.0)
    actual = inspect_model(gpt, TASK, factors=(1,), samples=1)
    ids, trace = niah.sample(TASK, 1, split="test").ids[0], torch.tensor(actual["trace"]["landmark"][0][0])
    tokens = {"filler": (0, 13), "key": (14, 14), "equals": (15, 15), "query": (16, 16), "digit": (17, 26)}
    means = {kind: actual["gates"]["landmark"][kind][0][0][0] for kind in KINDS}
    expected = {kind: float(trace[(ids >= low) & (ids <= high)].mean()) for kind, (low, high) in tokens.items()}
    assert means == pytest.approx(expected, abs=1e-3)
    assert len({round(value, 2) for value in means.values()}) == len(KINDS)


def test_a_model_without_gates_has_none_to_show() -> None:
    actual = inspect_model(model("rope"), TASK, factors=(1,), samples=1)
    assert actual["gates"] is None
    assert actual["trace"] is None


def test_the_training_length_is_required() -> None:
    with pytest.raises(ValueError, match="factors"):
        inspect_model(model("rope"), TASK, factors=(2, 4))
