"""Attention layers that gates were put into: what they do in each of the steps of every attention layer.

An injected module is an instance of a subclass of its own class. Its parameters keep their names; `gape` holds the
gates. Setting the class back leaves the module as it was. No class and no function of `transformers` is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gape.hf.cache import PackedKeys, refuse_uneven
from gape.hf.families import LLAMA_LIKE, Family, window_of
from gape.hf.gates import RetrofitGates
from gape.hf.implementations import (
    OPERATOR_OF,
    check_causality,
    gate_values,
    masked_attention,
    refuse_head_masks,
    refuse_paged,
    supported_name,
)
from gape.hf.paged import PagesForTransformers
from gape.hf.save_load import rebuild
from gape.models.attention_steps import QKV, AttentionLayer, Embeddings, attend_layer
from gape.models.skipping import Skips
from gape.ops.inputs import working_dtype
from gape.ops.prologue import Step
from gape.positions.angles import share_angles, shares_angles
from gape.positions.base import Scheme, Side
from gape.positions.gated import step_under
from gape.positions.rotary import NoPE
from gape.utils.validation import invalid_argument

#: What `accelerate` puts before attention layers for its own context parallelism.
ACCELERATE_HOOK = "_self_attn_pre_forward_hook"


def attend_in_transformers(
    layer: AttentionLayer,
    x: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    cache: Any,
    *,
    owner: Any,
    number: int,
    config: Any,
    embeddings: Embeddings = None,
    attend: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
    **packing: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`gape.models.attention_steps.attend_layer` under a mask of `transformers` and with a cache for it.

    Caches in pages do not read the mask, and know the layer by its owner; for others `packing` are the settings of
    :class:`gape.hf.cache.PackedKeys`. `config` names the attention implementation.
    """
    if layer.gates is not None and isinstance(cache, PagesForTransformers):
        real = cache.real_tokens(mask, x.size(1), x.size(0))
        return attend_layer(layer, x, positions, cache.layer(number, owner), real=real, embeddings=embeddings)
    check_causality(config._attn_implementation, x)
    keys = None if cache is None else PackedKeys(cache=cache, layer=number, **packing)
    return attend_layer(layer, x, positions, keys, embeddings=embeddings, attend=attend, mask=mask)


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """What an injected module needs besides its parameters.

    `first_layer` is the number of the first injected one. `scheme` is a rotation in place of the model's own; None
    keeps that. `softcap` says whether the model caps its logits.
    """

    family: Family
    context_length: int
    first_layer: int
    scheme: Scheme | None = None
    softcap: bool = True


