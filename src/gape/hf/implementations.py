"""Which implementation of the operator a model's `attn_implementation` means, and attention through it.

    sdpa, gape      the implementation that `impl="auto"` picks
    eager           the definition, dense; returns attention weights
    gape_split      through scaled_dot_product_attention alone
    gape_triton     the Triton kernels
    gape_reference  as eager, with bool masks

Names of `transformers` keep their own functions, which layers without gates run. Ours are registered with it, each with
a mask function: `transformers` gives an attention function without one no mask at all, and causality would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gape.hf import masks
from gape.models.skipping import IMPL
from gape.ops import attention, gated_attention, reference, sdpa
from gape.ops.inputs import bias_dtype
from gape.ops.limits import DECODE_QUERIES
from gape.utils.validation import invalid_argument

#: Names that we register → implementation of the operator.
REGISTERED = {
    "gape": "auto",
    "gape_split": "split",
    "gape_triton": "triton",
    "gape_reference": "reference",
}
#: The same, and names of transformers whose masks say all that the operator needs.
OPERATOR_OF = {**REGISTERED, "sdpa": "auto", "eager": "reference"}
#: Names whose masks do not, and the name that takes their place.
REPLACEMENTS = {"flex_attention": "gape"}
#: Why models with gates have no continuous batching.
NO_BATCHING = (
    "its pages have room for head_dim coordinates of a key, and a key with gates has more, for its landmark and "
    "position; generate runs, with gape.hf.FullCache in pages too"
)
#: (attention implementation, device type) that were checked.
_CHECKED: set[tuple[str, str]] = set()


class GateValues(NamedTuple):
    """What the gates of a layer say of some tokens.

    gate: (B, Hq, Nq). landmark: (B, Hk, Nk). amplitude: (Hq,). context_length: T.
    """

    gate: Tensor
    landmark: Tensor
    amplitude: Tensor
    context_length: float


def gate_values(layer: Any, gate: Tensor | None, landmark: Tensor | None) -> GateValues | None:
    """What the gates of an attention layer say; None without gates."""
    if gate is None or landmark is None:
        return None
    return GateValues(gate, landmark, layer.gates.amplitude, layer.context_length)


def supported_name(name: str | None) -> str:
    """The attention implementation that gates run in, by the one of the model; refused where it cannot carry a bias."""
    supported = REPLACEMENTS.get(name or "", name or "gape")
    if supported not in OPERATOR_OF:
        names = ", ".join((*OPERATOR_OF, *REPLACEMENTS))
        raise invalid_argument("attn_implementation", name, f"one of {names}")
    return supported


def refuse_paged(kwargs: Mapping[str, Any]) -> None:
    """Refuse the paged cache of `generate_batch`, which comes as `cache` under any attention implementation."""
    if kwargs.get("cache") is not None:
        raise invalid_argument("cache", type(kwargs["cache"]).__name__, f"None: {NO_BATCHING}")


def refuse_head_masks(module: Any) -> None:
    """Refuse the mask that some presses of kvpress leave for a layer's attention function, which is not called."""
    # getattr is slow where a module lacks the attribute.
    if vars(module).get("masked_key_indices") is not None:
        expected = "None: a layer with gates has no masks of kvpress; gape.hf.presses.GatedPress drops keys by scores"
        raise invalid_argument("masked_key_indices", "indices", expected)


def register() -> None:
    """Make our names known to `transformers`; may be called again."""
    for name in REGISTERED:
        AttentionInterface.register(name, _ungated_attention)
        AttentionMaskInterface.register(name, sdpa_mask)


