"""What no query of an injected layer can exceed, whatever the text: read off the module itself, of whatever family.

Norms and projections are asked for what they do to a few inputs, so that their classes need not be known: a norm that
scales is its answer to equal numbers, and a projection is affine. Shapes: E width, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gape.models.forgetting_limits import Attends, Limits, least_rates, of_maps
from gape.ops.checks import refuse

#: Large enough for what a norm adds to its divisor to vanish beside it.
_LARGE = 1e4


@torch.no_grad()
def of_module(module: Any, seat: Attends, norm: nn.Module | None, stretch: float) -> Limits:
    """Limits of an injected layer.

    Args:
        module: the layer.
        seat: the same as a forgetting cache sees it.
        norm: what it reads from.
        stretch: what its rotation multiplies q and k by.

    Raises:
        ValueError: there is no norm that bounds q and k.
    """
    if hasattr(module, "q_norm"):
        # Normed behind the projection, so nothing before it matters.
        query, key = (_gain(getattr(module, name), seat.head_dim).abs().max() for name in ("q_norm", "k_norm"))
        reach = seat.scale * stretch * query * seat.head_dim**0.5 * torch.ones(seat.n_heads, dtype=torch.float64)
        product = reach * stretch * key * seat.head_dim**0.5
        return Limits(rate=least_rates(seat), reach=reach, own=product, jitter=product)
    if norm is None:
        raise refuse("norm", None, "one before the projections; bounds='queries' needs none")
    width = _width(module)
    shift = torch.zeros(width, dtype=torch.float64)
    if isinstance(norm, nn.LayerNorm):
        gain = shift + 1 if norm.weight is None else norm.weight.detach().cpu().double()
        shift = shift if norm.bias is None else norm.bias.detach().cpu().double()
    else:
        gain = _gain(norm, width)
    queries, keys = _maps(module, gain, shift)
    if isinstance(norm, nn.LayerNorm):
        # z has mean 0, so what all coordinates share is never seen.
        queries, keys = ((A - A.mean(-1, keepdim=True), a) for A, a in (queries, keys))
    return of_maps(seat, queries, keys, stretch=stretch)


def _gain(norm: nn.Module, width: int) -> Tensor:
    """What a norm that divides by the root of the mean square multiplies with, (width,) in float64.

    Raises:
        ValueError: the module is none.
    """
    ones = torch.full((1, width), _LARGE)
    parameter = next(norm.parameters(), ones)
    ones = ones.to(parameter)
    alone = torch.zeros_like(ones)
    alone[0, 0] = _LARGE
    gain: Tensor
    gain, turned, single = (norm(x).cpu().double()[0] for x in (ones, -ones, alone))
    close = 1e-2 if ones.dtype in (torch.bfloat16, torch.float16) else 1e-4
    expected = torch.zeros_like(gain)
    expected[0] = gain[0] * width**0.5
    size = gain.abs().max() * width**0.5
    if not torch.allclose(turned, -gain) or (single - expected).abs().max() > close * size:
        raise refuse(
            "norm", norm, "a LayerNorm or a norm by the root of the mean square, which bounds what it is given"
        )
    return gain


def _maps(module: Any, gain: Tensor, shift: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(A, a) and (B, b), (H, D, E) and (H, D) in float64: q and k of an input gain ⊙ z + shift are affine in z."""
    asked = torch.cat([torch.zeros(1, len(gain), dtype=torch.float64), torch.eye(len(gain), dtype=torch.float64)])
    weight = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
    given = (asked * gain + shift).to(weight.device, weight.dtype)
    q, k, _ = module.gape_wiring.family.layout.project(module, given[None])
    queries, keys = (x[0].cpu().double() for x in (q, k))
    A, B = ((x[:, 1:] - x[:, :1]).transpose(1, 2) for x in (queries, keys))
    return (A, queries[:, 0]), (B, keys[:, 0])


def _width(module: Any) -> int:
    """The width of what a layer reads."""
    return int(module.config.hidden_size)
