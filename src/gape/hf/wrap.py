"""The attention of an injected layer: the model's own projections and rotation, our gates and operator.

An injected module is an instance of a subclass of its own class. Its parameters keep their names; `gape` holds the
gates, and taking the subclass away again leaves the module as it was. No class and no function of `transformers` is
changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.hf.attend import KNOWN, Sides, attend, our_name, refuse_paged, try_causality
from gape.hf.attending import AttendingCache, refuse_uneven
from gape.hf.families import Family, family_named
from gape.hf.packing import pack, unpack
from gape.hf.saving import rebuilt
from gape.hf.version import OLD
from gape.models.skipping import Skips
from gape.positions.base import Scheme
from gape.utils.validation import invalid_argument

#: Layers of caches whose handling of keys is tested here, by name.
CACHES = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """What an injected module needs besides its parameters.

    Attributes:
        family: of the model.
        rotation: the family's own, called as rotation(q, k, cos, sin); None where it has none.
        context_length: T.
        scheme: a rotation in place of the model's own; None keeps that.
        softcap: whether the model caps its logits.
    """

    family: Family
    rotation: Callable[..., tuple[Tensor, Tensor]] | None
    context_length: int
    scheme: Scheme | None = None
    softcap: bool = True

    def __reduce__(self) -> Any:
        # Layouts and rotations are functions, some without a name; the family knows its own.
        return _wired, (self.family.model_type, self.context_length, self.scheme, self.softcap)


def _wired(model_type: str, context_length: int, scheme: Scheme | None, softcap: bool) -> Wiring:
    family = family_named(model_type)
    return Wiring(
        family=family, rotation=family.rotation(), context_length=context_length, scheme=scheme, softcap=softcap
    )


class Injected(Skips):
    """Mixed into an attention class of `transformers`. `gape` are the gates, None where only positions changed."""

    gape: Any
    gape_base: type[nn.Module]
    gape_wiring: Wiring
    #: The door to the operator; whoever wants to hear what goes through it hides it by an attribute of the instance.
    gape_attend = staticmethod(attend)

    @property
    def impl(self) -> str:  # type: ignore[override]
        """The implementation of the operator that `attn_implementation` stands for."""
        module: Any = self
        return KNOWN[our_name(module.config._attn_implementation)]

    @property
    def gates(self) -> Any:
        """The gates; None where only positions changed."""
        return self.gape

    @property
    def gape_cap(self) -> float | None:
        """What content logits are capped at; None where they are not."""
        return getattr(self, "attn_logit_softcapping", None) if self.gape_wiring.softcap else None

    @property
    def unturned(self) -> bool:
        """Whether q and k are left as they are: SmolLM3 has layers without positions, with nothing to replace."""
        return not getattr(self, "use_rope", True)

    @property
    def never_skips(self) -> str | None:
        """Why no kernel can leave anything away in this layer; None where one can."""
        module: Any = self
        if self.impl == "reference":
            return f"runs attn_implementation {module.config._attn_implementation!r}, which keeps every weight"
        return None if self.gape_cap is None else "caps its logits"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle and copies: the class is made anew from the family's, which has a name to be found by."""
        return rebuilt, (injected, self.gape_base), vars(self)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (B, N, E) → (B, N, E), and weights where the dense form ran.

        Raises:
            ValueError: no positions came, or an argument that gates cannot honour.
        """
        module: Any = self
        wiring, layout = self.gape_wiring, self.gape_wiring.family.layout
        if kwargs.get("encoder_hidden_states") is not None or kwargs.get("head_mask") is not None:
            raise ValueError("encoder_hidden_states, head_mask: got a value, expected None in a layer with gates")
        refuse_paged(kwargs)
        name = module.config._attn_implementation
        q, k, v = layout.project(module, hidden_states)
        try_causality(name, q)
        positions = _positions(kwargs, q.size(0))
        held = None
        if self.gape is not None and isinstance(past_key_values, AttendingCache):
            held = past_key_values.layer(module.layer_idx, self.gape, q.size(2))
            out = held.attend_projected(q, k, v, positions, position_embeddings)
            if out is not None:
                return self._merged(out), None
        gate, landmark = (None, None) if self.gape is None else self.gape(q, k)
        q, k = self._rotate(q, k, positions, position_embeddings)
        if held is not None and gate is not None and landmark is not None:
            real = past_key_values.real(attention_mask, q.size(2), q.size(0))
            out = held.attend(q, k, v, gate, landmark, positions, real)
            return self._merged(out), None
        k, v, landmark, k_positions = remember(past_key_values, module.layer_idx, k, v, landmark, positions, kwargs)
        sides = None
        if gate is not None and landmark is not None:
            sides = Sides(gate, landmark, self.gape.amplitude, wiring.context_length)
        out, weights = self.gape_attend(
            q, k, v, sides, name=name, q_positions=positions, k_positions=k_positions, mask=attention_mask,
            scale=layout.scale(module), softcap=self.gape_cap, skips=self.skips,
        )  # fmt: skip
        return self._merged(out), weights

    def _merged(self, out: Tensor) -> Tensor:
        """(B, Hq, N, Dv) → (B, N, E)."""
        merged: Tensor = self.gape_wiring.family.layout.merge(self, out.transpose(1, 2).flatten(2))
        return merged

    def _rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        scheme, rotation = self.gape_wiring.scheme, self.gape_wiring.rotation
        if self.unturned:
            return q, k
        if scheme is not None:
            return scheme.queries(q, positions)[0], scheme.keys(k, positions)[0]
        if rotation is None or embeddings is None:
            return q, k
        return rotation(q, k, *embeddings)


@functools.cache
def injected(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of an attention class that attends under gates."""
    return type(f"Gape{base.__name__}", (Injected, base), {"gape_base": base, "__module__": __name__})


