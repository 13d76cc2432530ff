"""From q and k as projected to what attention takes, in one pass over memory: rows that carry the bias, or bounds.

Without Triton or a GPU the same numbers come from a scheme's own steps and :mod:`gape.ops.columns`, in several passes;
this module is what replaces them where it can run. `docs/results/precision.md` says what the coordinates are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.ops import columns, limits, sdpa
from gape.ops.columns import UNIT
from gape.ops.inputs import Visibility
from gape.ops.limits import HALVES, MOST_PROGRAMS, TRITON_WIDTH
from gape.utils.validation import invalid_argument, weight

#: Numbers of a row that a kernel loads at once: what Triton knows to be a multiple of it, it loads without looking at
#: each.
PIECE = 16

#: Cosines and sines, each (N, pairs). Where heads rotate in R ways, each is (R, N, pairs), and a third tensor has the
#: way of each query head, then of each key head, int32 (Hq + Hk,).
Angles = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class GateReading:
    """What reads the gates: a weight vector and a bias per head, in float32.

    Attributes:
        gate_weight, gate_bias: (Hq, D) and (Hq,) of the query gate.
        landmark_weight, landmark_bias: (Hk, D) and (Hk,) of the landmark.
        amplitude: Γ, (Hq,).
        floor: least gate, (Hq,).
        context_length: T.
    """

    gate_weight: Tensor
    gate_bias: Tensor
    landmark_weight: Tensor
    landmark_bias: Tensor
    amplitude: Tensor
    floor: Tensor
    context_length: float


class OnePass(NamedTuple):
    """What a positional scheme does to q and k, where that is no more than turning them and reading gates.

    Attributes:
        angles: cosines and sines, D/2 columns or more in float32, or None. Columns beyond D/2 are padding.
        reading: the gates, or None.
    """

    angles: Angles | None
    reading: GateReading | None


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What a layer is about to project: enough to say whether one pass can make its q and k ready.

    Attributes:
        device: of x.
        on_gpu: whether x is on a GPU.
        dtype: of q, k and v as they will be projected, autocast included.
        tokens: N.
        n_heads: query heads.
        content: coordinates of q and k, C.
        width: of a head, which is that of values.
        gated: whether there are gates.
        learns: whether a gradient will be asked of x, the projection or the scheme.
        bare: whether the projection is its weights and nothing more.
    """

    device: torch.device
    on_gpu: bool
    dtype: torch.dtype
    tokens: int
    n_heads: int
    content: int
    width: int
    gated: bool
    learns: bool
    bare: bool


@dataclass(frozen=True, kw_only=True)
class Fused:
    """How an implementation runs after the fused pass.

    Attributes:
        width: of the rows that the pass takes and makes; None where the pass cannot serve the projection.
        run: attends; takes q, k, v, angles, reading, scale and eps as :func:`bounded_attention` does.
        call: the prepared call of `scaled_dot_product_attention`, from the same but eps; None where there is none.
    """

    width: Callable[[Projection], int | None]
    run: Callable[..., Tensor]
    call: Callable[..., sdpa.Call] | None = None


def ready(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused pass can run: half precision, Triton, and a GPU (or its interpreter)."""
    here = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return limits.HAS_TRITON and dtype in HALVES and here


def spread(x: Tensor, width: int) -> Tensor:
    """Content (..., C) in the layout of the fused pass, (..., width): a gap of zeros behind each of its halves."""
    gap = (width - x.size(-1)) // 2
    return F.pad(x.reshape(*x.shape[:-1], 2, -1), (0, gap)).flatten(-2) if gap else x


def split_width(projection: Projection) -> int | None:
    """The width of rows that carry the bias in six coordinates; None where they do not fit the head.

    Both halves need a gap of three. Without gates there is no bias. Beyond two anchors' reach gates do not learn well.
    """
    if not projection.gated:
        return projection.content
    even = projection.content % 2 == 0 and projection.width % 2 == 0
    near = not torch.is_grad_enabled() or projection.tokens <= columns.ANCHORED_ROWS
    return projection.width if even and near and projection.width >= projection.content + columns.COLUMNS else None


def whole_rows(content: int, heads: int, value_width: int) -> int | None:
    """The width of rows with `content` coordinates and no bias that :func:`bounded_attention` takes; None for none."""
    fits = content % 2 == 0 and max(content, value_width) <= TRITON_WIDTH and heads <= MOST_PROGRAMS
    return -(-content // PIECE) * PIECE if fits else None


def whole_width(projection: Projection) -> int | None:
    """The width of rows without a bias for a projection with gates and without a gradient; None for none."""
    if projection.learns or not projection.gated:
        return None
    return whole_rows(projection.content, projection.n_heads, projection.width)


def prologue(
    q: Tensor,
    k: Tensor,
    angles: Angles | None,
    reading: GateReading | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Turn q and k and write the bias's coordinates into their gaps, for tokens in index order.

    Args:
        q, k: (B, Hq, N, W) and (B, Hk, N, W), bfloat16 or float16, any strides: content as :func:`spread` lays it out
            (a projection whose weights are laid out so gives it at once). Without gates there are no gaps.
        angles: :data:`Angles` with C/2 columns in float32; pair m of the content is (x_m, x_{m+C/2}). Further columns
            are padding, which lets rows begin where they are read fast. None turns nothing.
        reading: the gates; None leaves q and k without a bias.
        scale: the softmax scale.

    Returns:
        The same shapes, contiguous: attention over them with `scale` is the operator.

    Raises:
        ValueError: the fused pass cannot run here, or shapes do not fit together; names the argument.
    """
    _check(q, k, angles, reading)
    from gape.ops.triton.prologue import prepare  # noqa: PLC0415

    turning = tables_of(angles)
    gates: tuple[Tensor | None, ...] = (None,) * 6
    factor, anchors = 1.0, (1, 0, 0, 0)
    if reading is not None:
        gates = (
            reading.gate_weight, reading.gate_bias, reading.amplitude, reading.floor,
            reading.landmark_weight, reading.landmark_bias,
        )  # fmt: skip
        n = q.size(2)
        near = torch.is_grad_enabled() and n <= columns.ANCHORED_ROWS
        factor, anchors = UNIT / scale / reading.context_length, columns.index_anchors(0, n, 0, near=near)
    out_q, out_k = prepare(q, k, *turning, *gates, factor, *anchors)
    return out_q, out_k


def fused_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    reading: GateReading | None,
    *,
    scale: float,
) -> sdpa.Call:
    """The one call of `scaled_dot_product_attention` that is left after the prologue, causal and in index order.

    Args:
        q, k: as :func:`prologue` takes them.
        v: (B, Hk, N, Dv).
        angles, reading, scale: as :func:`prologue` takes them.
    """
    q, k = prologue(q, k, angles, reading, scale=scale)
    visibility = Visibility(n_q=q.size(2), n_k=k.size(2), device=q.device)
    return sdpa.prepare(q, k, v, visibility, scale)


