"""Rotary spectra against the owners of their definitions."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gape.positions import build, rotary_frequencies

SIZES = [(16, 10000.0), (64, 500000.0), (58, 10000.0)]
LENGTH = 2048


def owner(rope_type: str, head_dim: int, theta: float, **parameters: object) -> tuple[torch.Tensor, float]:
    """What transformers computes, in float32."""
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": rope_type, "rope_theta": theta, **parameters},
    )
    if rope_type == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))


def same(ours: tuple[torch.Tensor, float], theirs: tuple[torch.Tensor, float]) -> None:
    inv_freq, attention_scale = ours
    assert inv_freq.dtype == torch.float64
    torch.testing.assert_close(inv_freq, theirs[0].double(), rtol=3e-6, atol=0.0)
    assert attention_scale == pytest.approx(theirs[1], rel=1e-12)


@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_rope_and_pi(head_dim: int, theta: float) -> None:
    same(rotary_frequencies("rope", head_dim, theta), owner("default", head_dim, theta))
    for factor in (1.0, 4.0, 7.5):
        theirs = owner("linear", head_dim, theta, factor=factor)
        same(rotary_frequencies("pi", head_dim, theta, factor=factor), theirs)


@pytest.mark.parametrize("fraction", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_p_rope(head_dim: int, theta: float, fraction: float) -> None:
    theirs = owner("proportional", head_dim, theta, partial_rotary_factor=fraction)
    same(rotary_frequencies("p-rope", head_dim, theta, fraction), theirs)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("factor", [1.0, 16.0])
@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_yarn(head_dim: int, theta: float, factor: float, truncate: bool) -> None:
    for fast, slow, length in ((32, 1, LENGTH), (16, 2, 131072), (32, 1, 64)):
        theirs = owner(
            "yarn",
            head_dim,
            theta,
            factor=factor,
            beta_fast=fast,
            beta_slow=slow,
            original_max_position_embeddings=length,
            truncate=truncate,
        )
        ours = rotary_frequencies(
            "yarn",
            head_dim,
            theta,
            context_length=length,
            factor=factor,
            fast_rotations=fast,
            slow_rotations=slow,
            truncate=truncate,
        )
        same(ours, theirs)


@pytest.mark.parametrize("factor", [1.0, 32.0])
@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_longrope(head_dim: int, theta: float, factor: float) -> None:
    factors = [1 + 0.3 * pair for pair in range(head_dim // 2)]
    theirs = owner(
        "longrope",
        head_dim,
        theta,
        factor=factor,
        short_factor=factors,
        long_factor=factors,
        original_max_position_embeddings=LENGTH,
    )
    ours = rotary_frequencies("longrope", head_dim, theta, context_length=LENGTH, factor=factor, factors=factors)
    same(ours, theirs)
    plain, _ = rotary_frequencies("longrope", head_dim, theta)
    torch.testing.assert_close(plain, rotary_frequencies("rope", head_dim, theta)[0])


@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_ntk(head_dim: int, theta: float) -> None:
    ours, attention_scale = rotary_frequencies("ntk", head_dim, theta, factor=8.0)
    base = theta * math.pow(8.0, head_dim / (head_dim - 2))
    for pair, frequency in enumerate(ours.tolist()):
        assert frequency == pytest.approx(1 / math.pow(base, 2 * pair / head_dim), rel=1e-12)
    # Its purpose: the fastest pair stays, the slowest is interpolated by exactly the factor.
    rope, _ = rotary_frequencies("rope", head_dim, theta)
    assert ours[0] == rope[0]
    assert float(rope[-1] / ours[-1]) == pytest.approx(8.0, rel=1e-12)
    assert attention_scale == 1.0


@pytest.mark.parametrize("name", ["pi", "ntk", "yarn"])
def test_factor_defaults_to_four(name: str) -> None:
    left, left_scale = rotary_frequencies(name, 32, context_length=LENGTH)
    right, right_scale = rotary_frequencies(name, 32, context_length=LENGTH, factor=4.0)
    assert torch.equal(left, right)
    assert left_scale == right_scale


def test_scheme_holds_the_same_spectrum() -> None:
    options = {"factor": 8.0, "theta": 5e5}
    scheme = build("yarn+gape", n_heads=2, head_dim=32, context_length=LENGTH, **options).base
    inv_freq, attention_scale = rotary_frequencies("yarn+gape", 32, context_length=LENGTH, **options)
    assert torch.equal(scheme.inv_freq, inv_freq)
    assert scheme.attention_scale == attention_scale


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"name": "alibi", "head_dim": 8}, "alibi"),
        ({"name": "nope+gape", "head_dim": 8}, "nope"),
        ({"name": "rope", "head_dim": 7}, "head_dim"),
        ({"name": "ntk", "head_dim": 2}, "head_dim"),
        ({"name": "rope", "head_dim": 8, "theta": 0.0}, "theta"),
        ({"name": "rope", "head_dim": 8, "factor": 2.0}, "factor"),
        ({"name": "p-rope", "head_dim": 8, "factor": 2.0}, "factor"),
        ({"name": "rope", "head_dim": 8, "fraction": 0.5}, "fraction"),
        ({"name": "p-rope", "head_dim": 8, "fraction": 1.5}, "fraction"),
        ({"name": "pi", "head_dim": 8, "factor": -1.0}, "factor"),
        ({"name": "pi", "head_dim": 8, "truncate": False}, "truncate: pi does not take this"),
        ({"name": "pi", "head_dim": 8, "context_length": 0}, "context_length"),
        ({"name": "yarn", "head_dim": 8}, "context_length"),
        ({"name": "yarn", "head_dim": 8, "context_length": 8, "slow_rotations": 40.0}, "fast_rotations"),
        ({"name": "longrope", "head_dim": 8, "factor": 2.0}, "context_length"),
        ({"name": "longrope", "head_dim": 8, "factors": [1.0, 2.0]}, "factors"),
        ({"name": "longrope", "head_dim": 8, "factors": [1.0, 2.0, 0.0, 1.0]}, "factors"),
    ],
)
def test_refusals(arguments: dict[str, object], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        rotary_frequencies(**arguments)
