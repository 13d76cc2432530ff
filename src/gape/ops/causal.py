"""Causal attention among the tokens of a prompt, with the log-sum-exp that merging with cached keys needs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.ops.decode_prologue import Reading, Step
from gape.ops.inputs import learning
from gape.ops.limits import triton_cannot
from gape.ops.prologue import GateReading, ready, whole_rows

#: Logits that the plain form makes at once.
_LOGITS = 2**26


@torch.no_grad()
def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, exposure: Tensor, *, scale: float, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention of tokens in index order, each to itself and to those before it, without gradients.

    Args:
        q, k, v: (B, Hq, n, D), (B, Hk, n, D) and (B, Hk, n, Dv), rotated.
        rate: c_i of each query, (B, Hq, n) in float32 or float64.
        exposure: 1 − landmark, (B, Hk, n).
        scale: the softmax scale.
        eps: attention that a query may lose to tiles that are not read; only kernels skip.

    Returns:
        Output (B, Hq, n, Dv) in q's dtype and natural log-sum-exp (B, Hq, n) in float32 (float64 beside float64).
    """
    if q.is_cuda and triton_cannot(q, v) is None:
        from gape.ops.triton.attention import causal_answer  # noqa: PLC0415

        return causal_answer(q, k, v, rate, exposure, scale=scale, eps=eps)
    dtype, n, groups = exposure.dtype, q.size(2), q.size(1) // k.size(1)
    k, v = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    exposure = exposure.repeat_interleave(groups, dim=1)
    places = torch.arange(n, device=q.device)
    at_once = max(1, _LOGITS // max(1, q.size(0) * q.size(1) * n))
    outs, lses = [], []
    for start in range(0, n, at_once):
        rows = slice(start, start + at_once)
        distance = places[rows, None] - places
        logits = scale * (q[:, :, rows].to(dtype) @ k.mT)
        logits = logits - rate[:, :, rows, None].to(dtype) * exposure.unsqueeze(2) * distance
        logits = logits.masked_fill(distance < 0, -torch.inf)
        lses.append(logits.logsumexp(-1))
        outs.append(logits.softmax(-1) @ v)
    return torch.cat(outs, dim=2).to(q.dtype), torch.cat(lses, dim=2)


class Projected(NamedTuple):
    """What attention among projected tokens gives.

    Attributes:
        out: (B, Hq, n, Dv).
        base_2_lse: log-sum-exp in base 2, (B, Hq, n).
        q, k: rotated.
        base_2_rate: the rate times log₂e, (B, Hq, n) in float32.
        exposure: (B, Hk, n) in float32.
    """

    out: Tensor
    base_2_lse: Tensor
    q: Tensor
    k: Tensor
    base_2_rate: Tensor
    exposure: Tensor

    @property
    def lse(self) -> Tensor:
        """Natural log-sum-exp, (B, Hq, n)."""
        return self.base_2_lse * math.log(2)

    @property
    def rate(self) -> Tensor:
        """The rate c_i, (B, Hq, n)."""
        return self.base_2_rate * math.log(2)


def projects(q: Tensor, k: Tensor, v: Tensor, step: Step) -> bool:
    """Whether :func:`projected_attention` can run: half precision on a GPU, rows that share positions, no gradient."""
    if torch.compiler.is_compiling() or any(type(x) is not Tensor for x in (q, k, v)) or learning(q, k, v):
        return False
    # Two dimensions, and one more where heads rotate in several ways.
    shared = step.positions.dim() == 1 and (step.angles is None or step.angles[0].dim() == len(step.angles))
    whole = whole_rows(q.size(-1), q.size(1), v.size(-1)) == q.size(-1)
    return shared and whole and q.is_cuda and q.dtype == k.dtype == v.dtype and ready(q.device, q.dtype)


@torch.no_grad()
def projected_attention(q: Tensor, k: Tensor, v: Tensor, step: Step, *, scale: float, eps: float) -> Projected:
    """Read gates off q and k, rotate both and attend in index order: two launches.

    Args:
        q, k, v: (B, Hq, n, D), (B, Hk, n, D) and (B, Hk, n, Dv) as projected, for which :func:`projects` says yes.
        step: what the scheme does to them.
        scale: the softmax scale.
        eps: attention that a query may lose to tiles that are not read.
    """
    from gape.ops.triton.attention import attend_projected  # noqa: PLC0415

    return Projected(*attend_projected(q, k, v, step.angles, _reading(step, q, k), scale=scale, eps=eps))


def _reading(step: Step, q: Tensor, k: Tensor) -> GateReading:
    """What the kernel reads gates by, made once for parameters as they are."""
    parts = [step.raw_amplitude, *_tensors(step.gate), *_tensors(step.landmark)]
    parts += [] if step.strength is None else [step.strength]
    if any(x.is_inference() for x in parts):
        # Nothing says when they are written to.
        return _new_reading(step, q, k)
    key = tuple((x.data_ptr(), x._version) for x in parts)
    stored: tuple[object, GateReading] | None = getattr(step.raw_amplitude, "_gape_reading", None)
    if stored is None or stored[0] != key:
        with torch.inference_mode(False):
            stored = key, _new_reading(step, q, k)
        step.raw_amplitude._gape_reading = stored  # type: ignore[attr-defined]
    return stored[1]


def _tensors(reading: Reading) -> tuple[Tensor, ...]:
    return reading if isinstance(reading, tuple) else ()


def _new_reading(step: Step, q: Tensor, k: Tensor) -> GateReading:
    amplitude = F.softplus(step.raw_amplitude.float())
    if step.strength is not None:
        amplitude = amplitude * step.strength.float().abs()
    gate, landmark = (_weights(part, x) for part, x in ((step.gate, q), (step.landmark, k)))
    return GateReading(
        gate_weight=gate[0], gate_bias=gate[1], landmark_weight=landmark[0], landmark_bias=landmark[1],
        amplitude=amplitude, floor=step.floor, context_length=step.context_length,
    )  # fmt: skip


def _weights(reading: Reading, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (H, D) and biases (H,) of a gate; a fixed one has zeros and its number."""
    if isinstance(reading, tuple):
        return reading[0].float(), reading[1].float()
    zeros = torch.zeros(x.size(1), x.size(3), dtype=torch.float32, device=x.device)
    return zeros, torch.full((x.size(1),), reading, dtype=torch.float32, device=x.device)