def bounded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    reading: GateReading,
    *,
    scale: float,
    eps: float,
) -> Tensor:
    """What `impl="triton"` gives, causal and in index order, with all that it takes made in one pass. No gradients.

    Args:
        q, k: as :func:`prologue` takes them, in rows of :func:`whole_rows`, with gaps of any size or none.
        v: (B, Hk, N, Dv).
        angles, reading, scale: as :func:`prologue` takes them.
        eps: what a query may lose to tiles of keys that are skipped (`docs/results/proofs.md`); 0 skips nothing.

    Returns:
        (B, Hq, N, Dv) in q's dtype.

    Raises:
        ValueError: as :func:`prologue`, and for v and eps.
    """
    _check(q, k, angles, reading, least=0)
    if not isinstance(v, Tensor) or v.shape[:-1] != k.shape[:-1] or (v.dtype, v.device) != (q.dtype, q.device):
        raise invalid_argument("v", v, f"a {q.dtype} tensor {(*k.shape[:-1], 'width')} on {q.device}")
    eps = weight("eps", eps)
    from gape.ops.triton import attention  # noqa: PLC0415

    return attention.projected(q, k, v, angles, reading, scale=scale, eps=eps)[0]


#: How `split` and `triton` run after the fused pass.
SPLIT = Fused(
    width=split_width, run=lambda *given, scale, eps=0.0: fused_call(*given, scale=scale).run(), call=fused_call
)
TRITON = Fused(width=whole_width, run=bounded_attention)


def tables_of(angles: Angles | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Cosines, sines and the row of each head as kernels take them; None for what there is not."""
    cos, sin, rows = (*(angles or ()), None, None, None)[:3]
    return cos, sin, rows


def _check(
    q: Tensor,
    k: Tensor,
    angles: Angles | None,
    reading: GateReading | None,
    least: int = columns.COLUMNS,
) -> None:
    """Refuse what does not fit together: kernels read as much as they are told to. Gaps are of at least `least`."""
    if not isinstance(q, Tensor) or q.dim() != 4 or not ready(q.device, q.dtype) or q.size(3) % 2:
        raise invalid_argument(
            "q", q, "a half-precision tensor (B, heads, N, even width) on a GPU, with Triton installed"
        )
    batch, n_heads, n, width = q.shape
    like_q = isinstance(k, Tensor) and k.dim() == 4 and (k.dtype, k.device) == (q.dtype, q.device)
    if not like_q or (k.size(0), *k.shape[2:]) != (batch, n, width):
        # Written down where it is refused alone: a compiler takes a length in a text for one that never changes.
        raise invalid_argument("k", k, f"a {q.dtype} tensor ({batch}, heads, {n}, {width}) on {q.device}")
    if n_heads % k.size(1):
        raise invalid_argument("k", k, f"heads that divide {n_heads}, those of q")
    content = width
    if reading is not None:
        content = reading.gate_weight.size(-1)
        if content % 2 or content + least > width:
            expected = f"weights of an even number of coordinates up to {width - least}"
            raise invalid_argument("reading", reading.gate_weight, expected)
        heads = {"gate_bias": n_heads, "landmark_bias": k.size(1), "amplitude": n_heads, "floor": n_heads}
        shapes: dict[str, tuple[int, ...]] = {name: (count,) for name, count in heads.items()}
        shapes |= {"gate_weight": (n_heads, content), "landmark_weight": (k.size(1), content)}
        for name, shape in shapes.items():
            _float32(f"reading.{name}", getattr(reading, name), shape, q.device)
    if angles is not None:
        # Both may be padded, by as much.
        cos, sin, *rows = angles
        shape = (n, max(content // 2, cos.size(-1)))
        for name, x in (("cosines", cos), ("sines", sin)):
            _float32(f"angles: {name}", x, (cos.size(0), *shape) if rows else shape, q.device)
        if rows and (rows[0].dtype != torch.int32 or rows[0].shape != (n_heads + k.size(1),)):
            raise invalid_argument("angles: rows", rows[0], f"an int32 tensor ({n_heads + k.size(1)},)")


def _float32(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if x.dtype != torch.float32 or x.shape != shape or x.device != device:
        raise invalid_argument(name, x, f"a float32 tensor {shape} on {device}")
