"""Masks and positions of `transformers`: who sees whom, which tokens are pads; and attention in the dense form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from gape.ops import sdpa
from gape.ops.inputs import beside_heads, bias_dtype
from gape.ops.reference import visible_softmax
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.hf.attend import Sides


Found = TypeVar("Found")
#: Rows of a mask that are compared at once.
SLAB = 1024


def checked(mask: Any, n_k: int) -> Tensor:
    """A mask (.., Nq, at least Nk) cut to n_k keys.

    Raises:
        ValueError: a mask of another kind.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise invalid_argument(
            "attention_mask", mask, "a tensor (batch, heads, queries, keys), as sdpa, eager, gape, … make it"
        )
    # The same tensor where nothing is cut off, so that what is known of it is found again.
    return mask if mask.size(-1) == n_k else mask[..., :n_k]


def visible(mask: Tensor) -> Tensor:
    """A bool or additive mask as a bool one, True may attend."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def seen(q_positions: Tensor, k_positions: Tensor | None, mask: Tensor | None, n_q: int) -> dict[str, Any]:
    """Who sees whom, in the operator's words; the mask is bool. Without positions of keys it says all."""
    explicit: dict[str, Any] = {"q_positions": q_positions, "k_positions": k_positions}
    if k_positions is None:
        explicit = {"is_causal": False}
    if mask is not None:
        return {**explicit, "attn_mask": mask}
    if n_q == 1:
        # The only query sees every key; without causality to draw, positions cost no mask.
        return {**explicit, "is_causal": False}
    # No mask and as many keys as queries: the keys are these tokens.
    if consecutive(q_positions):
        return {}
    index = torch.ones(n_q, n_q, dtype=torch.bool, device=q_positions.device).tril()
    return {"q_positions": q_positions, "k_positions": q_positions, "attn_mask": index}


def goes_on(q_positions: Tensor, k_positions: Tensor | None, mask: Tensor) -> bool:
    """Whether keys (.., Nk) count on without a gap, the queries are the last of them, and a bool mask says no more.

    A compiled graph may not look: there it is False.
    """
    if k_positions is None or torch.compiler.is_compiling() or not consecutive(k_positions):
        return False
    last = k_positions[..., -mask.size(-2) :]
    return torch.equal(q_positions.expand_as(last), last) and _lower_right(mask)


def _lower_right(mask: Tensor) -> bool:
    """Whether a bool mask (.., Nq, Nk) is causality by index, the queries being the last keys."""
    everything = torch.ones(mask.size(-1), dtype=torch.bool, device=mask.device)
    return looked_at(mask, "_gape_lower_right", lambda: not _hides_more(mask, everything))


def real_tokens(mask: Tensor | None, n: int, batch: int) -> Tensor | None:
    """Which of the last n tokens are no pads, bool (B, n), by the mask that `transformers` made; None: all are.

    Args:
        mask: bool or additive (B or 1, 1, n, keys), or None.
        n: tokens that came.
        batch: B.

    Raises:
        ValueError: a mask that hides more than pads on the left and later tokens.
    """
    if mask is None:
        return None
    if mask.dim() != 4 or mask.size(1) != 1 or mask.size(-2) != n:
        raise invalid_argument("attention_mask", mask, f"(batch, 1, {n}, keys), as transformers makes it")
    real = looked_at(mask, "_gape_real_tokens", lambda: _real_tokens(mask[:, 0]))
    return None if real is None else real.expand(batch, -1)


def _real_tokens(mask: Tensor) -> Tensor | None:
    """As :func:`real_tokens`, of a mask (B or 1, n, keys)."""
    real = visible(mask[:, -1])
    if _hides_more(mask, real):
        raise ValueError("attention_mask: hides more than pads and later tokens, which would void the proof")
    refuse_pads_behind(real)
    return None if bool(real.all()) else real[:, -mask.size(-2) :]


