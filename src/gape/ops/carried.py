"""Attention over keys that already carry their share of the bias: what a cache keeps where coordinates are reserved.

The bias is a product of something of the query and something of the key, so a key's share can be written into it once
and for all. Decoding then reads the cached keys as they lie, and nothing is stored beside them. What rank2 and split
choose anew for each call cannot be chosen here: positions are counted from 0, the one anchor that later queries know.

    rank2   query [Γ·g, Γ·g·i/T] / scale                        key [j·u/T, 1 − u]
    split   query [−(c·i)₁, −(c·i)₂, −(c·i)₃, c, c, c] / scale  key [u, u, u, (u·j)₁, (u·j)₂, (u·j)₃]

c·i and u·j are good to 24 bits, in half precision too, so a logit is off by about 2⁻²⁴·c·i. Beside the rounding of half
precision that is nothing while c·i = Γ·g·i/T, what a query would lose at position 0, stays below 100,000. Positions
beyond :func:`furthest` are refused where they can be read without waiting for a device. Elsewhere, on a GPU and in a
compiled graph, their rows are not a number, and neither is what attends to them. Figures: `docs/results/precision.md`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.ops import columns, inputs, prologue, rank2
from gape.ops.columns import UNIT, significand_bits
from gape.ops.decode_prologue import Step
from gape.ops.inputs import bias_dtype, learning
from gape.ops.limits import DECODE_QUERIES, MOST_PROGRAMS
from gape.ops.plain import attention
from gape.utils import validation

#: Coordinates that each form takes.
COLUMNS = {"rank2": rank2.COLUMNS, "split": columns.COLUMNS}


class Rows(NamedTuple):
    """What a cache takes of a few tokens, in the form "split".

    Attributes:
        queries, keys: (B, Hq, Nq, width) and (B, Hk, N, width), with their shares of the bias.
        gate: (B, Hq, Nq) in float32, or None where nobody asked.
    """

    queries: Tensor
    keys: Tensor
    gate: Tensor | None


def steps(q: Tensor, k: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether :func:`carried_rows` can run for q and k (B, H, N, C): few tokens in half precision on a GPU.

    With `dtype`, that of the rows, q and k may be in float32. Not for compilers, nor for tensors that hold nothing.
    """
    if torch.compiler.is_compiling() or type(q) is not Tensor or type(k) is not Tensor:
        return False
    few = 0 < q.size(2) <= k.size(2) <= DECODE_QUERIES and q.size(0) > 0
    narrow = torch.float64 not in (q.dtype, k.dtype) and prologue.ready(q.device, dtype or q.dtype)
    return few and q.is_cuda and not learning(q, k) and narrow


def carried_rows(
    q: Tensor,
    k: Tensor,
    step: Step,
    *,
    width: int,
    scale: float,
    gate: bool = False,
    dtype: torch.dtype | None = None,
) -> Rows:
    """Queries and keys with their share of the bias from q and k as projected, in one launch.

    Args:
        q, k: (B, Hq, Nq, C) and (B, Hk, N, C) for which :func:`steps` says yes; queries belong to the last tokens.
        step: what the scheme does to them.
        width: of the rows, at least C + 6; zeros fill it.
        scale: the softmax scale.
        gate: whether to return the gates, too.
        dtype: of the rows; that of q when None.
    """
    from gape.ops.triton.split_bias import step_rows  # noqa: PLC0415

    width = _wide_enough(q.size(-1), "split", width)
    return Rows(*step_rows(q, k, step, width=width, scale=scale, gate=gate, dtype=dtype or q.dtype))


def carried_form(impl: str, room: int, like: Tensor) -> str | None:
    """The form in which keys like `like` can carry the bias within `room` coordinates; None if in none.

    "auto" is split where it fits, and rank2 where only that does and the dtype of `like` makes it exact.
    """
    if impl != "auto":
        return impl if impl in COLUMNS and room >= COLUMNS[impl] else None
    if room >= COLUMNS["split"]:
        return "split"
    return "rank2" if room >= COLUMNS["rank2"] and significand_bits(like) > 11 else None


def furthest(dtype: torch.dtype) -> int:
    """The position furthest from 0 that rows in `dtype` can carry: 2²⁴ − 1, 8,384,512 in float16, 2⁴⁶ in float64."""
    if dtype == torch.float64:
        return inputs.FURTHEST
    # float32 tells neighbours apart up to the one, float16 holds a key's share up to the other.
    return min(2**24 - 1, int(torch.finfo(dtype).max / 2 * UNIT))