class InjectedAttention(Skips):
    """Mixed into an attention class of `transformers`. `gape` are the gates, None where only positions changed."""

    config: Any
    layer_idx: int
    _forward_pre_hooks: dict[int, Any]
    gape: Any
    gape_base: type[nn.Module]
    gape_wiring: Wiring

    @property
    def impl(self) -> str:  # type: ignore[override]
        """The implementation of the operator that `attn_implementation` means."""
        return OPERATOR_OF[supported_name(self.config._attn_implementation)]

    @property
    def gates(self) -> Any:
        """The gates; None where only positions changed."""
        return self.gape

    @property
    def context_length(self) -> float:
        """T, by which gates divide distances."""
        return self.gape_wiring.context_length

    @property
    def softcap(self) -> float | None:
        """What content logits are capped at; None where they are not."""
        return getattr(self, "attn_logit_softcapping", None) if self.gape_wiring.softcap else None

    @property
    def without_rotation(self) -> bool:
        """Whether q and k are not rotated: SmolLM3 has such layers, in which nothing is replaced."""
        return not vars(self).get("use_rope", True)

    @property
    def not_plain_attention(self) -> str | None:
        """How the layer departs from the operator over all earlier tokens; None where it does not."""
        if self.softcap is not None:
            return "caps its logits"
        return None if window_of(self) is None else "has a sliding window"

    @property
    def never_skips(self) -> str | None:
        """Why no kernel can skip anything in this layer; None where one can."""
        if self.impl == "reference":
            return f"runs attn_implementation {self.config._attn_implementation!r}, which keeps every weight"
        return None if self.softcap is None else "caps its logits"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle and copies: the class is made again from the family's, which can be imported by name."""
        return rebuild, (injected_class, self.gape_base), vars(self)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (B, N, E) → (B, N, E), and weights where the dense form ran.

        A ValueError where there are no positions, or an argument that gates cannot honour.
        """
        if kwargs.get("encoder_hidden_states") is not None or kwargs.get("head_mask") is not None:
            raise ValueError("encoder_hidden_states, head_mask: got a value, expected None in a layer with gates")
        refuse_paged(kwargs)
        refuse_head_masks(self)
        if any(getattr(hook, "__name__", "") == ACCELERATE_HOOK for hook in self._forward_pre_hooks.values()):
            raise ValueError(
                "context parallelism: accelerate drops masks and slices positions that gates read, expected "
                "gape.distributed.context_parallel"
            )
        # GPT-NeoX has a name of its own for it.
        cache = kwargs.get("layer_past") if past_key_values is None else past_key_values
        if cache is not None and self.layer_idx == self.gape_wiring.first_layer:
            refuse_uneven(cache, self.layer_idx, hidden_states.size(1))
        return attend_in_transformers(
            self, hidden_states, token_positions(kwargs, hidden_states.size(0)), attention_mask, cache, owner=self.gape,
            number=self.layer_idx, config=self.config, embeddings=position_embeddings,
            cache_position=kwargs.get("cache_position"),
        )  # fmt: skip

    def project(self, x: Tensor, queries: int | None = None) -> QKV:
        """q, k and v as the family projects (and norms) them, keys about their mean; all tokens have queries."""
        q, k, v = self.gape_wiring.family.layout.project(self, x)
        center = getattr(self.gape, "key_center", None)
        return q, k if center is None else k - center[:, None].to(k.dtype), v

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, x: Tensor, embeddings: Embeddings, past: Side = None
    ) -> tuple[Tensor, Tensor, Side, Side]:
        """The gates of q and k before their rotation, and the rotation: the model's own, or that in its place."""
        gate, landmark = (None, None) if self.gape is None else self.gape(q, k)
        scheme, rotation = self.gape_wiring.scheme, self.gape_wiring.family.rotation
        if not self.without_rotation:
            if scheme is not None:
                q, k = scheme.queries(q, positions)[0], scheme.keys(k, positions)[0]
            elif rotation is not None and embeddings is not None:
                q, k = rotation(q, k, *embeddings)
        return q, k, gate, landmark

    def step(self, q: Tensor, positions: Tensor, embeddings: Embeddings) -> Step | None:
        """What :meth:`rotate` does, for kernels; None where it is more than they do."""
        wiring, gates = self.gape_wiring, self.gape
        if type(gates) is not RetrofitGates:
            return None
        angles, scheme = None, wiring.scheme
        if not self.without_rotation and not isinstance(scheme, NoPE):
            angles = self._own_angles(q, embeddings) if scheme is None else scheme.angles(positions)
            if angles is None:
                return None
        return step_under(gates, positions, angles, context_length=wiring.context_length, strength=gates.strength)

    def _own_angles(self, q: Tensor, embeddings: Embeddings) -> tuple[Tensor, Tensor] | None:
        """The model's own cosines and sines as kernels read them; None where it rotates in another way."""
        if embeddings is None or self.gape_wiring.family.model_type not in LLAMA_LIKE:
            return None
        if torch.compiler.is_compiling():
            return kernel_angles(q, *embeddings)
        # All layers of a call get the same tensors.
        cos, sin = embeddings
        key = (q.shape, q.dtype, id(sin))
        shared: tuple[Any, Any] | None = getattr(cos, "_gape_angles", None)
        if shared is None or shared[0] != key:
            shared = key, kernel_angles(q, cos.detach(), sin.detach())
            cos._gape_angles = shared  # type: ignore[attr-defined]
        return shared[1]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Side, side: Side, **visibility: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend under the gates, if there are some; `side` are the keys' landmarks."""
        return masked_attention(
            q, k, v, gate_values(self, gate, side), name=self.config._attn_implementation,
            scale=self.gape_wiring.family.layout.scale(self), softcap=self.softcap, skips=self.skips, **visibility,
        )  # fmt: skip

    def merge(self, y: Tensor) -> Tensor:
        """(B, Hq, N, Dv) → (B, N, E), by the family's output projection."""
        return self.gape_wiring.family.layout.merge(self, y.transpose(1, 2).flatten(2))


@functools.cache
def injected_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of an attention class that attends under gates."""
    return type(f"Gape{base.__name__}", (InjectedAttention, base), {"gape_base": base, "__module__": __name__})


def token_positions(kwargs: dict[str, Any], batch: int) -> Tensor:
    """The positions of these tokens, (N,) where all samples share them, else (B, N)."""
    for key in ("position_ids", "gape_position_ids", "cache_position"):
        given = kwargs.get(key)
        if given is None:
            continue
        if given.dim() == 1:
            return given  # type: ignore[no-any-return]
        if given.dim() != 2 or given.size(0) not in (1, batch):
            raise invalid_argument("position_ids", given, f"an integer tensor (1 or {batch}, tokens)")
        return given if given.size(0) == batch and batch > 1 else first_row(given)
    raise ValueError("position_ids: got nothing, expected the positions of the tokens")


def kernel_angles(q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines (1 or B, n, D) of `transformers` as kernels read them; None where they rotate otherwise."""
    batch, _, n, width = q.shape
    # Narrower ones rotate a part of each head.
    if cos.shape not in ((1, n, width), (batch, n, width)) or cos.stride(-1) != 1:
        return None
    if (cos.shape, cos.stride(), cos.dtype) != (sin.shape, sin.stride(), sin.dtype):
        return None
    # Wider ones than q would make q as wide.
    if working_dtype(cos) != working_dtype(q):
        return None
    return (cos[0], sin[0]) if cos.size(0) == 1 else (cos, sin)


def first_row(positions: Tensor) -> Tensor:
    """positions[0], the same tensor each time, so that what is memoized on it is not lost."""
    if torch.compiler.is_compiling():
        return positions[0]
    row: Tensor | None = getattr(positions, "_gape_row", None)
    if row is None:
        # Later writes to positions show in it. Detached, for a view of a tensor that refers to it is never freed.
        row = positions.detach()[0]
        if shares_angles(positions):
            share_angles(row)
        positions._gape_row = row  # type: ignore[attr-defined]
    return row
