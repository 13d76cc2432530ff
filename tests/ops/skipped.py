"""How much of a call the kernel that skips has looked at, and how much it should."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gape.ops.inputs import Problem
from gape.ops.triton import attention


def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The fraction of tiles that every call of the kernel looks at from now on; 1 where nothing may be left away."""
    seen: list[float] = []
    attended = attention._run_fwd

    def counted(problem: Problem, eps: float) -> Any:
        found = attended(problem, eps)
        visits, tiles = found[3], attention._visible_tiles(problem.q, problem.k, problem.v)
        seen.append(float(visits.sum()) / tiles if visits.numel() else 1.0)
        return found

    monkeypatch.setattr(attention, "_run_fwd", counted)
    return seen


def kept_tiles(
    q: Tensor, k: Tensor, rate: Tensor, u: Tensor, scale: float, eps: float, tile: tuple[int, int]
) -> Tensor:
    """The rule of docs/results/proofs.md in float64, dense: which tiles are kept, bool (H, tiles of rows, of columns).

    Args:
        q, k, rate, u: (H, Nq, D), (H, Nk, D), (H, Nq) and (H, Nk); the queries are the last of the keys.
        scale: the softmax scale.
        eps: what a query may lose.
        tile: rows and columns of a tile.
    """
    (rows, columns), n_q, n_k = tile, q.size(1), k.size(1)
    i, j = torch.arange(n_k - n_q, n_k, device=q.device), torch.arange(n_k, device=q.device)
    logits = scale * q @ k.mT - rate[..., None] * u[:, None] * (i[:, None] - j)
    logits = logits.masked_fill(j > i[:, None], -torch.inf)
    keep = torch.ones(q.size(0), -(-n_q // rows), -(-n_k // columns), dtype=torch.bool, device=q.device)
    for number, start in enumerate(range(0, n_q, rows)):
        row = slice(start, min(start + rows, n_q))
        keep[:, number, -(-(int(i[row][-1]) + 1) // columns) :] = False
        # From the first tile on whose last key is less than a tile away from the first query.
        near = max(int(i[start]) + 1 - columns, 0) // columns
        if near:
            ends = j[columns - 1 : near * columns : columns]
            norms, least = k[:, : near * columns].norm(dim=-1), u[:, : near * columns]
            reach = scale * q[:, row].norm(dim=-1)[..., None] * norms.unflatten(1, (near, columns)).amax(2)[:, None]
            fade = rate[:, row, None] * least.unflatten(1, (near, columns)).amin(2)[:, None] * (i[row, None] - ends)
            bound = reach - fade - logits[:, row, near * columns :].logsumexp(-1)[..., None]
            keep[:, number, :near] = (bound > _threshold(bound, eps, n_k, columns)).any(1)
    return keep


def _threshold(bound: Tensor, eps: float, n_k: int, columns: int) -> Tensor:
    """The highest of five thresholds below which all tiles of a query together hold at most eps; (H, rows, 1)."""
    even = math.log(eps / n_k)
    low = torch.full_like(bound[..., :1], even)
    for step in range(1, 5):
        higher = even + step * 2.25 * math.log(2)
        held = (columns * bound.exp()).masked_fill(bound > higher, 0.0).sum(-1, keepdim=True)
        low = torch.where(held <= eps * (1 - 2**-10), higher, low)
    return low
