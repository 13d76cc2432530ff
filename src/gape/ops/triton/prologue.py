"""The prologue's kernels as operators that torch can trace and differentiate: one launch each for q and k together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gape.ops.columns import significand_bits
from gape.ops.prologue import GateReading
from gape.ops.triton import prologue_kernels
from gape.ops.triton.custom_ops import Launch, operator, traceable


class Tile(NamedTuple):
    """What one program takes.

    Attributes:
        tokens: at a time, a power of two.
        heads: of q or of k, a power of two; halved until they divide those that there are. One, backward.
        warps: how many it has for heads of 64, more for wider ones. A thread should have eight neighbouring coordinates
            of each half, a load of 16 bytes; with more the compiler may move cosines through shared memory.
        parts: with gates, how many times `tokens` one after another; sums for the parameters are over all of them.
    """

    tokens: int
    heads: int
    warps: int
    parts: int = 1


#: "bounded" has as many more tokens and warps as make a tile of attention's keys.
TILES = {"fwd": Tile(16, 4, 2), "bwd": Tile(16, 1, 2, parts=4), "bounded": Tile(16, 4, 2)}


@operator("gape::prepare", batched=2)
def prepare(
    q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, rows: Tensor | None,
    gate_weight: Tensor | None, gate_bias: Tensor | None, amplitude: Tensor | None, floor: Tensor | None,
    landmark_weight: Tensor | None, landmark_bias: Tensor | None,
    factor: float, anchors: int, first: int, middle: int, apart: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turn q and k and write the bias's coordinates into their gaps.

    Args:
        q, k: (B, Hq, N, W) and (B, Hk, N, W) in half precision, laid out as :mod:`gape.ops.triton.prologue_kernels`
            says.
        cos, sin: (N, C/2 or more) in float32, or None to turn nothing. With a multiple of 4 columns, W/2 at best,
            they are read faster. With `rows` (R, N, C/2 or more).
        rows: int32 (Hq + Hk,), which of R each query head and then each key head is turned by; None for all alike.
        gate_weight, gate_bias: (Hq, C) and (Hq,) of the gate that reads q, in float32. None, like all that follow, for
            no gates: C is W then.
        amplitude, floor: (Hq,) in float32, what the gate is multiplied with and the least gate.
        landmark_weight, landmark_bias: (Hk, C) and (Hk,) of the landmark, which reads k, in float32.
        factor: times which amplitude · gate is the scaled rate.
        anchors, first, middle, apart: which coordinates; as `prologue_kernels._prologue_fwd_kernel` has them.

    Returns:
        q and k, their shapes, in their dtype, contiguous.
    """
    q, k = side_by_side(q), side_by_side(k)
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q.numel():
        tile = _tile("fwd", gate_weight)
        flags = _split_flags(q, cos, rows, gate_weight, tile, anchors)
        flags |= {"Q_HEADS": _heads(q.size(1), tile), "K_HEADS": _heads(k.size(1), tile), "BITS": significand_bits(q)}
        tables = (cos, sin, rows, gate_weight, gate_bias, amplitude, floor, landmark_weight, landmark_bias)
        traceable(prologue_kernels._prologue_fwd_kernel)[_grid(q.shape, k.size(1), tile)](
            q, k, *_given(q, tables), *outs, *q.stride()[:3], *k.stride()[:3],
            q.size(1), k.size(1), q.size(2), first, middle, apart, factor, **flags,
        )  # fmt: skip
    return outs[0], outs[1]


