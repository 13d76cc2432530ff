"""Attention among the tokens of a prompt against the definition: PyTorch, and kernels without and with a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gape.cache.gpt import gpt_specs
from gape.cache.layer import gate_readings
from gape.ops.paged import causal_attention
from gape.ops.prologue import projected_attention
from tests.models.tiny import model

pytest.importorskip("triton")
from gape.ops.triton.attention import causal_answer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.2
WAYS: dict[str, tuple[Any, torch.dtype, float]] = {
    "plain float64": (causal_attention, torch.float64, 1e-12),
    "plain float16": (causal_attention, torch.float16, 2e-3),
    "kernel float32": (causal_answer, torch.float32, 5e-5),
    "kernel float16": (causal_answer, torch.float16, 2e-3),
}


def drawn(dtype: torch.dtype, n: int = 90) -> list[Tensor]:
    """q, k, v, rates and exposures of one row, four query heads and two key heads."""
    random = torch.Generator().manual_seed(0)
    sizes = ((1, 4, n, 24), (1, 2, n, 24), (1, 2, n, 40))
    q, k, v = (torch.randn(size, generator=random).to(DEVICE, dtype) for size in sizes)
    side = torch.promote_types(dtype, torch.float32)
    rate, exposure = (torch.rand(1, heads, n, generator=random).to(DEVICE, side) for heads in (4, 2))
    return [q, k, v, 0.1 * rate, exposure]


def definition(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, exposure: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, rate, exposure = (x.double() for x in (q, k, v, rate, exposure))
    k, v, exposure = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v, exposure))
    places = torch.arange(q.size(2), device=q.device)
    distance = places[:, None] - places
    logits = SCALE * q @ k.mT - rate[..., None] * exposure[:, :, None] * distance
    logits = logits.masked_fill(distance < 0, -torch.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize(("run", "dtype", "near"), WAYS.values(), ids=WAYS)
def test_output_and_log_sum_exp_are_those_of_the_definition(run: Any, dtype: torch.dtype, near: float) -> None:
    given = drawn(dtype)
    (out, lse), (exact, exact_lse) = run(*given, scale=SCALE, eps=0.0), definition(*given)
    assert out.dtype == dtype
    assert float((out.double() - exact).norm() / exact.norm()) <= near
    torch.testing.assert_close(lse.double(), exact_lse, atol=max(1e-12, min(near, 1e-4)), rtol=0)


@pytest.mark.parametrize("position", ["p-rope+gape", "nope+gape"])
@torch.no_grad()
def test_projected_tokens_are_read_and_rotated_as_the_scheme_does(position: str) -> None:
    """Heads as wide as the kernel takes them whole, at positions behind others."""
    gpt = model(position, torch.float16, n_embd=256, reserve=0).to(DEVICE)
    attention, reading = next(gpt.blocks()).attention, gate_readings(gpt_specs(gpt, None))[0]
    positions = torch.arange(50, 120, device=DEVICE)
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 70, 64, generator=random).to(DEVICE).half() for heads in (4, 2, 2))
    found = projected_attention(q, k, v, attention.step(q, positions).angles, reading, scale=SCALE, eps=0.0)
    rotated_q, gate = attention.scheme.queries(q, positions)
    rotated_k, landmark = attention.scheme.keys(k, positions)
    rate = attention.gates.amplitude[:, None] * gate / attention.context_length
    out, lse = definition(rotated_q, rotated_k, v, rate, 1 - landmark)
    for actual, expected in ((found.q, rotated_q), (found.k, rotated_k), (found.rate, rate), (found.out, out)):
        assert float((actual - expected).double().norm() / expected.double().norm()) <= 2e-3
    torch.testing.assert_close(found.exposure, 1 - landmark.float(), atol=1e-3, rtol=0)
    torch.testing.assert_close(found.lse.double(), lse, atol=5e-3, rtol=0)
