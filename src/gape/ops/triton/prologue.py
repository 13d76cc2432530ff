"""The prologue's kernels as operators that torch can trace and differentiate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gape.ops.rounding import significand_bits
from gape.ops.triton import prologue_kernels
from gape.ops.triton.registered import operator, traceable

#: Tokens of one program, and its warps: forward and backward.
TILES = {"prepare": (16, 2), "undo": (32, 2)}

#: Heads that one program goes through, the first of these that divides them.
HEADS = (2, 1)


@operator("gape::prepare")
def prepare(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    factor: Tensor | None,
    floor: Tensor | None,
    queries: bool,
    anchors: int,
    first: int,
    middle: int,
    apart: int,
) -> Tensor:
    """Turn x and write the bias's coordinates into its gaps.

    Args:
        x: q or k, (B, H, N, W) in half precision, laid out as :mod:`gape.ops.triton.prologue_kernels` says.
        cos, sin: (N, C/2) in float32, or None to turn nothing.
        weight, bias: (H, C) and (H,) of the gate that reads x, in float32, or None for no gate: C is W then.
        factor: (H,) in float32, times which g is the scaled rate; for queries.
        floor: (H,) in float32, least g; for queries.
        queries: whether x is q.
        anchors, first, middle, apart: which coordinates; as `prologue_kernels.prepare` has them.

    Returns:
        (B, H, N, W) in x's dtype, contiguous.
    """
    x = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        flags = _flags(x, cos, weight, queries, anchors, "prepare") | {"BITS": significand_bits(x)}
        traceable(prologue_kernels.prepare)[_grid(x, "prepare")](
            x, *_given(x, cos, sin, weight, bias, factor, floor), out, *x.stride()[:3],
            x.size(1), x.size(2), first, middle, apart, **flags,
        )  # fmt: skip
    return out


@operator("gape::prepare_backward")
def prepare_backward(
    grad: Tensor,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    factor: Tensor | None,
    floor: Tensor | None,
    queries: bool,
    anchors: int,
    first: int,
    middle: int,
    apart: int,
) -> tuple[Tensor, Tensor]:
    """The gradient of x, (B, H, N, W), and the sums (blocks, H, C + 2) over tokens for the parameters."""
    grad, x = _rows(grad), _rows(x)
    batch, n_heads, n, width = x.shape
    dx = torch.empty(batch, n, n_heads, width, dtype=x.dtype, device=x.device)
    block = TILES["undo"][0]
    blocks, content = (0, 0) if weight is None else (batch * ((n + block - 1) // block), weight.size(1))
    sums = torch.empty(blocks, n_heads, content + 2, dtype=torch.float32, device=x.device)
    if dx.numel():
        traceable(prologue_kernels.undo)[_grid(x, "undo")](
            grad, x, *_given(x, cos, sin, weight, bias, factor, floor), dx, sums, *grad.stride()[:3], *x.stride()[:3],
            n_heads, n, first, middle, apart, **_flags(x, cos, weight, queries, anchors, "undo"),
        )  # fmt: skip
    return dx.transpose(1, 2), sums


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _, _, _, weight, _, factor, _ = ctx.saved_tensors
    dx, sums = torch.ops.gape.prepare_backward(grad, *ctx.saved_tensors, *ctx.settings)
    dweight = dbias = dfactor = None
    if weight is not None:
        total, content = sums.sum(0), weight.size(1)
        dweight, dbias = total[:, :content], total[:, content]
        dfactor = None if factor is None else total[:, content + 1]
    return (dx, None, None, dweight, dbias, dfactor, None, *(None,) * 5)


prepare.register_autograd(_backward, setup_context=_setup)


def _rows(x: Tensor) -> Tensor:
    """x with neighbouring coordinates side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _given(stand_in: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Contiguous tensors; one that is never read stands in for what is not there."""
    return [stand_in if x is None else x.contiguous() for x in tensors]


def _heads(n_heads: int) -> int:
    return next(heads for heads in HEADS if n_heads % heads == 0)


def _grid(x: Tensor, kernel: str) -> tuple[int, int, int]:
    return -(-x.size(2) // TILES[kernel][0]), x.size(1) // _heads(x.size(1)), x.size(0)


def _flags(
    x: Tensor, cos: Tensor | None, weight: Tensor | None, queries: bool, anchors: int, kernel: str
) -> dict[str, Any]:
    block, warps = TILES[kernel]
    edge = x.size(-1) // 2
    half = 1 << (edge - 1).bit_length()
    return {
        "QUERIES": queries, "ROTATED": cos is not None, "GATED": weight is not None,
        "LOW": edge if weight is None else weight.size(1) // 2, "EDGE": edge, "HEADS": _heads(x.size(1)),
        "T": block, "HALF": half, "EVEN": half == edge and not x.size(2) % block,
        "ANCHORS": anchors, "LIMIT": torch.finfo(x.dtype).max / 2, "num_warps": warps,
    }  # fmt: skip
