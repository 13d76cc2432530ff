"""Schemes that rotate q and k, or leave them unchanged: NoPE, RoPE, HoPE, p-RoPE, PI, NTK, YaRN, LongRoPE, SWAN.

Rotary schemes differ in their frequencies alone. Pair k of a head is (x_k, x_{k+D/2}), the half-split order of
`transformers`, and is rotated by position · inv_freq_k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from gape.ops import inputs
from gape.ops.prologue import Angles, OnePass
from gape.positions.angles import LARGEST_POSITION, AngleTable, Row
from gape.positions.base import SIZES, Scheme, Side, Sizes, distance, keyword_defaults
from gape.utils.constant import Constant
from gape.utils.validation import above, even, finite, flag, invalid_argument, positive_number, whole

#: Inverse frequencies, one per pair, and the factor on cos and sin.
Spectrum = tuple[list[float], float]


class Rotary(Scheme):
    """Rotates q and k by angles proportional to position; adds nothing to the logits.

    A subclass gives `frequencies(head_dim, context_length, *, ...)`, whose keyword-only arguments are the
    options of the scheme. It is called once: the frequencies never depend on the length at hand, so keys
    rotated earlier and cached stay right.

    Args:
        head_positions: for each key head the scheme that rotates it and its query heads, by name in :func:`build`, as a
            class here; one stands for all heads, None for this scheme.
        log_scale: whether scores of queries at positions i > T are multiplied by log i / log T, for all heads or one
            for each key head (after SSMax, arXiv 2501.19399). A bias, such as that of gates, is not multiplied.
        **options: those of `frequencies`, and the sizes of :class:`gape.positions.Scheme`.

    Attributes:
        attention_scale: factor on both cos and sin, the largest of all heads; 1 for most schemes.

    Raises:
        ValueError: head_dim is odd, an option is out of its range, a list has not one entry for each key head, or
            log_scale without a context_length above 1.
    """

    #: Maps (head_dim, context_length) and the options to a Spectrum.
    frequencies: ClassVar[Callable[..., Spectrum]]

    def __init__(
        self,
        *,
        head_positions: type[Scheme] | Sequence[type[Scheme]] | None = None,
        log_scale: bool | Sequence[bool] = False,
        **options: Any,
    ) -> None:
        sizes = {name: options.pop(name) for name in SIZES if name in options}
        super().__init__(**sizes)
        even("head_dim", self.head_dim)
        own = self._row(type(self), options)
        self._spectrum = Constant(own.frequencies)
        kinds = _of_heads("head_positions", head_positions, self.n_kv_heads)
        keys = [own if kind is None else self._row(kind, options) for kind in kinds]
        self.log_scale = tuple(flag("log_scale", x) for x in _of_heads("log_scale", log_scale, self.n_kv_heads))
        base = above("context_length", self.context_length, 1.0) if any(self.log_scale) else 0.0
        queries = [
            row._replace(log_base=base) if grows else row for row, grows in zip(keys, self.log_scale, strict=True)
        ]
        self.attention_scale = max(row.scale for row in keys)
        self._table = AngleTable([*queries, *keys])
        self._padded = AngleTable([row.padded() for row in self._table.rows])
        groups = self.n_heads // self.n_kv_heads
        self._query_rows = Constant(self._table.rows.index(row) for row in queries for _ in range(groups))
        self._key_rows = Constant(self._table.rows.index(row) for row in keys)
        self._rows = Constant([*self._query_rows.values, *self._key_rows.values])

    def _row(self, kind: type[Scheme], options: Mapping[str, Any]) -> Row:
        """How heads under a scheme rotate, with those of the options that it knows."""
        if issubclass(kind, NoPE):
            return Row((0.0,) * (self.head_dim // 2))
        if not issubclass(kind, Rotary):
            raise invalid_argument("head_positions", kind.__name__, "schemes that rotate, or nope")
        known = keyword_defaults(kind.frequencies)
        given = options if kind is type(self) else {name: x for name, x in options.items() if name in known}
        values, scale = kind.frequencies(self.head_dim, self.context_length, **given)
        return Row(tuple(values), scale)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Names and defaults of the options: those of `frequencies`, and those of all rotary schemes."""
        return {**keyword_defaults(cls.frequencies), "head_positions": None, "log_scale": False}

    @property
    def inv_freq(self) -> Tensor:
        """Inverse frequencies (D/2,) of the scheme itself, float64 on the CPU whatever the module's dtype."""
        return self._spectrum.on(torch.device("cpu"))

    @property
    def growth(self) -> list[float]:
        """The most that log_scale multiplies the queries of each query head by at any position of a cache, (Hq,)."""
        groups, base = self.n_heads // self.n_kv_heads, self.context_length
        most = [math.log(LARGEST_POSITION) / math.log(base) if x and base else 1.0 for x in self.log_scale]
        return [max(factor, 1.0) for factor in most for _ in range(groups)]

    def queries(self, q: Tensor, positions: Tensor, x: Tensor | None = None) -> tuple[Tensor, Side]:
        """Rotate q (B, Hq, N, D) at `positions` (N,) or (B, N), times the growth of log_scale; no side."""
        return self._rotated(q, positions, self._query_rows), None

    def keys(self, k: Tensor, positions: Tensor, x: Tensor | None = None, past: Side = None) -> tuple[Tensor, Side]:
        """Rotate k (B, Hk, N, D) at `positions` (N,) or (B, N); no side."""
        return self._rotated(k, positions, self._key_rows), None

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (B, H, N, D) at `positions` (N,) or (B, N); a ValueError where not all heads rotate alike."""
        if len(self._table.rows) > 1:
            raise ValueError("rotate: got heads that turn in several ways, expected queries and keys to be called")
        return self._rotated(x, positions, self._key_rows)

    def _rotated(self, x: Tensor, positions: Tensor, rows: Constant) -> Tensor:
        """x (B, H, N, D) rotated, head by head as the rows of the table say."""
        if not isinstance(x, Tensor) or x.dim() != 4 or x.size(-1) != self.head_dim:
            raise invalid_argument("x", x, f"a tensor (batch, heads, tokens, {self.head_dim})")
        inputs.positions("positions", positions, x.size(0), x.size(2), x.device)
        cos, sin = self._table.at(positions, inputs.bias_dtype(x.dtype))
        if len(self._table.rows) > 1:
            if x.size(1) != len(rows):
                raise invalid_argument("x", x, f"{len(rows)} heads")
            # (H, ..., N, D/2), before heads go behind the batch.
            cos, sin = (part[rows.on(x.device, torch.int64)].movedim(0, -3) for part in (cos, sin))
        elif positions.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def one_pass(self, n: int, device: torch.device) -> OnePass | None:
        """The angles of n tokens in index order, with columns that rotate nothing up to a multiple of eight."""
        return OnePass(self._with_rows(self._padded.in_order(n, device), device), None)

    def angles(self, positions: Tensor) -> Angles:
        """Cosines and sines times `attention_scale` in float32; layers that pass the same tensor share them."""
        return self._with_rows(self._table.shared(positions), positions.device)

    def _with_rows(self, angles: tuple[Tensor, Tensor], device: torch.device) -> Angles:
        """Angles as kernels take them: with the row of each query head and key head where there are several."""
        return angles if len(self._table.rows) == 1 else (*angles, self._rows.on(device, torch.int32))

    def extra_repr(self) -> str:
        """What `print` shows."""
        ways = f", {len(set(self._key_rows.values))} rotations" if len(set(self._key_rows.values)) > 1 else ""
        grows = ", log_scale" if any(self.log_scale) else ""
        return f"head_dim={self.head_dim}, attention_scale={self.attention_scale:g}{ways}{grows}"


def _of_heads(name: str, value: Any, heads: int) -> list[Any]:
    """One entry for each key head: a list as it is, anything else for all of them."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * heads
    if len(value) != heads:
        raise invalid_argument(name, list(value), f"one for all heads, or one for each of {heads} key heads")
    return list(value)


