"""Attention without gates: what the base schemes run, with the same pairs, masks and guarantees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gape.ops import inputs, limits, sdpa
from gape.ops.api import leave_autocast
from gape.ops.columns import UNIT, pieces, significand_bits
from gape.ops.inputs import Problem, Visibility, bias_dtype, learning
from gape.utils import validation
from gape.utils.constant import Constant

Bias = Callable[[Tensor, Tensor], Tensor]

_ZERO = Constant([0.0])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias | None = None,
    key_bias: Tensor | None = None,
    rates: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    strict: bool = False,
) -> Tensor:
    """Scaled dot-product attention with the visibility rules of :func:`gape.gated_attention`.

    Up to 16 queries on a GPU in half precision run in the operator's decode kernel where they need no gradient and
    have no `bias`, everything else in `scaled_dot_product_attention`.

    Args:
        q, k, v: (B, Hq, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv), one floating dtype, Hq a multiple of Hk.
        bias: a function of (query positions, key positions), each (N,) or (B, N), that returns additive logits
            (1 or B, 1 or Hq, Nq, Nk); called on chunks of queries, and rounded to q's dtype there.
        key_bias: (B, Hq, Nk) added to a key's logits, to three times the working precision, without an Nq × Nk
            tensor; float32 or float64. Only differences within a row matter.
        rates: (B, Hq, Nq) of queries and (B, Hq, Nk) of keys: (i − j) times their sum is taken off the logits, which
            are dense for a slice of the queries; not beside `bias`.
        scale: softmax scale, D ** −0.5 by default.
        q_positions, k_positions, q_documents, k_documents, attn_mask, is_causal, strict: as in
            :func:`gape.gated_attention`.

    Returns:
        (B, Hq, Nq, Dv) in q's dtype; a row that sees nothing is zero.

    Raises:
        ValueError: for an argument of wrong shape, dtype or device; it names the argument.
    """
    with leave_autocast(q, k, v) as (q, k, v):
        inputs.heads(q, k, v)
        visibility = inputs.visibility(
            q, k, q_positions=q_positions, k_positions=k_positions, q_documents=q_documents, k_documents=k_documents,
            attn_mask=attn_mask, is_causal=is_causal,
        )  # fmt: skip
        if bias is not None and not callable(bias):
            raise validation.invalid_argument("bias", bias, "a function of query and key positions")
        validation.flag("strict", strict)
        scale = q.size(-1) ** -0.5 if scale is None else validation.positive_number("scale", scale)
        tensors = (q, k, v)
        if key_bias is not None:
            shape = (q.size(0), q.size(1), k.size(2))
            inputs.floats("key_bias", key_bias, shape, q.device, "(B, Hq, Nk)")
            tensors = _with_key_bias(q, k, v, key_bias, scale)
        if rates is not None:
            if bias is not None or not isinstance(rates, tuple) or len(rates) != 2:
                raise validation.invalid_argument("rates", type(rates), "two tensors, and no bias beside them")
            for rate, x in zip(rates, (q, k), strict=True):
                inputs.floats("rates", rate, (q.size(0), q.size(1), x.size(2)), q.device, "(B, Hq, N)")
        if bias is None and rates is None and limits.decodes(*tensors, learns=learning(*tensors)):
            return _decode(*tensors, visibility, scale)
        return sdpa.run_all(_calls(*tensors, visibility, scale, bias, rates), strict=strict)


def _decode(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """The call in the operator's decode kernel, under gates that are zero."""
    from gape.ops.triton import decode  # noqa: PLC0415

    if not visibility.is_causal and not visibility.index_order:
        # Without a bias and without causality a position says nothing.
        visibility = replace(visibility, q_positions=None, k_positions=None)
    # A trace makes its own, and so does a capture: what outlives them would come from the host.
    lasting = type(q) is Tensor and not torch.compiler.is_compiling()
    lasting = lasting and not (q.is_cuda and torch.cuda.is_current_stream_capturing())
    zero = _ZERO.on(q.device, torch.float32) if lasting else q.new_zeros(1, dtype=torch.float32)
    # Strides of 0 on every axis, also one of a single element: a kernel is compiled anew for a stride of 1.
    gate, landmark = (zero.as_strided(x.shape[:3], (0, 0, 0)) for x in (q, k))
    amplitude = zero.as_strided((q.size(1),), (0,))
    problem = Problem(
        q=q, k=k, v=v, gate=gate, landmark=landmark, amplitude=amplitude, context_length=1.0, scale=scale,
        visibility=visibility,
    )  # fmt: skip
    return decode.run(problem)[0]


def _calls(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, scale: float, bias: Bias | None,
    rates: tuple[Tensor, Tensor] | None,
) -> Iterator[sdpa.Call]:  # fmt: skip
    drawn = bias is not None or rates is not None or sdpa.draws_mask(visibility, q)
    for start, stop in sdpa.chunks(visibility.n_q, sdpa.MASK_ROWS if drawn else None):
        part = visibility.rows(start, stop)
        values, rows, keys = None, slice(start, stop), slice(part.n_k)
        if bias is not None or rates is not None:
            i, j = visibility.positions()
            i, j = i[..., rows], j[..., keys]
            if bias is not None:
                values = bias(i, j)
            elif rates is not None:
                values = rate_bias(rates[0][..., rows], rates[1][..., keys], i, j)
        yield sdpa.prepare(q[:, :, start:stop], k[:, :, : part.n_k], v[:, :, : part.n_k], part, scale, values)


def rate_bias(of_queries: Tensor, of_keys: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """−(a_i + b_j)·(i − j), (B, Hq, Nq, Nk), of rates (B, Hq, N) and positions (N,) or (B, N)."""
    away = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
    rate = of_queries.unsqueeze(-1) + of_keys.unsqueeze(-2)
    return -rate * (away.unsqueeze(1) if away.dim() == 3 else away)


def _with_key_bias(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Put a bias per query head and key into three coordinates of q and k; shared keys are repeated for it."""
    if q.size(1) != k.size(1):
        groups = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    # Counted from the newest key, nearby keys carry small numbers; a power of two keeps far ones within float16.
    wide = key_bias.to(torch.promote_types(key_bias.dtype, bias_dtype(q.dtype)))
    logits = (wide - wide[..., -1:].detach()) / (scale * UNIT)
    if q.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    limit = torch.finfo(q.dtype).max / 2
    columns = torch.stack(pieces(logits.clamp(-limit, limit), significand_bits(q)), dim=-1).to(k.dtype)
    units = torch.full_like(q[..., :1], UNIT).expand(-1, -1, -1, columns.size(-1))
    return torch.cat([q, units], dim=-1), torch.cat([k, columns], dim=-1), v