def _ungated_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What layers without gates run under our names: `sdpa`, or the dense form where logits are capped."""
    settings = getattr(module.config, "gape", None)
    # Always, except in a model whose implementation did not cap them before.
    caps = not isinstance(settings, dict) or settings.get("softcap", True)
    if softcap is not None and caps:
        scale = query.size(-1) ** -0.5 if scaling is None else scaling
        out, weights = dense_attention(query, key, value, None, mask=attention_mask, scale=scale, softcap=softcap)
        return out.transpose(1, 2).contiguous(), weights
    answer: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return answer


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: GateValues | None,
    *,
    name: str,
    q_positions: Tensor,
    k_positions: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    plain: Callable[..., Tensor] = attention,
    auto: str = "auto",
    skips: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Attend with q, k, v (B, H, N, D) after rotation, under a mask of `transformers`, with distances by position.

    Args:
        values: of the gates, or None without.
        name: the model's attention implementation.
        q_positions, k_positions: integer (Nq,) or (B, Nq), and (Nk,), (B, Nk) or, where heads differ, (B, Hk, Nk); None
            without gates, where the mask alone says who attends to whom.
        mask: bool or additive (B or 1, heads or 1, Nq, at least Nk), or None where causality by index is all.
        softcap: content logits are cap · tanh(logit / cap); the bias is not capped.
        plain: attends without gates, called as gape.ops.attention is.
        auto: the implementation that the name `gape` means.
        skips: what more than 16 queries may lose under gates; above 0 the kernel that skips runs, whatever the name.

    Returns:
        (B, Hq, Nq, Dv), and the weights (B, Hq, Nq, Nk) where the dense form ran, else None.

    Raises:
        ValueError: a mask of another kind, or `skips` where only the dense form can run.
    """
    n = q.size(2)
    if k_positions is not None and k_positions.dim() == 3:
        folded, more = _heads_as_samples(q, k, v, values, q_positions, k_positions, mask)
        out, weights = masked_attention(
            *folded, name=name, scale=scale, softcap=softcap, auto=auto, skips=skips, **more
        )
        return out.reshape(*q.shape[:3], -1), None if weights is None else weights.reshape(*q.shape[:3], -1)
    if mask is None and 1 < n < k.size(2):
        # The first call with a static cache: what lies behind the first n keys is still empty.
        k, v, k_positions = k[:, :, :n], v[:, :, :n], None if k_positions is None else k_positions[..., :n]
        values = None if values is None else values._replace(landmark=values.landmark[..., :n])
    if mask is not None:
        mask = masks.first_keys(mask, k.size(2))
    impl = OPERATOR_OF[supported_name(name)]
    skips = skips if values is not None and n > DECODE_QUERIES else 0.0
    if skips and (softcap is not None or impl == "reference"):
        expected = "one with kernels and logits without a cap, where tiles are to be skipped; skip(model, 0) goes back"
        raise invalid_argument("attn_implementation", name, expected)
    additive = mask is not None and mask.dtype != torch.bool
    # A scheme of our GPT has a bias of its own, which only `plain` knows.
    dense = values is not None or plain is attention
    if softcap is not None or (dense and additive) or (values is not None and impl == "reference"):
        return dense_attention(
            q, k, v, values, mask=mask, scale=scale, softcap=softcap, q_positions=q_positions, k_positions=k_positions
        )
    mask = None if mask is None else masks.as_bool(mask)
    # The next chunk of a prompt is causal by index, and only there a kernel may skip.
    by_index = skips > 0 and mask is not None and masks.is_next_chunk(q_positions, k_positions, mask)
    visibility = {} if by_index else masks.visibility(q_positions, k_positions, mask, n)
    if values is None:
        return plain(q, k, v, scale=scale, **visibility), None
    impl = IMPL if skips else auto if impl == "auto" else impl
    visibility |= {"context_length": values.context_length, "scale": scale, "impl": impl, "eps": skips}
    return gated_attention(q, k, v, *values[:3], **visibility), None


