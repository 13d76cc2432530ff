"""A few queries against a long cache, at the speed of memory: keys are split over programs, the parts then merged.

:mod:`gape.ops.triton.decode_kernels` has the kernels. Few parts are merged by the last program to finish; many by a
kernel of their own, a program for each row. `gape::decode` is the operator that a compiler sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gape.ops import checks
from gape.ops.problem import Problem
from gape.ops.triton.decode_kernels import combine, partial
from gape.ops.triton.registered import direct, operator, traceable

LOG2E = math.log2(math.e)


class Tile(NamedTuple):
    """How one program works.

    Attributes:
        keys: that it looks at at once.
        warps, stages: launch options.
        programs: per multiprocessor, as many as are resident at once, so that there is one wave and none is left over.
        rows: that it has at most, as many as stay in registers.
    """

    keys: int
    warps: int
    stages: int
    programs: int
    rows: int = 32


#: Half precision with heads of up to 64, of up to 128, wider, and float32.
TILES = {
    "narrow": Tile(128, 4, 3, 2),
    "wide": Tile(64, 4, 3, 2),
    "widest": Tile(32, 4, 2, 2),
    "float32": Tile(16, 4, 2, 3, rows=16),
}

#: A split shorter than this many tiles costs more in the merging than it wins.
LEAST_TILES = 4

#: Parts of a row that are merged at once.
PARTS = 32

#: Such steps up to which the last program merges alone; above, a second kernel shares them out.
ALONE = 8


def run(problem: Problem, *, lengths: Tensor | None = None, splits: int | None = None) -> Tensor:
    """The operator without gradients, (B, Hq, Nq, Dv) in q's dtype; see :func:`attend`."""
    return attend(problem, lengths=lengths, splits=splits)[0]


