"""p-RoPE: RoPE without its lowest frequencies (Barbero et al., arXiv 2410.06205)."""

from __future__ import annotations

from gape.positions.rotary import Rotary, Spectrum, spectrum
from gape.utils.validation import finite, invalid_argument


class PRoPE(Rotary):
    """Rotates the fastest `fraction` of the pairs, spaced as in RoPE, and leaves the others unrotated."""

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
