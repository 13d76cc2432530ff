"""The steps of every attention layer, in their order: project → gates → rotation → cache → attention.

:func:`attend_layer` takes them for :class:`gape.GAPEAttention`, :class:`gape.hf.GapeForCausalLM` and layers that
:func:`gape.hf.inject` has put gates into. What each step does is the layer's own: :class:`AttentionLayer`.

Shapes: B rows, N tokens, E width, Hq / Hk query / key heads, D and Dv widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from gape.cache.kv import CachedKeys
from gape.cache.layer import PagedLayer, Rotated
from gape.ops.prologue import Step
from gape.positions.base import Side

QKV = tuple[Tensor, Tensor, Tensor]
#: Cosines and sines that a model hands to its layers; None where a layer makes its own.
Embeddings = tuple[Tensor, Tensor] | None


class AttentionLayer(Protocol):
    """What an attention layer does in each step; `context_length` is T, by which gates divide distances."""

    @property
    def gates(self) -> Any: ...  # noqa: D102

    @property
    def context_length(self) -> float: ...  # noqa: D102

    def project(self, x: Tensor, queries: int | None = None) -> QKV:
        """q (B, Hq, queries, D) of the last tokens of x (B, N, E), or of all, and k (B, Hk, N, D), v (B, Hk, N, Dv)."""

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, x: Tensor, embeddings: Embeddings, past: Side = None
    ) -> tuple[Tensor, Tensor, Side, Side]:
        """Rotated q and k, and a number per head and token of each: gate and landmark, if there are gates.

        `positions` (N,) or (B, N) are those of k, `past` the numbers of keys that are cached already.
        """

    def step(self, q: Tensor, positions: Tensor, embeddings: Embeddings) -> Step | None:
        """What :meth:`rotate` does, for kernels; None where it is more than they do."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Side, side: Side, **visibility: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, Hq, queries, Dv), and the weights where the dense form ran."""

    def merge(self, y: Tensor) -> Tensor:
        """(B, Hq, queries, Dv) → (B, queries, E)."""


class AppendsKeys(Protocol):
    """A cache of one layer that gives all its keys back, as :class:`gape.cache.kv.KVCache` does."""

    @property
    def side(self) -> Side:
        """The numbers of cached keys that :meth:`AttentionLayer.rotate` needs."""

    def append(
        self, k: Tensor, v: Tensor, side: Side, positions: Tensor | None, documents: Tensor | None
    ) -> CachedKeys:
        """Add tokens and return all of them."""


def attend_layer(
    layer: AttentionLayer,
    x: Tensor,
    positions: Tensor,
    cache: PagedLayer | AppendsKeys | None,
    *,
    attend: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run one attention layer on x (B, N, E), whose tokens are added to the cache.

    `attend` takes the place of `layer.attend`, and the options are those of :func:`take_steps`. Gives (B, queries, E),
    and the weights (B, Hq, queries, keys) where the dense form ran, else None.
    """
    in_pages = None if not isinstance(cache, PagedLayer) else cache.attend
    answer = take_steps(layer, x, positions, cache, attend or layer.attend, in_pages, **options)
    y, weights = (answer, None) if in_pages else answer
    return layer.merge(y), weights


def take_steps(
    layer: AttentionLayer,
    x: Tensor,
    positions: Tensor,
    cache: PagedLayer | AppendsKeys | None,
    attend: Callable[..., Any],
    in_pages: Callable[..., Any] | None,
    *,
    queries: int | None = None,
    in_order: bool = False,
    documents: Tensor | None = None,
    real: Tensor | None = None,
    embeddings: Embeddings = None,
    **visibility: Any,
) -> Any:
    """Project, read gates, rotate and add to the cache; the answer is that of `attend`, or of `in_pages` for pages.

    Args:
        layer, x, positions, cache: as in :func:`attend_layer`.
        attend, in_pages: called as :meth:`AttentionLayer.attend` is, and for a cache in pages as its layer's `attend`.
        queries: answer the last so many tokens; None answers all. Not with a cache in pages.
        in_order: whether the positions count on from what is cached, so that attention and cache need not be told them.
        documents: integer (B, N), for attention; None without.
        real: bool (B, N), False for pads, for a cache in pages; None where there are none.
        embeddings: cosines and sines that the model hands to its layers.
        **visibility: further arguments of `attend`, such as a mask.
    """
    q, k, v = layer.project(x, queries)
    if in_pages is not None:

        def rotate() -> Rotated:
            rotated_q, rotated_k, gate, landmark = layer.rotate(q, k, positions, x, embeddings)
            rate = None if gate is None else layer.gates.amplitude[:, None] * gate / layer.context_length
            return rotated_q, rotated_k, rate, landmark

        return in_pages(q, k, v, positions, rotate, step=layer.step(q, positions, embeddings), real=real)
    assert not isinstance(cache, PagedLayer)
    past = None if cache is None else cache.side
    q, k, gate, side = layer.rotate(q, k, positions, x, embeddings, past)
    keys = CachedKeys(k, v, side, None if in_order else positions, documents)
    if cache is not None:
        keys = cache.append(*keys)
    visibility |= {"q_positions": None if in_order else last(positions, q.size(2)), "k_positions": keys.positions}
    if documents is not None:
        visibility |= {"q_documents": last(documents, q.size(2)), "k_documents": keys.documents}
    return attend(q, keys.k, keys.v, gate, keys.side, **visibility)


def last(x: Tensor, rows: int) -> Tensor:
    """The last `rows` of x (..., N); x itself for all of them, so that what is memoized on it is not lost."""
    return x if x.size(-1) == rows else x[..., x.size(-1) - rows :]
