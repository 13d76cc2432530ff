"""The public operator: its contract, its checks, and which implementation runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor

from gape.ops import checks, rank2, reference, sdpa, split
from gape.ops.problem import Problem, bias_dtype
from gape.ops.rounding import significand_bits


class Implementation(Protocol):
    """A module that turns a problem into prepared attention calls."""

    def calls(self, problem: Problem) -> Iterator[sdpa.Call]:
        """One call per chunk of queries."""
        ...


#: Implementations that go through `scaled_dot_product_attention`.
FUSED: dict[str, Implementation] = {"rank2": rank2, "split": split}


def _triton(problem: Problem) -> Tensor:
    """Run the Triton kernels, which are imported here so that nothing else needs triton."""
    from gape.ops.triton import launch  # noqa: PLC0415

    return launch.run(problem)


def _triton_ready(problem: Problem) -> None:
    """Refuse where the Triton kernels cannot run."""
    if find_spec("triton") is None:
        raise ValueError("impl: got 'triton', which is not installed: pip install triton")
    if not problem.q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise checks.refuse("impl", "triton", "a CUDA device for it (or TRITON_INTERPRET=1, to test)")
    if problem.q.dtype == torch.float64:
        raise checks.refuse("impl", "triton", "bfloat16, float16 or float32 beside it, q is float64")


#: Implementations that run by themselves, and whether they keep an Nq × Nk matrix.
DIRECT: dict[str, tuple[Callable[[Problem], Tensor], bool]] = {
    "reference": (reference.run, True),
    "triton": (_triton, False),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a call of the operator would run.

    Attributes:
        impl: the implementation, and
        reason: why it is the one.
        backends: the backends of `scaled_dot_product_attention`, one per distinct kind of call.
        quadratic: whether any of them keeps an Nq × Nk matrix of logits.
        pairs: "full", "causal", "lower-right" or "dense" (a mask tensor, made for a chunk of queries at a time).
        chunks: number of attention calls.
        width, value_width: head dims of q/k and of v as the backend gets them.
    """

    impl: str
    reason: str
    backends: tuple[str, ...]
    quadratic: bool
    pairs: str
    chunks: int
    width: int
    value_width: int

    def __str__(self) -> str:
        cost = "quadratic memory" if self.quadratic else "no Nq × Nk matrix"
        return (
            f"{self.impl} ({self.reason}) on {', '.join(self.backends)} ({cost}); {self.pairs} pairs, "
            f"{self.chunks} call{'s' * (self.chunks != 1)}, head dims {self.width} and {self.value_width}"
        )


def available_implementations() -> list[str]:
    """Names that `impl=` accepts besides "auto"."""
    return [*DIRECT, *FUSED]


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
        q_positions, k_positions: integer, (N,) or (B, N), in any order, repeated or negative. Default: keys
            0 … Nk − 1, queries the last Nq of the keys' positions. Leave them out where the default is meant:
            causality then needs no mask tensor.
        q_documents, k_documents: integer (B, N); only equal ids see each other. Given together.
        attn_mask: bool, broadcastable to (B, Hq, Nq, Nk); True may attend.
        is_causal: a key is seen only from its own position or a later one. Distance is signed, so with False
            a later key would gain what an earlier one loses: meant for callers whose mask hides later keys.
        scale: softmax scale, D ** −0.5 of the D given by default. A model that reserves coordinates for the
            bias passes that of its full head dim.
        impl: "auto", "reference", "rank2", "split" or "triton".
        check: also check the values of the gates (this waits for the device).
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
        checks.flag("strict", strict)
        name, _ = _choose(impl, problem)
        if name in FUSED:
            return sdpa.run_all(FUSED[name].calls(problem), strict=strict)
        run, quadratic = DIRECT[name]
        if strict and quadratic:
            raise ValueError(f"strict: impl {name!r} keeps an Nq × Nk matrix of logits")
        return run(problem)


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
    check: bool = False,
    **seen: Any,
) -> Plan:
    """Say what :func:`gated_attention` would run for these arguments, without running the attention.

    `seen` are the operator's q_positions, k_positions, q_documents, k_documents, attn_mask and is_causal.

    Raises:
        ValueError: as the operator would without `strict`; whether that would refuse is the plan's `quadratic`.
    """
    unknown = set(seen) - _SEEN
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]}: not an argument of explain, expected one of {sorted(_SEEN)}")
    with leave_autocast(q, k, v) as (q, k, v):
        problem = _problem(q, k, v, gate, landmark, amplitude, context_length, scale, check, **seen)
        name, reason = _choose(impl, problem)
        if name not in FUSED:
            return Plan(
                impl=name, reason=reason, backends=(name,), quadratic=DIRECT[name][1], pairs=problem.seen.kind,
                chunks=1, width=q.size(-1), value_width=v.size(-1),
            )  # fmt: skip
        backends, count = [], 0
        for call in FUSED[name].calls(problem):
            count += 1
            backends.append(call.backend())
        distinct = tuple(dict.fromkeys(backends))
        return Plan(
            impl=name, reason=reason, backends=distinct, quadratic="math" in distinct, pairs=problem.seen.kind,
            chunks=count, width=call.q.size(-1), value_width=call.v.size(-1),
        )  # fmt: skip


#: What says who sees whom.
_SEEN = frozenset(signature(checks.visibility).parameters) - {"q", "k"}


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    landmark: Tensor,
    amplitude: Tensor,
    context_length: float,
    scale: float | None,
    check: bool,
    **seen: Any,
) -> Problem:
    checks.heads(q, k, v)
    batch, n_heads, n_q, width = q.shape
    _, n_kv_heads, n_k, _ = k.shape
    checks.floats("gate", gate, (batch, n_heads, n_q), q.device, "(B, Hq, Nq)")
    checks.floats("landmark", landmark, (batch, n_kv_heads, n_k), q.device, "(B, Hk, Nk)")
    checks.floats("amplitude", amplitude, (n_heads,), q.device, "(Hq,)")
    if checks.flag("check", check):
        checks.gate_values(gate, landmark, amplitude)
    dtype = bias_dtype(q.dtype)
    return Problem(
        q=q,
        k=k,
        v=v,
        gate=gate.to(dtype),
        landmark=landmark.to(dtype),
        amplitude=amplitude.to(dtype),
        context_length=checks.positive_number("context_length", context_length),
        scale=width**-0.5 if scale is None else checks.positive_number("scale", scale),
        seen=checks.visibility(q, k, **seen),
    )


def _choose(impl: str, problem: Problem) -> tuple[str, str]:
    """The implementation's name and why it was chosen."""
    if impl != "auto":
        if impl not in available_implementations():
            raise checks.refuse("impl", impl, f"'auto' or one of {available_implementations()}")
        if impl == "triton":
            _triton_ready(problem)
        return impl, "asked for"
    if problem.q.dtype in (torch.bfloat16, torch.float16):
        return "split", f"exact bias in {str(problem.q.dtype).removeprefix('torch.')}"
    if significand_bits(problem.q) <= 11:
        return "split", "TF32 products would ruin the two-coordinate form"
    return "rank2", f"two coordinates are enough in {str(problem.q.dtype).removeprefix('torch.')}"
