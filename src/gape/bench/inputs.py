"""Random arguments of the operator for benchmarks: never zeros, and gates of the kinds that matter for speed.

log-normal     Γg log-normal with median 1, landmarks uniform over [0, 1]
contracting    one rate for all, such that the bound on forgotten keys ends at 2,000 tokens; no landmarks
landmarks      the same with 1% of the keys, scattered, as full landmarks
trained        drawn like those of a trained model: Γg log-normal with medians from 0.1 to 9 over the heads,
               landmarks with median 0.2 and 99th percentile 0.5, ‖q‖‖k‖·scale up to 30
trained-floor  the same with a floor of 4 under Γg
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gape.ops.problem import Problem
from gape.ops.visibility import Visibility
from gape.utils.validation import invalid_argument

#: Training length T of all benchmarks.
CONTEXT_LENGTH = 1024.0

#: Tokens after which contracting gates have forgotten, by the bound.
HORIZON = 2000

#: Dropped weight that the horizon of contracting gates is made for.
HORIZON_EPS = 1e-4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a call: q (batch, heads, queries, dim), k and v (batch, kv_heads, length, dim)."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    queries: int | None = None

    @property
    def n_q(self) -> int:
        """Queries, the last of the keys; all of them by default."""
        return self.length if self.queries is None else self.queries


Arguments = dict[str, Tensor]


def draw(shape: Shape, gates: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Arguments:
    """q, k, v in `dtype` and gate, landmark, amplitude in float32, as `gape.gated_attention` takes them.

    Raises:
        ValueError: an unknown kind of gates.
    """
    if gates not in GATES:
        raise invalid_argument("gates", gates, f"one of {list(GATES)}")
    g = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=device)

    arguments = {
        "q": normal(shape.batch, shape.heads, shape.n_q, shape.dim),
        "k": normal(shape.batch, shape.kv_heads, shape.length, shape.dim),
        "v": normal(shape.batch, shape.kv_heads, shape.length, shape.dim),
    }
    arguments |= GATES[gates](shape, arguments["q"], arguments["k"], g)
    arguments["amplitude"] = torch.ones(shape.heads, device=device)
    return {name: x.to(dtype) if name in "qkv" else x for name, x in arguments.items()}


def problem(arguments: Arguments, scale: float | None = None, context_length: float = CONTEXT_LENGTH) -> Problem:
    """The arguments as implementations receive them: causal, in index order."""
    q, k = arguments["q"], arguments["k"]
    return Problem(
        **arguments,
        context_length=context_length,
        scale=q.size(-1) ** -0.5 if scale is None else scale,
        seen=Visibility(n_q=q.size(2), n_k=k.size(2), device=q.device),
    )


def largest_logit(q: Tensor, k: Tensor) -> float:
    """S_max, the largest ‖q‖‖k‖·scale of any pair."""
    return float(q.norm(dim=-1).max() * k.norm(dim=-1).max() * q.size(-1) ** -0.5)


Drawn = dict[str, Tensor]


def _log_normal(shape: Shape, q: Tensor, k: Tensor, g: torch.Generator) -> Drawn:
    return {"gate": _normal(q, g).exp(), "landmark": torch.rand(k.shape[:3], generator=g, device=k.device)}


def _contracting(shape: Shape, q: Tensor, k: Tensor, g: torch.Generator) -> Drawn:
    rate = (2 * largest_logit(q, k) + math.log(shape.length / HORIZON_EPS)) / HORIZON
    gate = torch.full(q.shape[:3], rate * CONTEXT_LENGTH, device=q.device)
    return {"gate": gate, "landmark": torch.zeros(k.shape[:3], device=k.device)}


def _landmarks(shape: Shape, q: Tensor, k: Tensor, g: torch.Generator) -> Drawn:
    scattered = torch.rand(k.shape[:3], generator=g, device=k.device) < 0.01
    return _contracting(shape, q, k, g) | {"landmark": scattered.float()}


def _trained(shape: Shape, q: Tensor, k: Tensor, g: torch.Generator, floor: float = 0.0) -> Drawn:
    medians = torch.logspace(-1, math.log10(9), shape.heads, device=q.device)[:, None]
    # Logits of median 0.2, with 0.5 at the 99th percentile.
    logit = math.log(0.2 / 0.8)
    landmark = torch.sigmoid(logit + _normal(k, g) * (-logit / 2.326))
    return {
        "q": q * (30 / largest_logit(q, k)),
        "gate": floor + medians * _normal(q, g).exp(),
        "landmark": landmark,
    }


def _trained_floor(shape: Shape, q: Tensor, k: Tensor, g: torch.Generator) -> Drawn:
    return _trained(shape, q, k, g, floor=4.0)


def _normal(like: Tensor, g: torch.Generator) -> Tensor:
    """One normal number per head and token of (B, H, N, D)."""
    return torch.randn(like.shape[:3], generator=g, device=like.device)


#: Kinds of gates by name.
GATES: dict[str, Callable[[Shape, Tensor, Tensor, torch.Generator], Drawn]] = {
    "log-normal": _log_normal,
    "contracting": _contracting,
    "landmarks": _landmarks,
    "trained": _trained,
    "trained-floor": _trained_floor,
}
