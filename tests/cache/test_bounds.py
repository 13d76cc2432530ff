"""Bounds on queries from weights hold for every input, and are not wider than they have to be."""

from __future__ import annotations

import torch

from gape.cache.bounds import least_rates, limits_of_maps, limits_of_weights
from tests.models.tiny import model


@torch.no_grad()
def test_limits_hold_for_any_input_and_are_attained() -> None:
    block = next(model("yarn+gape", bias=True).blocks())
    attention, norm = block.attention, block.attention_norm
    limits = limits_of_weights(attention, norm)
    width, n_q = attention.content_dim, attention.n_heads * attention.content_dim
    rows = attention.qkv.weight[:n_q].view(-1, width, 48)
    top = torch.linalg.svd(rows - rows.mean(-1, keepdim=True)).Vh[:, 0]
    x = torch.cat([1e3 * top, -1e3 * top, 100 * torch.randn(2000, 48, dtype=torch.float64)])
    q, k, _ = attention.qkv(norm(x)).tensor_split([n_q, n_q + attention.n_kv_heads * width], -1)
    q, k = (y.view(len(x), -1, width).transpose(0, 1) for y in (q, k))
    stretch = attention.scheme.base.attention_scale
    reach = attention.scale * stretch * q.norm(dim=-1).amax(-1)
    own = -attention.scale * stretch**2 * (q * k.repeat_interleave(2, dim=0)).sum(-1)
    assert (reach <= limits.reach).all()
    assert (own.amax(-1) <= limits.own).all()
    # The norm's own epsilon makes inputs a little smaller.
    assert (reach >= 0.999 * limits.reach).all()


def test_no_gate_is_below_the_least_rate() -> None:
    """0.1 in float32 is more than 0.1, by more than the room for rounding in float64."""
    attention = next(model(options={"gate_floor": 0.1}).blocks()).attention
    with torch.no_grad():
        attention.gates.gate_projection.weight.zero_()
        attention.gates.gate_projection.bias.fill_(-800.0)
        gate = attention.gates.gate(torch.randn(1, 4, 3, attention.content_dim, dtype=torch.float64))
        rate = (attention.gates.amplitude[:, None] * gate / attention.context_length).amin((0, 2))
    assert (least_rates(attention) * (1 - 2.0**-30) <= rate).all()


def test_own_logits_are_bounded_by_exact_algebra() -> None:
    """Never narrower, and by a hair wider; also where rows are multiples of others, or nothing at all."""
    attention = next(model(n_head=4, n_kv_head=4).blocks()).attention
    random = torch.Generator().manual_seed(0)
    A, B = torch.randn(2, 4, 12, 40, generator=random, dtype=torch.float64)
    B[0], A[1, 6:], A[2], B[2], B[3] = A[0], A[1, :6], 0.0, 0.0, -A[3]
    zeros = torch.zeros(4, 12, dtype=torch.float64)
    least = torch.linalg.eigvalsh((A.mT @ B + B.mT @ A) / 2)[:, 0].clamp(max=0)
    exact = -attention.scale * 40 * least
    own = limits_of_maps(attention, (A, zeros), (B, zeros)).own
    assert (own >= exact - 1e-9).all()
    torch.testing.assert_close(own, exact, atol=0.1, rtol=1e-6)
