"""Storage of cached keys: fixed-size pages, a block table and a length for each (layer, row, key head), a free list.

A page has room for 64 keys of one row and key head, with their values, exposures and positions. Sequences own pages by
number; the block table lists them in order. Memory grows by slabs of pages, so nothing that is cached is ever copied to
grow. Kernels read pages by address, so they do not care which slab a page lies in.

Shapes: L layers, B rows, Hk key heads, W pages that a table has room for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gape.ops.paged import PAGE, PageLayout, Pages, read_keys, runs_in_kernels, write_keys

#: Pages of the first slab for each sequence, and the share of all pages that a further slab adds.
_FIRST_PAGES = 2
_GROWTH = 4
#: Layers of which the device may still have to say how many keys they have.
_LAG = 2
#: Pages that a block table has room for at first.
_FIRST_WIDTH = 32


class PagedStorage:
    """The pages of all layers of a model, for one batch.

    Attributes:
        lengths: int32 (L, B, Hk), keys of each sequence, on the device; `counts` has the same on the host.
        key_norm: float32 (L, B, Hk), the largest norm of a key so far.
        next_position: int64 (B,), behind the last token of each row.
        query_range: float32 (L, 2, Hq), measured bounds on queries, where somebody measures them.
        tickets: int32 zeros for kernels.
        shape, width: (L, B, Hk) and W.
    """

    def __init__(
        self, layers: int, batch: int, heads: int, query_heads: int, layout: PageLayout, device: torch.device
    ) -> None:
        self.layout, self.device = layout, device
        self.shape = (layers, batch, heads)
        # Captured graphs and calls under inference_mode write to these alike.
        with torch.inference_mode(False):
            self.lengths = torch.zeros(self.shape, dtype=torch.int32, device=device)
            self.key_norm = torch.zeros(self.shape, dtype=torch.float32, device=device)
            self.next_position = torch.zeros(batch, dtype=torch.int64, device=device)
            self.query_range = torch.zeros(layers, 2, query_heads, dtype=torch.float32, device=device)
            self.tickets = torch.zeros(batch * heads, dtype=torch.int32, device=device)
        self.counts = np.zeros(self.shape, dtype=np.int64)
        self.in_kernels = runs_in_kernels(layout, device)
        #: The captured decoding step that reads these tables, and whether a single token has run before it.
        self.graph: Any = None
        self.stepped = False
        self.width, self._owned = 0, np.zeros(self.shape, dtype=np.int64)
        self._table: Any = np.zeros((*self.shape, 0), dtype=np.int64)
        self._widen(_FIRST_WIDTH)
        self._forget_pages()

    def _forget_pages(self) -> None:
        # Layers whose number of keys is being copied from the device, the copy, and the event that ends it.
        self._pending_counts: list[tuple[int, Tensor, Any]] = []
        self._slabs: list[Tensor] = []
        self._locate_pages()
        self._free = np.zeros(0, dtype=np.int64)
        # Of each layer, until a table or a slab takes the place of another.
        self._views: list[Pages] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedStorage:
        """A copy with pages of its own: addresses of the original would read its pages."""
        clone = copy(self)
        clone.graph = None
        self._take_counts()
        with torch.inference_mode(False):
            for name in ("lengths", "key_norm", "next_position", "query_range", "tickets", "addresses"):
                setattr(clone, name, getattr(self, name).clone())
            clone._slabs = [slab.clone() for slab in self._slabs]
        for name in ("counts", "_owned", "_table", "_free"):
            setattr(clone, name, getattr(self, name).copy())
        clone._pending_counts, clone._views = [], []
        clone._locate_pages()
        clone._upload()
        return clone

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that sequences own."""
        self._take_counts()
        return int(self._owned.sum()) * self.layout.nbytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all pages, those of the free list included."""
        return sum(slab.nbytes for slab in self._slabs)

    def room(self) -> int:
        """Keys that every sequence can take before it needs another page."""
        self._take_counts()
        return int((self._owned * PAGE - self.counts).min())

    def pages(self, layer: int) -> Pages:
        """The pages of a layer as attention reads them."""
        if not self._views:
            parts, slab = (self.addresses, self.lengths, self.key_norm), self._slab
            self._views = [Pages(self.layout, slab, *views) for views in zip(*parts, strict=True)]
        return self._views[layer]

    def _pages_of(self, sequences: Tensor) -> Pages:
        """The pages of some sequences, int64 (s,), as those of s rows with one key head."""
        parts = (x.flatten(0, 2)[sequences].unsqueeze(1) for x in (self.addresses, self.lengths, self.key_norm))
        return Pages(self.layout, self._slab, *parts)

    @property
    def _slab(self) -> Tensor:
        """All pages by number; an empty tensor where they lie in several slabs and are read by address."""
        return self._slabs[0] if len(self._slabs) == 1 else torch.empty(0, self.layout.nbytes, dtype=torch.uint8)

    def reserve(self, needed: int, layer: int | None = None) -> None:
        """Give sequences of one layer, or of all, the pages for so many more keys each, or leave them as they are."""
        if any(layer in (None, pending) for pending, *_ in self._pending_counts):
            # A count from before would undo what is counted from here on.
            self._take_counts()
        if self._assign(needed, layer):
            self._upload(layer)

    def _assign(self, needed: int, layer: int | None) -> bool:
        """Enter pages for so many more keys into the table on the host; whether any were needed."""
        part = _part(layer)
        owned, wanted = self._owned[part], -(-(self.counts[part] + needed) // PAGE)
        missing = np.maximum(wanted - owned, 0)
        if not missing.any():
            return False
        if int(wanted.max()) > self.width:
            self._widen(int(wanted.max()))
        count = int(missing.sum())
        if count > self._free.size:
            self._grow(count - self._free.size)
        numbers, self._free = self._free[:count], self._free[count:]
        # Of sequence s the places from owned[s] to owned[s] + missing[s].
        places = np.arange(self.width)
        new = (places >= owned[..., None]) & (places < (owned + missing)[..., None])
        self._table[part][new] = numbers
        self._owned[part] = owned + missing
        return True

    def write(self, layer: int, k: Tensor, v: Tensor, exposure: Tensor, positions: Tensor) -> None:
        """Write keys (B, Hk, n, …) behind those of a layer that has the pages; :meth:`advance` counts them."""
        write_keys(self.pages(layer), k, v, exposure, positions)

    def advance(self, tokens: int) -> None:
        """Count so many keys more in every sequence."""
        self.lengths.add_(tokens)
        self.counts += tokens

    def append(self, layer: int, k: Tensor, v: Tensor, exposure: Tensor, positions: Tensor, keep: Tensor) -> None:
        """Write the keys of a layer that `keep`, bool (B, Hk, n), names behind those it has, and count them."""
        # Room for all, until the device has said how many it is; reading that at once would keep the device waiting.
        self.reserve(k.size(2), layer)
        slots = self.lengths[layer].unsqueeze(-1) + keep.cumsum(-1, dtype=torch.int32) - 1
        write_keys(self.pages(layer), k, v, exposure, positions, slots.masked_fill(~keep, -1).int())
        self.lengths[layer].add_(keep.sum(-1, dtype=torch.int32))
        self.counts[layer] += k.size(2)
        if self.device.type != "cuda":
            self._settle(0, layer, self.lengths[layer].cpu())
            return
        # Start to copy how many keys the layer has, and count what was copied for earlier layers.
        counts = torch.empty(self.shape[1:], dtype=torch.int32, pin_memory=True)
        counts.copy_(self.lengths[layer], non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._pending_counts.append((layer, counts, copied))
        self._take_counts(_LAG)

    def _take_counts(self, lag: int = 0) -> None:
        """Count the keys of layers by the copies from the device, but for the last `lag` of them."""
        while len(self._pending_counts) > lag:
            layer, counts, copied = self._pending_counts.pop(0)
            copied.synchronize()
            self._settle(0, layer, counts)

    def rewrite(self, sequences: Tensor, keys: tuple[Tensor, ...], keep: Tensor) -> None:
        """Store only some keys of sequences, int64 (s,), moved together; :meth:`settle` then frees empty pages.

        `keys` is what :meth:`read` gave, keep bool (s, N) the keys that stay.
        """
        slots = (keep.cumsum(-1, dtype=torch.int32) - 1).masked_fill(~keep, -1).int()
        k, v, exposure, positions = (x.unsqueeze(1) for x in keys)
        write_keys(self._pages_of(sequences), k, v, exposure, positions, slots.unsqueeze(1))
        self.lengths.view(-1)[sequences] = keep.sum(-1, dtype=torch.int32)

    def read(self, sequences: Tensor) -> tuple[Tensor, ...]:
        """Keys, values, exposures, positions and which of them are there, (s, N, …), N being the longest sequence."""
        longest = int(self.counts.reshape(-1)[sequences.cpu().numpy()].max(initial=0))
        slots = torch.arange(longest, dtype=torch.int32, device=self.device)
        pages = self._pages_of(sequences)
        valid = slots < pages.lengths.unsqueeze(-1)
        keys = read_keys(pages, torch.where(valid, slots, -1))
        return (*(x.squeeze(1) for x in keys), valid.squeeze(1))

    def read_counts(self, layer: int | None = None) -> None:
        """Read back from the device how many keys sequences have: those of one layer, or of all."""
        self._take_counts()
        self.counts[_part(layer)] = self.lengths[_part(layer)].cpu().numpy()

    def settle(self, room: int, layer: int | None = None) -> None:
        """Read lengths back, free pages that are not needed, and make room for more keys: in one layer, or in all."""
        self._pending_counts.clear()
        self._settle(room, layer, self.lengths[_part(layer)].cpu())

    def _settle(self, room: int, layer: int | None, lengths: Tensor) -> None:
        part = _part(layer)
        self.counts[part] = lengths.numpy()
        wanted = -(-(self.counts[part] + room) // PAGE)
        places, table = np.arange(self.width), self._table[part]
        surplus = (places >= wanted[..., None]) & (places < self._owned[part][..., None])
        self._free = np.concatenate([self._free, table[surplus]])
        table[surplus] = -1
        self._owned[part] = np.minimum(self._owned[part], wanted)
        self._assign(room, layer)
        self._upload(layer)

    def drop_last(self, layer: int, tokens: int) -> None:
        """Forget so many of the last keys of every sequence of a layer."""
        self._take_counts()
        self.lengths[layer].sub_(tokens).clamp_(min=0)
        self.counts[layer] = np.maximum(self.counts[layer] - tokens, 0)

    def clear(self) -> None:
        """Forget everything and give all memory of pages back."""
        for state in (self.lengths, self.key_norm, self.next_position):
            state.zero_()
        self.counts[:] = 0
        self._owned[:] = 0
        self._table[:] = -1
        self._forget_pages()
        self._upload()

    def _grow(self, missing: int) -> None:
        total = self._addresses.size
        first = _FIRST_PAGES * int(np.prod(self.shape))
        pages = max(missing, total // _GROWTH, first if not total else 0)
        with torch.inference_mode(False):
            if self.in_kernels or not self._slabs:
                slab = torch.empty(pages, self.layout.nbytes, dtype=torch.uint8, device=self.device)
                self._slabs.append(slab)
            else:
                # PyTorch reads pages of one tensor.
                slab = torch.empty(total + pages, self.layout.nbytes, dtype=torch.uint8, device=self.device)
                slab[:total] = self._slabs[0]
                self._slabs = [slab]
        self._views = []
        self._locate_pages()
        self._free = np.concatenate([self._free, np.arange(total, total + pages)])
        if len(self._slabs) == 1:
            # It may have taken the place of another.
            self._upload()

    def _locate_pages(self) -> None:
        each = [slab.data_ptr() + self.layout.nbytes * np.arange(slab.size(0)) for slab in self._slabs]
        self._addresses = np.concatenate(each) if each else np.zeros(0, dtype=np.int64)

    def _widen(self, width: int) -> None:
        """Room for so many pages in the block tables, and some more."""
        old, width = self.width, max(width + width // _GROWTH, _FIRST_WIDTH)
        table = np.full((*self.shape, width), -1, dtype=np.int64)
        table[..., :old] = self._table
        self._table, self.width, self._views = table, width, []
        with torch.inference_mode(False):
            self.addresses = torch.zeros(table.shape, dtype=torch.int64, device=self.device)
        if old:
            self._upload()

    def _upload(self, layer: int | None = None) -> None:
        """Bring the block table of a layer, or those of all, to the device, without waiting for it."""
        part = _part(layer)
        numbers = self._table[part]
        if not self._addresses.size:
            self.addresses[part].zero_()
            return
        source = torch.from_numpy(np.where(numbers >= 0, self._addresses[np.maximum(numbers, 0)], 0))
        source = source.pin_memory() if self.device.type == "cuda" else source
        self.addresses[part].copy_(source, non_blocking=True)


def _part(layer: int | None) -> slice:
    """The part of all layers that a number means: one, or all."""
    return slice(None) if layer is None else slice(layer, layer + 1)


#: Pages of caches that are gone, one for each model: a new cache of the same batch takes them with their captured step.
_IDLE: weakref.WeakKeyDictionary[Any, PagedStorage] = weakref.WeakKeyDictionary()


def idle_pages(model: Any) -> PagedStorage | None:
    """Pages that an earlier cache of a model has left, for whoever asks first; None where there are none."""
    return _IDLE.pop(model, None)


def park(model: Callable[[], Any], storage: PagedStorage) -> None:
    """Keep the tables and the captured step of a cache that is gone, and free its pages; `model` gives its model."""
    owner = model()
    if storage.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Clearing would become a part of the graph.
        return
    storage.clear()
    if owner is not None:
        _IDLE[owner] = storage