@operator("gape::prepare_backward", batched=4)
def prepare_backward(
    q_grad: Tensor, k_grad: Tensor, q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, rows: Tensor | None,
    gate_weight: Tensor | None, gate_bias: Tensor | None, amplitude: Tensor | None, floor: Tensor | None,
    landmark_weight: Tensor | None, landmark_bias: Tensor | None,
    factor: float, anchors: int, first: int, middle: int, apart: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q and k, (B, H, N, W), and the sums (blocks, Hq + Hk, C + 2) over tokens for the parameters."""
    q_grad, k_grad, q, k = (side_by_side(x) for x in (q_grad, k_grad, q, k))
    (batch, q_heads, n, width), k_heads = q.shape, k.size(1)
    dq, dk = (torch.empty(batch, n, heads, width, dtype=q.dtype, device=q.device) for heads in (q_heads, k_heads))
    tile = _tile("bwd", gate_weight)
    blocks = 0 if gate_weight is None else batch * _blocks(n, tile)
    columns = 0 if gate_weight is None else gate_weight.size(1) + 2
    sums = torch.empty(blocks, q_heads + k_heads, columns, dtype=torch.float32, device=q.device)
    if q.numel():
        strides = (stride for x in (q_grad, k_grad, q, k) for stride in x.stride()[:3])
        flags = _split_flags(q, cos, rows, gate_weight, tile, anchors) | {"PARTS": tile.parts}
        tables = (cos, sin, rows, gate_weight, gate_bias, amplitude, floor, landmark_weight, landmark_bias)
        traceable(prologue_kernels._prologue_bwd_kernel)[_grid(q.shape, k_heads, tile)](
            q_grad, k_grad, q, k, *_given(q, tables), dq, dk, sums, *strides,
            q_heads, k_heads, n, first, middle, apart, factor, **flags,
        )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), sums


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:11])
    ctx.settings = inputs[11:]


def _backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Any, ...]:
    gate_weight = ctx.saved_tensors[5]
    dq, dk, sums = torch.ops.gape.prepare_backward(q_grad, k_grad, *ctx.saved_tensors, *ctx.settings)
    settings = (None,) * len(ctx.settings)
    if gate_weight is None:
        return (dq, dk, *(None,) * 9, *settings)
    heads, content = gate_weight.shape
    total = sums.sum(0)
    queries, keys = total[:heads], total[heads:]
    gate = (queries[:, :content], queries[:, content], queries[:, content + 1], None)
    return (dq, dk, None, None, None, *gate, keys[:, :content], keys[:, content], *settings)


prepare.register_autograd(_backward, setup_context=_setup)


def bounded_launch(
    q: Tensor,
    k: Tensor,
    turned: tuple[int, bool, int] | None,
    content: int,
    stretches: tuple[float, ...],
    columns: int,
    places: bool,
) -> tuple[list[tuple[int, ...]], Launch]:
    """Shapes of the numbers beside q and k that the bounded kernel writes, and its launch.

    Args:
        q, k: like those that are to come.
        turned: columns of cosines, whether heads are turned in several ways, and how many cosines each sample has of
            its own, 0 where all have the same; None turns nothing.
        content: coordinates that gates read.
        stretches: times which amplitude · gate is the rate, and norms of q and of k are reaches.
        columns: keys of a tile that is judged, a power of two; 0 to measure nothing.
        places: whether to write exposures also as :func:`gape.ops.triton.tiles.with_places` does.

    The launch takes q, k, :func:`bounded_tables`, and what it writes, contiguous: q and k, turned, zeros in the gaps;
    in float32 the rate (B, Hq, N) and the exposure (B, Hk, N), that with places (B, Hk, N, 2), each query's reach
    (B, Hq, N), each tile's largest (B, Hk, tiles) and its least exposure, these empty where they are not wanted.
    """
    tile, (batch, q_heads, n, width), k_heads = TILES["bounded"], q.shape, k.size(1)
    # A tile of as many tokens as one of attention's keys, if not fewer than it has, leaves as much to each thread.
    times = max(1, columns // tile.tokens)
    tile = tile._replace(tokens=tile.tokens * times, warps=tile.warps * times)
    tiles = _blocks(n, tile) if columns else 0
    sizes: tuple[tuple[int, ...], ...] = ((q_heads, n), (k_heads, n), (k_heads, n, 2 if places else 0))
    sizes += ((q_heads, n if columns else 0), (k_heads, tiles), (k_heads, tiles))
    angles, by_head, own = turned or (None, False, 0)
    flags = _flags(width, n, angles, by_head, content, tile) | {"BOUNDED": columns > 0, "PLACES": places}
    flags |= {"Q_HEADS": _heads(q_heads, tile), "K_HEADS": _heads(k_heads, tile)}
    numbers = (*q.stride()[:3], *k.stride()[:3], own, q_heads, k_heads, n, *stretches)
    launch = Launch(prologue_kernels._prologue_bounded_kernel, _grid(q.shape, k_heads, tile), numbers, flags)
    return [(batch, *size) for size in sizes], launch


def bounded_tables(q: Tensor, tables: Sequence[Tensor | None], reading: GateReading) -> list[Tensor]:
    """What the launch of :func:`bounded_launch` takes after q and k, of cosines, sines and the way of each head."""
    return _given(q, (*tables, *reading.parameters))


def side_by_side(x: Tensor) -> Tensor:
    """x with neighbouring coordinates side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _given(stand_in: Tensor, tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Contiguous tensors; one that is never read stands in for what is not there."""
    return [stand_in if x is None else x.contiguous() for x in tensors]


def _tile(kernel: str, gate_weight: Tensor | None) -> Tile:
    tile = TILES[kernel]
    return tile if gate_weight is not None else tile._replace(parts=1)


def _blocks(n: int, tile: Tile) -> int:
    tokens = tile.tokens * tile.parts
    return (n + tokens - 1) // tokens


def _heads(count: int, tile: Tile) -> int:
    heads = tile.heads
    while count % heads:
        heads //= 2
    return heads


def _grid(shape: torch.Size, k_heads: int, tile: Tile) -> tuple[int, int]:
    groups = sum(count // _heads(count, tile) for count in (shape[1], k_heads))
    return groups * _blocks(shape[2], tile), shape[0]


def _split_flags(
    q: Tensor, cos: Tensor | None, rows: Tensor | None, gate_weight: Tensor | None, tile: Tile, anchors: int
) -> dict[str, Any]:
    """Flags of the two kernels that know the bias's coordinates."""
    angles, content = (None if x is None else x.size(-1) for x in (cos, gate_weight))
    flags = _flags(q.size(-1), q.size(2), angles, rows is not None, content, tile)
    return flags | {"GATED": gate_weight is not None, "ANCHORS": anchors, "LIMIT": torch.finfo(q.dtype).max / 2}


def _flags(width: int, n: int, angles: int | None, by_head: bool, content: int | None, tile: Tile) -> dict[str, Any]:
    edge = width // 2
    half = 1 << (edge - 1).bit_length()
    return {
        "ROTATED": angles is not None, "LOW": edge if content is None else content // 2, "EDGE": edge,
        "COLUMNS": angles or 0, "BY_HEAD": by_head,
        "T": tile.tokens, "HALF": half, "EVEN": half == edge and not n % (tile.tokens * tile.parts),
        "num_warps": max(1, tile.warps * half // 32),
    }  # fmt: skip
