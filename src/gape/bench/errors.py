"""Errors against float64 at any length, from a sample of the queries.

An output row needs its own query and all keys, so a few rows can be recomputed exactly at lengths where the whole
cannot. Gradients of keys and values need all queries, unless only the sampled ones have a cotangent: so they do here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gape.bench.candidates import Work, attended
from gape.bench.inputs import Arguments

#: Sampled queries.
QUERIES = 128


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
    found = {"error": relative(out.detach()[0, :groups, rows], exact.detach()[0])}
    if backward:
        grads = torch.autograd.grad(out, list(leaves.values()), cotangent)
        wanted = torch.autograd.grad(exact, list(part.values()), sampled[None].double())
        for name, grad, want in zip(leaves, grads, wanted, strict=True):
            found[f"d{name}"] = relative(_first_group(name, grad, groups, rows), want)
    return found


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
