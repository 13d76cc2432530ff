"""The KV cache for any scheme, in one tensor for each part: keys, values, the scheme's numbers, positions, documents.

:mod:`gape.cache.paged` has the caches in pages, for rotations and gates.
"""

from __future__ import annotations

import weakref
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gape.utils.validation import described, invalid_argument, whole

if TYPE_CHECKING:
    from gape.models.gpt import GPT


class CachedKeys(NamedTuple):
    """Everything cached so far, newest last.

    Attributes:
        k, v: (B, Hk, N, D) and (B, Hk, N, Dv), k as it enters the dot product.
        side: (B, H, N), the scheme's number per key (landmark, cumulative decay), or None.
        positions: int64 (B, N); None while every token came in order without explicit positions.
        documents: integer (B, N), or None.
    """

    k: Tensor
    v: Tensor
    side: Tensor | None
    positions: Tensor | None
    documents: Tensor | None


class KVCache:
    """The cache of one attention layer, for inference: what is stored carries no gradient.

    Room grows by doubling, so appending a token costs no copy of the rest on average.

    Args:
        capacity: tokens to make room for at once; past that, room grows as ever.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._stores: dict[str, _Store] = {}
        self._capacity = capacity
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is cached, room to grow left out."""
        return sum(store.view(self.length).nbytes for store in self._stores.values())

    @property
    def side(self) -> Tensor | None:
        """The scheme's number per cached key, (B, H, N), or None."""
        return self._view("side")

    def append(
        self,
        k: Tensor,
        v: Tensor,
        side: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> CachedKeys:
        """Add n tokens and return all of them.

        Args:
            k, v, side: (B, Hk, n, D), (B, Hk, n, Dv) and (B, H, n) or None.
            positions: (n,) or (B, n), or None to go on counting from the number of tokens cached.
            documents: (B, n) or None.

        Raises:
            ValueError: the tokens do not go with the cached ones (another batch, width or dtype, documents or a
                side on one part only, positions left out after explicit ones).
        """
        batch, added = k.size(0), k.size(2)
        if positions is None and "positions" in self._stores:
            raise ValueError("positions: got None, expected positions, since cached tokens have explicit ones")
        stores = dict(self._stores)
        if positions is not None:
            positions = positions.to(torch.int64).expand(batch, added)
            if self.length and "positions" not in stores:
                counted = torch.arange(self.length, device=k.device).expand(batch, -1)
                stores["positions"] = _Store(counted, self._capacity)
                stores["positions"].write(0, counted)
        parts = {"k": k, "v": v, "side": side, "positions": positions, "documents": documents}
        for name, part in parts.items():
            self._check(name, part, stores.get(name))
        for name, part in parts.items():
            if part is not None:
                if name not in stores:
                    stores[name] = _Store(part, self._capacity)
                stores[name].write(self.length, part)
        # Nothing counts before this: a call that breaks off above leaves the cache as it was.
        self._stores, self.length = stores, self.length + added
        return CachedKeys(
            k=stores["k"].view(self.length),
            v=stores["v"].view(self.length),
            side=self._view("side"),
            positions=self._view("positions"),
            documents=self._view("documents"),
        )

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: length is negative or beyond what is cached.
        """
        if whole("length", length, 0) > self.length:
            raise invalid_argument("length", length, f"a whole number from 0 to {self.length}, the tokens cached")
        if length == 0:
            # An empty cache goes with anything: other sizes, explicit positions or none.
            self._stores = {}
        self.length = length

    def _view(self, name: str) -> Tensor | None:
        store = self._stores.get(name)
        return None if store is None else store.view(self.length)

    def _check(self, name: str, part: Tensor | None, store: _Store | None) -> None:
        if self.length and (store is None) != (part is None):
            given = "given" if part is not None else "left out"
            raise ValueError(f"{name}: {given}, expected as for the {self.length} tokens already cached")
        if store is not None and part is not None and not store.fits(part):
            raise invalid_argument(name, part, f"to go on from {described(store.view(self.length))}")


class ModelCache:
    """The caches of a model's layers, first layer first. Tokens in them are those of one model.

    Args:
        n_layer: number of layers.
        capacity: tokens to make room for at once, as in :class:`KVCache`.
    """

    #: The model whose tokens are cached. Not held: a copy of the cache belongs to it as well.
    _model: weakref.ref[GPT] | None = None

    def __init__(self, n_layer: int, capacity: int = 0) -> None:
        self.layers = [KVCache(capacity) for _ in range(n_layer)]

    def __getstate__(self) -> dict[str, Any]:
        # A reference to a model cannot be pickled; who unpickles a cache says which model it is for.
        return {name: value for name, value in self.__dict__.items() if name != "_model"}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelCache:
        clone = copy(self)
        clone.__dict__ = deepcopy(self.__getstate__(), memo)
        clone._model = self._model
        return clone

    def enter(self, model: GPT) -> None:
        """Refuse a model other than the one whose tokens are cached; an empty cache takes any.

        Raises:
            ValueError: the model is another one, or the layers hold different numbers of tokens.
        """
        if self.length and self._model is not None and self._model() is not model:
            raise ValueError(f"cache: got {self.length} tokens of another model, expected an empty one or its own")
        self._model = weakref.ref(model)

    @property
    def length(self) -> int:
        """Tokens cached.

        Raises:
            ValueError: the layers hold different numbers, since an earlier call did not come to its end.
        """
        lengths = sorted({layer.length for layer in self.layers})
        if len(lengths) != 1:
            raise ValueError(
                f"cache: layers hold from {lengths[0]} to {lengths[-1]} tokens, expected as many in each; "
                f"a call broke off, truncate({lengths[0]}) makes the cache whole again"
            )
        return lengths[0]

    @property
    def nbytes(self) -> int:
        """Bytes of what is cached, room to grow left out."""
        return sum(layer.nbytes for layer in self.layers)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens.

        Raises:
            ValueError: length is negative or beyond what is cached.
        """
        for layer in self.layers:
            layer.truncate(length)


class _Store:
    """A tensor that grows along the dimension of its tokens: the third, or the second of (B, N).

    Args:
        like: what is to be stored, for its sizes, dtype and device.
        capacity: tokens to make room for.
    """

    def __init__(self, like: Tensor, capacity: int) -> None:
        self._dim = 1 if like.dim() == 2 else 2
        self.buffer = self._empty(like, max(capacity, like.size(self._dim)))

    @property
    def room(self) -> int:
        return self.buffer.size(self._dim)

    def view(self, length: int) -> Tensor:
        return self.buffer.narrow(self._dim, 0, length)

    def fits(self, part: Tensor) -> bool:
        ours, theirs = list(self.buffer.shape), list(part.shape)
        ours[self._dim] = theirs[self._dim] = 0
        return ours == theirs and self.buffer.dtype == part.dtype

    def write(self, start: int, part: Tensor) -> None:
        stop, room = start + part.size(self._dim), self.room
        if stop > room:
            grown = self._empty(self.buffer, max(stop, 2 * room))
            grown.narrow(self._dim, 0, start).copy_(self.view(start))
            self.buffer = grown
        self.buffer.narrow(self._dim, start, stop - start).copy_(part.detach())

    def _empty(self, like: Tensor, size: int) -> Tensor:
        shape = list(like.shape)
        shape[self._dim] = size
        # Room made under inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            return like.new_empty(shape)
