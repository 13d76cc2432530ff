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
    """Everything cached so far, newest last: k (B, Hk, N, D) as it enters the dot product, and v (B, Hk, N, Dv).

    `side` (B, H, N) is the scheme's number per key (landmark, cumulative decay), `positions` int64 (B, N) while tokens
    came with explicit ones, `documents` integer (B, N); each may be None.
    """

    k: Tensor
    v: Tensor
    side: Tensor | None
    positions: Tensor | None
    documents: Tensor | None


class KVCache:
    """The cache of one attention layer, for inference: what is stored carries no gradient.

    It begins with room for `capacity` tokens and grows by doubling, so a token costs no copy of the rest on average.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._capacity = capacity
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is cached, room to grow left out."""
        return sum(self._part(x).nbytes for x in self._buffers.values())

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
        """Add n tokens, as in :class:`CachedKeys`, and return all of them.

        Positions (n,) or (B, n) of None go on counting from the number of tokens cached.

        A ValueError names what does not go with the cached tokens.
        """
        batch, added = k.size(0), k.size(2)
        if positions is None and "positions" in self._buffers:
            raise ValueError("positions: got None, expected positions, since cached tokens have explicit ones")
        buffers = dict(self._buffers)
        if positions is not None:
            positions = positions.to(torch.int64).expand(batch, added)
            if self.length and "positions" not in buffers:
                counted = torch.arange(self.length, device=k.device).expand(batch, -1)
                buffers["positions"] = _written(None, 0, counted, self._capacity)
        parts = {"k": k, "v": v, "side": side, "positions": positions, "documents": documents}
        for name, part in parts.items():
            self._check(name, part, buffers.get(name))
        for name, part in parts.items():
            if part is not None:
                buffers[name] = _written(buffers.get(name), self.length, part, self._capacity)
        # Nothing counts before this: a call that breaks off above leaves the cache as it was.
        self._buffers, self.length = buffers, self.length + added
        return CachedKeys(
            self._part(buffers["k"]), self._part(buffers["v"]), *map(self._view, ("side", "positions", "documents"))
        )

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; a ValueError for a length that is not cached."""
        if whole("length", length, 0) > self.length:
            raise invalid_argument("length", length, f"a whole number from 0 to {self.length}, the tokens cached")
        if length == 0:
            # An empty cache goes with anything: other sizes, explicit positions or none.
            self._buffers = {}
        self.length = length

    def _part(self, buffer: Tensor) -> Tensor:
        """What counts of a buffer."""
        return buffer.narrow(_axis(buffer), 0, self.length)

    def _view(self, name: str) -> Tensor | None:
        buffer = self._buffers.get(name)
        return None if buffer is None else self._part(buffer)

    def _check(self, name: str, part: Tensor | None, buffer: Tensor | None) -> None:
        if self.length and (buffer is None) != (part is None):
            given = "given" if part is not None else "left out"
            raise ValueError(f"{name}: {given}, expected as for the {self.length} tokens already cached")
        if buffer is not None and part is not None and not _fits(buffer, part):
            raise invalid_argument(name, part, f"to go on from {described(self._part(buffer))}")


class ModelCache:
    """The caches of the layers of one model, first to last, each with room for `capacity` tokens."""

    #: The model whose tokens are cached. Not held: a copy of the cache belongs to it as well.
    _model: weakref.ref[GPT] | None = None

    def __init__(self, n_layer: int, capacity: int = 0) -> None:
        self.layers = [KVCache(capacity) for _ in range(n_layer)]

    def __getstate__(self) -> dict[str, Any]:
        # A reference to a model cannot be pickled; who unpickles a cache says which model it is for.
        return {name: value for name, value in self.__dict__.items() if name != "_model"}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelCache:
        clone = copy(self)
        clone.layers, clone._model = deepcopy(self.layers, memo), self._model
        return clone

    def enter(self, model: GPT) -> None:
        """Refuse a model other than the one whose tokens are cached; an empty cache takes any."""
        if self.length and self._model is not None and self._model() is not model:
            raise ValueError(f"cache: got {self.length} tokens of another model, expected an empty one or its own")
        self._model = weakref.ref(model)

    @property
    def length(self) -> int:
        """Tokens cached; a ValueError where an earlier call broke off and layers hold different numbers."""
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
        """Forget all but the first `length` tokens, as :meth:`KVCache.truncate`."""
        for layer in self.layers:
            layer.truncate(length)


def _axis(x: Tensor) -> int:
    """Along which tokens come: the third, or the second of (B, N)."""
    return 1 if x.dim() == 2 else 2


def _fits(buffer: Tensor, part: Tensor) -> bool:
    """Whether a part may be written to a buffer, but for the room there is."""
    ours, theirs = list(buffer.shape), list(part.shape)
    ours[_axis(buffer)] = theirs[_axis(buffer)] = 0
    return ours == theirs and buffer.dtype == part.dtype


def _written(buffer: Tensor | None, start: int, part: Tensor, capacity: int) -> Tensor:
    """The buffer with a part from token `start` on, or a larger one with what it had before."""
    axis = _axis(part)
    stop = start + part.size(axis)
    if buffer is None:
        buffer = _empty(part, max(capacity, stop))
    elif stop > buffer.size(axis):
        grown = _empty(buffer, max(stop, 2 * buffer.size(axis)))
        grown.narrow(axis, 0, start).copy_(buffer.narrow(axis, 0, start))
        buffer = grown
    buffer.narrow(axis, start, stop - start).copy_(part.detach())
    return buffer


def _empty(like: Tensor, tokens: int) -> Tensor:
    shape = list(like.shape)
    shape[_axis(like)] = tokens
    # Room made under inference_mode could not be written to outside of it.
    with torch.inference_mode(False):
        return like.new_empty(shape)
