"""A cache for `generate` that lets go of keys which no future query can give weight: `docs/results/proofs.md`.

Each layer with gates keeps its keys in a :class:`gape.cache.forgetting.ForgettingLayer`. What no query of a layer can
exceed follows from its weights here too: from the norm before its projections, or from the norms of q and k behind them
where the model has those.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from gape.cache.forgetting import ForgettingLayer
from gape.cache.forgetting_limits import least_rates
from gape.cache.forgetting_pace import Pace
from gape.cache.kv import BOUNDS, Forgets, checked_eps
from gape.gates import GAPEGates
from gape.hf.attending import AttendingCache, AttendingLayer, in_working_precision
from gape.hf.families import rotated_part
from gape.hf.forgetting_limits import of_module
from gape.hf.gates import warn_of_idle
from gape.hf.masks import refuse_pads_behind
from gape.models.skipping import Skips
from gape.ops.carried import COLUMNS
from gape.ops.prologue import PIECE
from gape.utils.validation import flag, invalid_argument

#: Coordinates that a key takes to carry the bias.
ROOM = COLUMNS["split"]
#: What decoder layers call the norm that their attention reads from.
NORMS = ("input_layernorm", "ln_1", "attention_norm")


@dataclass(kw_only=True, eq=False)
class Seat:
    """An injected layer as its cache sees it: :class:`gape.cache.forgetting_limits.Attends`.

    A cached key is head_dim wide: content_dim of the model's head, then what is reserved for the bias.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    context_length: float
    gates: GAPEGates
    layer: Skips
    position: str
    content_dim: int
    reserve: int

    @property
    def impl(self) -> str:
        """The implementation of the operator, as the model was told."""
        return self.layer.impl

    def how(self, queries: int) -> dict[str, Any]:
        """The implementation for so many queries, and what it may drop: as the layer was told."""
        return self.layer.how(queries)


class ForgettingCacheLayer(AttendingLayer):
    """The cache of one layer with gates, in a :class:`gape.cache.forgetting.ForgettingLayer`."""

    held: ForgettingLayer

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, landmark: Tensor, positions: Tensor, real: Tensor | None
    ) -> Tensor:
        """Add tokens and attend to everything kept, as :meth:`gape.hf.attending.AttendingLayer.attend` says."""
        if self.seat.reserve:
            q, k, v = in_working_precision(q, k, v)
        where, told, documents = self._where(positions, real, k.size(0))
        seen = {"q_positions": told, "q_documents": documents, "attn_mask": None}
        return self.held.attend(self.seat, q, k, v, gate, landmark, where, seen)


