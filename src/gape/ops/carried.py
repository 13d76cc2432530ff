"""Attention over keys that already carry their share of the bias: what a cache keeps where coordinates are reserved.

The bias is a product of something of the query and something of the key, so a key's share can be written into it once
and for all. Decoding then reads the cached keys as they lie, and nothing is stored beside them. What rank2 and split
choose anew for each call cannot be chosen here: positions are counted from 0, the one anchor that later queries know.

    rank2   query [Γ·g, Γ·g·i/T] / scale                        key [j·u/T, 1 − u]
    split   query [−(c·i)₁, −(c·i)₂, −(c·i)₃, c, c, c] / scale  key [u, u, u, (u·j)₁, (u·j)₂, (u·j)₃]

c·i and u·j are good to 24 bits, in half precision too, so a logit is off by about 2⁻²⁴·c·i. Beside the rounding of half
precision that is nothing while c·i = Γ·g·i/T, what a query would lose at position 0, stays below 100,000, and positions
below 2²⁴ (2²³ in float16). `docs/model.md` has the figures.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.ops import checks, columns, rank2
from gape.ops.plain import attention
from gape.ops.rounding import significand_bits

#: Coordinates that each form takes.
COLUMNS = {"rank2": rank2.COLUMNS, "split": columns.COLUMNS}


def carried_form(impl: str, room: int, like: Tensor) -> str | None:
    """The form in which keys like `like` can carry the bias within `room` coordinates; None if in none.

    "auto" is split where it fits, and rank2 where only that does and the dtype of `like` makes it exact.
    """
    if impl != "auto":
        return impl if impl in COLUMNS and room >= COLUMNS[impl] else None
    if room >= COLUMNS["split"]:
        return "split"
    return "rank2" if room >= COLUMNS["rank2"] and significand_bits(like) > 11 else None


def carry(
    k: Tensor, landmark: Tensor, positions: Tensor, *, form: str, context_length: float, width: int | None = None
) -> Tensor:
    """Keys with their share of the bias.

    Args:
        k: (B, Hk, N, D), already rotated.
        landmark: (B, Hk, N), in float32 or float64.
        positions: integer (N,) or (B, N).
        form: "split" or "rank2".
        context_length: T.
        width: pad with zeros to this width; None leaves D + 6 or D + 2.

    Returns:
        (B, Hk, N, width) in k's dtype.

    Raises:
        ValueError: unknown form, or a width that is too small.
    """
    if _known(form) == "split":
        extra = columns.key_columns(1 - landmark, [positions], k.dtype, significand_bits(k))
    else:
        extra = rank2.key_columns(landmark, positions, context_length, k.dtype)
    return _joined(k, extra, k.size(-1) + COLUMNS[form] if width is None else width)


def carried_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    amplitude: Tensor,
    positions: Tensor,
    *,
    form: str,
    context_length: float,
    scale: float,
    **seen: Any,
) -> Tensor:
    """The gated operator over keys that `carry` returned.

    Args:
        q: (B, Hq, Nq, D), already rotated.
        k, v: (B, Hk, Nk, width) and (B, Hk, Nk, Dv), in q's dtype.
        gate, amplitude: (B, Hq, Nq) and (Hq,), in float32 or float64.
        positions: integer (Nq,) or (B, Nq), those of the queries.
        form, context_length: those with which the keys were made.
        scale: the softmax scale.
        **seen: who may see whom: q_positions, k_positions, q_documents, k_documents, attn_mask and is_causal of
            :func:`gape.gated_attention`. Leave q_positions out where queries are the last of the keys.

    Returns:
        (B, Hq, Nq, Dv) in q's dtype; a row that sees nothing is zero.

    Raises:
        ValueError: unknown form, or tensors that do not fit together; names the argument.
    """
    if _known(form) == "split":
        rate = amplitude[:, None] * gate / context_length
        extra = columns.query_columns(rate, [positions], scale, q.dtype, significand_bits(q))
    else:
        strength = amplitude[:, None] * gate / scale
        extra = rank2.query_columns(strength, positions, context_length, q.dtype)
    return attention(_joined(q, extra, k.size(-1)), k, v, scale=scale, **seen)


def _known(form: str) -> str:
    if form not in COLUMNS:
        raise checks.refuse("form", form, f"one of {sorted(COLUMNS)}")
    return form


def _joined(x: Tensor, extra: Tensor, width: int) -> Tensor:
    spare = width - x.size(-1) - extra.size(-1)
    if spare < 0:
        raise checks.refuse("width", width, f"at least {x.size(-1)} + {extra.size(-1)}, content and bias")
    return torch.cat([x, F.pad(extra, (0, spare))], dim=-1)