def attend(problem: Problem, *, lengths: Tensor | None = None, splits: int | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of a few queries over a long cache.

    Args:
        problem: q, k, v in bfloat16, float16 or float32, every layout; any number of queries, meant for few.
        lengths: integer (B,): sample b has keys 0 … lengths[b] − 1, and its queries are the last of those; what lies
            beyond is not read, nor what lies beyond Nk. Without explicit positions, documents or mask.
        splits: parts that the keys are cut into; by default enough to fill the device.

    Returns:
        (B, Hq, Nq, Dv) in q's dtype and float32 (B, Hq, Nq), natural logarithms; zero and −inf for an empty row.

    Raises:
        ValueError: float64, something that needs a gradient, lengths that do not fit; names the argument.
    """
    _refuse(problem, lengths)
    call = _call(problem, lengths)
    if torch.compiler.is_compiling() or isinstance(call.q, FakeTensor):
        found: tuple[Tensor, Tensor] = torch.ops.gape.decode(*call, splits)
        return found
    # A captured graph may run beside others: it cannot count on tickets that outlive a call.
    captured = call.q.is_cuda and torch.cuda.is_current_stream_capturing()
    return _launched(call, splits, direct, tickets=not captured)


class Call(NamedTuple):
    """A problem as the operator of torch takes it, every tensor expanded to its full sizes."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    landmark: Tensor
    amplitude: Tensor
    lengths: Tensor | None
    q_positions: Tensor | None
    k_positions: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None
    mask: Tensor | None
    causal: bool
    scale: float
    context_length: float


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
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    """:func:`attend` as compilers see it."""
    call = Call(
        q, k, v, gate, landmark, amplitude, lengths, q_positions, k_positions, q_documents, k_documents, mask, causal,
        scale, context_length,
    )  # fmt: skip
    return _launched(call, splits, traceable, tickets=False)


def _launched(call: Call, splits: int | None, form: Callable[[Any], Any], *, tickets: bool) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps by kernels in a `form` to launch; without tickets a second one merges the parts."""
    q, k, v = call.q, call.k, call.v
    batch, n_heads, n_q, d = q.shape
    n_key_heads, n_k, d_v = k.size(1), k.size(2), v.size(3)
    out = torch.empty(batch, n_heads, n_q, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, n_heads, n_q, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or n_k == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    plan = planned(call, splits)
    parts = torch.empty(batch * n_heads * n_q, plan.splits, d_v, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(batch * n_heads * n_q, plan.splits, dtype=torch.float32, device=q.device)
    alone = tickets and plan.merging_steps <= ALONE
    # A pointer that is never followed stands in for tickets that are not there.
    ticket = _tickets(batch * n_key_heads * plan.row_tiles, q.device) if alone else lse
    arguments, flags = _arguments(call)
    tile = plan.options
    merging = {"PARTS": PARTS, "BLOCK_V": tile["BLOCK_V"]}
    flags |= {"PARTIAL_D": d != tile["BLOCK_D"], "PARTIAL_V": d_v != tile["BLOCK_V"], "MERGE": alone}
    form(partial)[(plan.splits, batch * n_key_heads, plan.row_tiles)](
        parts, part_lse, ticket, out, lse, plan.span, n_key_heads, n_k, d, d_v,
        call.scale * LOG2E, LOG2E / call.context_length, 1 / LOG2E, *arguments, **(flags | tile | merging),
    )  # fmt: skip
    if not alone:
        form(combine)[(batch * n_heads * n_q,)](
            parts, part_lse, out, lse, plan.splits, d_v, 1 / LOG2E, **merging, num_warps=4
        )
    return out, lse


_held: dict[tuple[torch.device, int], Tensor] = {}


def _tickets(count: int, device: torch.device) -> Tensor:
    """At least `count` zeros, int32, which the kernel leaves as zeros; each stream has its own.

    Calls on one stream come one after another. A kernel that breaks off takes the whole context with it, so none is
    left with a ticket that was not given back.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    held = _held.get((device, stream))
    if held is None or held.numel() < count:
        held = _held[device, stream] = torch.zeros(max(1024, _power_of_two(count)), dtype=torch.int32, device=device)
    return held


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the work is cut.

    Attributes:
        splits: programs along the keys, each of
        span: keys, a multiple of a tile's.
        row_tiles: programs along the rows of a group.
        merging_steps: in which the parts of all rows of a program are merged.
        options: tile sizes and launch options of the kernel.
    """

    splits: int
    span: int
    row_tiles: int
    merging_steps: int
    options: dict[str, int]


def planned(call: Call, splits: int | None = None) -> Plan:
    """The cut for a call: `splits` parts, or as many as fill the device without becoming too short."""
    q, k, v = call.q, call.k, call.v
    width, value_width = (max(16, _power_of_two(x.size(-1))) for x in (q, v))
    widest = max(width, value_width)
    kind = "narrow" if widest <= 64 else "wide" if widest <= 128 else "widest"
    rows = q.size(1) // k.size(1) * q.size(2)
    tile = TILES["float32" if q.dtype == torch.float32 else kind]
    # Where pairs lie in a mask, each takes registers of its own.
    keys = tile.keys if call.mask is None else max(16, tile.keys // 2)
    block_m = min(tile.rows, max(16, _power_of_two(rows)))
    row_tiles = -(-rows // block_m)
    tiles = -(-k.size(2) // keys)
    if splits is None:
        # Rounded down: a last wave of a few programs would double the time of short ones.
        wanted = tile.programs * _multiprocessors(q.device) // (q.size(0) * k.size(1) * row_tiles)
        splits = max(1, min(wanted, tiles // LEAST_TILES))
    span = -(-tiles // splits) * keys
    options = {"BLOCK_M": block_m, "BLOCK_N": keys, "BLOCK_D": width, "BLOCK_V": value_width}
    return Plan(
        splits=-(-k.size(2) // span),
        span=span,
        row_tiles=row_tiles,
        merging_steps=min(rows, block_m) * -(-splits // PARTS),
        options=options | {"num_warps": tile.warps, "num_stages": tile.stages},
    )


def _call(problem: Problem, lengths: Tensor | None) -> Call:
    seen, q = problem.seen, problem.q

    def full(side: Tensor | None, *sizes: int) -> Tensor | None:
        return None if side is None else side.expand(q.size(0), *sizes)

    return Call(
        q, problem.k, problem.v, problem.gate, problem.landmark, problem.amplitude, lengths,
        full(seen.q_positions, -1), full(seen.k_positions, -1), full(seen.q_documents, -1), full(seen.k_documents, -1),
        full(seen.attn_mask, q.size(1), seen.n_q, seen.n_k), seen.is_causal, problem.scale, problem.context_length,
    )  # fmt: skip


def _arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """What :func:`partial` takes besides sizes, in its order, and flags."""
    tensors, optional = call[:6], call[6:12]
    strides = [s for x in tensors for s in x.stride()]
    for side in (call.q_positions, call.k_positions, call.q_documents, call.k_documents):
        strides += (0, 0) if side is None else side.stride()
    strides += (0, 0, 0, 0) if call.mask is None else call.mask.stride()
    flags = {
        "CAUSAL": call.causal,
        "HAS_LENGTHS": call.lengths is not None,
        "HAS_POSITIONS": call.q_positions is not None,
        "HAS_DOCUMENTS": call.q_documents is not None,
        "HAS_MASK": call.mask is not None,
    }
    # A pointer that is never followed stands in for what is not there.
    present = [call.q if x is None else x for x in optional]
    return [*tensors, *present, *strides, call.q.size(1) // call.k.size(1), call.q.size(2)], flags


def _refuse(problem: Problem, lengths: Tensor | None) -> None:
    tensors = (problem.q, problem.k, problem.v, problem.gate, problem.landmark, problem.amplitude)
    if problem.q.dtype == torch.float64:
        raise checks.refuse("q", problem.q, "bfloat16, float16 or float32 for the decode kernel")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("q: something needs a gradient, expected none for the decode kernel: use torch.no_grad()")
    if lengths is None:
        return
    seen = problem.seen
    shape = (problem.q.size(0),)
    if lengths.dtype not in checks.INTEGERS or lengths.shape != shape or lengths.device != problem.q.device:
        raise checks.refuse("lengths", lengths, f"integers {shape} on {problem.q.device}")
    if seen.q_positions is not None or seen.q_documents is not None or seen.attn_mask is not None:
        raise ValueError("lengths: given together with positions, documents or a mask, expected one or the other")


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _multiprocessors(device: Any) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
