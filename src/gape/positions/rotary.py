"""Schemes that rotate q and k, or leave them unchanged: NoPE, RoPE, p-RoPE, PI, NTK, YaRN, LongRoPE.

Rotary schemes differ in their frequencies alone. Pair k of a head is (x_k, x_{k+D/2}), the half-split order of
`transformers`, and is rotated by position · inv_freq_k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gape.ops import inputs
from gape.ops.prologue import OnePass
from gape.positions.base import Scheme, Side, cacheable, keyword_defaults, stream_of
from gape.utils.constant import Constant
from gape.utils.validation import above, even, finite, invalid_argument, positive_number

#: Inverse frequencies, one per pair, and the factor on cos and sin.
Spectrum = tuple[list[float], float]

#: Most tokens whose angles are cached for the next layer. Beside attention over more, computing them again is cheap.
LONGEST_CACHED = 65_536

#: Angles by the tensor of positions, as long as that exists: the version of the positions, cosines and sines by
#: frequencies, scale and stream.
_Angles = dict[tuple[tuple[float, ...], float, int], tuple[int, tuple[Tensor, Tensor]]]
_angles: MutableMapping[Tensor, _Angles] = WeakTensorKeyDictionary()
_shared_positions: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()


def share_angles(positions: Tensor) -> None:
    """Let the layers of one step share the angles of these positions, also while the step is captured."""
    _shared_positions[positions] = True


class Rotary(Scheme):
    """Rotates q and k by angles proportional to position; adds nothing to the logits.

    A subclass gives `frequencies(head_dim, context_length, *, ...)`, whose keyword-only arguments are the
    options of the scheme. It is called once: the frequencies never depend on the length at hand, so keys
    rotated earlier and cached stay right.

    Attributes:
        attention_scale: factor on both cos and sin, 1 for most schemes.

    Raises:
        ValueError: head_dim is odd, or an option is out of its range.
    """

    #: Maps (head_dim, context_length) and the options to a Spectrum.
    frequencies: ClassVar[Callable[..., Spectrum]]

    def __init__(
        self,
        *,
        n_heads: int,
        head_dim: int,
        n_kv_heads: int | None = None,
        context_length: float | None = None,
        n_embd: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            n_heads=n_heads,
            head_dim=even("head_dim", head_dim),
            n_kv_heads=n_kv_heads,
            context_length=context_length,
            n_embd=n_embd,
        )
        values, self.attention_scale = type(self).frequencies(head_dim, context_length, **options)
        self._spectrum = Constant(values)
        # Rows of a multiple of eight columns are read fast; the pairs added are not rotated.
        self._padded = Constant([*values, *[0.0] * (-len(values) % 8)])

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Names and defaults of the options, read off `frequencies`."""
        return keyword_defaults(cls.frequencies)

    @property
    def inv_freq(self) -> Tensor:
        """Inverse frequencies (D/2,), float64 on the CPU whatever dtype or device the module went to."""
        return self._spectrum.on(torch.device("cpu"))

    def queries(self, q: Tensor, positions: Tensor, x: Tensor | None = None) -> tuple[Tensor, Side]:
        """Rotate q (B, Hq, N, D) at `positions` (N,) or (B, N); no side."""
        return self.rotate(q, positions), None

    def keys(self, k: Tensor, positions: Tensor, x: Tensor | None = None, past: Side = None) -> tuple[Tensor, Side]:
        """Rotate k (B, Hk, N, D) at `positions` (N,) or (B, N); no side."""
        return self.rotate(k, positions), None

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, times `attention_scale`, each (..., N, D/2) in `dtype`.

        The angles are float64: in float32, position 131,072 times frequency 1 is already off by 0.004.
        """
        return _cos_sin(positions, self._spectrum, self.attention_scale, dtype)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (B, H, N, D) at `positions` (N,) or (B, N); returns x's shape and dtype.

        Raises:
            ValueError: x has another last dimension than head_dim.
        """
        if not isinstance(x, Tensor) or x.dim() != 4 or x.size(-1) != self.head_dim:
            raise invalid_argument("x", x, f"a tensor (batch, heads, tokens, {self.head_dim})")
        inputs.positions("positions", positions, x.size(0), x.size(2), x.device)
        cos, sin = self.cos_sin(positions, inputs.bias_dtype(x.dtype))
        if positions.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def one_pass(self, n: int, device: torch.device) -> OnePass | None:
        """The angles of n tokens in index order, with columns that rotate nothing up to a multiple of eight."""
        padded, scale = self._padded, self.attention_scale
        if torch.compiler.is_compiling():
            return OnePass(_in_order(padded, scale, n, device), None)
        if type(torch.empty(0, device=device)) is not Tensor:
            # A fake tensor is valid only in the trace it was made in.
            return OnePass(_in_order(Constant(padded.values), scale, n, device), None)
        # Also for a capture that comes later, which makes its angles itself and can copy nothing to its device.
        padded.on(device)
        if n > LONGEST_CACHED or not cacheable(device):
            return OnePass(_in_order(padded, scale, n, device), None)
        return OnePass(_cached(padded.values, scale, n, device, stream_of(device)), None)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`cos_sin` in float32, computed once for all layers that pass the same tensor."""
        # A tensor of inference_mode has no version that tells whether it was written to.
        if positions.is_inference() or not (cacheable(positions.device) or positions in _shared_positions):
            return self.cos_sin(positions)
        cached = _angles.setdefault(positions, {})
        key = (self._spectrum.values, self.attention_scale, stream_of(positions.device))
        if key not in cached or cached[key][0] != positions._version:
            cached[key] = (positions._version, self.cos_sin(positions))
        return cached[key][1]

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"head_dim={self.head_dim}, attention_scale={self.attention_scale:g}"


def _cos_sin(
    positions: Tensor, frequencies: Constant, scale: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `positions` times each frequency, times `scale`: (..., N, frequencies) in `dtype`."""
    device = positions.device
    # Apple's GPUs have no float64 at all.
    wide_device = torch.device("cpu") if device.type == "mps" else device
    angles = positions.to(wide_device, torch.float64).unsqueeze(-1) * frequencies.on(wide_device)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype).to(device), sin.to(dtype).to(device)