def carry(
    k: Tensor, landmark: Tensor, positions: Tensor, *, form: str, context_length: float, width: int | None = None
) -> Tensor:
    """Keys with their share of the bias.

    Args:
        k: (B, Hk, N, D), already rotated.
        landmark: (B, Hk, N), in float32 or float64.
        positions: integer (N,) or (B, N), no further from 0 than :func:`furthest`.
        form: "split" or "rank2".
        context_length: T.
        width: pad with zeros to this width; None leaves D + 6 or D + 2.

    Returns:
        (B, Hk, N, width) in k's dtype.

    Raises:
        ValueError: unknown form, a width that is too small, or positions too far from 0.
    """
    width = _wide_enough(k.size(-1), _known(form), width)
    positions = _near(positions, k, form, landmark)
    if form == "rank2":
        return _joined(k, rank2.key_columns(landmark, positions, context_length, k.dtype), width)
    if _in_one_launch(k, landmark):
        from gape.ops.triton.split_bias import augmented_keys  # noqa: PLC0415

        return augmented_keys(k, landmark, positions, width)
    return _joined(k, columns.key_columns(1 - landmark, [positions], k.dtype, significand_bits(k)), width)


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
    given: dict[str, Any] = {"form": form, "context_length": context_length, "scale": scale, "width": k.size(-1)}
    return attention(carried_queries(q, gate, amplitude, positions, **given), k, v, scale=scale, **seen)


def carried_queries(
    q: Tensor,
    gate: Tensor,
    amplitude: Tensor,
    positions: Tensor,
    *,
    form: str,
    context_length: float,
    scale: float,
    width: int | None = None,
) -> Tensor:
    """Queries with their share of the bias, (B, Hq, Nq, width) in q's dtype: plain attention of them is the operator.

    The arguments are those of :func:`carried_attention`; `width` is that of the keys, D + 6 or D + 2 when None.

    Raises:
        ValueError: unknown form, a width that is too small, or positions too far from 0.
    """
    width = _wide_enough(q.size(-1), _known(form), width)
    positions = _near(positions, q, form, gate, amplitude)
    if form == "rank2":
        strength = amplitude[:, None] * gate / scale
        return _joined(q, rank2.query_columns(strength, positions, context_length, q.dtype), width)
    if _in_one_launch(q, gate, amplitude):
        from gape.ops.triton.split_bias import augmented_queries  # noqa: PLC0415

        return augmented_queries(q, gate, amplitude, positions, width, context_length=context_length, scale=scale)
    rate = amplitude[:, None] * gate / context_length
    return _joined(q, columns.query_columns(rate, [positions], scale, q.dtype, significand_bits(q)), width)


def uncarried(k: Tensor, content: int) -> tuple[Tensor, Tensor]:
    """The keys and landmarks of which :func:`carry` made `k` in the form "split": for kernels that want both apart.

    Args:
        k: (B, Hk, N, width).
        content: coordinates of content, D.

    Returns:
        (B, Hk, N, D), a view, and (B, Hk, N) in float32 (float64 beside float64), rounded as the keys carry them.
    """
    return k[..., :content], 1 - k[..., content].to(bias_dtype(k.dtype)) / UNIT


def _known(form: str) -> str:
    if form not in COLUMNS:
        raise validation.invalid_argument("form", form, f"one of {sorted(COLUMNS)}")
    return form


def _wide_enough(content: int, form: str, width: int | None) -> int:
    """The width of rows: `width`, or no more than they need."""
    least = content + COLUMNS[form]
    if width is not None and width < least:
        raise validation.invalid_argument("width", width, f"at least {content} + {COLUMNS[form]}, content and bias")
    return least if width is None else width


def _near(positions: Tensor, rows: Tensor, form: str, *sides: Tensor) -> Tensor:
    """Positions that `rows` can carry: others are refused where they can be read, and not a number elsewhere."""
    if form == "split" and not inputs.readable(positions) and _in_one_launch(rows, *sides):
        # The kernel looks itself.
        return positions
    return inputs.near_positions(positions, furthest(rows.dtype))


def _in_one_launch(x: Tensor, *sides: Tensor) -> bool:
    """Whether a kernel may join content and bias: on a GPU, where nothing is learned and no compiler is at work.

    It has a program along its second axis for each head of each sample.
    """
    plain = all(y.dtype == torch.float32 for y in sides) and not torch.compiler.is_compiling()
    few = x.size(0) * x.size(1) <= MOST_PROGRAMS
    return x.is_cuda and plain and few and not learning(x, *sides) and prologue.ready(x.device, x.dtype)


def _joined(x: Tensor, extra: Tensor, width: int) -> Tensor:
    spare = width - x.size(-1) - extra.size(-1)
    return torch.cat([x, F.pad(extra, (0, spare)) if spare else extra], dim=-1)
