"""The gates of an injected layer, which may begin with a bias of exactly zero and still learn."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gape.gates import GAPEGates
from gape.hf.settings import MARKED, STARTS, Settings
from gape.utils.validation import invalid_argument

log = logging.getLogger("gape.hf")
#: Γ·(1 + floor) below which a key loses less than a hundredth of a nat over T tokens.
IDLE = 0.01
#: What lets gates act.
REMEDY = "start='paper' lets gates act at once, and about ten times the learning rate of the rest lets them learn"
_WARNED: WeakSet[nn.Module] = WeakSet()


class RetrofitGates(GAPEGates):
    """Gates with a strength per head: Γ_h = |s_h| · softplus(γ_h).

    "identity" begins with s = 0: the bias is exactly zero, so the model's logits are its own. At s = 0 the derivative
    of |s| is taken as 1. The first update therefore moves s off zero, to whichever side; from then on |s| > 0, and
    every other gate parameter has a gradient. Nothing is saturated: g, l and γ begin where the paper begins. "paper"
    begins with s = 1, which is the paper's Γ = 1.

    T is stored beside the parameters, in `context_length`, and what else they were trained under in `settings`. A state
    of another T or other settings is refused, also one of an adapter.

    Args:
        n_heads, head_dim, n_kv_heads: as in :class:`gape.GAPEGates`.
        context_length: T.
        start: "identity" or "paper".
        settings: of the injection; none are kept without.
        **options: options of :class:`gape.GAPEGates`.

    Raises:
        ValueError: an unknown start, or what :class:`gape.GAPEGates` refuses.
    """

    context_length: Tensor
    settings: Tensor

    def __init__(
        self,
        n_heads: int,
        head_dim: int,
        n_kv_heads: int,
        *,
        context_length: int,
        start: str,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        super().__init__(n_heads, head_dim, n_kv_heads, **options)
        if start not in STARTS:
            raise invalid_argument("start", start, f"one of {', '.join(STARTS)}")
        self.start, self.length = start, context_length
        self.strength = nn.Parameter(torch.full((n_heads,), float(start == "paper")))
        # An integer: casting a model to half precision leaves it alone.
        self.register_buffer("context_length", torch.tensor([context_length], dtype=torch.int64))
        self.told = settings
        marks = [] if settings is None else settings.marks()
        self.register_buffer("settings", torch.tensor(marks, dtype=torch.int64))

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
        refuse_other_settings(state_dict.get(f"{prefix}settings"), self.told, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def warn_of_idle(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> None:
    """Warn once for a model whose gates have learned and yet change nothing. Those that never learned are at 0.

    Args:
        model: with gates or without.
        state: its tensors; None takes those of its modules, which may be parts of them where a model is spread.
    """
    most = 0.0
    for name, gates in model.named_modules():
        if isinstance(gates, RetrofitGates):
            strength = gates.strength if state is None else state.get(f"{name}.strength")
            if strength is not None:
                strengths = strength.detach().abs().tolist()
                most = max(most, *(s * (1 + floor) for s, floor in zip(strengths, gates.gate_floor, strict=True)))
    if 0 < most < IDLE and model not in _WARNED:
        _WARNED.add(model)
        log.warning("gates cannot act: no strength is above %.1g, so nothing fades; %s", most, REMEDY)


def refuse_other_length(stored: Tensor | None, own: int, where: str) -> None:
    """Refuse gates that were trained with another T.

    Raises:
        ValueError: names the layer, the stored T and the model's.
    """
    if stored is not None and stored.device.type != "meta" and int(stored.reshape(-1)[0]) != own:
        raise ValueError(f"context_length: {where} was trained with T = {int(stored.reshape(-1)[0])}, expected {own}")


def refuse_other_settings(stored: Tensor | None, own: Settings | None, where: str) -> None:
    """Refuse gates that were trained under other settings of an injection than the model's.

    Raises:
        ValueError: names the layer, the settings that differ and the model's values of them.
    """
    if stored is None or own is None or stored.device.type == "meta":
        return
    values, marks = own.to_dict(), stored.to(torch.int64).tolist()
    known = zip(own.marks(), own.marks(as_given=True), strict=True)
    pairs = zip(MARKED, marks, known, strict=True) if len(marks) == len(MARKED) else ()
    other = [name for name, was, now in pairs if was not in now] if pairs else list(MARKED)
    if other:
        told = ", ".join(f"{name} = {values[name]!r}" for name in other)
        raise ValueError(f"{where} was trained under other settings than the model's {told}; inject with those it had")
