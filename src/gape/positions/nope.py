"""NoPE: no position at all beyond causality (Kazemnejad et al., arXiv 2305.19466)."""

from __future__ import annotations

from gape.positions.base import Scheme


class NoPE(Scheme):
    """Leaves q, k and the logits alone; order is known through the causal mask only."""
