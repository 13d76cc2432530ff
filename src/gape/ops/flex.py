"""`impl="flex"`: FlexAttention, with the bias in extra coordinates and who sees whom in tiles.

The coordinates are those of :mod:`gape.ops.split`, so gates get their gradients through q and k and nothing is
captured. Causality, documents, positions and masks become a mask_mod and a BlockMask, which is made from what is known
of whole tiles: memory is that of the tiles, never Nq × Nk. With eps > 0 tiles that cannot matter are left out of it,
see :func:`tile_bound`.

:func:`exact` is the same operator by its formula, as a score_mod in float32 that captures rate and exposure: an oracle.

FlexAttention has a backward pass on GPUs only, and no float64 there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, reduce
from types import CodeType, FunctionType

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention, noop_mask

from gape.ops import columns
from gape.ops.problem import Problem
from gape.ops.visibility import Visibility

#: Queries and keys of a tile.
TILE = 128

#: Pairs up to which a CPU runs the dense form instead of compiling a kernel for a minute.
DENSE_PAIRS = 2048**2

#: What two norms in float32 may have been rounded down by, and more.
SLACK = 1 + 2**-15

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def run(problem: Problem, eps: float = 0.0) -> Tensor:
    """The operator, (B, Hq, Nq, Dv) in q's dtype.

    Args:
        problem: any layout.
        eps: weight that may be dropped in all, for any query; 0 drops nothing.

    Raises:
        ValueError: a gradient is asked for on a CPU, or float64 on a GPU.
    """
    refuse(problem)
    return call(*_carried(problem), block_mask(problem, eps), problem.scale)


def exact(problem: Problem, pairs: BlockMask | None = None) -> Tensor:
    """The operator by its formula as a score_mod, float32 inside; gate gradients reach the captured tensors.

    Args:
        problem: any layout.
        pairs: its `block_mask`, where the caller keeps one.
    """
    refuse(problem)
    rate, exposure, groups = problem.rate, problem.exposure, problem.q.size(1) // problem.k.size(1)
    distance = _distance(problem.seen, problem.q.size(0))

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - rate[b, h, i] * exposure[b, h // groups, j] * distance(b, i, j).to(rate.dtype)

    pairs = block_mask(problem) if pairs is None else pairs
    return call(problem.q, problem.k, problem.v, pairs, problem.scale, biased)


def visited(problem: Problem, eps: float) -> float:
    """The fraction of the tiles with a visible pair that remain with eps (this waits for the device)."""
    some, _ = tile_kinds(problem.seen)
    some = some.expand(problem.q.size(0), problem.q.size(1), -1, -1)
    kept = some & tile_bound(problem, eps) if eps else some
    return float(kept.sum() / some.sum().clamp(min=1))


def refuse(problem: Problem) -> None:
    """Raise where FlexAttention cannot run; the message names `impl`."""
    tensors = (problem.q, problem.k, problem.v, problem.gate, problem.landmark, problem.amplitude)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if learns and problem.q.device.type == "cpu":
        raise ValueError("impl: 'flex' has no backward pass on a CPU, expected no gradients there, or 'split'")
    if problem.q.is_cuda and problem.q.dtype == torch.float64:
        raise ValueError("impl: 'flex' has no float64 on a GPU, expected bfloat16, float16 or float32")


def call(q: Tensor, k: Tensor, v: Tensor, pairs: BlockMask, scale: float, score_mod: ScoreMod | None = None) -> Tensor:
    """Compiled FlexAttention over q (B, Hq, Nq, D), k (B, Hk, Nk, D), v (B, Hk, Nk, Dv); any widths and lengths."""
    if q.size(2) == 0 or k.size(2) == 0:
        return (q[..., :1] * 0).expand(-1, -1, -1, v.size(-1))
    value_width = v.size(-1)
    q, k, v = _legal(q), _legal(k), _legal(v)
    # A comparison of traced sizes is no bool until it is asked for one.
    grouped = True if q.size(1) != k.size(1) else False  # noqa: SIM210
    # Within a graph that is being compiled there is nothing to compile.
    attend = _attend if torch.compiler.is_compiling() else _compiled(_kind(q, k, v, pairs, score_mod))
    out = attend(q, k, v, pairs, score_mod, scale, grouped)
    return out[..., :value_width]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, pairs: BlockMask, score_mod: ScoreMod | None, scale: float, grouped: bool
) -> Tensor:
    out = flex_attention(q, k, v, score_mod=score_mod, block_mask=pairs, scale=scale, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out


def _kind(q: Tensor, k: Tensor, v: Tensor, pairs: BlockMask, score_mod: ScoreMod | None) -> tuple[object, ...]:
    """What a kernel is compiled for; lengths beyond a tile and batches beyond one sample share it."""
    dense = not q.is_cuda and q.size(2) * k.size(2) <= DENSE_PAIRS
    sizes = (q.size(1), k.size(1), q.size(3), v.size(3), q.size(0) == 1, q.size(2) <= TILE, k.size(2) <= TILE)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    mods = (*_codes(pairs.mask_mod), None, *_codes(score_mod))
    return ("eager" if dense else "inductor", q.device, q.dtype, learns, *sizes, *mods, pairs.kv_indices.shape[:2])


def _codes(mod: object) -> list[CodeType]:
    """The code of a function and of the functions it encloses."""
    if not isinstance(mod, FunctionType):
        return []
    inner = [cell.cell_contents for cell in mod.__closure__ or ()]
    return [mod.__code__, *(code for function in inner for code in _codes(function))]


@lru_cache(maxsize=64)
def _compiled(kind: tuple[object, ...]) -> Callable[..., Tensor]:
    """FlexAttention compiled for a kind; `fullgraph` so that it can never fall back to the dense form in silence.

    Each kind has a copy of the code for itself: torch counts recompilations by code, and gives up after a few.
    """
    own = FunctionType(_attend.__code__.replace(co_name="flex"), globals())
    compiled: Callable[..., Tensor] = torch.compile(own, backend=str(kind[0]), fullgraph=True)
    return compiled


def _legal(x: Tensor) -> Tensor:
    """Zero coordinates up to a multiple of 8 that is at least 16, and neighbours side by side in memory."""
    width = max(16, -(-x.size(-1) // 8) * 8)
    if x.size(-1) != width:
        return F.pad(x, (0, width - x.size(-1)))
    return x if x.stride(-1) == 1 else x.contiguous()


def _carried(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with the bias's coordinates."""
    q_columns, k_columns = columns.sides(problem, 0, problem.seen.n_q)
    return torch.cat([problem.q, q_columns], dim=-1), torch.cat([problem.k, k_columns], dim=-1), problem.v


