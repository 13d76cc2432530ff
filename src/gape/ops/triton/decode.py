"""A few queries against many keys, at the speed of memory: keys are split over programs, the parts then merged.

Few parts are merged by the last program to finish; many by a kernel of their own, a program for each row.
:mod:`gape.ops.triton.decode_kernels` has the kernels. `gape::decode` is the operator that a compiler sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gape.ops.inputs import Problem
from gape.ops.triton.configs import multiprocessors, power_of_two, width_kind
from gape.ops.triton.custom_ops import direct, operator, traceable
from gape.ops.triton.decode_kernels import _combine_kernel, _decode_kernel
from gape.ops.triton.tiles import LOG2E

#: Steps of merging up to which the last program to finish takes them; above, a second kernel shares them out.
MERGE_STEPS = 8

#: Parts of a row that are merged at once.
PARTS = 32

#: A split shorter than this many tiles costs more in the merging than it wins.
LEAST_TILES = 4


class Tile(NamedTuple):
    """How one program works.

    Attributes:
        keys: that it reads at once.
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


class Call(NamedTuple):
    """A problem as the operator of torch takes it, every tensor expanded to its full sizes."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    landmark: Tensor
    amplitude: Tensor
    q_positions: Tensor | None
    k_positions: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None
    mask: Tensor | None
    causal: bool
    scale: float
    context_length: float


def run(problem: Problem, *, splits: int | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of a few queries over many keys, without gradients.

    Args:
        problem: q, k, v in bfloat16, float16 or float32, every layout; any number of queries, meant for few.
        splits: parts that the keys are cut into; by default enough to fill the device.

    Returns:
        (B, Hq, Nq, Dv) in q's dtype and float32 (B, Hq, Nq), natural logarithms; zero and −inf for an empty row.
    """
    call = as_call(problem)
    if torch.compiler.is_compiling() or isinstance(call.q, FakeTensor):
        traced: tuple[Tensor, Tensor] = torch.ops.gape.decode(*call, splits)
        return traced
    # A captured graph may run beside others: it cannot count on tickets that outlive a call.
    capturing = call.q.is_cuda and torch.cuda.is_current_stream_capturing()
    return _launch(call, splits, direct, tickets=not capturing)


@operator("gape::decode")
def decode(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, landmark: Tensor, amplitude: Tensor,
    q_positions: Tensor | None, k_positions: Tensor | None, q_documents: Tensor | None, k_documents: Tensor | None,
    mask: Tensor | None, causal: bool, scale: float, context_length: float, splits: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`run` as compilers see it."""
    call = Call(
        q, k, v, gate, landmark, amplitude, q_positions, k_positions, q_documents, k_documents, mask, causal, scale,
        context_length,
    )  # fmt: skip
    return _launch(call, splits, traceable, tickets=False)


def as_call(problem: Problem) -> Call:
    """The problem as the operator of torch takes it."""
    visibility, q = problem.visibility, problem.q

    def full(side: Tensor | None, *sizes: int) -> Tensor | None:
        return None if side is None else side.expand(q.size(0), *sizes)

    return Call(
        q, problem.k, problem.v, problem.gate, problem.landmark, problem.amplitude,
        full(visibility.q_positions, -1), full(visibility.k_positions, -1),
        full(visibility.q_documents, -1), full(visibility.k_documents, -1),
        full(visibility.attn_mask, q.size(1), visibility.n_q, visibility.n_k), visibility.is_causal,
        problem.scale, problem.context_length,
    )  # fmt: skip


def _launch(
    call: Call, splits: int | None, form: Callable[[Any], Any], *, tickets: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and log-sum-exps by kernels in a `form` to launch; a second one merges the parts without tickets."""
    q = call.q
    (batch, n_heads, n_q, d), (_, n_key_heads, n_k, d_v) = q.shape, call.v.shape
    out = torch.empty(batch, n_heads, n_q, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, n_heads, n_q, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or n_k == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    tile, rows = _tile_for(call), n_heads // n_key_heads * n_q
    block_m = min(tile.rows, max(16, power_of_two(rows)))
    row_tiles, tiles = -(-rows // block_m), -(-n_k // tile.keys)
    if splits is None:
        # As many as fill the device without becoming too short. Rounded down: a last wave of a few programs would
        # double the time of short ones.
        wanted = tile.programs * multiprocessors(q.device) // (batch * n_key_heads * row_tiles)
        splits = max(1, min(wanted, tiles // LEAST_TILES))
    span = -(-tiles // splits) * tile.keys
    merge = tickets and min(rows, block_m) * -(-splits // PARTS) <= MERGE_STEPS
    splits = -(-n_k // span)
    parts = torch.empty(batch * n_heads * n_q, splits, d_v, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(batch * n_heads * n_q, splits, dtype=torch.float32, device=q.device)
    # A pointer that is never followed stands in for tickets that are not there.
    ticket = stream_tickets(batch * n_key_heads * row_tiles, q.device) if merge else lse
    width, value_width = (max(16, power_of_two(x)) for x in (d, d_v))
    form(_decode_kernel)[(splits, batch * n_key_heads, row_tiles)](
        # Logits are in base 2.
        parts, part_lse, ticket, out, lse, span, n_key_heads, n_k, d, d_v,
        call.scale * LOG2E, LOG2E / call.context_length, 1 / LOG2E, *_arguments(call), n_heads // n_key_heads, n_q,
        CAUSAL=call.causal, HAS_POSITIONS=call.q_positions is not None, HAS_DOCUMENTS=call.q_documents is not None,
        HAS_MASK=call.mask is not None, PARTIAL_D=d != width, PARTIAL_V=d_v != value_width, MERGE=merge, PARTS=PARTS,
        BLOCK_M=block_m, BLOCK_N=tile.keys, BLOCK_D=width, BLOCK_V=value_width,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if not merge:
        form(_combine_kernel)[(batch * n_heads * n_q,)](
            parts, part_lse, out, lse, splits, d_v, 1 / LOG2E, PARTS=PARTS, BLOCK_V=value_width, num_warps=4
        )
    return out, lse


def _tile_for(call: Call) -> Tile:
    kind = "float32" if call.q.dtype == torch.float32 else width_kind(call.q.size(3), call.v.size(3))
    # Where pairs lie in a mask, each takes registers of its own.
    tile = TILES[kind]
    return tile if call.mask is None else tile._replace(keys=max(16, tile.keys // 2))


def _arguments(call: Call) -> list[Any]:
    """Tensors and strides of a call in the order of the kernel."""
    strides = [s for x in call[:6] for s in x.stride()]
    for side in (call.q_positions, call.k_positions, call.q_documents, call.k_documents):
        strides += (0, 0) if side is None else side.stride()
    strides += (0, 0, 0, 0) if call.mask is None else call.mask.stride()
    # A pointer that is never followed stands in for what is not there.
    return [*(call.q if x is None else x for x in call[:11]), *strides]


_tickets: dict[tuple[torch.device, int], Tensor] = {}


def stream_tickets(count: int, device: torch.device) -> Tensor:
    """At least `count` zeros, int32, which kernels leave as zeros; each stream has its own.

    Calls on one stream come one after another. A kernel that breaks off takes the whole context with it, so none is
    left with a ticket that was not given back.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    tickets = _tickets.get((device, stream))
    if tickets is None or tickets.numel() < count:
        tickets = torch.zeros(max(1024, power_of_two(count)), dtype=torch.int32, device=device)
        _tickets[device, stream] = tickets
    return tickets
