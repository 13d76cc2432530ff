"""The gates: formulas, starting values, floors, ablations, and float32 whatever the model is."""

from __future__ import annotations

import math

import pytest
import torch

import gape
from tests.wrong import each_wrong


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 7, 8, generator=g).to(dtype), torch.randn(2, 2, 9, 8, generator=g).to(dtype)


def test_formulas() -> None:
    torch.manual_seed(0)
    gates = gape.GAPEGates(4, 8, 2, gate_floor=[0.0, 1.0, 0.5, 2.0]).double()
    q, k = inputs(torch.float64)
    gate, landmark = gates(q, k)
    for h in range(4):
        raw = q[:, h] @ gates.gate_projection.weight[h] + gates.gate_projection.bias[h]
        torch.testing.assert_close(gate[:, h], gates.gate_floor[h] + torch.log1p(raw.exp()))
    for h in range(2):
        raw = k[:, h] @ gates.landmark_projection.weight[h] + gates.landmark_projection.bias[h]
        torch.testing.assert_close(landmark[:, h], 1 / (1 + torch.exp(-raw)))


def test_starting_values_are_the_papers() -> None:
    torch.manual_seed(0)
    gates = gape.GAPEGates(4, 8, 2)
    gate, landmark = gates(*inputs())
    torch.testing.assert_close(gates.amplitude, torch.ones(4), atol=1e-4, rtol=0)
    assert abs(gate.median() - 0.0486) < 0.01
    assert abs(landmark.median() - 0.5) < 0.05
    assert 0.015 < gates.gate_projection.weight.std() < 0.025


def test_ablations_are_constant_and_have_no_idle_parameters() -> None:
    gates = gape.GAPEGates(4, 8, 2, learn_gate=False, learn_landmark=False)
    gate, landmark = gates(*inputs())
    torch.testing.assert_close(gate, torch.full((2, 4, 7), math.log1p(math.exp(-3))))
    torch.testing.assert_close(landmark, torch.full((2, 2, 9), 0.5))
    assert [name for name, _ in gates.named_parameters()] == ["raw_amplitude"]


@pytest.mark.parametrize(("learn_gate", "learn_landmark"), [(True, True), (True, False), (False, True)])
def test_every_parameter_learns(learn_gate: bool, learn_landmark: bool) -> None:
    gates = gape.GAPEGates(4, 8, 2, learn_gate=learn_gate, learn_landmark=learn_landmark)
    q, k = inputs()
    gate, landmark = gates(q, k)
    v = torch.randn(2, 2, 9, 8)
    gape.gated_attention(q, k, v, gate, landmark, gates.amplitude, context_length=4).square().sum().backward()
    for name, parameter in gates.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
        assert parameter.dim() > 0, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_under_half_models_and_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = gape.GAPEGates(4, 8, 2, gate_floor=0.3)
    q, k = inputs(dtype)
    expected = exact(q.float(), k.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, want in zip(exact(q, k), expected, strict=True):
            assert got.dtype == torch.float32
            assert (got == want).all()
    low = gape.GAPEGates(4, 8, 2, gate_floor=0.3).to(dtype)
    low.load_state_dict(exact.state_dict())
    gate, _ = low(q, k)
    assert gate.dtype == low.amplitude.dtype == torch.float32
    torch.testing.assert_close(gate, expected[0], rtol=1e-2, atol=1e-3)
    assert (gate >= 0.3).all()


def test_finite_far_from_zero() -> None:
    gates = gape.GAPEGates(1, 1)
    x = torch.tensor([-5000.0, -50.0, 50.0, 5000.0]).view(1, 1, 4, 1).requires_grad_()
    with torch.no_grad():
        gates.gate_projection.weight.fill_(1.0)
        gates.landmark_projection.weight.fill_(1.0)
    gate, landmark = gates(x, x)
    (gate.sum() + landmark.sum()).backward()
    assert all(y.isfinite().all() for y in (gate, landmark, x.grad))


def test_reset_restores_the_start() -> None:
    gates = gape.GAPEGates(4, 8, 2)
    with torch.no_grad():
        for parameter in gates.parameters():
            parameter.fill_(7.0)
    gates.reset_parameters()
    torch.testing.assert_close(gates.amplitude, torch.ones(4), atol=1e-4, rtol=0)
    assert (gates.gate_projection.bias == -3).all()
    assert gates.landmark_projection.weight.std() < 0.1


@pytest.mark.parametrize(("name", "shape"), [("q", (2, 2, 7, 8)), ("q", (2, 4, 7, 9)), ("k", (2, 4, 9, 8))])
def test_wrong_input_is_named(name: str, shape: tuple[int, ...]) -> None:
    q, k = inputs()
    with pytest.raises(ValueError, match=f"^{name}: "):
        gape.GAPEGates(4, 8, 2)(**{"q": q, "k": k, name: torch.randn(shape)})


@each_wrong(
    n_heads=(0, 2.0), head_dim=(0,), n_kv_heads=(3,), gate_floor=(-1.0, [1.0, 2.0], "abcd"),
    init_amplitude=(float("nan"),), learn_gate=("no",),
)  # fmt: skip
def test_wrong_argument_is_named(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        gape.GAPEGates(**{"n_heads": 4, "head_dim": 8, argument: value})
