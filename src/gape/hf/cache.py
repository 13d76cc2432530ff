"""Keys with gates in caches of `transformers`.

Such a cache knows keys and values. A key needs its landmark and its position later, so both are packed into
coordinates of the key itself. Whatever the cache does with a key (append it, drop it from a window, reorder it for
beams, move it to another device) happens to its landmark and position too. Both come back exactly: the landmark in
float32, the position within :func:`furthest`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.cache.kv import CachedKeys
from gape.hf.families import CACHE_POSITIONS, TRANSFORMERS_4
from gape.ops import inputs
from gape.ops.columns import pieces
from gape.ops.inputs import bias_dtype
from gape.utils.validation import invalid_argument

#: Layers of caches whose handling of keys is tested here, by name.
LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
#: The attribute of a cache's layer in which every head has dropped keys of its own, so that positions differ by head.
KEYS_BY_HEAD = "gape_keys_by_head"
#: Dtype → bits of a piece, pieces of a landmark, base of a position's digits and how many there are.
_FORMS = {
    torch.bfloat16: (8, 3, 256, 3),
    torch.float16: (11, 3, 2048, 2),
    torch.float32: (24, 1, 65536, 2),
    torch.float64: (53, 1, 65536, 2),
}


def extra_width(dtype: torch.dtype) -> int:
    """Coordinates that packing adds to a key of a dtype."""
    _, parts, _, digits = _FORMS[dtype]
    return parts + digits


def furthest(dtype: torch.dtype) -> int:
    """The position furthest from 0 that keys of a dtype can carry: 2²⁴ − 1 in bfloat16, 2²² − 1 in float16."""
    _, _, base, digits = _FORMS[dtype]
    return int(base**digits) - 1


def pack(k: Tensor, landmark: Tensor | None, positions: Tensor) -> Tensor:
    """Keys (B, Hk, N, D) with their landmarks and positions: (B, Hk, N, D + extra_width) in k's dtype.

    Landmarks are (B, Hk, N) in float32 or float64; None stands for zeros. Positions are integer (N,) or (B, N), no
    further from 0 than :func:`furthest`. Beyond that keys are NaN on a device and in a graph, and a ValueError where
    positions can be read without waiting for a device.
    """
    near = inputs.near_positions(positions, furthest(k.dtype))
    if near is not positions:
        # Not the landmarks: layers without gates have none.
        k = k.masked_fill(near.isnan().reshape(-1, 1, near.size(-1), 1), torch.nan)
    bits, parts, base, digits = _FORMS[k.dtype]
    if landmark is None:
        landmark = torch.zeros(k.shape[:-1], dtype=bias_dtype(k.dtype), device=k.device)
    columns = pieces(landmark.to(bias_dtype(k.dtype)), bits, parts)
    rest = positions.to(torch.int64)
    for place in range(digits):
        digit = rest if place == digits - 1 else rest % base
        rest = rest // base
        columns.append((digit if digit.dim() == 1 else digit.unsqueeze(1)).expand(k.shape[:-1]))
    return torch.cat([k, torch.stack([part.to(k.dtype) for part in columns], dim=-1)], dim=-1)


def unpack(packed: Tensor, width: int, *, by_head: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(k, landmark, positions) of what `pack` returned, k being `width` wide.

    Positions are int64 (B, N), or (B, Hk, N) by head.
    """
    _, parts, base, digits = _FORMS[packed.dtype]
    k, landmark, places = torch.split(packed, [width, parts, digits], dim=-1)
    # All heads of a sample have the same positions, unless keys were dropped by head.
    places = places if by_head else places[:, 0]
    written = places.to(torch.float64 if packed.device.type != "mps" else torch.float32).round().to(torch.int64)
    positions = written[..., -1]
    for place in reversed(range(digits - 1)):
        positions = positions * base + written[..., place]
    return k, landmark.to(bias_dtype(packed.dtype)).sum(-1), positions


