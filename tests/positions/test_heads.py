"""Heads that rotate in different ways, pairs that fit the training length, and scores that grow with the position."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gape.positions import Scheme, build
from tests.positions.test_frequencies import spectrum
from tests.positions.test_stepwise import STEPS, full, stepwise

T, N, D = 16, 50, 32
SIZES: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "head_dim": D, "context_length": T}
MIXED = {"head_positions": ["rope", "hope"], "log_scale": [False, True], "theta": 100.0}


def made(name: str, **options: Any) -> Scheme:
    torch.manual_seed(0)
    scheme = build(name, **SIZES, **options)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return scheme.double()


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, N, D, dtype=torch.float64, generator=generator) for h in (4, 2, 2))
    return q, k, v


@pytest.mark.parametrize(("length", "theta", "pairs"), [(8192, 1e5, 20), (8192, 1e4, 25), (1024, 1e4, 18), (6, 1e4, 0)])
def test_pairs_turn_that_complete_a_turn_in_training(length: int, theta: float, pairs: int) -> None:
    """The wavelengths, counted in tokens; one of 2π does not fit into six."""
    got, scale = spectrum("hope", 64, theta, context_length=length)
    full = [theta ** (-pair / 32) for pair in range(32)]
    want = [f if 2 * math.pi / f <= length else 0.0 for f in full]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0.0)
    assert int(got.count_nonzero()) == pairs
    assert scale == 1.0
    auto = spectrum("p-rope", 64, theta, fraction="auto", context_length=length)
    assert torch.equal(auto[0], got)


@pytest.mark.parametrize("batched", [False, True])
def test_a_head_rotates_as_its_own_scheme_would(batched: bool) -> None:
    names = ["yarn", "nope"]
    scheme = made("yarn", head_positions=names, factor=8.0, theta=500.0)
    own = {"yarn": {"factor": 8.0, "theta": 500.0}, "nope": {}}
    q, k, _ = drawn()
    positions = torch.arange(N) + torch.tensor([[0], [70_000]]) if batched else torch.arange(N)
    got_q, got_k = scheme.queries(q, positions)[0], scheme.keys(k, positions)[0]
    for head, name in enumerate(names):
        alone, queries = made(name, **own[name]), slice(2 * head, 2 * head + 2)
        torch.testing.assert_close(got_q[:, queries], alone.queries(q, positions)[0][:, queries], rtol=0, atol=1e-12)
        torch.testing.assert_close(got_k[:, [head]], alone.keys(k, positions)[0][:, [head]], rtol=0, atol=1e-12)


def test_one_name_for_all_heads_is_that_scheme() -> None:
    q, k, _ = drawn()
    for x, y in (
        (made("rope", head_positions="hope"), made("hope")),
        (made("hope", head_positions=["rope"] * 2), made("rope")),
    ):
        assert torch.equal(x.queries(q, torch.arange(N))[0], y.queries(q, torch.arange(N))[0])
        assert torch.equal(x.keys(k, torch.arange(N))[0], y.keys(k, torch.arange(N))[0])


def test_scores_of_late_queries_grow_and_the_bias_does_not() -> None:
    """The definition, dense: scores times log i / log T behind T, then the bias of the gates."""
    scheme = made("rope+gape", gate_floor=1.0, **MIXED)
    plain = made("rope+gape", gate_floor=1.0, head_positions=MIXED["head_positions"], theta=MIXED["theta"])
    q, k, v = drawn()
    positions = torch.arange(N)
    (turned, gate), (keys, landmark) = plain.queries(q, positions), plain.keys(k, positions)
    growth = torch.tensor([max(1.0, math.log(max(i, 1)) / math.log(T)) for i in range(N)], dtype=torch.float64)
    scores = 0.3 * turned @ keys.repeat_interleave(2, 1).mT
    scores[:, 2:] *= growth[:, None]
    distance = positions[:, None] - positions
    rate = plain.gates.amplitude[:, None] * gate / T
    bias = rate[..., None] * (1 - landmark).repeat_interleave(2, 1).unsqueeze(2) * distance
    logits = (scores - bias).masked_fill(distance < 0, -torch.inf)
    want = logits.softmax(-1) @ v.repeat_interleave(2, 1)
    (got_q, side), (got_k, k_side) = scheme.queries(q, positions), scheme.keys(k, positions)
    got = scheme.attend(got_q, got_k, v, side, k_side, scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert torch.equal(got_q[:, :2], turned[:, :2])
    assert torch.equal(got_q[:, :, : T + 1], turned[:, :, : T + 1])


@pytest.mark.parametrize("name", ["rope", "rope+gape"])
def test_cached_steps_equal_the_full_pass(name: str) -> None:
    scheme, tensors = made(name, **MIXED), (*drawn(), torch.zeros(2, N, 1, dtype=torch.float64))
    positions = torch.arange(N) + torch.tensor([[0], [-9]])
    want = full(scheme, *tensors, positions)
    torch.testing.assert_close(stepwise(scheme, *tensors, positions, STEPS), want, rtol=1e-9, atol=1e-9)


def test_layers_with_other_heads_share_angles() -> None:
    positions = torch.arange(5, 8)
    one = build("rope", **SIZES, head_positions=["rope", "hope"]).angles(positions)
    other = build("rope", **SIZES, head_positions=["hope", "rope"]).angles(positions)
    assert one[0] is other[0]
    assert one[2].tolist() != other[2].tolist()


def test_one_rotation_for_all_heads_is_needed_to_rotate_any_tensor() -> None:
    scheme = build("rope", **SIZES, head_positions=["rope", "hope"])
    with pytest.raises(ValueError, match="queries and keys"):
        scheme.rotate(torch.zeros(1, 4, 3, D), torch.arange(3))
    with pytest.raises(ValueError, match=r"^x: .*4 heads"):
        scheme.queries(torch.zeros(1, 2, 3, D), torch.arange(3))
