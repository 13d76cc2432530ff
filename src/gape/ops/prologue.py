"""From q and k as projected to what attention takes, in one pass over memory.

:func:`prologue` writes rows that carry the bias, :func:`projected_attention` attends to a prompt right away, and
:func:`decode_prologue` writes one token to its page. Without Triton or a GPU the same numbers come from a scheme's own
steps and :mod:`gape.ops.columns`, in several passes. `docs/results/precision.md` says what the coordinates are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.ops import columns, limits, sdpa
from gape.ops.columns import UNIT
from gape.ops.inputs import Visibility, learning
from gape.ops.limits import HALVES, MOST_PROGRAMS, TRITON_WIDTH
from gape.ops.paged import PageLayout, Pages
from gape.utils.validation import invalid_argument

#: Numbers of a row that a kernel loads at once: what Triton knows to be a multiple of it, it loads without looking at
#: each.
PIECE = 16

#: Cosines and sines, each (N, pairs). Where heads rotate in R ways, each is (R, N, pairs), and a third tensor has the
#: way of each query head, then of each key head, int32 (Hq + Hk,).
Angles = tuple[Tensor, ...]


class GateReading(NamedTuple):
    """What reads the gates: a weight vector and a bias per head.

    Attributes:
        gate_weight, gate_bias: (Hq, D) and (Hq,) of the query gate, in float32; for :func:`projected_attention` also in
            half precision.
        landmark_weight, landmark_bias: (Hk, D) and (Hk,) of the landmark, likewise.
        amplitude: Γ, (Hq,) in float32.
        floor: least gate, (Hq,) in float32.
        context_length: T.
    """

    gate_weight: Tensor
    gate_bias: Tensor
    landmark_weight: Tensor
    landmark_bias: Tensor
    amplitude: Tensor
    floor: Tensor
    context_length: float

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the kernels."""
        gate = (self.gate_weight, self.gate_bias, self.amplitude, self.floor)
        return (*gate, self.landmark_weight, self.landmark_bias)


class OnePass(NamedTuple):
    """What a positional scheme does to q and k, where that is no more than turning them and reading gates.

    Attributes:
        angles: cosines and sines, D/2 columns or more in float32, or None. Columns beyond D/2 are padding.
        reading: the gates, or None.
    """

    angles: Angles | None
    reading: GateReading | None


#: How a gate reads content: weights (H, C) and biases (H,), or the number that a fixed one takes in their place.
Reading = tuple[Tensor, Tensor] | float


