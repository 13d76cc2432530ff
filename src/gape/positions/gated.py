"""`+gape`: the gates on top of a scheme that rotates or does nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gape.gates import GAPEGates, HeadProjection
from gape.ops import gated_attention
from gape.ops.prologue import Angles, GateReading, OnePass, Reading, Step
from gape.positions.base import Scheme, Side
from gape.positions.rotary import NoPE
from gape.utils.validation import invalid_argument


class Gated(Scheme):
    """A base scheme, which rotates q and k, under the gated operator.

    The gates read q and k before the base rotates them. The query side is the gate (B, Hq, N), the key side the
    landmark (B, Hk, N), both float32 (float64 beside float64). The options are those of :class:`gape.GAPEGates`.

    Raises:
        ValueError: the base refuses gates, or its context_length is None.
    """

    context_length: float

    def __init__(self, base: Scheme, **gate_options: Any) -> None:
        if base.refuses_gates is not None:
            raise invalid_argument("base", type(base).__name__, f"a scheme that +gape may follow; {base.refuses_gates}")
        if base.context_length is None:
            raise invalid_argument("context_length", None, "the training length T, by which +gape divides distances")
        super().__init__(
            n_heads=base.n_heads,
            head_dim=base.head_dim,
            n_kv_heads=base.n_kv_heads,
            context_length=base.context_length,
            n_embd=base.n_embd,
        )
        self.base = base
        self.gates = GAPEGates(self.n_heads, self.head_dim, self.n_kv_heads, **gate_options)

    def queries(self, q: Tensor, positions: Tensor, x: Tensor | None = None) -> tuple[Tensor, Side]:
        """Rotate q (B, Hq, N, D) as the base does; the side is its gate (B, Hq, N)."""
        return self.base.queries(q, positions, x)[0], self.gates.gate(q)

    def keys(self, k: Tensor, positions: Tensor, x: Tensor | None = None, past: Side = None) -> tuple[Tensor, Side]:
        """Rotate k (B, Hk, N, D) as the base does; the side is its landmark (B, Hk, N)."""
        return self.base.keys(k, positions, x)[0], self.gates.landmark(k)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, q_side: Side, k_side: Side, *, scale: float, impl: str = "auto",
        **visibility: Any,
    ) -> Tensor:  # fmt: skip
        """Attend under the gates; the sides are those of `queries` and `keys`. Returns (B, Hq, Nq, Dv).

        `visibility` may also have `eps`, the attention that a query may lose to skipped tiles.
        """
        if q_side is None or k_side is None:
            raise invalid_argument("q_side and k_side", None, "the gate and the landmark")
        amplitude, length = self.gates.amplitude, self.context_length
        return gated_attention(
            q, k, v, q_side, k_side, amplitude, context_length=length, scale=scale, impl=impl, **visibility
        )

    def one_pass(self, n: int, device: torch.device) -> OnePass | None:
        """The rotation of the base and the gates; None where the base does more, or :meth:`reading` is None."""
        reading, base = self.reading(device), self.base.one_pass(n, device)
        if reading is None or (base is None and not isinstance(self.base, NoPE)):
            return None
        return OnePass(None if base is None else base.angles, reading)

    def step(self, positions: Tensor) -> Step | None:
        """What one launch does to a few tokens at `positions` in the place of `queries` and `keys`, or None."""
        angles = self.base.angles(positions)
        if angles is None and not isinstance(self.base, NoPE):
            return None
        return step_under(self.gates, positions, angles, context_length=self.context_length)

    def reading(self, device: torch.device) -> GateReading | None:
        """What a fused pass needs to read the gates on `device`; None where one is fixed, or more than weights."""
        gates = self.gates
        gate = _reading(gates.gate_projection, gates.init_gate_bias)
        landmark = _reading(gates.landmark_projection, gates.init_landmark_bias)
        if not isinstance(gate, tuple) or not isinstance(landmark, tuple):
            return None
        return GateReading(
            gate_weight=gate[0].float(),
            gate_bias=gate[1].float(),
            landmark_weight=landmark[0].float(),
            landmark_bias=landmark[1].float(),
            amplitude=gates.amplitude,
            floor=gates.floors(device),
            context_length=self.context_length,
        )


def step_under(
    gates: GAPEGates,
    positions: Tensor,
    angles: Angles | None,
    *,
    context_length: float,
    strength: Tensor | None = None,
) -> Step | None:
    """What one launch does to q and k of a few tokens that `angles` rotate, under gates with Γ times a strength.

    None where the gates learn, or their readings are more than weights and biases.
    """
    gate = _reading(gates.gate_projection, gates.init_gate_bias)
    landmark = _reading(gates.landmark_projection, gates.init_landmark_bias)
    learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in gates.parameters())
    raw_amplitude = gates.raw_amplitude
    if gate is None or landmark is None or learns or raw_amplitude.dtype == torch.float64:
        return None
    return Step(
        positions=positions,
        angles=angles,
        gate=gate,
        landmark=landmark,
        raw_amplitude=raw_amplitude,
        floor=gates.floors(positions.device),
        context_length=context_length,
        strength=strength,
    )


def _reading(projection: HeadProjection | None, fixed: float) -> Reading | None:
    """How a gate is read: its weights, or a fixed number without a projection; None with hooks, or in float64."""
    if projection is None:
        return float(fixed)
    # Another module in its place may have no weight at all.
    if type(projection) is not HeadProjection or projection._forward_hooks or projection._forward_pre_hooks:
        return None
    weight = projection.weight
    return None if weight.dtype == torch.float64 else (weight, projection.bias)