def refuse_pads_behind(real: Tensor) -> None:
    """Refuse pads behind a token, by real tokens (B, N): attention through a cache knows pads on the left only.

    Raises:
        ValueError: there are some.
    """
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError("attention_mask: got pads behind a token, expected padding on the left")


def _hides_more(mask: Tensor, real: Tensor) -> bool:
    """Whether a mask (.., Nq, Nk) is other than causality by index over real keys (.., Nk), for queries that are real.

    The queries are the last keys.
    """
    n_q, n_k = mask.shape[-2:]
    index = torch.arange(n_k, device=mask.device)
    wrong = torch.zeros((), dtype=torch.bool, device=mask.device)
    for start in range(0, n_q, SLAB):
        rows = slice(start, min(start + SLAB, n_q))
        own = slice(rows.start + n_k - n_q, rows.stop + n_k - n_q)
        expected = (index <= index[own, None]) & real[..., None, :]
        wrong |= (real[..., own, None] & (visible(mask[..., rows, :]) != expected)).any()
    return bool(wrong)


def consecutive(positions: Tensor) -> bool:
    """Whether positions (N,) or (B, N) rise by one, so that distance by index is distance by position.

    A compiled graph may not look: there it is False.
    """
    if torch.compiler.is_compiling():
        return False
    return looked_at(positions, "_gape_consecutive", lambda: bool((positions.diff(dim=-1) == 1).all()))


def looked_at(tensor: Tensor, name: str, look: Callable[[], Found]) -> Found:
    """What `look` says of a tensor, kept in its attribute `name` until it is written to."""
    # Tensors of inference mode do not count their versions; they are looked at each time.
    version = None if tensor.is_inference() else tensor._version
    known: tuple[int | None, Found] | None = getattr(tensor, name, None)
    if known is None or version is None or known[0] != version:
        known = (version, look())
        setattr(tensor, name, known)
    return known[1]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sides: Sides | None,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the definition, in float32 (float64 beside float64), 1,024 queries at a time.

    Args are those of :func:`gape.hf.attend.attend`; positions may be left out without sides.

    Returns:
        (B, Hq, Nq, Dv) in q's dtype, and the weights (B, Hq, Nq, Nk), None for more than 1,024 queries.
    """
    dtype, groups = bias_dtype(q.dtype), q.size(1) // k.size(1)
    k, v = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    n_q, n_k = q.size(2), k.size(2)
    if mask is None:
        rows = torch.arange(n_q, device=q.device) + n_k - n_q
        mask = (torch.arange(n_k, device=q.device) <= rows.unsqueeze(-1))[None, None]
    outs, weights = [], None
    for start, stop in sdpa.chunks(n_q, sdpa.MASK_ROWS):
        a = scale * (q[:, :, start:stop].to(dtype) @ k.transpose(-1, -2))
        if softcap is not None:
            a = softcap * torch.tanh(a / softcap)
        part = mask if mask.size(-2) == 1 else mask[..., start:stop, :]
        visible = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
        if part.dtype != torch.bool:
            a = a + part.to(dtype).masked_fill(~visible, 0.0)
        if sides is not None:
            assert q_positions is not None
            assert k_positions is not None
            distance = _distance(q_positions[..., start:stop], k_positions, dtype)
            rate = (sides.amplitude[:, None] * sides.gate / sides.context_length).to(dtype)
            exposure = (1 - sides.landmark).to(dtype).repeat_interleave(groups, dim=1)
            a = a - rate[:, :, start:stop, None] * exposure.unsqueeze(-2) * distance
            visible = visible & (distance >= 0)
        weights = visible_softmax(a, visible)
        outs.append((weights @ v).to(q.dtype))
    return torch.cat(outs, dim=2), weights.to(q.dtype) if weights is not None and len(outs) == 1 else None


def _distance(q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
    """i − j, broadcastable to (B, H, Nq, Nk)."""
    i, j = beside_heads(q_positions, torch.int64), beside_heads(k_positions, torch.int64)
    return (i.unsqueeze(-1) - j.unsqueeze(-2)).to(dtype)
