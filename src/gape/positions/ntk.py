"""NTK-aware scaling, the static form (bloc97, 2023; written down in arXiv 2309.00071)."""

from __future__ import annotations

from gape.positions.rotary import Rotary, Spectrum, spectrum
from gape.utils.validation import even, positive_number


class NTK(Rotary):
    """RoPE with a larger base: the slowest pair is interpolated by `factor`, the fastest not at all."""

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
