"""What a key needs later, its landmark and its position, carried in coordinates of the key itself.

A cache of `transformers` knows keys and values. Whatever it does with a key (append it, drop it from a window, reorder
it for beams, move it to another device) happens to its landmark and position too. Both come back exactly: the landmark
in float32, the position within :func:`furthest`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gape.ops import inputs
from gape.ops.columns import pieces
from gape.ops.inputs import bias_dtype

#: Dtype → bits of a piece, pieces of a landmark, base of a position's digits and how many there are.
_FORMS = {
    torch.bfloat16: (8, 3, 256, 3),
    torch.float16: (11, 3, 2048, 2),
    torch.float32: (24, 1, 65536, 2),
    torch.float64: (53, 1, 65536, 2),
}


def columns(dtype: torch.dtype) -> int:
    """Coordinates that a key of a dtype grows by."""
    _, parts, _, digits = _FORMS[dtype]
    return parts + digits


def furthest(dtype: torch.dtype) -> int:
    """The position furthest from 0 that keys of a dtype can carry: 2²⁴ − 1 in bfloat16, 2²² − 1 in float16."""
    _, _, base, digits = _FORMS[dtype]
    return int(base**digits) - 1


def pack(k: Tensor, landmark: Tensor | None, positions: Tensor) -> Tensor:
    """Keys with their landmarks and positions.

    Args:
        k: (B, Hk, N, D).
        landmark: (B, Hk, N) in float32 or float64; None stands for zeros.
        positions: integer (N,) or (B, N), no further from 0 than :func:`furthest`.

    Returns:
        (B, Hk, N, D + columns) in k's dtype.

    Raises:
        ValueError: positions beyond that, where they can be read without waiting for a device.
    """
    if inputs.readable(positions):
        inputs.position_values("positions", positions, furthest(k.dtype))
    bits, parts, base, digits = _FORMS[k.dtype]
    if landmark is None:
        landmark = torch.zeros(k.shape[:-1], dtype=bias_dtype(k.dtype), device=k.device)
    carried = pieces(landmark.to(bias_dtype(k.dtype)), bits, parts)
    rest = positions.to(torch.int64)
    for place in range(digits):
        last = place == digits - 1
        digit = rest if last else rest % base
        rest = rest // base
        carried.append((digit if digit.dim() == 1 else digit.unsqueeze(1)).expand(k.shape[:-1]))
    return torch.cat([k, torch.stack([part.to(k.dtype) for part in carried], dim=-1)], dim=-1)


def unpack(packed: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(k, landmark, positions) of what `pack` returned, k being `width` wide; positions are int64 (B, N)."""
    _, parts, base, digits = _FORMS[packed.dtype]
    k, landmark, places = torch.split(packed, [width, parts, digits], dim=-1)
    # All heads of a row have the same positions.
    written = places[:, 0].to(torch.float64 if packed.device.type != "mps" else torch.float32).round().to(torch.int64)
    positions = written[..., -1]
    for place in reversed(range(digits - 1)):
        positions = positions * base + written[..., place]
    return k, landmark.to(bias_dtype(packed.dtype)).sum(-1), positions
