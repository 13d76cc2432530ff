"""Cosines and sines of positions, computed once for all layers that rotate by them.

Shapes: B batch, N tokens, P pairs, R rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gape.positions.base import cacheable, stream_of
from gape.utils.constant import Constant

#: Most tokens whose angles are cached for the next layer. Beside attention over more, computing them again is cheap.
LONGEST_CACHED = 65_536
#: The largest position that a cache in pages holds, int32: log_scale stays below its factor there.
LARGEST_POSITION = 2**31 - 1

CosSin = tuple[Tensor, Tensor]
#: Angles by the tensor of positions, as long as that exists: the version of the positions, cosines and sines by rows
#: and stream.
_angles: MutableMapping[Tensor, dict[Any, tuple[int, CosSin]]] = WeakTensorKeyDictionary()
_shared_positions: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()


def share_angles(positions: Tensor) -> None:
    """Let the layers of one step share the angles of these positions, also while the step is captured."""
    _shared_positions[positions] = True


def shares_angles(positions: Tensor) -> bool:
    """Whether :func:`share_angles` was called for these positions."""
    return positions in _shared_positions


class Row(NamedTuple):
    """One way to rotate: a frequency for each pair, and a factor on cosines and sines.

    `log_base` is T of queries whose scores grow by log i / log T behind position T; 0 for all others.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    log_base: float = 0.0

    def padded(self) -> Row:
        """The same with pairs that are not rotated, up to a multiple of eight: such rows are read fast."""
        return self._replace(frequencies=(*self.frequencies, *(0.0,) * (-len(self.frequencies) % 8)))


class AngleTable:
    """Cosines and sines of one way to rotate, or of several beside each other, in an order of their own."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = tuple(sorted(set(rows)))
        self._frequencies = [Constant(row.frequencies) for row in self.rows]
        self._alone = [AngleTable([row]) for row in self.rows] if len(self.rows) > 1 else []

    def on(self, device: torch.device) -> None:
        """Have the frequencies on a device: a later capture can copy nothing to it."""
        for frequencies in self._frequencies:
            frequencies.on(device)

    def at(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> CosSin:
        """Cosines and sines at positions (N,) or (B, N): (..., N, P) in `dtype`, (R, ..., N, P) of several rows.

        The angles are float64: in float32, position 131,072 times frequency 1 is already off by 0.004.
        """
        each = [_cos_sin(positions, *pair, dtype) for pair in zip(self.rows, self._frequencies, strict=True)]
        return each[0] if len(each) == 1 else _stacked(each)

    def shared(self, positions: Tensor) -> CosSin:
        """:meth:`at` in float32, computed once for all tables that are asked for the same tensor of positions."""
        # A tensor of inference_mode has no version that tells whether it was written to.
        if positions.is_inference() or not (cacheable(positions.device) or shares_angles(positions)):
            return self.at(positions)
        cached = _angles.setdefault(positions, {})
        key = (self.rows, stream_of(positions.device))
        if key not in cached or cached[key][0] != positions._version:
            # Single rows are shared with tables of other rows.
            rows = [row.shared(positions) for row in self._alone]
            angles = _stacked(rows) if rows else self.at(positions)
            cached[key] = (positions._version, angles)
        return cached[key][1]

    def in_order(self, n: int, device: torch.device) -> CosSin:
        """Cosines and sines of n tokens in index order; not to be written to."""
        if torch.compiler.is_compiling():
            return self.at(torch.arange(n, device=device))
        if type(torch.empty(0, device=device)) is not Tensor:
            # A fake tensor is valid only in the trace it was made in.
            return AngleTable(self.rows).at(torch.arange(n, device=device))
        self.on(device)
        if n > LONGEST_CACHED or not cacheable(device):
            return self.at(torch.arange(n, device=device))
        return _cached(self.rows, n, device, stream_of(device))


def _stacked(each: list[CosSin]) -> CosSin:
    cos, sin = zip(*each, strict=True)
    return torch.stack(cos), torch.stack(sin)


def _cos_sin(positions: Tensor, row: Row, frequencies: Constant, dtype: torch.dtype) -> CosSin:
    """Cosine and sine of `positions` times each frequency, times the scale: (..., N, P) in `dtype`."""
    device = positions.device
    # Apple's GPUs have no float64 at all.
    wide_device = torch.device("cpu") if device.type == "mps" else device
    wide = positions.to(wide_device, torch.float64).unsqueeze(-1)
    angles = wide * frequencies.on(wide_device)
    cos, sin = angles.cos(), angles.sin()
    if row.scale != 1.0:
        cos, sin = cos * row.scale, sin * row.scale
    if row.log_base:
        growth = log_growth(wide, row.log_base)
        cos, sin = cos * growth, sin * growth
    return cos.to(dtype).to(device), sin.to(dtype).to(device)


def log_growth(positions: Tensor, context_length: float) -> Tensor:
    """log i / log T at positions i > T, exactly 1 at others."""
    growth = positions.clamp(min=context_length).log() / math.log(context_length)
    return torch.where(positions > context_length, growth, 1.0)


@lru_cache(maxsize=8)
def _cached(rows: tuple[Row, ...], n: int, device: torch.device, stream: int) -> CosSin:
    """The angles of n tokens, shared by layers and passes; not to be written to. Each stream has its own."""
    # A tensor first made under inference_mode could not be saved for a later backward pass.
    with torch.inference_mode(False):
        return AngleTable(rows).at(torch.arange(n, device=device))
