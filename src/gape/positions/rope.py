"""RoPE: the rotary encoding (Su et al., arXiv 2104.09864)."""

from __future__ import annotations

from gape.positions.rotary import Rotary, Spectrum, spectrum


class RoPE(Rotary):
    """Rotates every pair, pair k by position · theta^(−2k/D)."""

    @staticmethod
    def frequencies(head_dim: int, context_length: float | None = None, *, theta: float = 10000.0) -> Spectrum:
        """The full spectrum, scale 1."""
        return spectrum(head_dim, theta), 1.0
