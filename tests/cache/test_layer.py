"""No query loses more than eps of its attention to evicted keys, in any model, chunk by chunk or token by token."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import gape
from gape.cache.bounds import limits_of_weights
from gape.cache.gpt import ForgettingCache, FullCache, gpt_specs
from gape.cache.layer import gate_readings
from tests.cache.witness import Witness, read, witnessed
from tests.models.tiny import model, tokens


def drawn(seed: int) -> tuple[gape.GPT, dict[str, Any]]:
    """A random small model, with floors and landmarks that differ from head to head, and arguments of a cache."""
    draw = random.Random(seed)
    context = draw.choice([8, 16, 64])
    floors = [context * draw.uniform(0.3, 1.8) for _ in range(4)]
    gpt = model(
        draw.choice(["p-rope+gape", "nope+gape", "yarn+gape"]),
        context_length=context,
        n_kv_head=draw.choice([1, 2, 4]),
        reserve=draw.choice([0, None]),
        bias=draw.choice([False, True]),
        options={"gate_floor": floors, "init_landmark_bias": draw.choice([-6.0, -2.0])},
    )
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype))
        for _, gates in gpt.gates():
            bias = gates.landmark_projection.bias
            bias.add_(2 * torch.randn(bias.shape, generator=noise, dtype=bias.dtype))
            gates.landmark_projection.weight.mul_(draw.choice([1.0, 4.0]))
    return gpt, {"eps": draw.choice([1e-2, 1e-2, 0.2, 1e-5]), "bounds": draw.choice(["weights", "queries"])}


def check_promise(seed: int, length: int) -> int:
    """The least keys of a head at the end."""
    gpt, arguments = drawn(seed)
    draw = random.Random(seed)
    sizes = [draw.choice([1, 1, 5, 40, 70]) for _ in range(length)]
    if draw.random() < 0.3:
        sizes.insert(draw.randrange(2), 260)
    total = sum(sizes)
    pads = torch.tensor([0, draw.choice([3, 50]), 17]) if draw.random() < 0.5 else None
    cache = ForgettingCache(gpt, **arguments)
    with pytest.MonkeyPatch.context() as patch, witnessed(cache) as witnesses:
        patch.setattr("gape.cache.paged.EARLY_TOKENS", 260)
        read(gpt, cache, tokens(3, total, seed=seed), sizes, pads)
    judged = [witness.judged() for witness in witnesses]
    assert max(each.error for each in judged) <= 1e-9
    lost = max(each.lost for each in judged)
    assert lost <= cache.realised_eps
    if arguments["bounds"] == "weights":
        assert cache.realised_eps <= arguments["eps"]
    return min(min(keys) for keys in cache.num_keys) - total


def test_no_query_loses_more_than_eps() -> None:
    evicted = [check_promise(seed, 13) for seed in range(4)]
    assert sum(each < 0 for each in evicted) > 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_no_query_of_any_model_loses_more_than_eps(seed: int) -> None:
    check_promise(1000 + seed, 24)


def test_the_promise_would_not_hold_under_other_limits() -> None:
    gpt, _ = drawn(0)
    cache = ForgettingCache(gpt, eps=1e-2)
    for layer in cache.layers:
        limits = layer.spec.limits
        wrong = replace(limits, rate=8 * limits.rate, reach=limits.reach / 10, own=limits.own / 10)
        layer.spec = replace(layer.spec, limits=wrong)
    with witnessed(cache) as witnesses:
        read(gpt, cache, tokens(2, 200), [5] * 40)
    assert max(witness.judged().lost for witness in witnesses) > 1e-2


@pytest.mark.parametrize("bounds", ["weights", "queries"])
@torch.no_grad()
def test_queries_of_a_new_kind_lose_no_more_than_is_realised(bounds: str) -> None:
    """They turn to old keys that nobody has asked for; only bounds from weights knew of them."""
    gpt = model(
        "nope+gape", n_layer=1, n_kv_head=4, reserve=0, options={"gate_floor": 24.0, "init_landmark_bias": -9.0}
    )
    block = next(gpt.blocks())
    attention, norm = block.attention, block.attention_norm
    q, k, _ = attention.qkv.weight.view(3, 4, 12, 48).unbind()
    # A coordinate that only inputs of a kind of their own ask for.
    q[:, 0], k[:, 0] = 0.0, 0.0
    q[:, 0, 0], k[:, 0, 1] = 3.0, 3.0
    cache = ForgettingCache(gpt, eps=1e-3, bounds=bounds)
    witness = Witness(cache, cache.layers[0])
    x = 0.5 * torch.randn(300, 1, 1, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[..., :2] = torch.tensor([0.0, -4.0])
    x[:80, ..., 1] = 4.0
    x[131::7, ..., :2] = torch.tensor([40.0, -40.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache.layers[0], "attend", witness.attend)
        for token in x:
            attention(norm(token), cache=cache.layers[0])
    assert max(cache.num_keys[0]) < 300
    lost = witness.judged().lost
    assert lost <= cache.realised_eps
    assert (lost > 1e-3) == (bounds == "queries")


def test_a_key_goes_at_its_horizon_and_not_before() -> None:
    gpt = model(n_layer=1, n_kv_head=4, options={"gate_floor": 48.0, "init_landmark_bias": -40.0})
    cache, eps = ForgettingCache(gpt, eps=2e-3), 1e-3
    with witnessed(cache) as witnesses:
        read(gpt, cache, tokens(1, 200), [1] * 200)
    for witness, block in zip(witnesses, gpt.blocks(), strict=True):
        limits = limits_of_weights(block.attention, block.attention_norm)
        norms = torch.cat([given[1] for given in witness.calls], dim=2)[0].norm(dim=-1)
        for head in range(4):
            longest, shortest = (limits.horizon(eps, norm)[head] for norm in (norms[head].max(), norms[head].min()))
            for step, cached in enumerate(witness.cached):
                there = {*cached[head][0].tolist(), step}
                gone = set(range(step)) - there
                assert step - max(gone, default=-300) >= shortest - 1e-3
                # Keys are judged every 64 tokens.
                assert step - min(there) <= longest + 65


@pytest.mark.parametrize(("dtype", "bounds"), [(torch.float32, "queries"), (torch.bfloat16, "weights")])
def test_rounding_is_allowed_for(dtype: torch.dtype, bounds: str) -> None:
    gpt = model(options={"gate_floor": 24.0, "init_landmark_bias": -3.0}).to(dtype)
    cache = ForgettingCache(gpt, eps=1e-2, bounds=bounds)
    with witnessed(cache) as witnesses:
        read(gpt, cache, tokens(2, 300), [50] * 5 + [1] * 50)
    assert max(witness.judged().lost for witness in witnesses) <= min(1e-2, cache.realised_eps)
    assert max(max(keys) for keys in cache.num_keys) < 300


@pytest.mark.parametrize(
    ("budget", "floor"), [pytest.param({"max_keys": 128}, 24.0, marks=pytest.mark.slow), ({"max_bytes": 200_000}, 0.0)]
)
def test_what_a_budget_costs_is_realised(budget: dict[str, int], floor: float) -> None:
    gpt = model(options={"gate_floor": floor, "init_landmark_bias": -2.0}, n_layer=1)
    cache = ForgettingCache(gpt, **budget)
    # Tokens of a long call still attend to what is evicted at its end.
    with witnessed(cache) as witnesses:
        read(gpt, cache, tokens(2, 320), [1] * 10 + [7] * 40 + [1] * 30)
    lost, error = witnesses[0].judged()
    assert error <= 1e-9
    assert 0 < lost <= cache.realised_eps <= 1


@pytest.mark.parametrize("learned", [True, False])
@torch.no_grad()
def test_kernels_read_gates_as_they_are_now(learned: bool) -> None:
    """Also after a write to `data`, which torch does not count."""
    gpt = model(options={"gate_floor": [1.0, 2.0, 3.0, 4.0], "learn_gate": learned, "learn_landmark": learned})
    specs = gpt_specs(gpt, None)
    gate_readings(specs)
    for parameter in gpt.parameters():
        parameter.data.add_(0.3)
    for spec, reading in zip(specs, gate_readings(specs), strict=True):
        q, k = torch.randn(1, 4, 5, spec.gates.head_dim), torch.randn(1, 2, 5, spec.gates.head_dim)
        gate = (q * reading.gate_weight[:, None]).sum(-1) + reading.gate_bias[:, None]
        gate = torch.nn.functional.softplus(gate) + reading.floor[:, None]
        landmark = ((k * reading.landmark_weight[:, None]).sum(-1) + reading.landmark_bias[:, None]).sigmoid()
        expected = spec.gates(q.double(), k.double())
        torch.testing.assert_close((gate.double(), landmark.double()), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(reading.amplitude.double(), spec.gates.amplitude, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_a_module_in_the_place_of_a_gate_is_called() -> None:
    """Kernels read weights, which it need not have."""
    gpt, ids = model(dtype=torch.float32), tokens(1, 20)
    wanted = gpt(ids).logits
    for _, gates in gpt.gates():
        gates.gate_projection = torch.nn.Sequential(gates.gate_projection)
    torch.testing.assert_close(read(gpt, FullCache(gpt), ids, [8, 11, 1]), wanted, atol=1e-4, rtol=1e-4)
