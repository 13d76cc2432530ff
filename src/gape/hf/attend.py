"""Which implementation of the operator a model's `attn_implementation` means, and masks to go with it.

    sdpa, gape      the implementation that `impl="auto"` picks
    eager           the definition, dense; returns attention weights
    gape_split      through scaled_dot_product_attention alone
    gape_triton     the Triton kernels
    gape_reference  as eager, with bool masks

Names of `transformers` keep their own functions, which layers without gates run. Ours are registered with it.

A mask function beside every attention function is what keeps causality: `transformers` hands a function without one no
mask at all. The first use of a name on a device tries it on a few tokens and stops if a later token is seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, sdpa_mask

from gape.hf import masks
from gape.hf.masks import dense_attention
from gape.models.skipping import IMPL
from gape.ops import attention, gated_attention
from gape.ops.limits import DECODE_QUERIES
from gape.utils.validation import invalid_argument

#: Names that we register → implementation of the operator.
IMPLS = {
    "gape": "auto",
    "gape_split": "split",
    "gape_triton": "triton",
    "gape_reference": "reference",
}
#: The same, and names of transformers whose masks say all that the operator needs.
KNOWN = {**IMPLS, "sdpa": "auto", "eager": "reference"}
#: Names whose masks do not, and what stands for them.
INSTEAD = {"flex_attention": "gape"}


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
        raise invalid_argument("attn_implementation", name, f"one of {', '.join((*KNOWN, *INSTEAD))}")
    return found


def refuse_paged(kwargs: Mapping[str, Any]) -> None:
    """Refuse the paged cache of `generate_batch`, which comes as `cache` under any name of an implementation.

    Raises:
        ValueError: there is one.
    """
    if kwargs.get("cache") is not None:
        raise invalid_argument(
            "cache", type(kwargs["cache"]).__name__, "None; generate runs with gates, generate_batch does not"
        )


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
    k_positions: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    plain: Callable[..., Tensor] = attention,
    auto: str = "auto",
    skips: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Attend as the mask of `transformers` says, with distances by position.

    Args:
        q, k, v: (B, Hq, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv), rotated.
        sides: the gates, or None without.
        name: the model's attention implementation.
        q_positions: integer (Nq,) or (B, Nq).
        k_positions: integer (Nk,) or (B, Nk); None without gates, where the mask alone says who sees whom.
        mask: bool or additive (B or 1, heads or 1, Nq, at least Nk), or None where causality by index is all.
        scale: the softmax scale.
        softcap: content logits are cap · tanh(logit / cap); the bias is not capped.
        plain: attends without gates, called as gape.ops.attention is.
        auto: the implementation that the name `gape` stands for.
        skips: what more than 16 queries may lose under gates; above 0 the kernel that skips runs, whatever the name.

    Returns:
        (B, Hq, Nq, Dv), and the weights (B, Hq, Nq, Nk) where the dense form ran, else None.

    Raises:
        ValueError: a mask of another kind, or `skips` where only the dense form knows what is asked for.
    """
    if mask is None and 1 < q.size(2) < k.size(2):
        k, v, k_positions, sides = _without_room(k, v, k_positions, sides, q.size(2))
    if mask is not None:
        mask = masks.checked(mask, k.size(2))
    impl = KNOWN[our_name(name)]
    skips = skips if sides is not None and q.size(2) > DECODE_QUERIES else 0.0
    if skips and (softcap is not None or impl == "reference"):
        wanted = "one with kernels and logits without a cap, where tiles are to be skipped; skip(model, 0) goes back"
        raise invalid_argument("attn_implementation", name, wanted)
    additive = mask is not None and mask.dtype != torch.bool
    # A scheme of our GPT has a bias of its own, which only `plain` knows.
    known = sides is not None or plain is attention
    if softcap is not None or (known and additive) or (sides is not None and impl == "reference"):
        return dense_attention(
            q, k, v, sides, mask=mask, scale=scale, softcap=softcap, q_positions=q_positions, k_positions=k_positions
        )
    mask = None if mask is None else masks.visible(mask)
    # A chunk that follows what is cached: causality by index, under which alone a kernel may skip.
    follows = skips > 0 and mask is not None and masks.goes_on(q_positions, k_positions, mask)
    seen = {} if follows else masks.seen(q_positions, k_positions, mask, q.size(2))
    if sides is None:
        return plain(q, k, v, scale=scale, **seen), None
    impl = IMPL if skips else auto if impl == "auto" else impl
    told = {"context_length": sides.context_length, "scale": scale, "impl": impl, "eps": skips, **seen}
    return gated_attention(q, k, v, *sides[:3], **told), None


def _without_room(
    k: Tensor, v: Tensor, k_positions: Tensor | None, sides: Sides | None, n: int
) -> tuple[Tensor, Tensor, Tensor | None, Sides | None]:
    """The first n keys of an empty static cache that was just filled: what lies behind them is room."""
    sides = None if sides is None else sides._replace(landmark=sides.landmark[..., :n])
    return k[:, :, :n], v[:, :, :n], None if k_positions is None else k_positions[..., :n], sides


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
