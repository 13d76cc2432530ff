"""Floors by theorem: none smaller would do, text stays within bounds of weights, and inject does as planned."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import gape.hf
from gape.hf import FloorPlan, ForgettingCache, plan_floors
from gape.hf.attention import InjectedAttention
from tests.hf.tiny import tiny, tokens

SCORES = torch.tensor([[0.1, 0.9], [0.2, 0.3]])


def planned(bounds: str = "scores", **arguments: Any) -> FloorPlan:
    ids = None if bounds == "weights" else tokens(2, 100)
    return plan_floors(tiny("llama"), bounds=bounds, ids=ids, **{"free": 1, "scores": SCORES} | arguments)


@pytest.mark.parametrize("amplitude", [1.0, 0.25])
@pytest.mark.parametrize("mass", [None, 0.01])
def test_a_floor_is_the_smallest_that_keeps_a_head_within_range(mass: float | None, amplitude: float) -> None:
    """The weights of keys from distance T on, one by one, at the largest scores the gap allows."""
    plan = planned(mass=mass, amplitude=amplitude)
    gap, floor = (torch.tensor(x, dtype=torch.float64) for x in (plan.gap, plan.gate_floor))
    distance = torch.arange(128, 200_000, dtype=torch.float64)

    def beyond(floor: torch.Tensor) -> torch.Tensor:
        weights = (gap[..., None] - amplitude * floor[..., None] / 128 * distance).exp()
        return weights[..., 0] if mass is None else weights.sum(-1)

    allowed, floored = 1.0 if mass is None else mass, floor > 0
    assert floored.sum() == 6
    assert (beyond(floor)[floored] <= allowed).all()
    assert (beyond((floor - 0.02).clamp(min=0))[floored] > allowed).all()
    assert (plan.horizons()[plan.horizons().isfinite()] <= 128).all()


@torch.no_grad()
def test_measured_gaps_are_those_of_the_scores() -> None:
    model, ids = tiny("llama"), tokens(1, 40)
    plan = plan_floors(model, bounds="scores", ids=ids)
    seen: list[Any] = []
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(lambda *a: seen.append(a[2]), with_kwargs=True)
    model(ids)
    handle.remove()
    x, (cos, sin) = seen[0]["hidden_states"], seen[0]["position_embeddings"]
    module = model.model.layers[0].self_attn
    q, k = (p(x).view(1, 40, -1, 8).transpose(1, 2) for p in (module.q_proj, module.k_proj))
    q, k = (y * cos + torch.cat((-y[..., 4:], y[..., :4]), -1) * sin for y in (q, k))
    scores = module.scaling * (q @ k.repeat_interleave(2, 1).mT)[0]
    gaps = (
        scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf) - scores.diagonal(dim1=1, dim2=2)[..., None]
    )
    torch.testing.assert_close(torch.tensor(plan.gap[0]), gaps.amax((1, 2)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_text_stays_within_the_bounds_of_weights(family: str) -> None:
    model, ids = tiny(family), tokens(2, 60)
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    kind, config = type(model), model.config.to_dict()
    gaps = [
        torch.tensor(plan_floors(model, bounds=b, ids=ids, context_length=64).gap)
        for b in ("weights", "norms", "scores")
    ]
    assert (gaps[0] >= gaps[2] - 1e-4).all()
    assert (gaps[1] >= gaps[2] - 1e-4).all()
    assert type(model) is kind
    assert model.config.to_dict() == config
    after = {name: (p, p.requires_grad) for name, p in model.named_parameters()}
    assert after.keys() == before.keys()
    assert all(torch.equal(p, before[name][0]) and learns == before[name][1] for name, (p, learns) in after.items())


def test_inject_takes_a_plan() -> None:
    plan = FloorPlan.from_dict(json.loads(json.dumps(planned().to_dict())))
    assert plan == planned()
    assert plan.free == [(0, 1)]
    assert plan.head_positions == [["rope", "hope"], ["rope", "rope"]]
    model = gape.hf.inject(tiny("llama"), floors=plan, start="paper", gates={"learn_landmark": False}, log_scale=True)
    modules = [module for module in model.modules() if isinstance(module, InjectedAttention)]
    assert [list(module.gape.gate_floor) for module in modules] == plan.gate_floor
    grows = [[False, True], [False, False]]
    assert model.config.gape["options"] == {"head_positions": plan.head_positions, "log_scale": grows}
    assert model.config.gape["context_length"] == 128
    for name, value in (("context_length", 64), ("position", "rope+gape"), ("head_positions", "hope")):
        with pytest.raises(ValueError, match=f"^{name}: .*plan of floors"):
            gape.hf.inject(tiny("llama"), floors=plan, **{name: value})
    with pytest.raises(ValueError, match=r"^gate_floor: .*plan of floors"):
        gape.hf.plan(tiny("llama"), floors=plan, gates={"gate_floor": 1.0})


@torch.no_grad()
def test_scores_grow_only_in_heads_without_a_floor() -> None:
    """A floor is for scores as they are within T; log 256 / log 16 is 2."""
    model = gape.hf.inject(tiny("llama"), floors=planned("weights", context_length=16), start="paper", log_scale=True)
    q, k = torch.ones(1, 4, 1, 8), torch.ones(1, 2, 1, 8)
    for layer, expected in zip(model.model.layers, ([1.0, 1.0, 2.0, 2.0], [1.0] * 4), strict=True):
        rotated = layer.self_attn.rotate(q, k, torch.tensor([256]), q, None)[0]
        torch.testing.assert_close(rotated.norm(dim=-1)[0, :, 0] / 8**0.5, torch.tensor(expected))


def test_a_model_that_does_not_rotate_keeps_its_positions() -> None:
    given = {"context_length": 64, "free": 1, "scores": torch.zeros(2, 4)}
    with pytest.raises(ValueError, match=r"^position, free_position: GPT2LMHeadModel does not rotate"):
        plan_floors(tiny("gpt2"), **given)
    assert plan_floors(tiny("gpt2"), **given, free_position=None).position is None


def test_a_plan_that_leaves_rotations_keeps_the_models_own() -> None:
    for plan in (planned(free=0), planned(free_position=None)):
        assert plan.position is None
        assert plan.head_positions is None
    assert planned(position="hope", least=2.0).gate_floor[1] == [2.0] * 4


@torch.no_grad()
def test_a_cache_has_about_as_many_keys_as_planned() -> None:
    plan = planned(free=1, mass=0.5)
    # Stronger floors, so that keys fade within a text that a test has time for.
    rows = [[2 * floor for floor in row] for row in plan.gate_floor]
    plan = FloorPlan.from_dict({**plan.to_dict(), "gate_floor": rows})
    gates = {"learn_landmark": False, "init_landmark_bias": -12.0, "learn_gate": False, "init_gate_bias": -20.0}
    model, length = gape.hf.inject(tiny("llama"), floors=plan, start="paper", gates=gates), 1024
    cache = ForgettingCache(model, eps=1e-3, bounds="queries")
    model(tokens(1, length), past_key_values=cache)
    cache.pages.evict()
    actual, expected = torch.tensor(cache.num_keys), plan.cached_keys(length)
    assert actual[0, 1] == expected[0, 1] == length
    torch.testing.assert_close(actual.double(), expected, rtol=0.15, atol=0)
    assert expected[1].max() < length / 4


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("free", 5), ("scores", None), ("scores", SCORES[:1]), ("bounds", "guess"), ("ids", None),
        ("ids", tokens(1, 129)), ("mass", 1.5), ("amplitude", 0.0), ("context_length", 0),
        ("position", "yarn"), ("free_position", "alibi"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(argument: str, value: Any) -> None:
    given: dict[str, Any] = {"free": 1, "scores": SCORES, "bounds": "scores", "ids": tokens(1, 20)}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        plan_floors(tiny("llama"), **given | {argument: value})


def test_a_line_for_each_key_head() -> None:
    lines = str(planned()).splitlines()
    assert [line.split()[:3] for line in lines[2:-1]] == [
        ["0", "0", "rope"], ["0", "1", "hope"], ["1", "0", "rope"], ["1", "1", "rope"],
    ]  # fmt: skip