def spectrum(head_dim: int, theta: float) -> list[float]:
    """theta^(−2k/D) for pair k = 0 … D/2 − 1."""
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


class HoPE(Rotary):
    """HoPE (Chen et al., arXiv 2410.21216): rotates RoPE's pairs that complete a turn in T tokens, and no others."""

    @staticmethod
    def frequencies(head_dim: int, context_length: float | None = None, *, theta: float = 10000.0) -> Spectrum:
        """RoPE's spectrum with zeros where the wavelength 2π/f exceeds `context_length`, which is needed; scale 1."""
        if context_length is None:
            raise invalid_argument("context_length", None, "the training length, within which pairs must turn")
        slowest = 2 * math.pi / positive_number("context_length", context_length)
        return [f if f >= slowest else 0.0 for f in spectrum(head_dim, theta)], 1.0


class PRoPE(Rotary):
    """p-RoPE (Barbero et al., arXiv 2410.06205): rotates the fastest `fraction` of RoPE's pairs, and no others."""

    @staticmethod
    def frequencies(
        head_dim: int, context_length: float | None = None, *, theta: float = 10000.0, fraction: float | str = 0.75
    ) -> Spectrum:
        """RoPE's spectrum with zeros from pair int(fraction · D // 2) on, scale 1; "auto" takes HoPE's pairs."""
        if fraction == "auto":
            return HoPE.frequencies(head_dim, context_length, theta=theta)
        expected = 'a number from 0 to 1, or "auto"'
        if not 0 <= finite("fraction", fraction, expected) <= 1:
            raise invalid_argument("fraction", fraction, expected)
        full = spectrum(head_dim, theta)
        rotated = int(float(fraction) * head_dim // 2)
        return full[:rotated] + [0.0] * (len(full) - rotated), 1.0


class PI(Rotary):
    """Position interpolation (Chen et al., arXiv 2306.15595): RoPE at position / factor."""

    @staticmethod
    def frequencies(
        head_dim: int, context_length: float | None = None, *, theta: float = 10000.0, factor: float = 4.0
    ) -> Spectrum:
        """RoPE's spectrum divided by `factor`, scale 1."""
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
        """RoPE's spectrum for theta · factor^(D/(D−2)), scale 1; D is at least 4."""
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

    One list holds for all lengths: a second one beyond the training length would make cached keys disagree.
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
        """RoPE's spectrum divided by D/2 `factors`; scale sqrt(1 + ln(factor) / ln(context_length)) above factor 1."""
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


class SWAN(Scheme):
    """SWAN (arXiv 2504.08719): RoPE whose queries see the last `window` positions, beside layers of NoPE.

    A model gives `window` as a list for each layer, such as [[0], [256], [0], [256]]; 0 sees all and rotates nothing.
    Every key stays in the cache. `log_scale` is that of :class:`Rotary`, at window 0, and needs a context_length.
    """

    refuses_gates: ClassVar[str | None] = "its windows forget already, and the gated operator takes none"

    def __init__(
        self, *, window: int = 256, theta: float = 10000.0, log_scale: bool = True, **sizes: Unpack[Sizes]
    ) -> None:
        super().__init__(**sizes)
        if isinstance(window, list | tuple):
            raise invalid_argument("window", window, "a whole number; models take [[0], [256], …], one for each layer")
        self.window = whole("window", window, 0)
        grows = flag("log_scale", log_scale) and not window
        self.base = RoPE(head_positions=None if window else NoPE, log_scale=grows, theta=theta, **sizes)

    def queries(self, q: Tensor, positions: Tensor, x: Tensor | None = None) -> tuple[Tensor, Side]:
        """Rotate q (B, Hq, N, D), or multiply it by the growth of log_scale; no side."""
        return self.base.queries(q, positions)

    def keys(self, k: Tensor, positions: Tensor, x: Tensor | None = None, past: Side = None) -> tuple[Tensor, Side]:
        """Rotate k (B, Hk, N, D) where there is a window; no side."""
        return self.base.keys(k, positions)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """0 inside the window and −∞ outside, (1 or B, 1, Nq, Nk); None without a window."""
        if not self.window:
            return None
        away = distance(q_positions, k_positions)
        return torch.zeros_like(away, dtype=torch.float32).masked_fill_(away >= self.window, -torch.inf)

    def terms(self, q: Tensor, k: Tensor, k_side: Side) -> dict[str, Any]:
        """The bias, where there is a window."""
        return {"bias": self.bias if self.window else None}
