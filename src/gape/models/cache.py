"""What a decoding layer remembers: keys, values, what the scheme keeps per key, positions and documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Remembered:
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
    """

    def __init__(self) -> None:
        self._stores: dict[str, _Store] = {}
        self.length = 0

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
    ) -> Remembered:
        """Add n tokens and return all of them.

        Args:
            k, v, side: (B, Hk, n, D), (B, Hk, n, Dv) and (B, H, n) or None.
            positions: (n,) or (B, n), or None to go on counting from the number of tokens cached.
            documents: (B, n) or None.

        Raises:
            ValueError: the tokens do not go with the cached ones (another batch or width, documents or a side
                on one part only, positions left out after explicit ones).
        """
        batch, added = k.size(0), k.size(2)
        if positions is None and "positions" in self._stores:
            raise ValueError("positions: got None, expected positions, since cached tokens have explicit ones")
        if positions is not None:
            positions = positions.expand(batch, added)
            if self.length and "positions" not in self._stores:
                counted = torch.arange(self.length, device=k.device).expand(batch, -1)
                self._stores["positions"] = _Store(1, counted)
        parts = {"k": k, "v": v, "side": side, "positions": positions, "documents": documents}
        for name, part in parts.items():
            self._check(name, part)
        for name, part in parts.items():
            if part is None:
                continue
            if name in self._stores:
                self._stores[name].append(part)
            else:
                self._stores[name] = _Store(1 if part.dim() == 2 else 2, part)
        self.length += added
        return Remembered(
            k=self._stores["k"].view(),
            v=self._stores["v"].view(),
            side=self._view("side"),
            positions=self._view("positions"),
            documents=self._view("documents"),
        )

    def _view(self, name: str) -> Tensor | None:
        store = self._stores.get(name)
        return None if store is None else store.view()

    def _check(self, name: str, part: Tensor | None) -> None:
        store = self._stores.get(name)
        if self.length and (store is None) != (part is None):
            came = "given" if part is not None else "left out"
            raise ValueError(f"{name}: {came}, expected as for the {self.length} tokens already cached")
        if store is not None and part is not None and not store.fits(part):
            raise ValueError(
                f"{name}: got shape {tuple(part.shape)}, expected to go on from {tuple(store.view().shape)}"
            )


class _Store:
    """A tensor that grows along one dimension."""

    def __init__(self, dim: int, start: Tensor) -> None:
        self._dim = dim
        self._used = start.size(dim)
        self._buffer = start.detach().clone()

    def view(self) -> Tensor:
        return self._buffer.narrow(self._dim, 0, self._used)

    def fits(self, part: Tensor) -> bool:
        ours, theirs = list(self._buffer.shape), list(part.shape)
        ours[self._dim] = theirs[self._dim] = 0
        return ours == theirs

    def append(self, part: Tensor) -> None:
        needed = self._used + part.size(self._dim)
        if needed > self._buffer.size(self._dim):
            shape = list(self._buffer.shape)
            shape[self._dim] = max(needed, 2 * shape[self._dim])
            grown = self._buffer.new_empty(shape)
            grown.narrow(self._dim, 0, self._used).copy_(self.view())
            self._buffer = grown
        self._buffer.narrow(self._dim, self._used, needed - self._used).copy_(part.detach())
        self._used = needed
