"""Norms of queries and keys by rotary pair, that is, by frequency."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gape.analysis.tap import Attended
from gape.ops.inputs import bias_dtype
from gape.positions.base import Scheme
from gape.positions.gated import Gated
from gape.positions.rotary import Rotary
from gape.utils.validation import invalid_argument


class PairNorms(NamedTuple):
    """Mean norms over the tokens of each sequence, float32 (float64 beside float64).

    Attributes:
        queries: (B, Hq, D/2).
        keys: (B, Hk, D/2).
    """

    queries: Tensor
    keys: Tensor


@torch.no_grad()
def pair_norms(attended: Attended) -> PairNorms:
    """The mean norm of each pair (x_k, x_{k+D/2}) of queries and keys, before or after rotation alike.

    The factor of schemes that scale what they rotate (YaRN, LongRoPE) is divided out.

    Raises:
        ValueError: a scheme that does not rotate.
    """
    base = rotary(attended.scheme)
    if base is None:
        raise invalid_argument("attended", type(attended.scheme).__name__, "a layer whose scheme rotates")
    dtype = bias_dtype(attended.q.dtype)

    def norms(x: Tensor) -> Tensor:
        first, second = x.to(dtype).chunk(2, dim=-1)
        return torch.hypot(first, second).mean(2) / base.attention_scale

    return PairNorms(norms(attended.q), norms(attended.k))


def rotary(scheme: Scheme | None) -> Rotary | None:
    """The rotary scheme: a scheme itself or the base under its gates; None where nothing rotates."""
    base = scheme.base if isinstance(scheme, Gated) else scheme
    return base if isinstance(base, Rotary) else None