def _distance(seen: Visibility, batch: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The distance of a pair by index, as an integer tensor."""
    if seen.q_positions is None or seen.k_positions is None:
        # A number in a tensor: as a constant it would be compiled in, once for every length.
        first = torch.tensor(seen.n_k - seen.n_q, device=seen.device)
        return lambda b, i, j: i + first - j
    q_positions, k_positions = seen.q_positions.expand(batch, -1), seen.k_positions.expand(batch, -1)
    return lambda b, i, j: q_positions[b, i] - k_positions[b, j]


def _mask_mod(seen: Visibility, batch: int, n_heads: int) -> Mod:
    """Whether a pair may be used, by index."""
    distance = _distance(seen, batch)
    mods: list[Mod] = []
    if seen.is_causal:
        mods.append(lambda b, h, i, j: distance(b, i, j) >= 0)
    if seen.q_documents is not None and seen.k_documents is not None:
        q_documents, k_documents = seen.q_documents, seen.k_documents
        mods.append(lambda b, h, i, j: q_documents[b, i] == k_documents[b, j])
    if seen.attn_mask is not None:
        mask = seen.attn_mask.expand(batch, n_heads, seen.n_q, seen.n_k)
        mods.append(lambda b, h, i, j: mask[b, h, i, j])
    return reduce(_both, mods) if mods else noop_mask


def _both(one: Mod, other: Mod) -> Mod:
    return lambda b, h, i, j: one(b, h, i, j) & other(b, h, i, j)


def block_mask(problem: Problem, eps: float = 0.0) -> BlockMask:
    """Which tiles are visited, and which of them without a look at single pairs."""
    seen, batch, n_heads = problem.seen, problem.q.size(0), problem.q.size(1)
    if seen.kind in ("causal", "lower-right", "full") and not eps:
        # A compiler looks through the cache, and says so.
        plain = _plain_mask if torch.compiler.is_compiling() else _kept_mask
        return plain(seen.n_q, seen.n_k, seen.is_causal, seen.device)
    with torch.no_grad():
        some, full = tile_kinds(seen)
        if eps:
            needed = tile_bound(problem, eps)
            some, full = some & needed, full & needed
        return _from_tiles(some, full, _mask_mod(seen, batch, n_heads), seen)


def _plain_mask(n_q: int, n_k: int, is_causal: bool, device: torch.device) -> BlockMask:
    """The tiles of index order, which depend on lengths alone."""
    seen = Visibility(n_q=n_q, n_k=n_k, device=device, is_causal=is_causal)
    return _from_tiles(*tile_kinds(seen), _mask_mod(seen, 1, 1), seen)


_kept_mask = lru_cache(maxsize=16)(_plain_mask)


def _from_tiles(some: Tensor, full: Tensor, mask_mod: Mod, seen: Visibility) -> BlockMask:
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~full), *_ordered(full), BLOCK_SIZE=TILE, mask_mod=mask_mod, seq_lengths=(seen.n_q, seen.n_k)
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of a row are set, and their indices first, as int32."""
    found = tiles.to(torch.int8)
    order = found.argsort(dim=-1, descending=True, stable=True)
    return found.sum(-1, dtype=torch.int32), order.to(torch.int32)


def tile_kinds(seen: Visibility) -> tuple[Tensor, Tensor]:
    """Tiles that may hold a visible pair, and tiles all of whose pairs are visible: bool (B or 1, Hq or 1, nq, nk).

    From the least and the greatest position and document of a tile, so memory is that of tiles; the first may say yes
    too often and the second no.
    """
    q_positions, k_positions = (x if x.dim() == 2 else x[None] for x in seen.positions())
    (i_low, i_high), (j_low, j_high) = _ends(q_positions), _ends(k_positions)
    if seen.is_causal:
        some = j_low[:, None, :] <= i_high[:, :, None]
        full = j_high[:, None, :] <= i_low[:, :, None]
    else:
        some = full = torch.ones_like(i_low[:, :, None] == j_low[:, None, :])
    if seen.q_documents is not None and seen.k_documents is not None:
        (i_low, i_high), (j_low, j_high) = _ends(seen.q_documents), _ends(seen.k_documents)
        some = some & (i_low[:, :, None] <= j_high[:, None, :]) & (j_low[:, None, :] <= i_high[:, :, None])
        one = (i_low == i_high)[:, :, None] & (j_low == j_high)[:, None, :]
        full = full & one & (i_low[:, :, None] == j_low[:, None, :])
    some, full = some[:, None], full[:, None]
    if seen.attn_mask is not None:
        mask = seen.attn_mask.to(torch.uint8)
        some = some & (_pooled(mask, Tensor.amax) > 0)
        full = full & (_pooled(mask, Tensor.amin) > 0)
    return some, full


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each tile of (B, N)."""
    return _pooled_last(x, Tensor.amin), _pooled_last(x, Tensor.amax)


def _pooled_last(x: Tensor, pool: Callable[..., Tensor]) -> Tensor:
    """`pool` over each tile of the last dimension; a short last tile repeats its last element."""
    spare = -x.size(-1) % TILE
    if spare:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], spare)], dim=-1)
    return pool(x.reshape(*x.shape[:-1], x.size(-1) // TILE, TILE), dim=-1)


def _pooled(mask: Tensor, pool: Callable[..., Tensor]) -> Tensor:
    """`pool` over each tile of the last two dimensions, of which a broadcast one stays."""
    if mask.size(-1) > 1:
        mask = _pooled_last(mask, pool)
    if mask.size(-2) > 1:
        mask = _pooled_last(mask.transpose(-1, -2), pool).transpose(-1, -2)
    return mask


def tile_bound(problem: Problem, eps: float) -> Tensor:
    """Tiles that a query may need, bool (B, Hq, nq, nk): for any query the others weigh at most eps together.

    No logit of a tile exceeds scale·max‖q‖·max‖k‖ − min c · min u · (nearest distance). The row's greatest logit is at
    least that of the query's own key. Where the one is below the other + log(eps / Nk), each key of the tile weighs
    less than eps / Nk, and there are at most Nk.

    A query whose own key it may not see keeps all its tiles, and a tile whose bound is not a number stays.
    """
    with torch.no_grad():
        groups = problem.q.size(1) // problem.k.size(1)
        q_norm = _pooled_last(problem.q.float().norm(dim=-1), Tensor.amax)
        k_norm = _pooled_last(problem.k.float().norm(dim=-1), Tensor.amax).repeat_interleave(groups, dim=1)
        rate, exposure = problem.rate.float(), problem.exposure.float().repeat_interleave(groups, dim=1)
        q_positions, k_positions = (x if x.dim() == 2 else x[None] for x in problem.seen.positions())
        nearest = _ends(q_positions)[0][:, None, :, None] - _ends(k_positions)[1][:, None, None, :]
        lost = _least_loss(rate, exposure, nearest.float(), problem.seen.is_causal)
        best = problem.scale * SLACK * q_norm[..., :, None] * k_norm[..., None, :] - lost
        known = _pooled_last(_own_logits(problem), Tensor.amin)
        return ~(best < known[..., None] + math.log(eps / max(problem.seen.n_k, 1)))


def _least_loss(rate: Tensor, exposure: Tensor, nearest: Tensor, is_causal: bool) -> Tensor:
    """The least c·u·distance of any visible pair of a tile, (B, Hq, nq, nk)."""
    c, u = _pooled_last(rate, Tensor.amin), _pooled_last(exposure, Tensor.amin)
    lost = c[..., :, None] * u[..., None, :] * nearest.clamp(min=0)
    if is_causal:
        return lost
    # Without causality a later key gains, and most where rate and exposure are greatest.
    c, u = _pooled_last(rate, Tensor.amax), _pooled_last(exposure, Tensor.amax)
    return torch.where(nearest < 0, c[..., :, None] * u[..., None, :] * nearest, lost)


def _own_logits(problem: Problem) -> Tensor:
    """The logit of each query with the key of its own place from the end, float32 (B, Hq, Nq); −inf where unseen."""
    seen, groups = problem.seen, problem.q.size(1) // problem.k.size(1)
    shape = problem.q.shape[:3]
    if seen.n_q > seen.n_k:
        return problem.q.new_full(shape, -torch.inf, dtype=torch.float32)
    first = seen.n_k - seen.n_q
    k = problem.k[:, :, first:].float().repeat_interleave(groups, dim=1)
    u = problem.exposure[:, :, first:].float().repeat_interleave(groups, dim=1)
    q_positions, k_positions = (x if x.dim() == 2 else x[None] for x in seen.positions())
    distance = (q_positions - k_positions[:, first:])[:, None]
    logits = problem.scale * (problem.q.float() * k).sum(-1) - problem.rate.float() * u * distance
    visible = torch.ones_like(distance, dtype=torch.bool)
    if seen.is_causal:
        visible = visible & (distance >= 0)
    if seen.q_documents is not None and seen.k_documents is not None:
        visible = visible & (seen.q_documents == seen.k_documents[:, first:])[:, None]
    if seen.attn_mask is not None:
        whole = seen.attn_mask.expand(*problem.q.shape[:2], seen.n_q, seen.n_k)
        visible = visible & whole.diagonal(offset=first, dim1=-2, dim2=-1)
    return logits.masked_fill(~visible, -torch.inf)
