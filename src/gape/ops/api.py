"""The public operator: its contract, its checks, and what it would run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gape.ops import implementations, inputs, sdpa
from gape.ops.implementations import IMPLEMENTATIONS, Choice, Details, FusedChoice
from gape.ops.inputs import Problem, bias_dtype
from gape.ops.prologue import Angles, GateReading
from gape.utils import validation


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a call of the operator, or of a layer, would run.

    Attributes:
        impl: the implementation, and
        reason: why it is the one.
        backends: the backends of `scaled_dot_product_attention`, one per distinct kind of call; "reference" for chunks
            of queries whose positions are too far apart for coordinates.
        quadratic: whether any of them keeps an Nq × Nk matrix of logits.
        pairs: "full", "causal", "lower-right" or "dense" (a mask tensor, made for a chunk of queries at a time).
        chunks: number of attention calls.
        width, value_width: head dims of q/k and of v as the backend gets them.
        others: why "auto" takes none of the other implementations; empty where one was asked for by name.
        prologue: how a layer makes q and k ready: "fused" in one pass over memory, "steps" by its scheme's own steps
            one after another. None for the operator, which gets them ready.
    """

    impl: str
    reason: str
    backends: tuple[str, ...]
    quadratic: bool
    pairs: str
    chunks: int
    width: int
    value_width: int
    others: dict[str, str] = field(default_factory=dict)
    prologue: str | None = None

    def __str__(self) -> str:
        cost = "quadratic memory" if self.quadratic else "no Nq × Nk matrix"
        before = "" if self.prologue is None else f", {PROLOGUES[self.prologue]}"
        return (
            f"{self.impl} ({self.reason}) on {', '.join(self.backends)} ({cost}); {self.pairs} pairs, "
            f"{self.chunks} call{'s' * (self.chunks != 1)}, head dims {self.width} and {self.value_width}{before}"
        )


#: Values of :attr:`Plan.prologue` in words.
PROLOGUES = {"fused": "q and k made ready in one pass", "steps": "q and k made ready step by step"}


def available_implementations() -> list[str]:
    """Names that `impl=` accepts besides "auto"."""
    return list(IMPLEMENTATIONS)


def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    landmark: Tensor,
    amplitude: Tensor,
    *,
    context_length: float,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    q_documents: Tensor | None = None,
    k_documents: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    impl: str = "auto",
    eps: float = 0.0,
    check: bool = False,
    strict: bool = False,
) -> Tensor:
    """Attention whose logits are a_ij = scale · q_iᵀk_j − Γ_h·g_i/T · (1 − l_j) · (i − j).

    Args:
        q, k, v: (B, Hq, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv); one of float64, float32, bfloat16, float16;
            Hq a multiple of Hk; q and k already rotated.
        gate: (B, Hq, Nq), g_i ≥ 0, any floating dtype; float32 inside (float64 beside float64).
        landmark: (B, Hk, Nk), 0 ≤ l_j ≤ 1.
        amplitude: (Hq,), Γ_h ≥ 0.
        context_length: T, a positive number: the training length, never that of the batch.
        q_positions, k_positions: integer, (N,) or (B, N), in any order, repeated or negative, between −2⁴⁶ and 2⁴⁶.
            Default: keys 0 … Nk − 1, queries the last Nq of the keys' positions. Leave them out where the default is
            meant: causality then needs no mask tensor.
        q_documents, k_documents: integer (B, N); only equal ids see each other. Given together.
        attn_mask: bool, broadcastable to (B, Hq, Nq, Nk); True may attend.
        is_causal: a key is visible only from its own position or a later one. Distance is signed, so with False
            a later key would gain what an earlier one loses: meant for callers whose mask hides later keys.
        scale: softmax scale, D ** −0.5 of the D given by default. A model that reserves coordinates for the
            bias passes that of its full head dim.
        impl: "auto", or one of :func:`available_implementations`.
        eps: weight that may be dropped, in all and for any query; 0 drops nothing. Kernels that skip tiles skip
            what provably has no more (`docs/results/proofs.md`), others ignore it. Forward and backward agree.
        check: also check the values of the gates, and of positions on a GPU (this waits for the device).
        strict: refuse an implementation or backend that keeps an Nq × Nk matrix.

    Returns:
        (B, Hq, Nq, Dv) in q's dtype. A row that may attend to nothing is zero, with zero gradients. Under
        autocast q, k and v are first cast as autocast would, the bias is not.

    Raises:
        ValueError: for an argument of wrong shape, dtype, device or value; it names the argument, what came
            and what was expected. With `strict`, when only a quadratic way is left.
    """
    with leave_autocast(q, k, v) as (q, k, v):
        problem = _problem(
            q, k, v, gate, landmark, amplitude, context_length, scale, check,
            q_positions=q_positions, k_positions=k_positions, q_documents=q_documents,
            k_documents=k_documents, attn_mask=attn_mask, is_causal=is_causal,
        )  # fmt: skip
        validation.flag("strict", strict)
        eps = validation.weight("eps", eps)
        chosen = IMPLEMENTATIONS[implementations.choose(problem, eps, impl).name]
        if strict and chosen.quadratic:
            raise ValueError(f"strict: impl {chosen.name!r} keeps an Nq × Nk matrix of logits")
        return chosen.run(problem, eps, strict)


