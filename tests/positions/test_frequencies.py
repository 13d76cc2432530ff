"""Rotary spectra against the owners of their definitions."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gape.positions import build

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


def spectrum(name: str, head_dim: int, theta: float = 1e4, **options: Any) -> tuple[torch.Tensor, float]:
    """Ours: inverse frequencies (D/2,) in float64, and the factor on cosines and sines."""
    scheme = build(name, n_heads=1, head_dim=head_dim, theta=theta, **options)
    return scheme.inv_freq, scheme.attention_scale


def same(ours: tuple[torch.Tensor, float], theirs: tuple[torch.Tensor, float]) -> None:
    inv_freq, attention_scale = ours
    assert inv_freq.dtype == torch.float64
    torch.testing.assert_close(inv_freq, theirs[0].double(), rtol=3e-6, atol=0.0)
    assert attention_scale == pytest.approx(theirs[1], rel=1e-12)


@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_rope_and_pi(head_dim: int, theta: float) -> None:
    same(spectrum("rope", head_dim, theta), owner("default", head_dim, theta))
    for factor in (1.0, 4.0, 7.5):
        theirs = owner("linear", head_dim, theta, factor=factor)
        same(spectrum("pi", head_dim, theta, factor=factor), theirs)


@pytest.mark.parametrize("fraction", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_p_rope(head_dim: int, theta: float, fraction: float) -> None:
    theirs = owner("proportional", head_dim, theta, partial_rotary_factor=fraction)
    same(spectrum("p-rope", head_dim, theta, fraction=fraction), theirs)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("factor", [1.0, 16.0])
@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_yarn(head_dim: int, theta: float, factor: float, truncate: bool) -> None:
    both: dict[str, Any] = {"head_dim": head_dim, "theta": theta, "factor": factor, "truncate": truncate}
    for fast, slow, length in ((32, 1, LENGTH), (16, 2, 131072), (32, 1, 64)):
        theirs = owner("yarn", beta_fast=fast, beta_slow=slow, original_max_position_embeddings=length, **both)
        ours = spectrum("yarn", context_length=length, fast_rotations=fast, slow_rotations=slow, **both)
        same(ours, theirs)


@pytest.mark.parametrize("factor", [1.0, 32.0])
@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_longrope(head_dim: int, theta: float, factor: float) -> None:
    factors = [1 + 0.3 * pair for pair in range(head_dim // 2)]
    lists = {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": LENGTH}
    theirs = owner("longrope", head_dim, theta, factor=factor, **lists)
    same(spectrum("longrope", head_dim, theta, context_length=LENGTH, factor=factor, factors=factors), theirs)
    plain, _ = spectrum("longrope", head_dim, theta)
    torch.testing.assert_close(plain, spectrum("rope", head_dim, theta)[0])


@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_ntk(head_dim: int, theta: float) -> None:
    ours, attention_scale = spectrum("ntk", head_dim, theta, factor=8.0)
    base = theta * math.pow(8.0, head_dim / (head_dim - 2))
    for pair, frequency in enumerate(ours.tolist()):
        assert frequency == pytest.approx(1 / math.pow(base, 2 * pair / head_dim), rel=1e-12)
    # Its purpose: the fastest pair stays, the slowest is interpolated by exactly the factor.
    rope, _ = spectrum("rope", head_dim, theta)
    assert ours[0] == rope[0]
    assert float(rope[-1] / ours[-1]) == pytest.approx(8.0, rel=1e-12)
    assert attention_scale == 1.0


@pytest.mark.parametrize("name", ["pi", "ntk", "yarn"])
def test_factor_defaults_to_four(name: str) -> None:
    left, left_scale = spectrum(name, 32, context_length=LENGTH)
    right, right_scale = spectrum(name, 32, context_length=LENGTH, factor=4.0)
    assert torch.equal(left, right)
    assert left_scale == right_scale
