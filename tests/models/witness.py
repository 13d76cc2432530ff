"""Whoever looks over a forgetting cache's shoulder, and remembers everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gape.cache.forgetting import ForgettingLayer

import gape
from gape.cache.kv import ForgettingCache

FLOOR = {"gate_floor": 24.0, "init_landmark_bias": -3.0}


class Witness:
    """Everything a layer was asked and what it held then, for a judgement in float64 afterwards."""

    def __init__(self, layer: ForgettingLayer) -> None:
        self.layer = layer
        self.asked: list[tuple[torch.Tensor, ...]] = []
        self.held: list[torch.Tensor] = []

    def attend(self, attention: gape.GAPEAttention, *given: Any) -> torch.Tensor:
        out = ForgettingLayer.attend(self.layer, attention, *given)
        q, k, v, gate, landmark, where = (x.double() for x in given[:6])
        self.asked.append((q, k, v, gate, landmark, where.expand(q.size(0), -1), out.double()))
        heads = []
        for head in range(k.size(1)):
            held = self.layer.positions(head).long()
            heads.append(torch.zeros(q.size(0), self.layer.length, dtype=torch.bool).scatter(1, held, True))
        self.held.append(torch.stack(heads, dim=1))
        return out

    def judged(self) -> tuple[float, float]:
        """(most that a query missed, largest error of an output against attention to what was held)."""
        attention = self.layer._attention
        q, k, v, gate, landmark, where, out = (torch.cat(parts, dim=-2 if parts[0].dim() == 4 else -1)
                                               for parts in zip(*self.asked, strict=True))  # fmt: skip
        groups, n = q.size(1) // k.size(1), k.size(2)
        k, v, landmark = (x.repeat_interleave(groups, dim=1) for x in (k, v, landmark))
        rate = attention.gates.amplitude.double()[:, None] * gate / attention.context_length
        distance = (where[:, :, None] - where[:, None, :])[:, None]
        logits = attention.scale * q @ k.mT - rate[..., None] * (1 - landmark)[:, :, None] * distance
        logits = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        spans = [part[0].size(2) for part in self.asked]
        held = torch.cat(
            [torch.nn.functional.pad(part, (0, n - part.size(-1)))[:, :, None].expand(-1, -1, span, -1)
             for part, span in zip(self.held, spans, strict=True)], dim=2,
        ).repeat_interleave(groups, dim=1)  # fmt: skip
        missed = (logits.softmax(-1) * ~held).sum(-1).max().item()
        there = logits.masked_fill(~held, -torch.inf).softmax(-1) @ v
        return missed, (there - out).abs().max().item()


@contextmanager
def witnessed(cache: ForgettingCache) -> Iterator[list[Witness]]:
    witnesses = [Witness(layer) for layer in cache.layers]
    with pytest.MonkeyPatch.context() as patch:
        for witness in witnesses:
            patch.setattr(witness.layer, "attend", witness.attend)
        yield witnesses


@torch.no_grad()
def decoded(gpt: gape.GPT, cache: Any, ids: torch.Tensor, prompt: int, chunk: int = 1) -> torch.Tensor:
    """Logits of a prompt read in chunks, and of the rest token by token."""
    starts = [*range(0, prompt, chunk), *range(prompt, ids.size(1))] or [0]
    stops = [*starts[1:], ids.size(1)]
    return torch.cat([gpt(ids[:, a:b], cache=cache).logits for a, b in zip(starts, stops, strict=True)], dim=1)
