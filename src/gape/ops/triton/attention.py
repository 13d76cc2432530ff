"""`impl="triton"`: the bias made in float32 registers, every coordinate free for content, any length and layout.

The kernels are operators of torch (`gape::attention_fwd` and `gape::attention_bwd`), so a compiler carries them along
and autograd knows their gradients. A prompt without gradients goes without them: :func:`attend_projected`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.ops.inputs import Problem
from gape.ops.prologue import PIECE, Angles, GateReading, tables_of
from gape.ops.triton import attention_bwd, attention_fwd
from gape.ops.triton.configs import tiles_for
from gape.ops.triton.custom_ops import Launch, capped, in_parts, operator, traceable
from gape.ops.triton.prologue import bounded_launch, bounded_tables, side_by_side
from gape.ops.triton.tiles import (
    CAUSAL,
    LOG2E,
    SLACK,
    Layout,
    bounds,
    layout_of,
    strides_of,
    with_places,
)


def run(problem: Problem, eps: float = 0.0) -> Tensor:
    """The operator, (B, Hq, Nq, Dv) in q's dtype, which is not float64."""
    return _run_fwd(problem, eps)[0]


def answer(problem: Problem, eps: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """The operator with what else is known when it has run: :class:`gape.ops.Details`."""
    out, lse, _, visited, _ = _run_fwd(problem, eps)
    if not visited.numel():
        return out, lse / LOG2E, lse.new_ones(())
    # There may be more tiles than float32 counts.
    count = visited.sum(dtype=torch.float64)
    return out, lse / LOG2E, (count / _visible_tiles(problem.q, problem.k, problem.v)).float()


def causal_answer(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, exposure: Tensor, *, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp of tokens in index order: :func:`gape.ops.paged.causal_attention`."""
    wide = (_whole_pieces(x) for x in (q, k, v))
    out, lse, *_ = torch.ops.gape.attention_fwd(*wide, rate, exposure, *CAUSAL, scale, eps)
    return out[..., : v.size(-1)], lse / LOG2E


def _run_fwd(problem: Problem, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What :func:`fwd` returns; nothing is skipped but tokens in index order."""
    layout = layout_of(problem)
    q, k, v = (_whole_pieces(x) for x in (problem.q, problem.k, problem.v))
    out, *others = torch.ops.gape.attention_fwd(
        q, k, v, problem.rate, problem.exposure, *layout, problem.scale, eps if layout.plain else 0.0
    )
    return out[..., : problem.v.size(-1)], *others


def attend_projected(
    q: Tensor, k: Tensor, v: Tensor, angles: Angles | None, reading: GateReading, *, scale: float, eps: float
) -> tuple[Tensor, ...]:
    """A few launches for tokens in index order: :class:`gape.ops.prologue.Projected`, then what :func:`fwd` counts.

    Without the operators around them, which take longer than the launches, and so without gradients. Norms are those of
    the rows that attention reads, stretched as in :func:`bounds`.
    """
    cos, sin, ways = tables_of(angles)
    rows: tuple[Tensor | None, ...] = (side_by_side(q), side_by_side(k), _whole_pieces(v))
    constants: tuple[Any, ...] = (ways, reading, scale, eps)
    if cos is not None and sin is not None and _by_sample(cos, ways):
        rows += (cos, sin) if ways is None else (cos.transpose(0, 1), sin.transpose(0, 1))
    else:
        constants = (cos, sin, *constants)
    out, *others = in_parts(_attend_projected, rows, *q.shape[:2], constants=constants)
    return out if out.size(-1) == v.size(-1) else out[..., : v.size(-1)], *others


def _by_sample(cos: Tensor | None, ways: Tensor | None) -> bool:
    """Whether each sample has cosines of its own; `ways` says that heads rotate in several."""
    return cos is not None and cos.dim() == (3 if ways is None else 4)


def _attend_projected(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, ways: Tensor | None, reading: GateReading,
    scale: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As :func:`attend_projected`; where samples have cosines of their own, their axis is the first."""
    forms = ((q.shape, q.stride()), (k.shape, k.stride()), (v.shape, v.stride()))
    turned: tuple[Any, ...] = ()
    if cos is not None:
        turned = (cos.size(-1), ways is not None, cos[0].numel() if _by_sample(cos, ways) else 0, cos.dtype)
    gates = (reading.gate_weight.size(-1), reading.gate_weight.dtype, reading.landmark_weight.dtype)
    plan = _plan(q.device, q.dtype, forms, turned, gates, reading.context_length, scale, eps)
    rotated = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    out = torch.empty(plan.out, dtype=q.dtype, device=q.device).transpose(1, 2)
    room = torch.empty(plan.room, dtype=torch.float32, device=q.device)
    c, u, places, reach, k_reach, u_least, lse, low, visited, earliest = (
        room if part is None else room.as_strided(*part) for part in plan.parts
    )
    if out.numel():
        tables = bounded_tables(q, (cos, sin, ways), reading)
        plan.prologue(q, k, *tables, *rotated, c, u, places, reach, k_reach, u_least)
        exposures = places if plan.places else u
        tensors = (
            *rotated, v, c, exposures, q, q, q, q, q, out, lse, reach, low, k_reach, u_least, visited,
            earliest.view(torch.int32),
        )  # fmt: skip
        plan.attention(*tensors)
    return out, lse, *rotated, c, u, visited


class _Plan(NamedTuple):
    """How :func:`attend_projected` runs for tensors alike, as those of all layers of a model are.

    Attributes:
        prologue, attention: the launches; attention's second one follows its first.
        places: whether attention reads exposures with places.
        out: shape of the output, heads behind tokens: so they lie side by side for the projection that follows.
        room: float32 numbers that they need beside rows of heads.
        parts: shape, strides and start in it of each tensor; None for one that is neither written nor read.
    """

    prologue: Launch
    attention: Launch
    places: bool
    out: torch.Size
    room: int
    parts: list[tuple[tuple[int, ...], tuple[int, ...], int] | None]


@functools.lru_cache(maxsize=64)
def _plan(
    device: torch.device, dtype: torch.dtype, forms: tuple[tuple[torch.Size, tuple[int, ...]], ...],
    turned: tuple[Any, ...], gates: tuple[int, torch.dtype, torch.dtype], context_length: float, scale: float,
    eps: float,
) -> _Plan:  # fmt: skip
    """The plan for q, k and v of these shapes and strides; `device` and dtypes tell plans apart.

    Args:
        turned: as :func:`bounded_launch` takes it, and the dtype of cosines; () turns nothing.
        gates: how many coordinates they read, and the dtypes of their weights.
    """
    q, k, v = (torch.empty_strided(*form, dtype=dtype, device="meta") for form in forms)
    tile = tiles_for(q, v, "fwd", skip=True)["BLOCK_N"] if eps else 0
    stretches = (LOG2E / context_length, scale * LOG2E * SLACK, SLACK)
    rotated_q, rotated_k = (torch.empty(x.shape, dtype=dtype, device="meta") for x in (q, k))
    _, *outs = _blank(q, v, eps)
    out = torch.empty(q.size(0), q.size(2), q.size(1), v.size(3), dtype=dtype, device="meta")
    grid, sizes, flags = _fwd_launch(rotated_q, rotated_k, v, out.transpose(1, 2), CAUSAL, scale, eps)
    places = flags["COPIES"] > 0
    shapes, prologue = bounded_launch(q, k, turned[:3] or None, gates[0], stretches, tile, places)
    numbers = [torch.empty(shape, device="meta") for shape in shapes]
    parts: list[Any] = []
    room, skips = 0, eps > 0
    # Rates, exposures, these with places, bounds; then log-sum-exps, thresholds, visits and first tiles. To make a
    # tensor takes as long as a third of a launch. Visits are given back in any case.
    wanted = (True, True, places, skips, skips, skips, True, skips, True, skips)
    for x, used in zip((*numbers, *outs), wanted, strict=True):
        parts.append((tuple(x.shape), x.stride(), room) if used else None)
        # Each begins where loads of 128 bytes may begin.
        room += -(-x.numel() // 32) * 32
    again = Launch(attention_fwd._fwd_kernel, _grid_again(grid), sizes, flags | {"AGAIN": True})
    attention = Launch(attention_fwd._fwd_kernel, grid, sizes, flags | {"AGAIN": False}, then=again)
    return _Plan(prologue, attention, places, out.shape, room, parts)


def _whole_pieces(x: Tensor) -> Tensor:
    """Zero coordinates up to a multiple of PIECE: rows of another width are read number by number, at half the speed.

    One copy is little beside attention, which reads each key once for every tile of queries.
    """
    spare = -x.size(-1) % PIECE
    return F.pad(x, (0, spare)) if spare else x


@operator("gape::attention_fwd", batched=10, by_head=True)
def fwd(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, u: Tensor,
    q_positions: Tensor | None, k_positions: Tensor | None, q_documents: Tensor | None, k_documents: Tensor | None,
    mask: Tensor | None, causal: bool, scale: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Forward: out, base-2 log-sum-exp, and with eps > 0 what is known of skipping.

    That is each query's threshold, each row tile's visits, and the first tile of keys that may matter to it.
    """
    outs = _blank(q, v, eps)
    out, lse, low, visited, earliest = outs
    if out.numel():
        layout = Layout(q_positions, k_positions, q_documents, k_documents, mask, causal)
        reach, k_reach, u_least = bounds(q, k, v, u, scale) if eps else (c, c, c)
        grid, numbers, flags = _fwd_launch(q, k, v, out, layout, scale, eps)
        tensors = _tensors(q, k, v, c, with_places(u) if flags["COPIES"] else u, layout)
        arguments = (*tensors, out, lse, reach, low, k_reach, u_least, visited, earliest, *numbers)
        traceable(attention_fwd._fwd_kernel)[grid](*arguments, **flags, AGAIN=False)
        if all(x is None for x in layout[:5]):
            traceable(attention_fwd._fwd_kernel)[_grid_again(grid)](*arguments, **flags, AGAIN=True)
    return outs


@operator("gape::attention_bwd", batched=15, by_head=True)
def bwd(
    grad: Tensor, out: Tensor, lse: Tensor, low: Tensor, earliest: Tensor,
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, u: Tensor,
    q_positions: Tensor | None, k_positions: Tensor | None, q_documents: Tensor | None, k_documents: Tensor | None,
    mask: Tensor | None, causal: bool, scale: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward: gradients of q, k, v in their dtypes and of c, u in float32."""
    layout = Layout(q_positions, k_positions, q_documents, k_documents, mask, causal)
    grad = grad.contiguous()
    dq, dk, dv, dc, du = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, c, u))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dc.zero_(), du.zero_()
    tile, column_tile = (_tile(q, v, kernel, layout, eps) for kernel in ("bwd_dq", "bwd_dkv"))
    reach, k_reach, u_least = bounds(q, k, v, u, scale) if eps else (c, c, c)
    tensors, strides, sizes = _tensors(q, k, v, c, u, layout), _strides(q, k, v, layout), _sizes(q, k, v)
    flags, skipping = _flags(q, v, layout, eps), (reach, low, earliest, k_reach, u_least)
    numbers = torch.empty(*lse.shape, 4, dtype=torch.float32, device=lse.device)
    traceable(attention_bwd._bwd_rows_kernel)[(-(-lse.numel() // 64),)](
        grad, out, tensors[3], lse, numbers, lse.numel(), q.size(2), v.size(3),
        BLOCK=64, BLOCK_D=tile["BLOCK_V"], BLOCK_M=column_tile["BLOCK_M"],
    )  # fmt: skip
    rows = (-(-q.size(2) // tile["BLOCK_M"]), q.size(0) * q.size(1))
    copies = _copies(tile, layout)
    traceable(attention_bwd._bwd_dq_kernel)[rows](
        *tensors[:4], with_places(u) if copies else tensors[4], *tensors[5:], grad, numbers, dq, dc, *skipping,
        *strides, q.size(1), *sizes, scale * LOG2E, scale, **flags, **tile, COPIES=copies,
    )  # fmt: skip
    columns = (-(-k.size(2) // column_tile["BLOCK_N"]), k.size(0) * k.size(1))
    traceable(attention_bwd._bwd_dkv_kernel)[columns](
        *tensors, grad, numbers, dk, dv, du, *skipping, *strides, q.size(1), k.size(1), *sizes[1:],
        scale * LOG2E, scale, LOG2E,
        **flags, **column_tile, RAGGED=bool(q.size(2) % column_tile["BLOCK_M"]),
        # Elsewhere the compiler lets no product run beside another if there is no loop over heads.
        ALONE=q.size(1) == k.size(1) and column_tile["num_stages"] == 2 and layout.plain,
    )  # fmt: skip
    return dq, dk, dv, dc, du


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, lse, low, visited, earliest = output
    ctx.save_for_backward(out, lse, low, earliest, *inputs[:10])
    ctx.settings = inputs[10:]
    ctx.mark_non_differentiable(lse, low, visited, earliest)


def _backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
    grads = torch.ops.gape.attention_bwd(grad, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None,) * 8)


fwd.register_autograd(_backward, setup_context=_setup)


def _blank(q: Tensor, v: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Memory for what the forward pass returns; nothing where tiles are not skipped."""
    batch, n_heads, n_q, _ = q.shape
    out = torch.empty(batch, n_heads, n_q, v.size(-1), dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, n_heads, n_q, dtype=torch.float32, device=q.device)
    rows = tiles_for(q, v, "fwd", skip=True)["BLOCK_M"]
    tiles = (n_q + rows - 1) // rows if eps else 0
    visited = torch.empty(batch, n_heads, tiles, dtype=torch.float32, device=q.device)
    low = torch.empty_like(lse) if eps else lse.new_empty(0)
    return out, lse, low, visited, visited.new_empty(visited.shape, dtype=torch.int32)


def _visible_tiles(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Key tiles that causality leaves to all row tiles of all heads."""
    tile = tiles_for(q, v, "fwd", skip=True)
    rows, columns, n_q, n_k = tile["BLOCK_M"], tile["BLOCK_N"], q.size(2), k.size(2)
    ends = (min(n_k, n_k - n_q + start + rows) for start in range(0, n_q, rows))
    return q.size(0) * q.size(1) * sum(-(-end // columns) for end in ends)


# What all kernels take, in their order.


def _tensors(q: Tensor, k: Tensor, v: Tensor, c: Tensor, u: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    documents = (None if x is None else x.contiguous() for x in layout[2:4])
    # A pointer that is never followed stands in for what is not there: kernels do arithmetic on all of them.
    optional = (q if x is None else x for x in (*layout[:2], *documents, layout.mask))
    return (q, k, v, (c * LOG2E).contiguous(), u.contiguous(), *optional)


def _strides(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[int, ...]:
    positions, mask = strides_of(*layout[:2]), strides_of(layout.mask, axes=4)
    return (*q.stride(), *k.stride(), *v.stride(), *positions, *mask)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return q.size(1) // k.size(1), q.size(2), k.size(2), q.size(3), v.size(3)


def _flags(q: Tensor, v: Tensor, layout: Layout, eps: float) -> dict[str, Any]:
    tile = _tile(q, v, "fwd", layout, eps)
    partial = {
        "PARTIAL_D": not tile["REST_D"] and q.size(3) != tile["BLOCK_D"],
        "PARTIAL_V": not tile["REST_V"] and v.size(3) != tile["BLOCK_V"],
    }
    return layout.flags | partial | {"SKIP": eps > 0}


def _tile(q: Tensor, v: Tensor, kernel: str, layout: Layout, eps: float) -> dict[str, int]:
    if layout.q_positions is None:
        return tiles_for(q, v, kernel, skip=eps > 0, capped=capped(attention_fwd._fwd_kernel))
    # Positions of keys cost so much that many queries should share them, and shared memory of a third stage.
    tile = tiles_for(q, v, kernel, capped=False)
    return tile | {"num_stages": min(2, tile["num_stages"])}


def _copies(tile: dict[str, int], layout: Layout) -> int:
    """How often kernels of queries fetch a key's two numbers, so that a thread fetches one; 0 if they read u alone."""
    copies = max(1, tile["num_warps"] * 32 // (tile["BLOCK_N"] * 2))
    return copies if copies <= 2 and layout.q_positions is None else 0


def _grid_again(grid: tuple[int, int]) -> tuple[int, int]:
    """Of programs that look which tiles of queries have to be done again, from the grid of one program a tile."""
    return -(-grid[0] // attention_fwd.TOGETHER.value), grid[1]


def _fwd_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, layout: Layout, scale: float, eps: float
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, numbers and flags of the forward kernel."""
    tile = _tile(q, v, "fwd", layout, eps)
    grid = (-(-q.size(2) // tile["BLOCK_M"]), q.size(0) * q.size(1))
    numbers = (*_strides(q, k, v, layout), q.size(1), *_sizes(q, k, v), scale * LOG2E, eps, *out.stride()[:3])
    return grid, numbers, _flags(q, v, layout, eps) | tile | {"COPIES": _copies(tile, layout)}