class ForgettingCache(Forgets, AttendingCache):
    """The caches of a model with gates that drop keys for good once no future query can give them weight.

    Give it to `generate` or to the model as `past_key_values`; a new one for every text. Batches, left padding and
    chunked prefill work, beams do not.

    Args:
        model: a :class:`gape.hf.GapeForCausalLM`, or a model that :func:`gape.hf.inject` was called on; its gates have
            a floor.
        eps, bounds, partial: as in :class:`gape.cache.kv.ForgettingCache`. With `partial`, heads without a floor
            and layers without gates keep all their keys.
        carried: whether keys carry the bias, in coordinates of their own behind those of the head: attention of few
            tokens on a GPU then reads keys and nothing else, and single ones can be recorded
            (:class:`gape.hf.Captured`). A GPT of ours has room for them within the head, or not; it is not asked.

    Raises:
        ValueError: an argument is out of range, a head has no floor or an amplitude of 0, or a layer caps its logits or
            has a window; names layer and head.
    """

    def __init__(
        self, model: nn.Module, *, eps: float, bounds: str = "weights", partial: bool = False, carried: bool = False
    ) -> None:
        checked_eps(eps)
        if bounds not in BOUNDS:
            raise invalid_argument("bounds", bounds, f"one of {BOUNDS}")
        flag("partial", partial)
        places = places_of(model, limited=bounds == "weights", carried=flag("carried", carried))
        if bounds != "gates":
            _refuse_without_floors([seat for seat, _ in places], partial)
        layers, pace = [], Pace()
        for number, (seat, limits) in enumerate(places):
            if seat is None and not partial:
                raise ValueError(
                    f"model: layer {number} has no gates and forgets nothing; expected some, or partial=True"
                )
            held = None if seat is None else ForgettingLayer(seat, limits, eps=eps, bounds=bounds, pace=pace)
            layers.append(DynamicLayer() if held is None else ForgettingCacheLayer(seat, held))
        warn_of_idle(model)
        super().__init__(layers=layers)

    def fresh(self, eps: float) -> ForgettingCache:
        """An empty cache of the same model and bounds. Limits are not worked out again: weights have to be the same.

        Raises:
            ValueError: eps is out of range.
        """
        checked_eps(eps)
        made, pace = copy(self), Pace()
        made.layers = [
            ForgettingCacheLayer(layer.seat, layer.held.fresh(eps, pace)) if isinstance(layer, ForgettingCacheLayer)
            else DynamicLayer() for layer in self.layers
        ]  # fmt: skip
        return made

    def crop(self, tokens_to_remove: int) -> None:
        """Forget some of the last tokens, as :meth:`gape.hf.attending.AttendingLayer.crop` says: all layers, or none.

        Raises:
            ValueError: keys were dropped that a token there could see.
        """
        for layer in self.layers:
            if isinstance(layer, ForgettingCacheLayer):
                layer.held.check_length(layer.cropped(tokens_to_remove))
        super().crop(tokens_to_remove)

    @property
    def forgetting(self) -> list[ForgettingLayer]:
        """The layers that forget."""
        return [layer.held for layer in self.layers if isinstance(layer, ForgettingCacheLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes that are held, room to grow included; those of layers that do not forget too."""
        plain = [layer for layer in self.layers if not isinstance(layer, ForgettingCacheLayer)]
        return sum(held.nbytes for held in self.forgetting) + bytes_of(plain)


def bytes_of(layers: Iterable[Any]) -> int:
    """Bytes of the keys and values that layers of a cache of `transformers` hold."""
    held: list[Tensor] = [x for layer in layers if layer.keys is not None for x in (layer.keys, layer.values)]
    return sum(x.nbytes for x in held)


def pads(real: Tensor | None, embeddings: Tensor) -> Tensor | None:
    """Which of some tokens (B, n, E) are no pads, bool (B, n), by a mask (B, cached + n); None: all are.

    Raises:
        ValueError: a mask of another kind, or pads behind a token.
    """
    if real is None:
        return None
    if real.dim() != 2:
        raise invalid_argument("attention_mask", real, "(batch, tokens), 0 for pads, where the cache forgets")
    there = real != 0
    refuse_pads_behind(there)
    return None if bool(there.all()) else there[:, -embeddings.size(1) :]


def _refuse_without_floors(seats: list[Any], partial: bool) -> None:
    rates = [torch.zeros(1) if seat is None else least_rates(seat) for seat in seats]
    bare = [(layer, head) for layer, each in enumerate(rates) for head in torch.nonzero(each <= 0).flatten().tolist()]
    if bare and not (partial and any(bool((each > 0).any()) for each in rates)):
        hint = "in some head" if partial else "everywhere, or partial=True"
        raise ValueError(
            f"model: nothing ever fades in layer {bare[0][0]}, head {bare[0][1]}; expected gates with a gate_floor and "
            f"an amplitude above 0 {hint}"
        )


def places_of(model: Any, *, limited: bool, carried: bool) -> list[tuple[Any, Any]]:
    """For each layer of a model what attends there, None without gates, and its limits, or what they follow from.

    Args:
        model: one with gates.
        limited: whether limits are worked out.
        carried: whether cached keys have room for the bias.

    Raises:
        ValueError: no layer has gates, or one that has caps its logits or has a window.
    """
    from gape.hf.attention import InjectedAttention  # noqa: PLC0415
    from gape.hf.modeling_gape import GapeForCausalLM  # noqa: PLC0415

    if isinstance(model, GapeForCausalLM):
        return [(block.attention, block.attention_norm) for block in model.gpt.blocks()]
    found: dict[int, tuple[Seat, Any]] = {}
    for parent in model.modules():
        for module in parent.children():
            if isinstance(module, InjectedAttention) and module.gape is not None:
                place: Any = module
                found[place.layer_idx] = _injected(model, parent, place, limited=limited, carried=carried)
    if not found:
        raise invalid_argument(
            "model", type(model).__name__, "one with gates: of gape.hf.inject, or a gape.hf.GapeForCausalLM"
        )
    return [found.get(number, (None, None)) for number in range(model.config.num_hidden_layers)]


def _injected(model: Any, parent: Any, module: Any, *, limited: bool, carried: bool) -> tuple[Seat, Any]:
    wiring, number = module.gape_wiring, module.layer_idx
    layout = wiring.family.layout
    if module.softcap is not None:
        raise ValueError(f"model: layer {number} caps its logits, expected none that does")
    if has_window(module):
        raise ValueError(f"model: layer {number} has a sliding window, expected none that has one")
    n_heads, n_kv_heads, width = layout.sizes(module)
    # Keys of a loaded model have no coordinates to spare for the bias; kernels read whole pieces of memory.
    room = ROOM + -(width + ROOM) % PIECE if carried else 0
    seat = Seat(
        n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=width + room, content_dim=width, scale=layout.scale(module),
        context_length=wiring.context_length, gates=module.gape, layer=module,
        position=f"{wiring.family.model_type}+gape", reserve=room,
    )  # fmt: skip
    norm = next((getattr(parent, name) for name in NORMS if hasattr(parent, name)), None)
    if limited:
        stretch, evenly = _stretch(model, module)
        return seat, of_module(module, seat, norm, stretch, evenly=evenly)
    return seat, norm


def has_window(module: Any) -> bool:
    """Whether a layer sees the latest tokens only, wherever its family says so."""
    if hasattr(module, "sliding_window"):
        return bool(module.sliding_window)
    kinds = getattr(module.config, "layer_types", None)
    if kinds is not None:
        return bool(kinds[module.layer_idx] != "full_attention")
    return bool(getattr(module.config, "sliding_window", None))


def _stretch(model: Any, module: Any) -> tuple[float, bool]:
    """The most that the rotation of a layer multiplies q and k by, and whether all coordinates alike, by 1 or more."""
    if module.gape_wiring.scheme is not None:
        return float(getattr(module.gape_wiring.scheme, "attention_scale", 1.0)), True
    # A model may have several rotations, with names before the word; the one that stretches most bounds all.
    told = (item for rotation in model.modules() for item in vars(rotation).items())
    factors = [1.0, *(float(value) for name, value in told if name.endswith("attention_scaling"))]
    most = max(factors)
    return most, min(factors) == 1.0 and (most == 1.0 or rotated_part(model.config) == 1.0)
