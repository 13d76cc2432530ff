"""One token of decoding, from projected q, k and v to pages: gates, rotation and writing in one launch.

Decoding has one token a row, so its time goes by launches. Steps of torch would be some thirty for each layer.
:mod:`gape.ops.triton.decode_prologue` has the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gape.ops.inputs import learning
from gape.ops.limits import HALVES, HAS_TRITON, TRITON_WIDTH
from gape.ops.paged import PageLayout, Pages
from gape.ops.prologue import Angles
from gape.utils.validation import invalid_argument

#: How a gate reads content: weights (H, C) and biases (H,), or the number that a fixed one takes in their place.
Reading = tuple[Tensor, Tensor] | float


class Step(NamedTuple):
    """What a gated scheme does to q and k of a few tokens, where that is rotating them and reading gates.

    Attributes:
        positions: integer (N,) or (B, N).
        angles: cosines and sines of the tokens, each (N, C/2) or (B, N, C/2), laid out alike, in float32 or half
            precision, or None to rotate nothing. They may be wider: what follows is not read. Where heads rotate in R
            ways, each has a first axis of R, and the way of each head follows: :data:`gape.ops.prologue.Angles`.
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


def prologue_runs(q: Tensor, k: Tensor, v: Tensor, layout: PageLayout) -> bool:
    """Whether :func:`decode_prologue` can run for q, k and v (B, H, 1, D): one token a row on a GPU, nothing learned.

    Not for compilers, nor for tensors that hold nothing.
    """
    if torch.compiler.is_compiling() or any(type(x) is not Tensor for x in (q, k, v)):
        return False
    narrow = torch.float64 not in (q.dtype, k.dtype, v.dtype) and layout.dtype in (*HALVES, torch.float32)
    fits = max(layout.key_width, layout.value_width) <= TRITON_WIDTH
    one = q.size(2) == k.size(2) == 1 and q.size(0) > 0
    return HAS_TRITON and q.is_cuda and one and narrow and fits and not learning(q, k, v)


def decode_prologue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    pages: Pages,
    *,
    scale: float,
    measured: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Read gates off q and k, rotate both, and write the token behind the cached keys; in one launch.

    Key, value, exposure and position go to slot `lengths` of each sequence, where its table has a page; lengths stay as
    they are, and `key_norm` takes the key in. Attention then follows with `new=1`.

    Args:
        q: (B, Hq, 1, D) as projected, in float32 or half precision, for which :func:`prologue_runs` says yes.
        k, v: (B, Hk, 1, D) and (B, Hk, 1, Dv), likewise.
        step: what the scheme does to them.
        pages: what is written to.
        scale: the softmax scale.
        measured: running maxima of scale·‖q‖ and of −scale·q·k over the token's own key, each (Hq,) in float32, which
            take this token in; infinite once a query was not a number.

    Returns:
        q rotated, (B, Hq, 1, D) in the dtype of the pages, and its rate c = Γ·g/T, (B, Hq, 1) in float32.

    Raises:
        ValueError: tensors that do not fit together; names the argument.
    """
    rows, key_heads, _ = pages.table.shape
    if q.dim() != 4 or (q.size(0), q.size(2)) != (rows, 1) or q.size(1) % max(1, key_heads):
        raise invalid_argument("q", q, f"({rows}, a multiple of {key_heads} heads, 1, D)")
    if k.shape != (rows, key_heads, 1, q.size(3)) or k.size(3) > pages.layout.key_width:
        raise invalid_argument("k", k, f"({rows}, {key_heads}, 1, D), D that of q and up to {pages.layout.key_width}")
    if v.dim() != 4 or v.shape[:3] != k.shape[:3] or v.size(3) > pages.layout.value_width:
        raise invalid_argument("v", v, f"({rows}, {key_heads}, 1, up to {pages.layout.value_width})")
    if step.positions.shape not in ((1,), (rows, 1)):
        raise invalid_argument("step.positions", step.positions, f"(1,) or ({rows}, 1)")
    from gape.ops.triton import decode_prologue as kernel  # noqa: PLC0415

    return kernel.decode_prologue(q, k, v, step, pages, scale=scale, measured=measured)
