"""Which implementation of the operator a model's `attn_implementation` means, and masks to go with it.

    sdpa, gape      the implementation that `impl="auto"` picks
    eager           the definition, dense; returns attention weights
    gape_split      through scaled_dot_product_attention alone
    gape_flex       FlexAttention
    gape_triton     the Triton kernels
    gape_reference  as eager, with bool masks

Names of `transformers` keep their own functions, which layers without gates run. Ours are registered with it.

A mask function beside every attention function is what keeps causality: `transformers` hands a function without one no
mask at all. The first use of a name on a device tries it on a few tokens and stops if a later token is seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, sdpa_mask

from gape.hf.dense import dense_attention
from gape.models.skipping import Skipping
from gape.ops import attention, gated_attention
from gape.ops.checks import refuse
from gape.ops.dispatch import DECODE_QUERIES

#: Names that we register → implementation of the operator.
IMPLS = {
    "gape": "auto",
    "gape_split": "split",
    "gape_flex": "flex",
    "gape_triton": "triton",
    "gape_reference": "reference",
}
#: The same, and names of transformers whose masks say all that the operator needs.
KNOWN = {**IMPLS, "sdpa": "auto", "eager": "reference"}
#: Names whose masks do not, and what stands for them.
INSTEAD = {"flex_attention": "gape_flex"}


class Sides(NamedTuple):
    """What the gates add to q, k and v.

    gate: (B, Hq, Nq). landmark: (B, Hk, Nk). amplitude: (Hq,). context_length: T.
    """

    gate: Tensor
    landmark: Tensor
    amplitude: Tensor
    context_length: float


def our_name(name: str | None) -> str:
    """The name under which a model of attention implementation `name` goes on: the same, where that says enough.

    Raises:
        ValueError: one that cannot carry a bias, such as flash_attention_2.
    """
    found = INSTEAD.get(name or "", name or "gape")
    if found not in KNOWN:
        raise refuse("attn_implementation", name, f"one of {', '.join((*KNOWN, *INSTEAD))}")
    return found


def register() -> None:
    """Make the names known to `transformers`; doing it again changes nothing."""
    for name in IMPLS:
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, _mask)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """A bool mask, True may attend, or None where causality by index is all; as for `sdpa`."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def _attention(
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
    if softcap is not None and _caps(module):
        scale = query.size(-1) ** -0.5 if scaling is None else scaling
        out, weights = dense_attention(query, key, value, None, mask=attention_mask, scale=scale, softcap=softcap)
        return out.transpose(1, 2).contiguous(), weights
    answer: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return answer


def _caps(module: Any) -> bool:
    """Whether a layer's logits are capped: always, but for a model that began with them uncapped."""
    told = getattr(module.config, "gape", None)
    return bool(told["softcap"]) if isinstance(told, dict) else True


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sides: Sides | None,
    *,
    name: str,
    q_positions: Tensor,
    k_positions: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    plain: Callable[..., Tensor] = attention,
    auto: str = "auto",
    skips: Skipping | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend as the mask of `transformers` says, with distances by position.

    Args:
        q, k, v: (B, Hq, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv), rotated.
        sides: the gates, or None without.
        name: the model's attention implementation.
        q_positions: integer (Nq,) or (B, Nq).
        k_positions: integer (Nk,) or (B, Nk).
        mask: bool or additive (B or 1, heads or 1, Nq, at least Nk), or None where causality by index is all.
        scale: the softmax scale.
        softcap: content logits are cap · tanh(logit / cap); the bias is not capped.
        plain: attends without gates, called as gape.ops.attention is.
        auto: the implementation that the name `gape` stands for.
        skips: what more than 16 queries may lose under gates, and to which kernel; it stands in for the name's own.

    Returns:
        (B, Hq, Nq, Dv), and the weights (B, Hq, Nq, Nk) where the dense form ran, else None.

    Raises:
        ValueError: a mask of another kind, or `skips` where only the dense form knows what is asked for.
    """
    n_q, n_k = q.size(2), k.size(2)
    if mask is None and 1 < n_q < n_k:
        # An empty static cache was just filled: what lies behind the queries is room, not keys.
        k, v, k_positions, n_k = k[:, :, :n_q], v[:, :, :n_q], k_positions[..., :n_q], n_q
        sides = None if sides is None else sides._replace(landmark=sides.landmark[..., :n_q])
    if mask is not None:
        mask = _checked(mask, n_k)
    impl = KNOWN[our_name(name)]
    additive = mask is not None and mask.dtype != torch.bool
    # A scheme of our GPT has a bias of its own, which only `plain` knows.
    dense = sides is not None or plain is attention
    skips = skips if sides is not None and n_q > DECODE_QUERIES else None
    if skips is not None and (softcap is not None or impl == "reference"):
        wanted = "one with kernels and logits without a cap, where tiles are to be skipped; skip(model, 0) goes back"
        raise refuse("attn_implementation", name, wanted)
    if softcap is not None or (dense and additive) or (sides is not None and impl == "reference"):
        return dense_attention(
            q, k, v, sides, mask=mask, scale=scale, softcap=softcap, q_positions=q_positions, k_positions=k_positions
        )
    if mask is not None and additive:
        mask = mask > torch.finfo(mask.dtype).min / 2
    if skips is not None and mask is not None and _goes_on(q_positions, k_positions, mask):
        # The chunk follows what is cached: causality by index, under which alone a kernel may skip.
        seen: dict[str, Any] = {}
    else:
        seen = _seen(q_positions, k_positions, mask, n_q)
    if sides is None:
        return plain(q, k, v, scale=scale, **seen), None
    eps, impl = Skipping(0.0, auto if impl == "auto" else impl) if skips is None else skips
    out = gated_attention(
        q, k, v, *sides[:3], context_length=sides.context_length, scale=scale, impl=impl, eps=eps, **seen
    )
    return out, None


def _seen(q_positions: Tensor, k_positions: Tensor, mask: Tensor | None, n_q: int) -> dict[str, Any]:
    """Who sees whom, in the operator's words."""
    explicit = {"q_positions": q_positions, "k_positions": k_positions}
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


