"""What benchmarks run beside `gape.experiments.operator_calls`: kinds of gates that matter for speed, plain attention.

log-normal     Γg log-normal with median 1, landmarks uniform over [0, 1]
contracting    one rate for all, such that the bound on forgotten keys ends at 2,000 tokens; no landmarks
landmarks      the same with 1% of the keys, scattered, as full landmarks
trained        drawn like those of a trained model: Γg log-normal with medians from 0.1 to 9 over the heads,
               landmarks with median 0.2 and 99th percentile 0.5, ‖q‖‖k‖·scale up to 30
trained-floor  the same with a floor of 4 under Γg
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import UnavailableError
from gape.experiments.operator_calls import CONTEXT_LENGTH, Arguments, Gates, Shape, Work, log_normal, normal_like

#: Tokens after which contracting gates have forgotten, by the bound.
HORIZON = 2000

#: Dropped weight that the horizon of contracting gates is made for.
HORIZON_EPS = 1e-4


def largest_logit(q: Tensor, k: Tensor) -> float:
    """S_max, the largest ‖q‖‖k‖·scale of any pair."""
    return float(q.norm(dim=-1).max() * k.norm(dim=-1).max() * q.size(-1) ** -0.5)


def _contracting(shape: Shape, q: Tensor, k: Tensor, g: torch.Generator) -> Arguments:
    rate = (2 * largest_logit(q, k) + math.log(shape.length / HORIZON_EPS)) / HORIZON
    gate = torch.full(q.shape[:3], rate * CONTEXT_LENGTH, device=q.device)
    return {"gate": gate, "landmark": torch.zeros(k.shape[:3], device=k.device)}


def _landmarks(shape: Shape, q: Tensor, k: Tensor, g: torch.Generator) -> Arguments:
    scattered = torch.rand(k.shape[:3], generator=g, device=k.device) < 0.01
    return _contracting(shape, q, k, g) | {"landmark": scattered.float()}


def _trained(shape: Shape, q: Tensor, k: Tensor, g: torch.Generator, floor: float = 0.0) -> Arguments:
    medians = torch.logspace(-1, math.log10(9), shape.heads, device=q.device)[:, None]
    # Logits of median 0.2, with 0.5 at the 99th percentile.
    logit = math.log(0.2 / 0.8)
    landmark = torch.sigmoid(logit + normal_like(k, g) * (-logit / 2.326))
    return {
        "q": q * (30 / largest_logit(q, k)),
        "gate": floor + medians * normal_like(q, g).exp(),
        "landmark": landmark,
    }


def _trained_floor(shape: Shape, q: Tensor, k: Tensor, g: torch.Generator) -> Arguments:
    return _trained(shape, q, k, g, floor=4.0)


#: Kinds of gates by name.
GATES: dict[str, Gates] = {
    "log-normal": log_normal,
    "contracting": _contracting,
    "landmarks": _landmarks,
    "trained": _trained,
    "trained-floor": _trained_floor,
}


def plain(arguments: Arguments, backends: Sequence[SDPBackend], *, is_causal: bool) -> Work:
    """Attention without any bias, by some of torch's backends."""
    if list(backends) == [SDPBackend.CUDNN_ATTENTION] and not arguments["q"].is_cuda:
        raise UnavailableError("needs a CUDA device")
    grouped, scale = arguments["q"].size(1) != arguments["k"].size(1), arguments["q"].size(-1) ** -0.5

    def forward(leaves: Arguments) -> Tensor:
        with sdpa_kernel(list(backends)):
            return F.scaled_dot_product_attention(
                leaves["q"], leaves["k"], leaves["v"], is_causal=is_causal, scale=scale, enable_gqa=grouped
            )

    return Work(leaves={name: arguments[name] for name in "qkv"}, forward=forward)
