"""What no query of an injected layer can exceed, whatever the text: read off the module itself, of whatever family.

Norms and projections are asked for what they do to a few inputs, so that their classes need not be known: a norm that
scales is its answer to equal numbers, and a projection is affine. Shapes: E width, H heads, D head dim.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from gape.cache.forgetting_limits import Attends, Limits, least_rates, of_maps
from gape.utils.validation import invalid_argument

#: Large enough for what a norm adds to its divisor to vanish beside it.
_LARGE = 1e4


@torch.no_grad()
def of_module(module: Any, seat: Attends, norm: nn.Module | None, stretch: float, *, evenly: bool = True) -> Limits:
    """Limits of an injected layer.

    Args:
        module: the layer.
        seat: the same as a forgetting cache sees it.
        norm: what it reads from.
        stretch: the most that its rotation multiplies q and k by.
        evenly: whether it multiplies all coordinates alike, by 1 or more.

    Raises:
        ValueError: there is no norm that bounds q and k.
    """
    if hasattr(module, "q_norm"):
        # Normed behind the projection, so nothing before it matters.
        query, key = (_gain(getattr(module, name), seat.content_dim).abs().max() for name in ("q_norm", "k_norm"))
        reach = seat.scale * stretch * query * seat.content_dim**0.5 * torch.ones(seat.n_heads, dtype=torch.float64)
        product = reach * stretch * key * seat.content_dim**0.5
        return Limits(rate=least_rates(seat), reach=reach, own=product, jitter=product)
    if norm is None:
        raise invalid_argument("norm", None, "one before the projections; bounds='queries' needs none")
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
    return of_maps(seat, queries, keys, stretch=stretch, evenly=evenly)


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
        raise invalid_argument(
            "norm", norm, "a LayerNorm or a norm by the root of the mean square, which bounds what it is given"
        )
    return gain


def _maps(module: Any, gain: Tensor, shift: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(A, a) and (B, b), (H, D, E) and (H, D) in float64: q and k of an input gain ⊙ z + shift are affine in z."""
    asked = copy.deepcopy(module)
    # Projections in few bits have a dtype of their own for what they read.
    if all(parameter.is_floating_point() for parameter in asked.parameters()):
        asked.double()
    a, b = _projected(asked, shift[None])
    # A weight in half precision would vanish beside a bias that is added to it.
    for name, parameter in asked.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    A, B = _projected(asked, torch.diag(gain))
    return (A.transpose(1, 2), a[:, 0]), (B.transpose(1, 2), b[:, 0])


def _projected(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (H, N, D) in float64 that a layer makes of x (N, E)."""
    like = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
    with torch.autocast(like.device.type, enabled=False):
        q, k, _ = module.gape_wiring.family.layout.project(module, x.to(like)[None])
    return q[0].cpu().double(), k[0].cpu().double()


def _width(module: Any) -> int:
    """The width of what a layer reads."""
    return int(module.config.hidden_size)
