"""Single tokens of a model of `transformers` between their projections and attention, in one launch for q and k.

Gates, rotation and the bias's coordinates are some forty small launches a layer otherwise, and a recorded step has so
little to do that its time goes by them. The kernel is that of our GPT: :func:`gape.ops.carried.carried_rows`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gape.hf.gates import RetrofitGates
from gape.models.attention import GAPEAttention
from gape.models.loss import working_dtype
from gape.ops.carried import Rows, Step, carried_rows, steps
from gape.positions import Gated
from gape.positions.gated import step_under
from gape.positions.rotary import NoPE

#: Families whose own rotation turns pairs (x_m, x_{m+D/2}) by cosines and sines whose halves are alike.
HALVES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")


def rows_of(
    seat: Any, q: Tensor, k: Tensor, positions: Tensor, embeddings: tuple[Tensor, Tensor] | None
) -> Rows | None:
    """Queries and keys with their share of the bias; None, and nothing done, where one launch cannot make them.

    Args:
        seat: the layer as its cache sees it.
        q, k: (B, Hq, N, D) and (B, Hk, N, D) as projected, and normed where the model norms them.
        positions: integer (N,) or (B, N).
        embeddings: cosines and sines that the model handed to the layer, (1 or B, N, D).
    """
    dtype = working_dtype(q)
    if not steps(q, k, dtype):
        return None
    ours = isinstance(seat, GAPEAttention)
    step = _of_ours(seat, positions) if ours else _of_injected(seat.layer, q, positions, embeddings)
    if step is None:
        return None
    return carried_rows(q, k, step, width=seat.head_dim, scale=seat.scale, dtype=dtype)


def _of_ours(attention: GAPEAttention, positions: Tensor) -> Step | None:
    listened = attention.stepwise or attention.keep_landmark
    return attention.scheme.step(positions) if isinstance(attention.scheme, Gated) and not listened else None


def _of_injected(layer: Any, q: Tensor, positions: Tensor, embeddings: tuple[Tensor, Tensor] | None) -> Step | None:
    gates, wiring = layer.gape, layer.gape_wiring
    if type(gates) is not RetrofitGates:
        return None
    angles, scheme = None, wiring.scheme
    if not layer.unturned and not isinstance(scheme, NoPE):
        angles = _own_angles(wiring, q, embeddings) if scheme is None else scheme.angles(positions)
        if angles is None:
            return None
    return step_under(gates, positions, angles, context_length=wiring.context_length, strength=gates.strength)


def _own_angles(wiring: Any, q: Tensor, embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """The model's own cosines and sines as the kernel reads them; None where it cannot, or would turn otherwise."""
    if wiring.rotation is None or embeddings is None or wiring.family.model_type not in HALVES:
        return None
    cos, sin = embeddings
    batch, _, n, width = q.shape
    # A part of each head is turned where they are narrower.
    if cos.shape not in ((1, n, width), (batch, n, width)) or cos.stride(-1) != 1:
        return None
    if (cos.shape, cos.stride(), cos.dtype) != (sin.shape, sin.stride(), sin.dtype):
        return None
    # Wider ones than q would have made q as wide.
    if working_dtype(cos) != working_dtype(q):
        return None
    return (cos[0], sin[0]) if cos.size(0) == 1 else (cos, sin)
