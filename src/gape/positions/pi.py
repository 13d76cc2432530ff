"""PI: position interpolation (Chen et al., arXiv 2306.15595)."""

from __future__ import annotations

from gape.positions.rotary import Rotary, Spectrum, spectrum
from gape.utils.validation import positive_number


class PI(Rotary):
    """RoPE at position / factor."""

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
