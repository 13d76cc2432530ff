"""The gates of an injected layer, which may begin with a bias of exactly zero and still learn."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.gates import GAPEGates
from gape.ops.checks import refuse

#: How an injected model begins: with its own logits, or with the gates of the paper.
STARTS = ("identity", "paper")


class RetrofitGates(GAPEGates):
    """Gates with a strength per head: Γ_h = |s_h| · softplus(γ_h).

    "identity" begins with s = 0: the bias is exactly zero, so the model's logits are its own. At s = 0 the derivative
    of |s| is taken as 1. The first update therefore moves s off zero, to whichever side; from then on |s| > 0, and
    every other gate parameter has a gradient. Nothing is saturated: g, l and γ begin where the paper begins. "paper"
    begins with s = 1, which is the paper's Γ = 1.

    T is stored beside the parameters, in `context_length`, and a state with another T is refused.

    Args:
        n_heads, head_dim, n_kv_heads: as in :class:`gape.GAPEGates`.
        context_length: T.
        start: "identity" or "paper".
        **options: options of :class:`gape.GAPEGates`.

    Raises:
        ValueError: an unknown start, or what :class:`gape.GAPEGates` refuses.
    """

    context_length: Tensor

    def __init__(
        self, n_heads: int, head_dim: int, n_kv_heads: int, *, context_length: int, start: str, **options: Any
    ) -> None:
        super().__init__(n_heads, head_dim, n_kv_heads, **options)
        if start not in STARTS:
            raise refuse("start", start, f"one of {', '.join(STARTS)}")
        self.start, self.length = start, context_length
        self.strength = nn.Parameter(torch.full((n_heads,), float(start == "paper")))
        # An integer: casting a model to half precision leaves it alone.
        self.register_buffer("context_length", torch.tensor([context_length], dtype=torch.int64))

    def reset_parameters(self) -> None:
        """Draw the projections anew and set everything else back."""
        super().reset_parameters()
        nn.init.constant_(self.strength, float(self.start == "paper"))

    @property
    def amplitude(self) -> Tensor:
        """Γ, (Hq,) in float32 or float64; 0 at an identity start."""
        dtype = torch.promote_types(self.strength.dtype, torch.float32)
        strength, raw = self.strength.to(dtype), self.raw_amplitude.to(dtype)
        sign = torch.where(strength < 0, -1.0, 1.0).to(dtype)
        # Not through the parent's property, which a compiler cannot follow.
        return strength * sign * F.softplus(raw)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        refuse_other_length(state_dict.get(f"{prefix}context_length"), self.length, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def refuse_other_length(stored: Tensor | None, own: int, where: str) -> None:
    """Refuse gates that were trained with another T.

    Raises:
        ValueError: names the layer, the stored T and the model's.
    """
    if stored is not None and stored.device.type != "meta" and int(stored.reshape(-1)[0]) != own:
        raise ValueError(f"context_length: {where} was trained with T = {int(stored.reshape(-1)[0])}, expected {own}")
