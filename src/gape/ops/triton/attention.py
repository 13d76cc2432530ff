"""`impl="triton"`: the bias made in float32 registers, every coordinate free for content, any length and layout.

The kernels are operators of torch (`gape::attention_fwd` and `gape::attention_bwd`), so a compiler carries them along
and autograd knows their gradients.
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
from gape.ops.triton.custom_ops import Launch, in_parts, operator, traceable
from gape.ops.triton.prologue import _given, _rows, bounded_launch, prepare_bounded
from gape.ops.triton.tiles import LOG2E, SLACK, bounds


class Layout(NamedTuple):
    """Who sees whom, as the kernels take it: tensors or None, and a flag."""

    q_positions: Tensor | None
    k_positions: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None
    mask: Tensor | None
    causal: bool

    @property
    def plain(self) -> bool:
        """Whether the order is that of the tensors and causality is all there is: where tiles may be skipped."""
        return self.causal and all(x is None for x in self[:5])


#: Tokens in index order.
CAUSAL = Layout(None, None, None, None, None, causal=True)


class Answer(NamedTuple):
    """What the kernels return.

    Attributes:
        out: (B, Hq, Nq, Dv) in q's dtype.
        lse: natural log-sum-exp of the logits, (B, Hq, Nq) in float32, without gradient; −inf for a row that saw
            nothing.
        visited: fraction of the visible key tiles that were visited, one number.
    """

    out: Tensor
    lse: Tensor
    visited: Tensor


def run(problem: Problem, eps: float = 0.0) -> Tensor:
    """The operator, (B, Hq, Nq, Dv) in q's dtype, which is not float64."""
    return _run_fwd(problem, eps)[0]


def answer(problem: Problem, eps: float = 0.0) -> Answer:
    """The operator with what else is known when it has run."""
    out, lse, _, visited, _ = _run_fwd(problem, eps)
    if not visited.numel():
        return Answer(out, lse / LOG2E, lse.new_ones(()))
    # There may be more tiles than float32 counts.
    count = visited.sum(dtype=torch.float64)
    return Answer(out, lse / LOG2E, (count / _visible_tiles(problem.q, problem.k, problem.v)).float())


