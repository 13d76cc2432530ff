"""SWAN: layers without positions among layers that rotate within a sliding window (arXiv 2504.08719)."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from gape.positions.base import Scheme, Side, Sizes, distance
from gape.positions.rotary import NoPE, RoPE
from gape.utils.validation import flag, invalid_argument, whole


class SWAN(Scheme):
    """RoPE whose queries see the last `window` positions; NoPE over all of them, with `log_scale`, at window 0.

    A model gives `window` as a list for each layer, such as [[0], [256], [0], [256]]. Every key stays in the cache.

    Args:
        window: positions that a query sees, its own among them; 0 sees all and rotates nothing.
        theta: the base of the frequencies.
        log_scale: whether, at window 0, scores of queries at i > T are multiplied by log i / log T, as the option of
            the same name of rotary schemes does. The paper's factor may have other constants.
        **sizes: see :class:`gape.positions.Scheme`; context_length is needed at window 0 with log_scale.

    Raises:
        ValueError: window is negative or a list, or what :class:`gape.positions.Rotary` refuses.
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
