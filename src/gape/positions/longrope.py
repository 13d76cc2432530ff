"""LongRoPE: a searched factor per pair (Ding et al., arXiv 2402.13753)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gape.positions.rotary import Rotary, Spectrum, spectrum
from gape.utils.validation import above, invalid_argument, positive_number


class LongRoPE(Rotary):
    """RoPE with each pair's frequency divided by its own factor.

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
