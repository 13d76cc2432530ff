"""Calls of the operator that are measured: random arguments, what is timed, and errors against float64.

Arguments are never zeros. Errors are those of a sample of the queries. An output row needs its own query and all keys,
so a few rows can be recomputed exactly at lengths where the whole cannot. Gradients of keys and values need all
queries, unless only the sampled ones have a cotangent: so they do here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gape

#: Training length T of all that is measured.
CONTEXT_LENGTH = 1024.0

#: Queries whose errors are measured.
QUERIES = 128


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

    def row(self) -> dict[str, str]:
        """The sizes as rows have them."""
        return {name: str(getattr(self, name)) for name in ("batch", "heads", "kv_heads", "length", "dim")}


Arguments = dict[str, Tensor]

#: Draws gates for a shape and its q and k, and q itself where it changes.
Gates = Callable[[Shape, Tensor, Tensor, torch.Generator], Arguments]


def log_normal(shape: Shape, q: Tensor, k: Tensor, g: torch.Generator) -> Arguments:
    """Γg log-normal with median 1, landmarks uniform over [0, 1]."""
    return {"gate": normal_like(q, g).exp(), "landmark": torch.rand(k.shape[:3], generator=g, device=k.device)}


def normal_like(x: Tensor, g: torch.Generator) -> Tensor:
    """One normal number per head and token of (B, H, N, D)."""
    return torch.randn(x.shape[:3], generator=g, device=x.device)


def draw(shape: Shape, dtype: torch.dtype, device: torch.device, gates: Gates = log_normal) -> Arguments:
    """q, k, v in `dtype` and gate, landmark, amplitude in float32, as `gape.gated_attention` takes them."""
    g = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, device=device)

    arguments = {
        "q": normal(shape.batch, shape.heads, shape.n_q, shape.dim),
        "k": normal(shape.batch, shape.kv_heads, shape.length, shape.dim),
        "v": normal(shape.batch, shape.kv_heads, shape.length, shape.dim),
    }
    arguments |= gates(shape, arguments["q"], arguments["k"], g)
    arguments["amplitude"] = torch.ones(shape.heads, device=device)
    return {name: x.to(dtype) if name in "qkv" else x for name, x in arguments.items()}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One candidate, ready to run.

    Attributes:
        leaves: its inputs by name.
        forward: the output from a dict like `leaves`.
        scale: its softmax scale, None for that of q's width.
        exact: whether the output is causal attention over leaves q, k, v, with the gates that are there.
    """

    leaves: Arguments
    forward: Callable[[Arguments], Tensor]
    scale: float | None = None
    exact: bool = True

    def step(self, *, backward: bool) -> Callable[[], object]:
        """What is timed: the forward pass without a graph, or forward and backward to every leaf."""
        if not backward:
            plain = {name: x.detach() for name, x in self.leaves.items()}
            return torch.no_grad()(lambda: self.forward(plain))
        leaves = {name: x.detach().requires_grad_() for name, x in self.leaves.items()}
        cotangent = torch.randn_like(self.forward(leaves))

        def both() -> object:
            return torch.autograd.grad(self.forward(leaves), list(leaves.values()), cotangent)

        return both


def attended(leaves: Arguments, **options: Any) -> Tensor:
    """The operator's output over leaves; `options` are its keywords."""
    arguments: dict[str, Any] = {**leaves, "context_length": CONTEXT_LENGTH, **options}
    return gape.gated_attention(**arguments)


def operator(arguments: Arguments, impl: str, eps: float = 0.0) -> Work:
    """The gated operator by one implementation."""
    return Work(leaves=arguments, forward=lambda leaves: attended(leaves, impl=impl, eps=eps))


def relative(got: Tensor, exact: Tensor) -> float:
    """Relative error in the Euclidean norm; infinite where something is not finite."""
    distance = (got.double() - exact).norm() / exact.norm().clamp(min=1e-300)
    return float(distance) if bool(distance.isfinite()) else float("inf")


def against_float64(work: Work, *, backward: bool, queries: int = QUERIES) -> dict[str, float]:
    """Errors by quantity: "error" of the output, and "dq" … "damplitude" of the gradients with `backward`.

    The first sample and the query heads of the first key head are compared, at `queries` of the queries.
    """
    if not work.exact:
        return {}
    leaves = {name: x.detach().requires_grad_(backward) for name, x in work.leaves.items()}
    groups = leaves["q"].size(1) // leaves["k"].size(1)
    rows = sample(leaves["q"].size(2), queries).to(leaves["q"].device)
    with torch.set_grad_enabled(backward):
        out = work.forward(leaves)
    sampled = torch.randn(groups, len(rows), out.size(-1), device=out.device).to(out.dtype)
    cotangent = torch.zeros_like(out)
    cotangent[0, :groups, rows] = sampled
    part = {name: _first_group(name, x.detach(), groups, rows).requires_grad_(backward) for name, x in leaves.items()}
    with torch.set_grad_enabled(backward):
        exact = _exactly(part, rows, work, leaves["k"].size(2) - leaves["q"].size(2))
    errors = {"error": relative(out.detach()[0, :groups, rows], exact.detach()[0])}
    if backward:
        grads = torch.autograd.grad(out, list(leaves.values()), cotangent)
        exact_grads = torch.autograd.grad(exact, list(part.values()), sampled[None].double())
        for name, grad, exact_grad in zip(leaves, grads, exact_grads, strict=True):
            errors[f"d{name}"] = relative(_first_group(name, grad, groups, rows), exact_grad)
    return errors


def sample(n: int, count: int) -> Tensor:
    """At most `count` of n rows in order, the last among them."""
    if n <= count:
        return torch.arange(n)
    drawn = torch.randperm(n - 1, generator=torch.Generator().manual_seed(0))[: count - 1]
    return torch.cat([drawn, torch.tensor([n - 1])]).sort().values


def _first_group(name: str, x: Tensor, groups: int, rows: Tensor) -> Tensor:
    """The part of an argument, or of its gradient, that the compared rows read, in float64."""
    if name == "amplitude":
        return x[:groups].double()
    if name in ("q", "gate"):
        return x[:1, :groups, rows].double()
    return x[:1, :1].double()


def _exactly(part: Arguments, rows: Tensor, work: Work, first: int) -> Tensor:
    """The definition in float64; gates that a candidate does not have are zero."""
    heads, n_k = part["q"].size(1), part["k"].size(2)
    none = {
        "gate": part["q"].new_zeros(part["q"].shape[:3]),
        "landmark": part["q"].new_zeros(1, 1, n_k),
        "amplitude": part["q"].new_ones(heads),
    }
    return attended(none | part, scale=work.scale, q_positions=rows + first, impl="reference")