def _positions(kwargs: dict[str, Any], batch: int) -> Tensor:
    """The positions of these tokens, (N,) where all rows share them, else (B, N)."""
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


def first_row(positions: Tensor) -> Tensor:
    """positions[0], the same tensor each time, so that what is known of it is found again."""
    if torch.compiler.is_compiling():
        return positions[0]
    row: Tensor | None = getattr(positions, "_gape_row", None)
    if row is None:
        # A view: what is written into positions later is seen in it.
        row = positions[0]
        positions._gape_row = row  # type: ignore[attr-defined]
    return row


def remember(
    cache: Any,
    layer: int,
    k: Tensor,
    v: Tensor,
    landmark: Tensor | None,
    positions: Tensor,
    told: dict[str, Any],
    at_least: int = 0,
    *,
    placed: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Put keys and values into a cache.

    Args:
        cache: of `transformers`, or None.
        layer: its number.
        k, v: (B, Hk, N, D) and (B, Hk, N, Dv).
        landmark: (B, Hk, N), or None without gates.
        positions: integer (N,) or (B, N).
        told: `cache_position` for caches of transformers 4.
        at_least: width of a cached key; it is wider where its landmark and position take more.
        placed: whether keys carry their positions without gates too.

    Returns:
        All that the cache holds: keys, values, landmarks and the keys' positions, None where keys do not carry them.

    Raises:
        ValueError: a cache that is not known to leave keys as they are, or whose layers an earlier call left uneven.
    """
    if cache is None:
        return k, v, landmark, positions
    static = _layer_kind(cache, layer).startswith("Static")
    refuse_uneven(cache, layer, k.size(2))
    learns = k.requires_grad or (landmark is not None and landmark.requires_grad)
    first = torch.is_grad_enabled() and learns and not int(cache.get_seq_length(layer))
    plain = landmark is None and not placed
    packed = k if plain else pack(k, landmark, positions)
    width, carried = k.size(-1), packed.size(-1)
    # Static layers of transformers 4 make room for values as wide as keys.
    most = max(carried, at_least, v.size(-1) if OLD and static else 0)
    kept_v = F.pad(v, (0, most - v.size(-1))) if OLD and static else v
    more = ({"cache_position": told.get("cache_position")},) if OLD else ()
    keys, values = cache.update(F.pad(packed, (0, most - carried)), kept_v, layer, *more)
    if first:
        # Nothing came before: gradients take the straight way.
        return k, v, landmark, positions
    values = values[..., : v.size(-1)]
    if plain:
        return keys[..., :width], values, None, None
    k, found, k_positions = unpack(keys[..., :carried], width)
    return k, values, None if landmark is None else found, k_positions


def _layer_kind(cache: Any, layer: int) -> str:
    """The class of a cache's layer by name.

    Raises:
        ValueError: one that does something to keys that is not tested here, such as rounding them.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise invalid_argument("past_key_values", cache, "a cache of layers, such as DynamicCache or StaticCache")
    kind = type(layers[layer]) if layer < len(layers) else getattr(cache, "layer_class_to_replicate", None)
    name = "DynamicLayer" if kind is None else kind.__name__
    if name not in CACHES:
        raise ValueError(f"past_key_values: got layers of {name}, expected one of {', '.join(CACHES)}")
    return name