def causal_answer(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, exposure: Tensor, *, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp of tokens in index order: :func:`gape.ops.causal.causal_attention`."""
    wide = (_whole_pieces(x) for x in (q, k, v))
    out, lse, *_ = torch.ops.gape.attention_fwd(*wide, rate, exposure, *CAUSAL, scale, eps)
    return out[..., : v.size(-1)], lse / LOG2E


def visits(problem: Problem, eps: float) -> Tensor:
    """The fraction of the visible key tiles that each head visits, (B, Hq); 1 where none may be skipped."""
    visited = _run_fwd(problem, eps)[3]
    if not visited.numel():
        return visited.new_ones(visited.shape[:2])
    each = _visible_tiles(problem.q, problem.k, problem.v) / (problem.q.size(0) * problem.q.size(1))
    return (visited.sum(-1, dtype=torch.float64) / each).float()


def _run_fwd(problem: Problem, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What :func:`fwd` returns; nothing is skipped but tokens in index order."""
    layout = _layout_of(problem)
    q, k, v = (_whole_pieces(x) for x in (problem.q, problem.k, problem.v))
    out, *others = torch.ops.gape.attention_fwd(
        q, k, v, problem.rate, problem.exposure, *layout, problem.scale, eps if layout.plain else 0.0
    )
    return out[..., : problem.v.size(-1)], *others


def projected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    reading: GateReading,
    *,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What :func:`fwd` returns, of q and k as :func:`gape.ops.prologue.bounded_attention` takes them; no gradients.

    Norms are those of the rows that attention reads, stretched as in :func:`bounds`.
    """
    values = _whole_pieces(v)
    factors = _bounded_factors(q, values, reading.context_length, scale, eps)
    ready = prepare_bounded(q, k, *_bounded_tables(angles, reading), *factors)
    out, *others = fwd_bounded(*ready[:2], values, *ready[2:], scale, eps)
    return out[..., : v.size(-1)], *others


def attend_projected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    reading: GateReading,
    *,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, base-2 log-sum-exp, rotated q and k, base-2 rate and exposure, without gradients.

    The same launches as :func:`projected`, without the operators around them, which take longer than the launches.
    """
    rows = (_rows(q), _rows(k), _whole_pieces(v))
    out, *others = in_parts(_attend_projected, rows, *q.shape[:2], angles, reading, scale, eps)
    return out if out.size(-1) == v.size(-1) else out[..., : v.size(-1)], *others


def _attend_projected(
    q: Tensor, k: Tensor, v: Tensor, angles: Angles | None, reading: GateReading, scale: float, eps: float
) -> tuple[Tensor, ...]:
    tables = _bounded_tables(angles, reading)
    forms = ((q.shape, q.stride()), (k.shape, k.stride()), (v.shape, v.stride()))
    turned = () if angles is None else (angles[0].size(-1), len(angles) == 3, angles[0].dtype)
    plan = _plan(q.device, q.dtype, forms, turned, reading.gate_weight.size(-1), reading.context_length, scale, eps)
    rotated = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    out = torch.empty(plan.out, dtype=q.dtype, device=q.device)
    room = torch.empty(plan.room, dtype=torch.float32, device=q.device)
    c, u, reach, k_reach, u_least, lse, low, visited, earliest = (room.as_strided(*part) for part in plan.parts)
    if out.numel():
        plan.prologue(q, k, *_given(q, *tables), *rotated, c, u, reach, k_reach, u_least)
        plan.attention(
            *rotated, v, c, u, q, q, q, q, q, out, lse, reach, low, k_reach, u_least, visited,
            earliest.view(torch.int32),
        )  # fmt: skip
    return out, lse, *rotated, c, u


class _Plan(NamedTuple):
    """How :func:`attend_projected` runs for tensors alike, as those of all layers of a model are.

    Attributes:
        prologue, attention: the launches.
        out: shape of the output.
        room: float32 numbers that they need beside rows of heads.
        parts: shape, strides and start in it of each tensor.
    """

    prologue: Launch
    attention: Launch
    out: torch.Size
    room: int
    parts: list[tuple[tuple[int, ...], tuple[int, ...], int]]


@functools.lru_cache(maxsize=64)
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    forms: tuple[tuple[torch.Size, tuple[int, ...]], ...],
    turned: tuple[Any, ...],
    content: int,
    context_length: float,
    scale: float,
    eps: float,
) -> _Plan:
    """The plan for q, k and v of these shapes and strides; `device` and the dtype of cosines tell plans apart.

    Args:
        turned: columns of cosines, whether heads are turned in several ways, and their dtype; () turns nothing.
        content: coordinates that gates read.
    """
    q, k, v = (torch.empty_strided(*form, dtype=dtype, device="meta") for form in forms)
    columns, by_head = turned[:2] or (None, False)
    factors = _bounded_factors(q, v, context_length, scale, eps)
    shapes, prologue = bounded_launch(q, k, columns, by_head, content, factors)
    rotated_q, rotated_k = (torch.empty(x.shape, dtype=dtype, device="meta") for x in (q, k))
    numbers = [torch.empty(shape, device="meta") for shape in shapes]
    c, u, *norms = numbers
    out, *outs = _blank(q, v, eps)
    a = _arguments(rotated_q, rotated_k, v, c, u, (norms[0], norms[1], norms[2]), CAUSAL, eps)
    parts, room = [], 0
    for x in (*numbers, *outs):
        parts.append((tuple(x.shape), x.stride(), room))
        # Each begins where loads of 128 bytes may begin.
        room += -(-x.numel() // 32) * 32
    attention = Launch(attention_fwd._fwd_kernel, *_fwd_sizes(a, q, v, scale, eps))
    return _Plan(prologue, attention, out.shape, room, parts)


def _bounded_tables(angles: Angles | None, reading: GateReading) -> tuple[Tensor | None, ...]:
    """The tensors that :func:`prepare_bounded` takes after q and k."""
    return (
        *tables_of(angles), reading.gate_weight, reading.gate_bias, reading.amplitude,
        reading.floor, reading.landmark_weight, reading.landmark_bias,
    )  # fmt: skip


def _bounded_factors(
    q: Tensor, v: Tensor, context_length: float, scale: float, eps: float
) -> tuple[float, float, float, int]:
    """The numbers that it takes behind them."""
    columns = tiles_for(q, v, "fwd", skip=True)["BLOCK_N"] if eps else 0
    return LOG2E / context_length, scale * LOG2E * SLACK, SLACK, columns


def _whole_pieces(x: Tensor) -> Tensor:
    """Zero coordinates up to a multiple of PIECE: rows of another width are read number by number, at half the speed.

    One copy is little beside attention, which reads each key once for every tile of queries.
    """
    spare = -x.size(-1) % PIECE
    return F.pad(x, (0, spare)) if spare else x


def _layout_of(problem: Problem) -> Layout:
    """The problem's visibility in the form that the kernels take."""
    visibility, batch = problem.visibility, problem.q.size(0)
    mask = visibility.attn_mask
    if mask is not None:
        mask = mask.expand(batch, problem.q.size(1), visibility.n_q, visibility.n_k)
    return Layout(
        q_positions=None if visibility.q_positions is None else visibility.q_positions.expand(batch, -1),
        k_positions=None if visibility.k_positions is None else visibility.k_positions.expand(batch, -1),
        q_documents=None if visibility.q_documents is None else visibility.q_documents.contiguous(),
        k_documents=None if visibility.k_documents is None else visibility.k_documents.contiguous(),
        mask=mask,
        causal=visibility.is_causal,
    )


@operator("gape::attention_fwd")
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    u: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward: out, base-2 log-sum-exp, and with eps > 0 what is known of skipping.

    That is each query's threshold, each row tile's visits, and the first tile of keys that may matter to it.
    """
    batched = (q, k, v, c, u, q_positions, k_positions, q_documents, k_documents, mask)
    outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = in_parts(_fwd, batched, *q.shape[:2], causal, scale, eps)
    return outputs


def _fwd(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, u: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout, (scale, eps) = Layout(*settings[:6]), settings[6:]
    outs = _blank(q, v, eps)
    if outs[0].numel():
        tile_bounds = bounds(q, k, v, u, scale) if eps else (c, c, c)
        _launch_fwd(outs, _arguments(q, k, v, c * LOG2E, u, tile_bounds, layout, eps), q, v, scale, eps)
    return outs


@operator("gape::attention_fwd_bounded")
def fwd_bounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    u: Tensor,
    reach: Tensor,
    k_reach: Tensor,
    u_least: Tensor,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward alone, what :func:`fwd` returns, with c in base 2 and bounds as :func:`bounds` makes them.

    For causal tokens in index order. The bounds are of no matter where eps is 0.
    """
    outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    outputs = in_parts(_fwd_bounded, (q, k, v, c, u, reach, k_reach, u_least), *q.shape[:2], scale, eps)
    return outputs


def _fwd_bounded(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, u: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tile_bounds, (scale, eps) = settings[:3], settings[3:]
    outs = _blank(q, v, eps)
    if outs[0].numel():
        _launch_fwd(outs, _arguments(q, k, v, c, u, tile_bounds, CAUSAL, eps), q, v, scale, eps)
    return outs


def _launch_fwd(
    outs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], a: _Arguments, q: Tensor, v: Tensor, scale: float, eps: float
) -> None:
    (out, lse, low, visited, earliest), (reach, k_reach, u_least) = outs, a.bounds
    grid, numbers, flags = _fwd_sizes(a, q, v, scale, eps)
    traceable(attention_fwd._fwd_kernel)[grid](
        *a.tensors, out, lse, reach, low, k_reach, u_least, visited, earliest, *numbers, **flags
    )


def _fwd_sizes(
    a: _Arguments, q: Tensor, v: Tensor, scale: float, eps: float
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Grid, numbers and flags of the forward kernel."""
    tile = tiles_for(q, v, "fwd", skip=eps > 0)
    grid = (-(-q.size(2) // tile["BLOCK_M"]), q.size(0) * q.size(1))
    return grid, (*a.strides, q.size(1), *a.sizes, scale * LOG2E, eps), {**a.flags, **tile}


@operator("gape::attention_bwd")
def bwd(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    low: Tensor,
    earliest: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    u: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    q_documents: Tensor | None,
    k_documents: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backward: gradients of q, k, v in their dtypes and of c, u in float32."""
    batched = (grad, out, lse, low, earliest, q, k, v, c, u, q_positions, k_positions, q_documents, k_documents, mask)
    outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    outputs = in_parts(_bwd, batched, *q.shape[:2], causal, scale, eps)
    return outputs


def _bwd(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    low: Tensor,
    earliest: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    u: Tensor,
    *settings: Any,
) -> tuple[Tensor, ...]:
    layout, (scale, eps) = Layout(*settings[:6]), settings[6:]
    grad = grad.contiguous()
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, c, u))
    if q.numel() == 0 or k.numel() == 0:
        return tuple(x.zero_() for x in grads)
    dq, dk, dv, dc, du = grads
    tile, column_tile = (tiles_for(q, v, kernel, skip=eps > 0) for kernel in ("bwd_dq", "bwd_dkv"))
    tile_bounds = bounds(q, k, v, u, scale) if eps else (c, c, c)
    a = _arguments(q, k, v, c * LOG2E, u, tile_bounds, layout, eps)
    reach, k_reach, u_least = tile_bounds
    numbers = torch.empty(*lse.shape, 4, dtype=torch.float32, device=lse.device)
    upstream = (grad, numbers)
    traceable(attention_bwd._bwd_rows_kernel)[(-(-lse.numel() // 64),)](
        grad, out, a.base_2_rate, lse, numbers, lse.numel(), q.size(2), v.size(3),
        BLOCK=64, BLOCK_D=tile["BLOCK_V"], BLOCK_M=column_tile["BLOCK_M"],
    )  # fmt: skip
    rows = (-(-q.size(2) // tile["BLOCK_M"]), q.size(0) * q.size(1))
    traceable(attention_bwd._bwd_dq_kernel)[rows](
        *a.tensors, *upstream, dq, dc, reach, low, earliest, k_reach, u_least, *a.strides, q.size(1), *a.sizes,
        scale * LOG2E, scale, **a.flags, **tile,
    )  # fmt: skip
    columns = (-(-k.size(2) // column_tile["BLOCK_N"]), k.size(0) * k.size(1))
    traceable(attention_bwd._bwd_dkv_kernel)[columns](
        *a.tensors, *upstream, dk, dv, du, reach, low, earliest, k_reach, u_least, *a.strides, k.size(1), *a.sizes,
        scale * LOG2E, scale, LOG2E, **a.flags, **column_tile, RAGGED=bool(q.size(2) % column_tile["BLOCK_M"]),
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


class _Arguments(NamedTuple):
    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    bounds: tuple[Tensor, Tensor, Tensor]
    flags: dict[str, Any]

    @property
    def base_2_rate(self) -> Tensor:
        """c · log₂e, as all kernels take it."""
        return self.tensors[3]


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    u: Tensor,
    tile_bounds: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    eps: float,
) -> _Arguments:
    """What all kernels take, in their order; c in base 2."""
    tile = tiles_for(q, v, "fwd", skip=eps > 0)
    n_q, n_k, d, d_v = q.size(2), k.size(2), q.size(3), v.size(3)
    positions = [(0, 0) if p is None else p.stride() for p in (layout.q_positions, layout.k_positions)]
    mask = (0, 0, 0, 0) if layout.mask is None else layout.mask.stride()
    flags = {
        "CAUSAL": layout.causal,
        "HAS_POSITIONS": layout.q_positions is not None,
        "HAS_DOCUMENTS": layout.q_documents is not None,
        "HAS_MASK": layout.mask is not None,
        "PARTIAL_D": d != tile["BLOCK_D"],
        "PARTIAL_V": d_v != tile["BLOCK_V"],
        "SKIP": eps > 0,
    }
    # A pointer that is never followed stands in for what is not there: kernels do arithmetic on all of them.
    optional = tuple(q if x is None else x for x in layout[:5])
    return _Arguments(
        tensors=(q, k, v, c.contiguous(), u.contiguous(), *optional),
        strides=(*q.stride(), *k.stride(), *v.stride(), *positions[0], *positions[1], *mask),
        sizes=(q.size(1) // k.size(1), n_q, n_k, d, d_v),
        bounds=tile_bounds,
        flags=flags,
    )