class Step(NamedTuple):
    """What a gated scheme does to q and k of a few tokens, where that is rotating them and reading gates.

    Attributes:
        positions: integer (N,) or (B, N).
        angles: cosines and sines of the tokens, each (N, C/2) or (B, N, C/2), laid out alike, in float32 or half
            precision, or None to rotate nothing. They may be wider: what follows is not read. Where heads rotate in R
            ways, each has a first axis of R, and the way of each head follows: :data:`Angles`.
        gate, landmark: how they are read, before softplus and sigmoid; in float32 or half precision.
        raw_amplitude: (Hq,), Γ before its softplus.
        floor: least gate, (Hq,) in float32.
        context_length: T.
        strength: (Hq,), by whose size Γ is multiplied; None leaves it.
    """

    positions: Tensor
    angles: Angles | None
    gate: Reading
    landmark: Reading
    raw_amplitude: Tensor
    floor: Tensor
    context_length: float
    strength: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What a layer is about to project: enough to say whether one pass can make its q and k ready.

    Attributes:
        device, on_gpu, tokens: of x.
        dtype: of q, k and v as they will be projected, autocast included.
        n_heads, gated: of the layer: query heads, and whether there are gates.
        content: coordinates of q and k, C.
        width: of a head, which is that of values.
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
        run: attends; takes q, k, v, angles, reading, scale and eps as :func:`projected_attention` does.
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
    """The width of rows with `content` coordinates and no bias that :func:`projected_attention` takes; None: none."""
    fits = content % 2 == 0 and max(content, value_width) <= TRITON_WIDTH and heads <= MOST_PROGRAMS
    return -(-content // PIECE) * PIECE if fits else None


def whole_width(projection: Projection) -> int | None:
    """The width of rows without a bias for a projection with gates and without a gradient; None for none."""
    # Launches without an operator around them are closed to compilers.
    if projection.learns or not projection.gated or torch.compiler.is_compiling():
        return None
    return whole_rows(projection.content, projection.n_heads, projection.width)


def prologue(
    q: Tensor, k: Tensor, angles: Angles | None, reading: GateReading | None, *, scale: float
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
        ValueError: angles of another shape or dtype.
    """
    _check(angles, q, k, reading)
    from gape.ops.triton.prologue import prepare  # noqa: PLC0415

    gates: tuple[Tensor | None, ...] = (None,) * 6
    factor, anchors = 1.0, (1, 0, 0, 0)
    if reading is not None:
        n = q.size(2)
        near = torch.is_grad_enabled() and n <= columns.ANCHORED_ROWS
        gates, anchors = reading.parameters, columns.index_anchors(0, n, 0, near=near)
        factor = UNIT / scale / reading.context_length
    out_q, out_k = prepare(q, k, *tables_of(angles), *gates, factor, *anchors)
    return out_q, out_k


def fused_call(
    q: Tensor, k: Tensor, v: Tensor, angles: Angles | None, reading: GateReading | None, *, scale: float
) -> sdpa.Call:
    """The one call of `scaled_dot_product_attention` that is left after :func:`prologue`, causal and in index order.

    v is (B, Hk, N, Dv); the other arguments are those of :func:`prologue`.
    """
    q, k = prologue(q, k, angles, reading, scale=scale)
    visibility = Visibility(n_q=q.size(2), n_k=k.size(2), device=q.device)
    return sdpa.prepare(q, k, v, visibility, scale)


class Projected(NamedTuple):
    """What :func:`projected_attention` gives.

    Attributes:
        out: (B, Hq, n, Dv).
        base_2_lse: log-sum-exp in base 2, (B, Hq, n).
        q, k: rotated.
        base_2_rate: the rate times log₂e, (B, Hq, n) in float32.
        exposure: (B, Hk, n) in float32.
    """

    out: Tensor
    base_2_lse: Tensor
    q: Tensor
    k: Tensor
    base_2_rate: Tensor
    exposure: Tensor

    @property
    def lse(self) -> Tensor:
        """Natural log-sum-exp, (B, Hq, n)."""
        return self.base_2_lse * math.log(2)

    @property
    def rate(self) -> Tensor:
        """The rate c_i, (B, Hq, n)."""
        return self.base_2_rate * math.log(2)


def projects(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether :func:`projected_attention` can run: half precision on a GPU, and no gradient."""
    plain = type(q) is type(k) is type(v) is Tensor
    if not plain or torch.compiler.is_compiling() or learning(q, k, v):
        return False
    whole = whole_rows(q.size(-1), q.size(1), v.size(-1)) == q.size(-1)
    return whole and q.is_cuda and q.dtype == k.dtype == v.dtype and ready(q.device, q.dtype)


def projected_attention(
    q: Tensor, k: Tensor, v: Tensor, angles: Angles | None, reading: GateReading, *, scale: float, eps: float
) -> Projected:
    """Read gates off q and k, rotate both and attend in index order, as `impl="triton"` does; without gradients.

    Args:
        q, k: as :func:`prologue` takes them, in rows of :func:`whole_rows`, with gaps of any size or none.
        v: (B, Hk, N, Dv).
        angles, reading, scale: as :func:`prologue` takes them. Angles may be in half precision too, and of each
            sample: (B, N, pairs), or (R, B, N, pairs).
        eps: what a query may lose to tiles of keys that are skipped (`docs/results/proofs.md`); 0 skips nothing.
    """
    _check(angles, q, k, reading, dtypes=(torch.float32, *HALVES), by_sample=True)
    from gape.ops.triton.attention import attend_projected  # noqa: PLC0415

    return Projected(*attend_projected(q, k, v, angles, reading, scale=scale, eps=eps)[:6])


#: How `split` and `triton` run after the fused pass.
SPLIT = Fused(
    width=split_width, run=lambda *tensors, scale, eps=0.0: fused_call(*tensors, scale=scale).run(), call=fused_call
)
TRITON = Fused(width=whole_width, run=lambda *tensors, **options: projected_attention(*tensors, **options).out)


def prologue_runs(q: Tensor, k: Tensor, v: Tensor, layout: PageLayout) -> bool:
    """Whether :func:`decode_prologue` can run for q, k and v (B, H, 1, D): one token a row on a GPU, nothing learned.

    Not for compilers, nor for tensors that hold nothing.
    """
    if torch.compiler.is_compiling() or any(type(x) is not Tensor for x in (q, k, v)):
        return False
    narrow = torch.float64 not in (q.dtype, k.dtype, v.dtype) and layout.dtype in (*HALVES, torch.float32)
    fits = max(layout.key_width, layout.value_width) <= TRITON_WIDTH
    one = q.size(2) == k.size(2) == 1 and q.size(0) > 0
    return limits.HAS_TRITON and q.is_cuda and one and narrow and fits and not learning(q, k, v)


def decode_prologue(
    q: Tensor, k: Tensor, v: Tensor, step: Step, pages: Pages, *, scale: float,
    measured: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Read gates off q and k, rotate both, and write the token behind the cached keys; in one launch.

    Decoding has one token a row, so its time goes by launches: steps of torch would be some thirty for each layer. Key,
    value, exposure and position go to slot `lengths` of each sequence, where its table has a page; lengths stay as they
    are, and `key_norm` takes the key in. Attention then follows with `new=1`.

    Args:
        q: (B, Hq, 1, D) as projected, in float32 or half precision, for which :func:`prologue_runs` says yes.
        k, v: (B, Hk, 1, D) and (B, Hk, 1, Dv), likewise.
        step: what the scheme does to them, at positions (1,) or (B, 1).
        pages: what is written to.
        scale: the softmax scale.
        measured: running maxima of scale·‖q‖ and of −scale·q·k over the token's own key, each (Hq,) in float32, which
            take this token in; infinite once a query was not a number.

    Returns:
        q rotated, (B, Hq, 1, D) in the dtype of the pages, and its rate c = Γ·g/T, (B, Hq, 1) in float32.
    """
    from gape.ops.triton import decode_prologue as kernel  # noqa: PLC0415

    return kernel.decode_prologue(q, k, v, step, pages, scale=scale, measured=measured)


def tables_of(angles: Angles | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Cosines, sines and the row of each head as kernels take them; None for what there is not."""
    cos, sin, rows = (*(angles or ()), None, None, None)[:3]
    return cos, sin, rows


def _check(
    angles: Angles | None, q: Tensor, k: Tensor, reading: GateReading | None,
    *, dtypes: Sequence[torch.dtype] = (torch.float32,), by_sample: bool = False,
) -> None:  # fmt: skip
    """Refuse angles that do not fit, which a scheme may make its own way: kernels read as much as they are told to.

    Also gates on another device, whose addresses would mean nothing there.
    """
    for x in () if reading is None else (reading.gate_weight, reading.landmark_weight, reading.amplitude):
        if x.device != q.device:
            raise invalid_argument("gates", x, f"tensors on {q.device}")
    if angles is None:
        return
    content = q.size(3) if reading is None else reading.gate_weight.size(-1)
    # Both may be padded, by as much.
    cos, sin, *rows = angles
    shape: tuple[int, ...] = (q.size(2), max(content // 2, cos.size(-1)))
    if by_sample and cos.dim() == 3 + len(rows):
        shape = (q.size(0), *shape)
    shape = (cos.size(0), *shape) if rows else shape
    for name, x in (("cosines", cos), ("sines", sin)):
        if x.dtype not in dtypes or x.dtype != cos.dtype or x.shape != shape or x.device != q.device:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise invalid_argument(f"angles: {name}", x, f"a {known} tensor {shape} on {q.device}")
    heads = q.size(1) + k.size(1)
    if rows and (rows[0].dtype != torch.int32 or rows[0].shape != (heads,)):
        raise invalid_argument("angles: rows", rows[0], f"an int32 tensor ({heads},)")
