"""Bounds on every query that a layer can produce, from its weights. Eviction rests on them.

`docs/results/proofs.md` has the proof. Shapes: Hq query heads, Hk key heads, d content coordinates, E model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.positions.rotary import Rotary
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.cache.layer import LayerSpec
    from gape.models.attention import GAPEAttention

#: How far the numbers of a dtype may be from what the weights say: gates are rounded once on each side, norms and
#: projections in half precision and, where a GPU is allowed to, in TF32.
_ROUNDING = {torch.float64: 2.0**-30, torch.float32: 2.0**-9, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-6}

#: What is added to a matrix of products, as a part of its trace, so that rounding leaves it a square root.
_LIFT = 2.0**-34


@dataclass(frozen=True)
class Limits:
    """Bounds on the queries of a layer, each (Hq,) in float64.

    Attributes:
        rate: no query's rate Γ·g/T is below it.
        reach: softmax scale times a norm that no query exceeds: a key of norm n has no logit above reach · n.
        own: no query's logit for its own key is below −own.
        jitter: by how much rounding of unit size would move the logit of an own key.
    """

    rate: Tensor
    reach: Tensor
    own: Tensor
    jitter: Tensor

    def rounded(self, dtype: torch.dtype) -> Limits:
        """The same with room for the rounding of `dtype`."""
        part = _ROUNDING[dtype]
        return replace(
            self, rate=self.rate * (1 - part), reach=self.reach * (1 + part), own=self.own + part * self.jitter
        )

    def grown(self, factors: Sequence[float]) -> Limits:
        """The same for queries that are multiplied by a factor from 1 up to these, one for each query head."""
        most = torch.tensor(factors, dtype=torch.float64)
        own = torch.maximum(self.own, self.own * most)
        return replace(self, reach=self.reach * most, own=own, jitter=self.jitter * most)

    def horizon(self, eps: float, norm: float | Tensor) -> Tensor:
        """Tokens after which no query of a head misses an unprotected key of this norm, (Hq,); inf without a floor.

        A key that several query heads share goes with the last of them.
        """
        return (self.reach * norm + self.own - torch.log(-0.5 * eps * torch.expm1(-self.rate))) / self.rate


def limits_of_weights(attention: GAPEAttention, norm: nn.Module) -> Limits:
    """Limits that hold for every input whatever, since `norm` comes before the projection of `attention`.

    A normed input is gain ⊙ z + shift with ‖z‖ ≤ √E, so q = A·z + a and k = B·z + b lie in balls pressed flat. The
    score of the own key, where rotations cancel, is a quadratic form in z, with a least value of its own.
    """
    rotation = getattr(attention.scheme, "base", None)
    stretch = float(getattr(rotation, "attention_scale", 1.0))
    limits = limits_of_maps(attention, *_maps(attention, norm), stretch=stretch)
    return limits.grown(rotation.growth) if isinstance(rotation, Rotary) else limits


def limits_of_maps(
    attention: GAPEAttention | LayerSpec, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], *,
    stretch: float = 1.0, evenly: bool = True,
) -> Limits:  # fmt: skip
    """Limits of a layer with q = A·z + a and k = B·z + b before any rotation, for all z of norm √E at most.

    Args:
        attention: the layer.
        queries, keys: A (Hq, d, E) and a (Hq, d), B (Hk, d, E) and b (Hk, d), in float64.
        stretch: the most that the rotation multiplies q and k by.
        evenly: whether it multiplies all coordinates alike, by 1 or more; else norms bound the score of the own key.
    """
    (A, a), (B, b) = queries, keys
    groups = attention.n_heads // attention.n_kv_heads
    B, b = B.repeat_interleave(groups, dim=0), b.repeat_interleave(groups, dim=0)
    radius = A.size(-1) ** 0.5
    query = stretch * (radius * _stretch(A) + a.norm(dim=-1))
    key = stretch * (radius * _stretch(B) + b.norm(dim=-1))
    linear = torch.einsum("hde,hd->he", A, b) + torch.einsum("hde,hd->he", B, a)
    least = radius**2 * _least_eigenvalue(A, B).clamp(max=0) - radius * linear.norm(dim=-1) + (a * b).sum(-1)
    # Some layers are not stretched: what is above 0 is then less, what is below 0 more.
    least = torch.minimum(least, stretch**2 * least) if evenly else -query * key
    scale = attention.scale
    return Limits(rate=least_rates(attention), reach=scale * query, own=-scale * least, jitter=scale * query * key)


def least_rates(attention: GAPEAttention | LayerSpec) -> Tensor:
    """Γ·floor/T, (Hq,) in float64: what no query's rate falls below; a ValueError for a layer without gates.

    A gate that is fixed is its own floor.
    """
    gates = attention.gates
    if gates is None:
        position = getattr(attention, "position", None)
        raise invalid_argument("position", position, "a scheme with gates, which alone forgets at a known rate")
    # Not from float32, which may be above what a layer in float64 adds.
    least = torch.tensor(gates.gate_floor, dtype=torch.float64)
    if gates.gate_projection is None:
        least = least + F.softplus(torch.tensor(gates.init_gate_bias, dtype=torch.float64))
    return gates.amplitude.detach().cpu().double() * least / attention.context_length


def _maps(attention: GAPEAttention, norm: nn.Module) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(A, a) and (B, b), (H, d, E) and (H, d) in float64: q = A·z + a and k = B·z + b before any rotation."""
    gain, shift = _affine(norm, attention.qkv.weight.size(1))
    widths = [heads * attention.content_dim for heads in (attention.n_heads, attention.n_kv_heads)]
    weight = attention.qkv.weight.detach().cpu().double()[: sum(widths)]
    offset = weight @ shift
    if attention.qkv.bias is not None:
        offset = offset + attention.qkv.bias.detach().cpu().double()[: sum(widths)]
    weight = weight * gain
    if isinstance(norm, nn.LayerNorm):
        # z has mean 0, so what all coordinates share adds nothing.
        weight = weight - weight.mean(-1, keepdim=True)
    A, B = (part.view(-1, attention.content_dim, weight.size(1)) for part in torch.split(weight, widths))
    a, b = (part.view(-1, attention.content_dim) for part in torch.split(offset, widths))
    return (A, a), (B, b)


