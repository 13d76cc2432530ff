"""What a positional scheme is: how queries and keys are rotated, and how they then attend.

Shapes: B batch, Hq query heads, Hk key heads, N tokens, D head dim, Dv value dim, E model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar, Required, TypedDict

import torch
from torch import Tensor, nn

from gape.ops import attention
from gape.ops.inputs import INTEGERS
from gape.ops.prologue import Angles, OnePass
from gape.utils.validation import invalid_argument, positive_number, whole

#: One number per head and token that a scheme needs in `attend`, (B, H, N), or None.
Side = Tensor | None


class Sizes(TypedDict, total=False):
    """The keyword arguments that every scheme takes besides its own options; see :class:`Scheme`."""

    n_heads: Required[int]
    head_dim: Required[int]
    n_kv_heads: int | None
    context_length: float | None
    n_embd: int | None


SIZES = frozenset(Sizes.__annotations__)


class Scheme(nn.Module):
    """A positional scheme: three steps that an attention layer calls in order.

    `queries` and `keys` receive projected tensors and return them ready for the dot product, each with a
    *side*: one number per head and token that the scheme needs later (a gate, a landmark, a cumulative
    decay), or None. The key side is cached next to k and v. `attend` then does the attention itself.

    Positions are integers of any sign and order, (N,) for the whole batch or (B, N) for each row.

    Args:
        n_heads, n_kv_heads: query heads Hq and key heads Hk; as many when None.
        head_dim: coordinates of q and k that carry content, D.
        context_length: the training length T; schemes that need it refuse None.
        n_embd: width E of the layer input, for schemes that read it.

    Raises:
        ValueError: a size is not a positive integer, n_kv_heads is no divisor of n_heads, or context_length
            is not a positive number.
    """

    #: Why `+gape` may not follow this scheme; None where it may.
    refuses_gates: ClassVar[str | None] = None

    def __init__(
        self,
        *,
        n_heads: int,
        head_dim: int,
        n_kv_heads: int | None = None,
        context_length: float | None = None,
        n_embd: int | None = None,
    ) -> None:
        super().__init__()
        self.n_heads = whole("n_heads", n_heads)
        self.head_dim = whole("head_dim", head_dim)
        self.n_kv_heads = n_heads if n_kv_heads is None else whole("n_kv_heads", n_kv_heads)
        if n_heads % self.n_kv_heads:
            raise invalid_argument("n_kv_heads", n_kv_heads, f"a divisor of n_heads = {n_heads}")
        self.context_length = context_length
        if context_length is not None:
            positive_number("context_length", context_length)
        self.n_embd = None if n_embd is None else whole("n_embd", n_embd)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Names and defaults of the options that `build` passes on, besides the sizes."""
        return keyword_defaults(cls)

    def queries(self, q: Tensor, positions: Tensor, x: Tensor | None = None) -> tuple[Tensor, Side]:
        """Rotate q (B, Hq, N, D) at `positions` (N,) or (B, N); x (B, N, E) is the layer input."""
        return q, None

    def keys(self, k: Tensor, positions: Tensor, x: Tensor | None = None, past: Side = None) -> tuple[Tensor, Side]:
        """Rotate k (B, Hk, N, D); `past` is the key side (B, H, M) of the M keys already cached, if any."""
        return k, None

    def separate(self, side: Tensor) -> Tensor:
        """A key side (B, H, N) as numbers that each depend on one token alone, to be sent to other processes."""
        return side

    def accumulate(self, values: Tensor) -> Tensor:
        """The key side of tokens in index order from what :meth:`separate` made of each."""
        return values

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, q_side: Side, k_side: Side, *, scale: float, impl: str = "auto",
        **visibility: Any,
    ) -> Tensor:  # fmt: skip
        """Attend with what `queries` and `keys` returned.

        `visibility` says who may see whom: q_positions, k_positions, q_documents, k_documents, attn_mask and
        is_causal of :func:`gape.gated_attention`. Returns (B, Hq, Nq, Dv).
        """
        return attention(q, k, v, scale=scale, **self.terms(q, k, k_side), **visibility)

    def terms(self, q: Tensor, k: Tensor, k_side: Side) -> dict[str, Any]:
        """What is added to the logits, as an argument of `gape.ops.attention`: `bias`, `key_bias` or `rates`."""
        return {}

    @property
    def adds_to_logits(self) -> bool:
        """Whether logits are more than the dot products of q and k."""
        own = type(self)
        return own.attend is not Scheme.attend or own.terms is not Scheme.terms

    def one_pass(self, n: int, device: torch.device) -> OnePass | None:
        """What a fused pass over n tokens in index order does in the place of `queries` and `keys`, or None."""
        return None

    def angles(self, positions: Tensor) -> Angles | None:
        """Cosines and sines by which tokens at `positions` are rotated; None where they are not. Not to be written to.

        Each is (..., N, D/2) in float32; :data:`gape.ops.prologue.Angles` says what follows where heads rotate in
        several ways. Layers that pass the same tensor share them.
        """
        return None

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """Additive logits (1 or B, Hq, Nq, Nk) in float32, or None where positions alone fix none."""
        return None


def keyword_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Names and defaults of the arguments of `function` that have one, the sizes of a scheme left out."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in SIZES}


def counted(first: int, n: int, device: torch.device) -> Tensor:
    """Positions first … first + n − 1, (n,), the same tensor for every layer of a call; not to be written to."""
    if not cacheable(device):
        return torch.arange(first, first + n, device=device)
    return _counted(first, n, device, stream_of(device))


@lru_cache(maxsize=2)
def _counted(first: int, n: int, device: torch.device, stream: int) -> Tensor:
    # Under inference_mode it would have no version, by which angles made of it are known to be current.
    with torch.inference_mode(False):
        return torch.arange(first, first + n, device=device)


def cacheable(device: torch.device) -> bool:
    """Whether tensors made now can be cached, and cached ones be used: not while a CUDA graph is captured."""
    # What a capture makes has no values until a replay; what it reads must outlive it, and cached tensors may not.
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def stream_of(device: torch.device) -> int:
    """The current stream of a device: a cached tensor is valid on the stream where it was made."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def distance(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """i − j as (1 or B, 1, Nq, Nk) int64, from integer positions of shape (N,) or (B, N)."""
    for name, x in (("q_positions", q_positions), ("k_positions", k_positions)):
        if x.dtype not in INTEGERS:
            raise invalid_argument(name, x, "an integer tensor")
    delta = q_positions.to(torch.int64).unsqueeze(-1) - k_positions.to(torch.int64).unsqueeze(-2)
    return delta.unsqueeze(0).unsqueeze(0) if delta.dim() == 2 else delta.unsqueeze(1)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast shortens nothing on `device`."""
    # The one device without autocast; torch.amp.is_autocast_available cannot be traced by torch 2.11.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