def _goes_on(q_positions: Tensor, k_positions: Tensor, mask: Tensor) -> bool:
    """Whether keys (.., Nk) count on without a gap, the queries are the last of them, and a bool mask says no more.

    A compiled graph may not look: there it is False.
    """
    if torch.compiler.is_compiling() or not consecutive(k_positions):
        return False
    last = k_positions[..., -mask.size(-2) :]
    return torch.equal(q_positions.expand_as(last), last) and _lower_right(mask)


def _lower_right(mask: Tensor) -> bool:
    """Whether a bool mask (.., Nq, Nk) is causality by index, the queries being the last keys; looked at once."""

    def look() -> bool:
        n_q, n_k = mask.shape[-2:]
        return bool((mask == torch.ones(n_q, n_k, dtype=torch.bool, device=mask.device).tril(n_k - n_q)).all())

    return _looked_at(mask, "_gape_lower_right", look)


def consecutive(positions: Tensor) -> bool:
    """Whether positions (N,) or (B, N) rise by one, so that distance by index is distance by position.

    Looked at once for a tensor, since every layer gets the same one. A compiled graph may not look: there it is False.
    """
    if torch.compiler.is_compiling():
        return False
    return _looked_at(positions, "_gape_consecutive", lambda: bool((positions.diff(dim=-1) == 1).all()))


def _looked_at(tensor: Tensor, name: str, look: Callable[[], bool]) -> bool:
    """What `look` says of a tensor, kept in its attribute `name` until it is written to."""
    # Tensors of inference mode do not count their versions; they are looked at each time.
    version = None if tensor.is_inference() else tensor._version
    known = getattr(tensor, name, None)
    if known is None or version is None or known[0] != version:
        known = (version, look())
        setattr(tensor, name, known)
    return bool(known[1])


def _checked(mask: Any, n_k: int) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise refuse(
            "attention_mask", mask, "a tensor (batch, heads, queries, keys), as sdpa, eager, gape, gape_flex, … make it"
        )
    # The same tensor where nothing is cut off, so that what is known of it is found again.
    return mask if mask.size(-1) == n_k else mask[..., :n_k]


_TRIED: set[tuple[str, str]] = set()


def try_causality(name: str, like: Tensor) -> None:
    """The first time a name is used on a device, make sure that no later token is seen there.

    Raises:
        RuntimeError: one is.
    """
    key = (name, like.device.type)
    if key in _TRIED or torch.compiler.is_compiling() or like.device.type == "meta":
        return
    with torch.no_grad():
        for padded in (False, True):
            before, after = (_probe(name, like, padded, changed) for changed in (False, True))
            if not torch.equal(before[:, :, :-2], after[:, :, :-2]):
                raise RuntimeError(f"attn_implementation {name!r} lets tokens see later ones; nothing was computed")
    _TRIED.add(key)


def _probe(name: str, like: Tensor, padded: bool, changed: bool) -> Tensor:
    """The answer for a few random tokens, the last two of which may be other ones."""
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
    sides = Sides(gate, landmark, torch.ones(1, device=like.device), float(n))
    mask = made_mask(SimpleNamespace(_attn_implementation=name), q[:, 0], real if padded else None, positions)
    out, _ = attend(
        q, k, v, sides, name=name, q_positions=positions, k_positions=positions, mask=mask, scale=width**-0.5
    )
    return out


def made_mask(
    config: Any, embeddings: Tensor, real: Tensor | None, positions: Tensor, past_key_values: Any = None
) -> Any:
    """What `transformers` would hand to attention layers.

    Args:
        config: says the attention implementation.
        embeddings: (B, N, E), for sizes and dtype.
        real: (B, cached + N), 0 for pads, or None.
        positions: integer (N,) or (B, N).
        past_key_values: the cache, or None.
    """
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    told = {
        "config": config,
        "inputs_embeds": embeddings,
        "input_embeds": embeddings,
        "attention_mask": real,
        "cache_position": torch.arange(embeddings.size(1), device=embeddings.device) + past,
        "past_key_values": past_key_values,
        "position_ids": positions if positions.dim() == 2 else positions.unsqueeze(0),
    }
    return create_causal_mask(**{key: value for key, value in told.items() if key in _MASK_ARGUMENTS})


#: Versions differ in names and in what they ask for.
_MASK_ARGUMENTS = frozenset(inspect.signature(create_causal_mask).parameters)