def detailed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    landmark: Tensor,
    amplitude: Tensor,
    *,
    context_length: float,
    scale: float | None = None,
    impl: str = "auto",
    eps: float = 0.0,
    check: bool = False,
    **visibility: Any,
) -> Details:
    """The operator with each query's log-sum-exp and the fraction of key tiles that were visited.

    Args are those of :func:`gated_attention`; `impl` is "triton", "decode", "reference", or "auto" for triton where it
    can run and else reference, which keeps an Nq × Nk matrix. Gradients go through the output alone.

    Raises:
        ValueError: as :func:`gated_attention`, and for an implementation that does not know these things.
        TypeError: for an argument that the operator does not have.
    """
    with leave_autocast(q, k, v) as (q, k, v):
        problem = _problem(q, k, v, gate, landmark, amplitude, context_length, scale, check, **visibility)
        eps = validation.weight("eps", eps)
        details = IMPLEMENTATIONS[implementations.choose(problem, eps, impl, details=True).name].details
        assert details is not None
        return details(problem, eps)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    landmark: Tensor,
    amplitude: Tensor,
    *,
    context_length: float,
    scale: float | None = None,
    impl: str = "auto",
    eps: float = 0.0,
    check: bool = False,
    **visibility: Any,
) -> Plan:
    """Say what :func:`gated_attention` would run for these arguments, without running the attention.

    :meth:`gape.GAPEAttention.explain` says it of a layer.

    `visibility` are the operator's q_positions, k_positions, q_documents, k_documents, attn_mask and is_causal.

    Raises:
        ValueError: as the operator would without `strict`; whether that would refuse is the plan's `quadratic`.
        TypeError: for an argument that the operator does not have.
    """
    with leave_autocast(q, k, v) as (q, k, v):
        problem = _problem(q, k, v, gate, landmark, amplitude, context_length, scale, check, **visibility)
        eps = validation.weight("eps", eps)
        choice = implementations.choose(problem, eps, impl)
        calls = IMPLEMENTATIONS[choice.name].calls
        plan = _plan(choice, problem.visibility.kind, q, v, None if calls is None else calls(problem))
        return replace(plan, others=implementations.others(problem, eps)) if impl == "auto" else plan


def explain_fused(
    chosen: FusedChoice, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None, reading: GateReading | None, *,
    scale: float,
) -> Plan:  # fmt: skip
    """The plan of what `chosen.fused` would run; arguments are those of its functions."""
    call = chosen.fused.call
    calls = None if call is None else [call(q, k, v, angles, reading, scale=scale)]
    return replace(_plan(chosen.choice, "causal", q, v, calls), prologue="fused")


def _plan(choice: Choice, pairs: str, q: Tensor, v: Tensor, calls: Iterable[sdpa.Call] | None) -> Plan:
    """The plan of an implementation that makes these calls, or None where it launches a kernel of its own."""
    backends, reason = [choice.name], choice.reason
    if calls is not None:
        backends = []
        for call in calls:
            backends.append(call.backend())
            q, v = call.q, call.v
        if "reference" in backends:
            reason += ", and the definition for queries too far apart"
    distinct = tuple(dict.fromkeys(backends))
    return Plan(
        impl=choice.name, reason=reason, backends=distinct, quadratic=not sdpa.QUADRATIC.isdisjoint(distinct),
        pairs=pairs, chunks=len(backends), width=q.size(-1), value_width=v.size(-1),
    )  # fmt: skip


# Asking torch which devices have autocast would break a compiled graph in torch 2.11 and earlier.
_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


@contextmanager
def leave_autocast(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cast tensors as autocast would and switch it off inside, so that no bias is ever cast with them."""
    device = next((x.device.type for x in tensors if isinstance(x, Tensor)), "cpu")
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device):
        yield tensors
        return
    low = torch.get_autocast_dtype(device)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    cast = tuple(x.to(low) if isinstance(x, Tensor) and x.dtype in floats else x for x in tensors)
    with torch.autocast(device, enabled=False):
        yield cast


def _problem(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, landmark: Tensor, amplitude: Tensor, context_length: float,
    scale: float | None, check: bool, **pairs: Any,
) -> Problem:  # fmt: skip
    inputs.heads(q, k, v)
    (batch, n_heads, n_q, width), (_, n_kv_heads, n_k, _) = q.shape, k.shape
    inputs.floats("gate", gate, (batch, n_heads, n_q), q.device, "(B, Hq, Nq)")
    inputs.floats("landmark", landmark, (batch, n_kv_heads, n_k), q.device, "(B, Hk, Nk)")
    inputs.floats("amplitude", amplitude, (n_heads,), q.device, "(Hq,)")
    visibility = inputs.visibility(q, k, **pairs)
    if validation.flag("check", check):
        inputs.gate_values(gate, landmark, amplitude)
        inputs.position_values("q_positions", visibility.q_positions)
        inputs.position_values("k_positions", visibility.k_positions)
    dtype = bias_dtype(q.dtype)
    return Problem(
        q=q, k=k, v=v, gate=gate.to(dtype), landmark=landmark.to(dtype), amplitude=amplitude.to(dtype),
        context_length=validation.positive_number("context_length", context_length),
        scale=width**-0.5 if scale is None else validation.positive_number("scale", scale),
        visibility=visibility,
    )  # fmt: skip
