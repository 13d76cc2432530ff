"""A few queries against a long cache, at the speed of memory: keys are split over programs, the parts then merged.

:mod:`gape.ops.triton.decode_plan` says which kernel runs a call and how the keys are cut. Few parts are merged by the
last program to finish; many by a kernel of their own, a program for each row. `gape::decode` is the operator that a
compiler sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gape.ops import inputs
from gape.ops.inputs import Problem
from gape.ops.triton.custom_ops import direct, operator, traceable
from gape.ops.triton.decode_kernels import combine
from gape.ops.triton.decode_plan import Call, planned, power_of_two
from gape.utils import validation

#: Steps of merging up to which the last program merges alone; above, a second kernel shares them out.
ALONE = 8


def run(
    problem: Problem,
    *,
    lengths: Tensor | None = None,
    splits: int | None = None,
    gated: bool = True,
    recorded: bool = False,
    tickets: Tensor | None = None,
) -> Tensor:
    """The operator without gradients, (B, Hq, Nq, Dv) in q's dtype; see :func:`attend`."""
    return attend(problem, lengths=lengths, splits=splits, gated=gated, recorded=recorded, tickets=tickets)[0]


def attend(
    problem: Problem,
    *,
    lengths: Tensor | None = None,
    splits: int | None = None,
    gated: bool = True,
    recorded: bool = False,
    tickets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of a few queries over a long cache.

    One query per key head in half precision leaves values unread that have no weight: see docs/results/proofs.md.

    Args:
        problem: q, k, v in bfloat16, float16 or float32, every layout; any number of queries, meant for few.
        lengths: integer (B,): sample b has keys 0 … lengths[b] − 1, and its queries are the last of those; what lies
            beyond is not read, nor what lies beyond Nk. Without explicit positions, documents or mask.
        splits: parts that the keys are cut into; by default enough to fill the device.
        gated: whether there is a bias; without, gates have to be zero and are not always read.
        recorded: run what a captured graph would run, also outside of one: a call before a capture then compiles it.
        tickets: zeros, int32, which are zeros again afterwards, and which no other launch has that might run at the
            same time: a graph that owns some needs no second kernel where they suffice.

    Returns:
        (B, Hq, Nq, Dv) in q's dtype and float32 (B, Hq, Nq), natural logarithms; zero and −inf for an empty row.

    Raises:
        ValueError: float64, something that needs a gradient, lengths that do not fit; names the argument.
    """
    _refuse(problem, lengths)
    call = _call(problem, lengths, gated)
    if torch.compiler.is_compiling() or isinstance(call.q, FakeTensor):
        found: tuple[Tensor, Tensor] = torch.ops.gape.decode(*call, splits)
        return found
    # A captured graph may run beside others: it cannot count on tickets that outlive a call.
    recorded = recorded or (call.q.is_cuda and torch.cuda.is_current_stream_capturing())
    return _launched(call, splits, direct, tickets=not recorded if tickets is None else tickets)


@operator("gape::decode")
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    landmark: Tensor,
    amplitude: Tensor,
    lengths: Tensor | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    context_length: float,
    gated: bool,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    """:func:`attend` as compilers see it."""
    call = Call(
        q, k, v, gate, landmark, amplitude, lengths, q_positions, k_positions, q_documents, k_documents, mask, causal,
        scale, context_length, gated,
    )  # fmt: skip
    return _launched(call, splits, traceable, tickets=False)


def _launched(
    call: Call, splits: int | None, form: Callable[[Any], Any], *, tickets: Tensor | bool
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps by kernels in a `form` to launch; a second one merges the parts without tickets.

    tickets: some to take, or whether to take those of the stream.
    """
    q = call.q
    batch, n_heads, n_q, _ = q.shape
    n_key_heads, n_k, d_v = call.k.size(1), call.k.size(2), call.v.size(3)
    out = torch.empty(batch, n_heads, n_q, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, n_heads, n_q, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or n_k == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    plan = planned(call, splits, traced=form is traceable)
    parts = torch.empty(batch * n_heads * n_q, plan.splits, d_v, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(batch * n_heads * n_q, plan.splits, dtype=torch.float32, device=q.device)
    count = batch * n_key_heads * plan.row_tiles
    enough = tickets.numel() >= count if isinstance(tickets, Tensor) else tickets
    alone = enough and plan.merging_steps <= ALONE
    # A pointer that is never followed stands in for tickets that are not there.
    ticket = lse if not alone else tickets if isinstance(tickets, Tensor) else stream_tickets(count, q.device)
    form(plan.kernel)[(plan.splits, batch * n_key_heads, plan.row_tiles)](
        parts, part_lse, ticket, out, lse, *plan.arguments, **plan.flags, MERGE=alone
    )
    if not alone:
        form(combine)[(batch * n_heads * n_q,)](
            parts, part_lse, out, lse, plan.splits, d_v, call.units[-1],
            PARTS=plan.parts, BLOCK_V=plan.width, num_warps=4,
        )  # fmt: skip
    return out, lse


_held: dict[tuple[torch.device, int], Tensor] = {}


def stream_tickets(count: int, device: torch.device) -> Tensor:
    """At least `count` zeros, int32, which the kernel leaves as zeros; each stream has its own.

    Calls on one stream come one after another. A kernel that breaks off takes the whole context with it, so none is
    left with a ticket that was not given back.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    held = _held.get((device, stream))
    if held is None or held.numel() < count:
        held = _held[device, stream] = torch.zeros(max(1024, power_of_two(count)), dtype=torch.int32, device=device)
    return held


def _call(problem: Problem, lengths: Tensor | None, gated: bool = True) -> Call:
    seen, q = problem.seen, problem.q

    def full(side: Tensor | None, *sizes: int) -> Tensor | None:
        return None if side is None else side.expand(q.size(0), *sizes)

    return Call(
        q, problem.k, problem.v, problem.gate, problem.landmark, problem.amplitude,
        None if lengths is None else lengths.contiguous(),
        full(seen.q_positions, -1), full(seen.k_positions, -1), full(seen.q_documents, -1), full(seen.k_documents, -1),
        full(seen.attn_mask, q.size(1), seen.n_q, seen.n_k), seen.is_causal, problem.scale, problem.context_length,
        gated,
    )  # fmt: skip


def _refuse(problem: Problem, lengths: Tensor | None) -> None:
    tensors = (problem.q, problem.k, problem.v, problem.gate, problem.landmark, problem.amplitude)
    if problem.q.dtype == torch.float64:
        raise validation.invalid_argument("q", problem.q, "bfloat16, float16 or float32 for the decode kernel")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("q: something needs a gradient, expected none for the decode kernel: use torch.no_grad()")
    if lengths is None:
        return
    seen = problem.seen
    shape = (problem.q.size(0),)
    if lengths.dtype not in inputs.INTEGERS or lengths.shape != shape or lengths.device != problem.q.device:
        raise validation.invalid_argument("lengths", lengths, f"integers {shape} on {problem.q.device}")
    if seen.q_positions is not None or seen.q_documents is not None or seen.attn_mask is not None:
        raise ValueError("lengths: given together with positions, documents or a mask, expected one or the other")
