"""Keys that are not sent, because no query of the process that would get them can give them attention.

A logit is at most scale·|q|·|k| − c·u·(i − j). A query's own key has the logit scale·q·k, which the sum over its keys
exceeds. So a block of keys has at most exp(scale·max|q|·max|k| − min c·min u·distance − min own) per key of a query's
attention, over the queries of a block of theirs. Blocks for which that is at most eps / N are not sent: together they
have at most eps. Their places hold zeros, which by the same bound also have at most eps.

Shapes: M blocks of S tokens in a slice, K processes; the others as in :mod:`gape.distributed.context`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gape.distributed.collectives import exchange, gather

if TYPE_CHECKING:
    from gape.distributed.context import ContextParallel

#: Tokens of a block, at most.
BLOCK = 128


class KeyBounds(NamedTuple):
    """Of each block of keys, (B, Hk, M): the longest key and the least exposure 1 − l."""

    norm: Tensor
    exposure: Tensor


class QueryBounds(NamedTuple):
    """Of each block of queries, (B, Hq, M): the longest query times the scale, the least rate and least own logit."""

    norm: Tensor
    rate: Tensor
    own: Tensor


def exchange_keys(
    context: ContextParallel, layer: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, landmark: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and landmarks of this process's slice and of what its queries can attend to before it.

    Leading blocks that no head needs are left out, the others are zero in the heads that do not need them.
    """
    assert landmark is not None
    n, size = q.size(2), block_size(q.size(2))
    with torch.no_grad():
        rate = layer.gates.amplitude[:, None] * gate / layer.context_length
        keys = key_bounds(k, landmark, size)
        queries = query_bounds(q, k, rate, softmax_scale(layer), size)
        stacked = gather(torch.stack(keys), context.group, context.traffic, "bounds")
        needed = needed_blocks(queries, KeyBounds(*stacked.unbind(1)), context.rank, size, context.eps)
        # uint8: not every backend sends flags.
        requests = gather(needed.to(torch.uint8), context.group, context.traffic, "bounds")
        requested = requests[:, context.rank].bool()
    blocks = _blocks(torch.cat([k, v], dim=-1), size)
    received = exchange(blocks, requested, needed, context.group, context.traffic)
    sides = context.gather_side(layer, landmark)
    assert sides is not None
    # (K, B, H, M, S, W) of the earlier processes as (B, H, tokens, W).
    earlier = received[: context.rank].movedim(0, 2).flatten(2, 4)
    # The first block that any head of any row needs.
    flags = needed[: context.rank].any(dim=2).any(dim=1).flatten()
    first = size * (int(flags.nonzero()[0]) if bool(flags.any()) else flags.numel())
    both = torch.cat([earlier[:, :, first:], torch.cat([k, v], dim=-1)], dim=2)
    k, v = torch.split(both, [k.size(-1), v.size(-1)], dim=-1)
    return k, v, sides[:, :, first : (context.rank + 1) * n]


def softmax_scale(layer: Any) -> float:
    """The softmax scale of a layer of gape, or of transformers, whose family says it."""
    wiring = getattr(layer, "gape_wiring", None)
    return float(layer.scale if wiring is None else wiring.family.layout.scale(layer))


def block_size(n: int) -> int:
    """Tokens of a block in a slice of n: the largest divisor up to `BLOCK`."""
    return next(size for size in range(min(BLOCK, n), 0, -1) if n % size == 0)


def key_bounds(k: Tensor, landmark: Tensor, size: int) -> KeyBounds:
    """The bounds of blocks of `size` keys; k (B, Hk, n, D), landmark (B, Hk, n)."""
    norm = torch.linalg.vector_norm(k.to(landmark.dtype), dim=-1)
    return KeyBounds(_blocks(norm, size).amax(-1), _blocks(1 - landmark, size).amin(-1))


def query_bounds(q: Tensor, k: Tensor, rate: Tensor, scale: float, size: int) -> QueryBounds:
    """The bounds of blocks of `size` queries; q (B, Hq, n, D), k their own keys, rate (B, Hq, n)."""
    wide = q.to(rate.dtype)
    own = scale * (wide * k.to(rate.dtype).repeat_interleave(q.size(1) // k.size(1), dim=1)).sum(-1)
    norm = scale * torch.linalg.vector_norm(wide, dim=-1)
    return QueryBounds(_blocks(norm, size).amax(-1), _blocks(rate, size).amin(-1), _blocks(own, size).amin(-1))


def _blocks(x: Tensor, size: int) -> Tensor:
    """(B, H, n, ...) → (B, H, M, S, ...)."""
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


def needed_blocks(queries: QueryBounds, keys: KeyBounds, rank: int, size: int, eps: float) -> Tensor:
    """Which blocks of earlier slices the queries of slice `rank` may attend to: bool (K, B, Hk, M).

    `queries` are bounds (B, Hq, M) of the slice, `keys` (K, B, Hk, M) of all. A slice does not need its own blocks, of
    `size` tokens, which it has; a query may lose attention `eps` to all blocks that are not needed.
    """
    ways, _, heads, m = keys.norm.shape
    groups = queries.norm.size(1) // heads
    limit = math.log(eps / (ways * m * size))
    firsts = (rank * m + torch.arange(m, device=keys.norm.device)) * size
    needed = torch.zeros(keys.norm.shape, dtype=torch.bool, device=keys.norm.device)
    for other in range(rank):
        # (B, Hq, query blocks, key blocks)
        lasts = (other * m + torch.arange(m, device=firsts.device) + 1) * size - 1
        distance = (firsts[:, None] - lasts).to(queries.rate.dtype)
        norm, exposure = (x[other].repeat_interleave(groups, dim=1).unsqueeze(2) for x in keys)
        most = queries.norm.unsqueeze(3) * norm - queries.rate.unsqueeze(3) * exposure * distance
        # What is not a number is sent: it shall not go unnoticed.
        attended = (~(most - queries.own.unsqueeze(3) <= limit)).any(2)
        needed[other] = attended.reshape(-1, heads, groups, m).any(2)
    return needed