def _in_order(frequencies: Constant, scale: float, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The angles of n tokens in index order."""
    return _cos_sin(torch.arange(n, device=device), frequencies, scale)


@lru_cache(maxsize=4)
def _cached(
    frequencies: tuple[float, ...], scale: float, n: int, device: torch.device, stream: int
) -> tuple[Tensor, Tensor]:
    """The angles of n tokens, shared by layers and passes; not to be written to. Each stream has its own."""
    # A tensor first made under inference_mode could not be saved for a later backward pass.
    with torch.inference_mode(False):
        return _in_order(Constant(frequencies), scale, n, device)


def spectrum(head_dim: int, theta: float) -> list[float]:
    """theta^(−2k/D) for pair k = 0 … D/2 − 1.

    Raises:
        ValueError: head_dim is odd or theta is not positive.
    """
    even("head_dim", head_dim)
    positive_number("theta", theta)
    return [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]


class NoPE(Scheme):
    """NoPE: no position beyond causality (Kazemnejad et al., arXiv 2305.19466). Changes neither q, k nor the logits."""


class RoPE(Rotary):
    """RoPE (Su et al., arXiv 2104.09864): rotates every pair, pair k by position · theta^(−2k/D)."""

    @staticmethod
    def frequencies(head_dim: int, context_length: float | None = None, *, theta: float = 10000.0) -> Spectrum:
        """The full spectrum, scale 1."""
        return spectrum(head_dim, theta), 1.0


class PRoPE(Rotary):
    """p-RoPE (Barbero et al., arXiv 2410.06205): rotates the fastest `fraction` of RoPE's pairs, and no others."""

    @staticmethod
    def frequencies(
        head_dim: int, context_length: float | None = None, *, theta: float = 10000.0, fraction: float = 0.75
    ) -> Spectrum:
        """RoPE's spectrum with zeros from pair int(fraction · D // 2) on, scale 1.

        Raises:
            ValueError: fraction lies outside [0, 1].
        """
        if not 0 <= finite("fraction", fraction) <= 1:
            raise invalid_argument("fraction", fraction, "a number from 0 to 1")
        full = spectrum(head_dim, theta)
        rotated = int(fraction * head_dim // 2)
        return full[:rotated] + [0.0] * (len(full) - rotated), 1.0


class PI(Rotary):
    """Position interpolation (Chen et al., arXiv 2306.15595): RoPE at position / factor."""

    @staticmethod
    def frequencies(
        head_dim: int, context_length: float | None = None, *, theta: float = 10000.0, factor: float = 4.0
    ) -> Spectrum:
        """RoPE's spectrum divided by `factor`, scale 1.

        Raises:
            ValueError: factor is not positive.
        """
        positive_number("factor", factor)
        return [frequency / factor for frequency in spectrum(head_dim, theta)], 1.0


class NTK(Rotary):
    """NTK-aware scaling, the static form (bloc97, 2023; arXiv 2309.00071): RoPE with a larger base.

    The slowest pair is interpolated by `factor`, the fastest not at all.
    """

    @staticmethod
    def frequencies(
        head_dim: int, context_length: float | None = None, *, theta: float = 10000.0, factor: float = 4.0
    ) -> Spectrum:
        """RoPE's spectrum for theta · factor^(D/(D−2)), scale 1.

        Raises:
            ValueError: factor is not positive, or head_dim is below 4, where the exponent has no value.
        """
        even("head_dim", head_dim, at_least=4)
        stretch = positive_number("factor", factor) ** (head_dim / (head_dim - 2))
        return spectrum(head_dim, positive_number("theta", theta) * stretch), 1.0


class YaRN(Rotary):
    """YaRN (Peng et al., arXiv 2309.00071): interpolation by wavelength, and a sharper softmax.

    Keeps pairs that turn often within the training length, interpolates those that hardly turn.
    """

    @staticmethod
    def frequencies(
        head_dim: int,
        context_length: float | None = None,
        *,
        theta: float = 10000.0,
        factor: float = 4.0,
        fast_rotations: float = 32.0,
        slow_rotations: float = 1.0,
        truncate: bool = True,
    ) -> Spectrum:
        """RoPE's spectrum, divided by `factor` along a ramp over the pairs; scale 0.1 · ln(factor) + 1.

        The ramp runs from the pair that makes `fast_rotations` turns in `context_length` tokens (kept) to the
        one that makes `slow_rotations` (divided), both rounded outwards to whole pairs if `truncate`.

        Raises:
            ValueError: context_length is None, or an option is not positive, or theta is not greater than 1,
                or fast_rotations does not exceed slow_rotations.
        """
        if context_length is None:
            raise invalid_argument("context_length", None, "the training length, which yarn needs")
        above("theta", theta, 1.0)
        positive_number("factor", factor)
        above("fast_rotations", fast_rotations, positive_number("slow_rotations", slow_rotations))
        turns_of_first = positive_number("context_length", context_length) / (2 * math.pi)

        def pair_turning(rotations: float) -> float:
            return head_dim * math.log(turns_of_first / rotations) / (2 * math.log(theta))

        first, last = pair_turning(fast_rotations), pair_turning(slow_rotations)
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        # A ramp of no width would divide by zero; 0.001 of a pair is a step in all but name.
        width = last - first or 0.001
        unchanged = [1 - min(max((pair - first) / width, 0.0), 1.0) for pair in range(head_dim // 2)]
        full = spectrum(head_dim, theta)
        scaled = [f * keep + f / factor * (1 - keep) for f, keep in zip(full, unchanged, strict=True)]
        return scaled, 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


class LongRoPE(Rotary):
    """LongRoPE (Ding et al., arXiv 2402.13753): RoPE with each pair's frequency divided by its own factor.

    One list holds for all lengths. The published models switch between a short and a long list when the
    input passes the training length, which would make cached keys disagree with new ones.
    """

    @staticmethod
    def frequencies(
        head_dim: int,
        context_length: float | None = None,
        *,
        theta: float = 10000.0,
        factor: float = 1.0,
        factors: Sequence[float] | None = None,
    ) -> Spectrum:
        """RoPE's spectrum divided by `factors`; scale sqrt(1 + ln(factor) / ln(context_length)) above factor 1.

        Raises:
            ValueError: factors has not D/2 positive entries (None means all ones), or factor is not positive,
                or factor exceeds 1 and context_length is None or not greater than 1.
        """
        full = spectrum(head_dim, theta)
        divisors = [1.0] * len(full) if factors is None else list(factors)
        if len(divisors) != len(full):
            raise invalid_argument("factors", factors, f"head_dim / 2 = {len(full)} numbers")
        scaled = [f / positive_number("factors", divisor) for f, divisor in zip(full, divisors, strict=True)]
        if positive_number("factor", factor) <= 1:
            return scaled, 1.0
        if context_length is None:
            raise invalid_argument("context_length", None, "the training length, which longrope needs above factor 1")
        return scaled, math.sqrt(1 + math.log(factor) / math.log(above("context_length", context_length, 1.0)))