@dataclass(frozen=True, kw_only=True)
class PackedKeys:
    """A layer, by number, of a cache of `transformers` whose keys carry their landmarks and positions.

    Attributes:
        cache_position: integer (N,), for caches of transformers before 5.4.
        key_width: the least width of a cached key; it is wider where its landmark and position take more.
        stores_positions: whether keys carry their positions without gates too.
    """

    cache: Any
    layer: int
    cache_position: Tensor | None = None
    key_width: int = 0
    stores_positions: bool = False

    @property
    def side(self) -> None:
        """None: no scheme that runs with such a cache adds up numbers of earlier keys."""

    def append(
        self, k: Tensor, v: Tensor, landmark: Tensor | None, positions: Tensor | None, documents: Tensor | None = None
    ) -> CachedKeys:
        """Add keys (B, Hk, N, D), values and landmarks (B, Hk, N) at positions (N,) or (B, N), and return all.

        Landmarks are None without gates. Positions come back as None where keys do not carry them, as (B, Hk, N) where
        heads dropped keys of their own; they may then not go back.
        """
        assert positions is not None
        cache, layer = self.cache, self.layer
        static = _layer_kind(cache, layer).startswith("Static")
        pads_values = TRANSFORMERS_4 and static
        learns = k.requires_grad or (landmark is not None and landmark.requires_grad)
        first = torch.is_grad_enabled() and learns and not int(cache.get_seq_length(layer))
        plain = landmark is None and not self.stores_positions
        packed = k if plain else pack(k, landmark, positions)
        width = packed.size(-1)
        # Static layers of transformers 4 allocate values as wide as keys.
        cached_width = max(width, self.key_width, v.size(-1) if pads_values else 0)
        cached_v = F.pad(v, (0, cached_width - v.size(-1))) if pads_values else v
        more = ({"cache_position": self.cache_position},) if CACHE_POSITIONS else ()
        keys, values = cache.update(F.pad(packed, (0, cached_width - width)), cached_v, layer, *more)
        if first:
            # Nothing was cached before, so gradients need not pass the packing.
            return CachedKeys(k, v, landmark, positions, None)
        values = values[..., : v.size(-1)]
        if plain:
            return CachedKeys(keys[..., :width], values, None, None, None)
        by_head = getattr(cache.layers[layer], KEYS_BY_HEAD, False)
        k, cached_landmark, k_positions = unpack(keys[..., :width], k.size(-1), by_head=by_head)
        if by_head and bool((k_positions.amax((1, 2)) > positions.amax(-1)).any()):
            raise invalid_argument("position_ids", positions, "those of the text: a press has shortened the cache")
        return CachedKeys(k, values, None if landmark is None else cached_landmark, k_positions, None)


def refuse_uneven(cache: Any, layer: int, n: int) -> None:
    """Refuse a cache in which only some layers have the tokens of an earlier call that broke off.

    `layer` is called with n new tokens, which those before it have already. The length is not read in a compiled graph,
    nor from a device other than the CPU, which would have to be waited for.
    """
    if torch.compiler.is_compiling():
        return
    # Such a call ends at some layer, so the first and the last differ.
    lengths = []
    for number in sorted({0, layer, max(layer, len(_layers(cache)) - 1)}):
        length = cache.get_seq_length(number)
        if isinstance(length, Tensor) and length.device.type != "cpu":
            return
        lengths.append(int(length) - (n if number < layer else 0))
    if min(lengths) != max(lengths):
        raise ValueError(
            f"past_key_values: layers hold from {min(lengths)} to {max(lengths)} tokens, expected as many in each; "
            "a call broke off, begin again with a new cache"
        )


def _layers(cache: Any) -> Any:
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise invalid_argument("past_key_values", cache, "a cache of layers, such as DynamicCache or StaticCache")
    return layers


def _layer_kind(cache: Any, layer: int) -> str:
    """The class of a cache's layer by name; refused where it may do more to keys than is tested, such as round them."""
    layers = _layers(cache)
    kind = type(layers[layer]) if layer < len(layers) else getattr(cache, "layer_class_to_replicate", None)
    name = "DynamicLayer" if kind is None else kind.__name__
    if name not in LAYERS:
        raise ValueError(f"past_key_values: got layers of {name}, expected one of {', '.join(LAYERS)}")
    return name