def _heads_as_samples(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: GateValues | None,
    q_positions: Tensor,
    k_positions: Tensor,
    mask: Tensor | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of :func:`masked_attention` in which each key head, with its query heads, is a sample of its own.

    A sample has one position for a token, so this is how heads can have different ones.
    """
    heads = k.size(1)
    groups = q.size(1) // heads
    q = q.reshape(-1, groups, *q.shape[2:])
    k, v = (x.reshape(-1, 1, *x.shape[2:]) for x in (k, v))
    if values is not None:
        gate = (values.amplitude[:, None] * values.gate).reshape(-1, groups, values.gate.size(-1))
        landmark = values.landmark.reshape(-1, 1, values.landmark.size(-1))
        values = GateValues(gate, landmark, torch.ones_like(values.amplitude[:groups]), values.context_length)
    if q_positions.dim() == 2:
        q_positions = q_positions.repeat_interleave(heads, dim=0)
    if mask is not None and mask.size(1) > 1:
        mask = mask.expand(len(k) // heads, -1, -1, -1).reshape(-1, groups, *mask.shape[2:])
    elif mask is not None and mask.size(0) > 1:
        mask = mask.repeat_interleave(heads, dim=0)
    return (q, k, v, values), {"q_positions": q_positions, "k_positions": k_positions.flatten(0, 1), "mask": mask}


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: GateValues | None,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the definition, in float32 (float64 beside float64), 1,024 queries at a time.

    Arguments as in :func:`masked_attention`; positions are needed with gates only. Returns (B, Hq, Nq, Dv) in the dtype
    of q, and the weights (B, Hq, Nq, Nk), None for more than 1,024 queries.
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
        visible = masks.as_bool(part)
        if part.dtype != torch.bool:
            a = a + part.to(dtype).masked_fill(~visible, 0.0)
        if values is not None:
            assert q_positions is not None
            assert k_positions is not None
            distance = reference.distance(q_positions[..., start:stop], k_positions, dtype)
            rate = (values.amplitude[:, None] * values.gate / values.context_length).to(dtype)
            exposure = (1 - values.landmark).to(dtype).repeat_interleave(groups, dim=1)
            a = a - reference.penalty(rate[:, :, start:stop], exposure, distance)
            visible = visible & (distance >= 0)
        weights = reference.visible_softmax(a, visible)
        outs.append((weights @ v).to(q.dtype))
    return torch.cat(outs, dim=2), weights.to(q.dtype) if weights is not None and len(outs) == 1 else None


def check_causality(name: str, like: Tensor) -> None:
    """Make sure, once for an implementation and device, that no token attends to a later one, or a RuntimeError."""
    key = (name, like.device.type)
    if key in _CHECKED or torch.compiler.is_compiling() or like.device.type == "meta":
        return
    with torch.no_grad():
        for padded in (False, True):
            before, after = (_sample_output(name, like, padded, changed) for changed in (False, True))
            if not torch.equal(before[:, :, :-2], after[:, :, :-2]):
                raise RuntimeError(f"attn_implementation {name!r} lets tokens see later ones; nothing was computed")
    _CHECKED.add(key)


def _sample_output(name: str, like: Tensor, padded: bool, changed: bool) -> Tensor:
    """The output for a few random tokens, of which the last two may be changed."""
    generator = torch.Generator().manual_seed(0)
    n, width = 6, 16
    q, k, v = (torch.randn(1, 1, n, width, generator=generator).to(like) for _ in range(3))
    if changed:
        k[:, :, -2:], v[:, :, -2:] = -3.0, 5.0
    positions = torch.arange(n, device=like.device)
    real = torch.ones(1, n, dtype=torch.int64, device=like.device)
    if padded:
        real[:, 0] = 0
    gate, landmark = (torch.full((1, 1, n), 0.5, device=like.device) for _ in range(2))
    values = GateValues(gate, landmark, torch.ones(1, device=like.device), float(n))
    config = SimpleNamespace(_attn_implementation=name)
    mask = masks.causal_mask(config, q[:, 0], real if padded else None, positions)
    out, _ = masked_attention(
        q, k, v, values, name=name, q_positions=positions, k_positions=positions, mask=mask, scale=width**-0.5
    )
    return out