def _affine(norm: nn.Module, width: int) -> tuple[Tensor, Tensor]:
    """Gain and shift (E,) of a norm in float64."""
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or tuple(norm.normalized_shape) != (width,):
        raise invalid_argument("norm", norm, f"a LayerNorm or RMSNorm over {width}, which bounds what a layer reads")
    gain = torch.ones(width, dtype=torch.float64) if norm.weight is None else norm.weight.detach().cpu().double()
    shift = getattr(norm, "bias", None)
    return gain, torch.zeros(width, dtype=torch.float64) if shift is None else shift.detach().cpu().double()


def _stretch(A: Tensor) -> Tensor:
    """The largest singular value (H,) of A (H, d, E), from d × d numbers."""
    return _eigenvalues(A @ A.mT)[..., -1].clamp(min=0).sqrt()


def _least_eigenvalue(A: Tensor, B: Tensor) -> Tensor:
    """No eigenvalue of the symmetric part of AᵀB on the span of the rows of A and B, both (H, d, E), is less; (H,).

    With L·Lᵀ = M·Mᵀ and M the rows of both, they are those of the symmetric part of L_Aᵀ·L_B. Lifting the diagonal
    makes the matrix a part of a larger one, whose least eigenvalue is no more.
    """
    rows = torch.cat([A, B], dim=1)
    gram = rows @ rows.mT
    lift = _LIFT * gram.diagonal(dim1=-2, dim2=-1).sum(-1) + torch.finfo(gram.dtype).tiny
    gram = gram + torch.diag_embed(lift[:, None].expand(-1, gram.size(-1)))
    with _one_thread():
        root: Tensor = torch.linalg.cholesky(gram)
    product = root[:, : A.size(1)].mT @ root[:, A.size(1) :]
    return _eigenvalues((product + product.mT) / 2)[..., 0]


def _eigenvalues(S: Tensor) -> Tensor:
    """Eigenvalues (H, n) of symmetric S (H, n, n), the least first."""
    with _one_thread():
        values: Tensor = torch.linalg.eigvalsh(S)
    return values


@contextmanager
def _one_thread() -> Iterator[None]:
    """Solvers by one thread: many wait for one another at every step, on a busy machine for seconds in all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
