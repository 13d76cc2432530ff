"""A listener at the layers of a cache in pages: what every query was asked, against all keys that ever came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gape
from gape.cache.layer import PagedLayer
from gape.cache.paged import PagedCache


class Judgement(NamedTuple):
    """The most attention that a query lost, and how far outputs are from attention to the keys that were there."""

    lost: float
    error: float


class Witness:
    """Queries and keys of one layer, and the positions cached behind every call."""

    def __init__(self, cache: PagedCache, layer: PagedLayer) -> None:
        self.cache, self.layer = cache, layer
        self.calls: list[tuple[Tensor, ...]] = []
        self.cached: list[list[list[Tensor]]] = []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotate: Any, *, step: Any, real: Any
    ) -> Tensor:
        out = PagedLayer.attend(self.layer, q, k, v, positions, rotate, step=step, real=real)
        q, k, rate, landmark = rotate()
        positions = positions.expand(q.size(0), -1)
        real = torch.ones_like(positions, dtype=torch.bool) if real is None else real
        numbers = [x.double().cpu() for x in (q, k, v, rate, landmark)]
        self.calls.append((*numbers, positions.cpu(), real.cpu(), out.cpu()))
        heads = range(k.size(1))
        self.cached.append([[x.cpu() for x in self.cache.positions(self.layer.index, head)] for head in heads])
        return out

    def judged(self) -> Judgement:
        """In float64, with all keys of the row up to the query."""
        parts = zip(*self.calls, strict=True)
        q, k, v, rate, landmark, positions, real, out = (torch.cat(x, -2 if x[0].dim() == 4 else -1) for x in parts)
        groups, n = q.size(1) // k.size(1), k.size(2)
        k, v, landmark = (x.repeat_interleave(groups, dim=1) for x in (k, v, landmark))
        distance = (positions[:, :, None] - positions[:, None, :])[:, None]
        logits = self.layer.spec.scale * q @ k.mT - rate[..., None] * (1 - landmark)[:, :, None] * distance
        hidden = torch.ones(n, n).triu(1).bool() | ~real[:, None, None, :]
        logits = logits.masked_fill(hidden, -torch.inf)
        there = torch.cat([self._there(call, positions, real) for call in range(len(self.calls))], dim=2)
        there = there.repeat_interleave(groups, dim=1)
        judged = real[:, None, :].expand(out.shape[:3])
        lost = (logits.softmax(-1) * ~there).sum(-1)[judged]
        expected = logits.masked_fill(~there, -torch.inf).softmax(-1) @ v
        return Judgement(min(1.0, float(lost.max())), float((expected - out.double()).abs()[judged].max()))

    def _there(self, call: int, positions: Tensor, real: Tensor) -> Tensor:
        """Keys that queries of a call could attend to, (B, Hk, n, N): those cached behind it, and its own tokens."""
        start = sum(given[0].size(2) for given in self.calls[:call])
        stop = start + self.calls[call][0].size(2)
        own = torch.arange(positions.size(1))
        own = (own >= start) & (own < stop)
        rows = [
            torch.stack([torch.isin(positions[row], head[row]) for head in self.cached[call]])
            for row in range(positions.size(0))
        ]
        there = (torch.stack(rows) | own) & real[:, None]
        return there.unsqueeze(2).expand(-1, -1, stop - start, -1)


@contextmanager
def witnessed(cache: PagedCache) -> Iterator[list[Witness]]:
    witnesses = [Witness(cache, layer) for layer in cache.layers]
    with pytest.MonkeyPatch.context() as patch:
        for witness in witnesses:
            patch.setattr(witness.layer, "attend", witness.attend)
        yield witnesses


@torch.no_grad()
def read(gpt: gape.GPT, cache: Any, ids: Tensor, sizes: list[int], pads: Tensor | None = None) -> Tensor:
    """Logits of ids (B, N) in chunks of these sizes, rows beginning with so many pads (B,)."""
    logits = []
    places = torch.arange(ids.size(1), device=ids.device)
    real = None if pads is None else places >= pads[:, None]
    for part in places.split(sizes):
        given = {}
        if real is not None and pads is not None:
            given = {"positions": (part - pads[:, None]).clamp(min=0), "documents": real[:, part].long()}
        logits.append(gpt(ids[:, part], cache=cache, **given).logits)
    return torch.cat(logits, dim=1)
