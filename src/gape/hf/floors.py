"""Floors by theorem: for each head the smallest floor under which it cannot look past the range it was trained on.

A key at distance d loses at least Γ·floor/T · d logits. If no score exceeds that of the own key by more than a gap, a
key from distance gap · T / (Γ·floor) on stays below the own key (Corollary 2 of the paper, where the gap is 2·S_max). A
floor that makes this distance T keeps a head within distances at which its rotation was trained. Heads that retrieve
are left free, and rotate only pairs that complete a turn within T: those meet no new angle at any distance.

Shapes: L layers, Hq / Hk query / key heads, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gape.cache.bounds import Limits
from gape.hf.bounds import injected_layers, injected_limits
from gape.hf.families import Family, family_of
from gape.hf.heads import Head, best, read_layers, sizes
from gape.hf.injection import inject, remove
from gape.utils.validation import finite, invalid_argument, positive_number, weight, whole

#: Where bounds on scores come from.
BOUNDS = ("weights", "norms", "scores")
#: Rotations that meet no angle beyond T that they have not met within.
IN_RANGE = ("hope", "nope")
#: Rotations that a plan may give to heads. Under others, scores are not those that the floors are for.
ROTATIONS = ("rope", *IN_RANGE)
#: Quantiles of key norms that a plan stores.
_QUANTILES = 16
#: Scores that are computed at once.
_SCORES = 2**25
#: As :class:`gape.cache.eviction` has them: its margin on measured bounds.
_MARGIN = 1.125


@dataclass(frozen=True, kw_only=True)
class FloorPlan:
    """Floors and rotations of a model's heads, for :func:`gape.hf.inject`; prints as a table.

    Attributes:
        context_length: T, the range that rotations were trained on, and the length by which gates divide distances.
        bounds: where bounds on scores come from, "weights", "norms" or "scores".
        mass: attention that a query may give to keys beyond T; None: each of them stays below the own key.
        amplitude: Γ under which the floors hold.
        free: (layer, key head) of heads without a floor.
        gate_floor: (L, Hq), the floors.
        position: the scheme that takes the place of the model's own rotation; None keeps that.
        head_positions: (L, Hk), the rotation of each key head; None with the model's own.
        gap: (L, Hq), by how much a score may exceed that of the own key.
        reach, own: (L, Hq), the largest scale · ‖q‖ and −(score of the own key), by which a cache evicts.
        norms: (L, Hk, quantiles), norms of keys.
    """

    context_length: int
    bounds: str
    mass: float | None
    amplitude: float
    free: list[Head]
    gate_floor: list[list[float]]
    position: str | None
    head_positions: list[list[str]] | None
    gap: list[list[float]]
    reach: list[list[float]]
    own: list[list[float]]
    norms: list[list[list[float]]]

    def unbounded(self) -> list[list[bool]]:
        """Which key heads have no floor, (L, Hk), and so may attend to keys at any distance."""
        return [[not floor for floor in row] for row in self._by_key_head(_tensor(self.gate_floor)).tolist()]

    @property
    def rate(self) -> Tensor:
        """Γ·floor/T, (L, Hq) in float64: what no query's rate falls below."""
        return _tensor(self.gate_floor) * self.amplitude / self.context_length

    def horizons(self) -> Tensor:
        """Tokens that a key head can look back, (L, Hk); inf without a floor.

        Keys from there on hold at most `mass` together, and without a mass are below the own key, each.
        """
        gap, rate = _tensor(self.gap), self.rate
        needed = gap if self.mass is None else gap - (-self.mass * torch.expm1(-rate)).log()
        return self._by_key_head(torch.where(rate > 0, needed / rate, torch.inf))

    def cached_keys(self, length: int, eps: float = 1e-3) -> Tensor:
        """Keys that :class:`gape.hf.ForgettingCache` will have of a text of so many tokens, (L, Hk), without landmarks.

        An estimate for texts like the one measured; from weights the most that any text leads to.
        """
        whole("length", length)
        own = _tensor(self.own)
        margin = 1.0 if self.bounds == "weights" else _MARGIN
        limits = Limits(self.rate, margin * _tensor(self.reach), own + (margin - 1) * own.abs(), own)
        norms = _tensor(self.norms).repeat_interleave(self._groups, dim=1)
        # The cache spends half of eps on keys that it skips.
        each = [limits.horizon(eps / 2, norm) for norm in norms.unbind(-1)]
        cached = torch.stack([torch.where(self.rate > 0, x, torch.inf).clamp(0, length) for x in each])
        return self._by_key_head(cached).mean(0)

    def __str__(self) -> str:
        """A line for each key head: rotation, gap, floor, what it sees, and keys cached of texts of T and 8·T."""
        lengths, eps = (self.context_length, 8 * self.context_length), 1e-3
        keys = [self.cached_keys(length, eps) for length in lengths]
        gap, floor = (self._by_key_head(_tensor(x)) for x in (self.gap, self.gate_floor))
        beyond = "below the own key" if self.mass is None else f"at most {self.mass:g} of the attention"
        lines = [
            f"T = {self.context_length:,}, {len(self.free)} of {gap.numel()} key heads free, bounds by {self.bounds}; "
            f"keys beyond what a head sees: {beyond}",
            "layer  head  rotation     gap   floor     sees" + "".join(f"{f'keys of {n:,}':>18}" for n in lengths),
        ]
        for (layer, head), far in np.ndenumerate(self.horizons().numpy()):
            rotation = "own" if self.head_positions is None else self.head_positions[layer][head]
            sees = f"{far:,.0f}" if math.isfinite(far) else "all"
            counts = "".join(f"{float(x[layer, head]):>18,.0f}" for x in keys)
            numbers = f"{gap[layer, head]:6.1f}  {floor[layer, head]:6.2f}  {sees:>7}{counts}"
            lines.append(f"{layer:5}  {head:4}  {rotation:8}  {numbers}")
        shares = ", ".join(f"{float(x.mean()) / n:.3f} of {n:,}" for x, n in zip(keys, lengths, strict=True))
        return "\n".join([*lines, f"cache, eps = {eps:g}: {shares} tokens' keys"])

    @property
    def _groups(self) -> int:
        return len(self.gap[0]) // len(self.norms[0])

    def _by_key_head(self, x: Tensor) -> Tensor:
        """(…, L, Hq) → (…, L, Hk), the largest of the query heads."""
        return x.view(*x.shape[:-1], -1, self._groups).amax(-1)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `gape hf inject --floors` reads its floors."""
        return {**asdict(self), "free": [list(head) for head in self.free]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FloorPlan:
        """The plan that :meth:`to_dict` wrote; a ValueError where a value is missing."""
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise invalid_argument(missing[0], None, "a value, as FloorPlan.to_dict writes it")
        plain = {name: values[name] for name in names}
        return cls(**{**plain, "free": [(int(layer), int(head)) for layer, head in plain["free"]]})


def plan_floors(
    model: Any,
    *,
    free: int = 0,
    scores: Tensor | None = None,
    context_length: int | None = None,
    bounds: str = "weights",
    ids: Tensor | None = None,
    mass: float | None = 0.01,
    position: str = "rope",
    free_position: str | None = "hope",
    least: float = 0.0,
    amplitude: float = 1.0,
) -> FloorPlan:
    """The smallest floor for each head that keeps it within the range its rotation was trained on.

    Args:
        model: a causal language model without gates.
        free: key heads without a floor, the best of `scores`.
        scores: (L, Hk), as :func:`gape.hf.heads.head_scores` gives them.
        context_length: T, the range; `max_position_embeddings` by default.
        bounds: "weights" holds for any text; "norms" takes the largest norms of q and k over `ids`, and "scores" the
            largest score less that of the own key, both for texts like that.
        ids: (B, N) tokens on the model's device, N up to T.
        mass: attention that a query may give to all keys beyond T together; None is the paper's bare bound, under which
            each of them stays below the own key.
        position: the rotation of heads with a floor, one of :data:`ROTATIONS`; "rope" is the model's own.
        free_position: that of free heads; None is that of the others.
        least: floor of heads that need none, or less.
        amplitude: Γ at the start, 1 with start="paper".

    Raises:
        ValueError: a value out of range or missing; names it. The model is as it was.
    """
    layers, n_heads, n_kv_heads = sizes(model)
    length = _range(model, context_length)
    chosen = _chosen(scores, free, (layers, n_kv_heads))
    rotations = _rotations(model, position, free_position, chosen)
    if bounds not in BOUNDS:
        raise invalid_argument("bounds", bounds, f"one of {', '.join(BOUNDS)}")
    share = None if mass is None else weight("mass", mass)
    gamma, low = positive_number("amplitude", amplitude), finite("least", least)
    if low < 0 or share == 0:
        raise invalid_argument("least, mass", (least, mass), "a floor from 0, and a mass above 0 or None")
    measured = _from_weights(model, length) if bounds == "weights" else _from_text(model, ids, length, bounds)
    gap, reach, own, norms = measured
    needed = _least_rate(gap.clamp(min=0), length, share) * length / gamma
    # Up to the next hundredth: floors that a reader can write down, and none too small.
    floors = (needed.mul(100).ceil() / 100).clamp(min=low)
    if position in IN_RANGE:
        floors = torch.full_like(floors, low)
    groups = n_heads // n_kv_heads
    for layer, head in chosen:
        floors[layer, head * groups : (head + 1) * groups] = 0.0
    base = "rope" if position == "nope" else position
    return FloorPlan(
        context_length=length, bounds=bounds, mass=share, amplitude=gamma, free=chosen, gate_floor=floors.tolist(),
        position=None if rotations is None else f"{base}+gape", head_positions=rotations,
        gap=gap.tolist(), reach=reach.tolist(), own=own.tolist(), norms=norms.tolist(),
    )  # fmt: skip


def _rotations(model: Any, position: str, free_position: str | None, free: Sequence[Head]) -> list[list[str]] | None:
    """The rotation of each key head, (L, Hk); None where all have the model's own."""
    for name, value in (("position", position), ("free_position", free_position or position)):
        if value not in ROTATIONS:
            raise invalid_argument(name, value, f"one of {', '.join(ROTATIONS)}")
    layers, _, n_kv_heads = sizes(model)
    rows = [[position] * n_kv_heads for _ in range(layers)]
    for layer, head in free:
        rows[layer][head] = free_position or position
    if all(name == "rope" for row in rows for name in row):
        return None
    if not family_of(model).layout.rotary:
        raise ValueError(
            f"position, free_position: {type(model).__name__} does not rotate q and k, expected free_position=None"
        )
    return rows


#: gap, reach and own (L, Hq) and norms of keys (L, Hk, quantiles), in float64 on the CPU.
Measured = tuple[Tensor, Tensor, Tensor, Tensor]


def _least_rate(gap: Tensor, length: int, mass: float | None) -> Tensor:
    """The smallest rate under which keys from distance `length` on hold at most `mass`, or stay below the own key.

    Together they hold at most Σ_{d ≥ T} exp(gap − rate·d), which is exp(gap − rate·T) / (1 − exp(−rate)).
    """
    if mass is None:
        return gap / length
    needed = gap - math.log(mass)
    low, high = torch.zeros_like(gap), needed / length + 1
    for _ in range(100):
        middle = (low + high) / 2
        enough = middle * length + (-torch.expm1(-middle)).log() >= needed
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


def _range(model: Any, context_length: int | None) -> int:
    native = getattr(model.config, "max_position_embeddings", None) if context_length is None else context_length
    if native is None:
        raise invalid_argument("context_length", None, "T, since the model's config has no max_position_embeddings")
    return whole("context_length", native, 2)


def _chosen(scores: Tensor | None, free: int, shape: tuple[int, int]) -> list[Head]:
    """The heads without a floor."""
    most = math.prod(shape)
    if whole("free", free, 0) > most:
        raise invalid_argument("free", free, f"a whole number from 0 to {most}, the model's key heads")
    if not free:
        return []
    if scores is None or tuple(scores.shape) != shape or not bool(scores.isfinite().all()):
        raise invalid_argument("scores", scores, f"finite numbers {shape} of gape.hf.heads.head_scores")
    return best(scores, free)


def _from_weights(model: Any, length: int) -> Measured:
    """Bounds that hold for any text: those by which a cache evicts."""
    # The draws of the gates, which nothing reads, are taken back.
    with torch.random.fork_rng(devices=[]):
        inject(model, context_length=length, start="paper")
    try:
        each = injected_limits(model, injected_layers(model))
    finally:
        remove(model)
    reach, own, most = (torch.stack([getattr(x, name) for x in each]) for name in ("reach", "own", "jitter"))
    _, n_heads, n_kv_heads = sizes(model)
    norms = (most / reach.clamp(min=1e-30)).view(-1, n_kv_heads, n_heads // n_kv_heads).amax(-1)
    return most + own, reach, own, norms.unsqueeze(-1)


@torch.no_grad()
def _from_text(model: Any, ids: Tensor | None, length: int, bounds: str) -> Measured:
    """Bounds of the queries and keys that a text leads to."""
    if ids is None or ids.dim() != 2 or not 2 <= ids.size(1) <= length:
        raise invalid_argument("ids", ids, f"tokens (B, N), N from 2 to T = {length:,}, for bounds of a text")
    family, rows = family_of(model), {}

    def measure(module: Any, x: Tensor, embeddings: Any) -> None:
        rows[module] = _layer_from_text(family, module, x, embeddings, scores=bounds == "scores")

    read_layers(model, ids, measure)
    layers = [rows[module] for module in family.modules(model)]
    gap, reach, own, norms = (torch.stack(parts) for parts in zip(*layers, strict=True))
    return gap, reach, own, norms


def _layer_from_text(family: Family, module: Any, x: Tensor, embeddings: Any, *, scores: bool) -> Measured:
    """Bounds of one layer, without the axis of layers."""
    q, k, _ = family.layout.project(module, x)
    rotation = family.rotation
    if rotation is not None and embeddings is not None and getattr(module, "use_rope", True):
        q, k = rotation(q, k, *embeddings)
    q, k, scale = q.float(), k.float(), family.layout.scale(module)
    groups = q.size(1) // k.size(1)
    shared = k.repeat_interleave(groups, dim=1)
    own = scale * (q * shared).sum(-1)
    reach, norms = scale * q.norm(dim=-1).amax((0, 2)), k.norm(dim=-1)
    # 2·S_max of the paper, or what it stands for.
    most = 2 * reach * norms.amax((0, 2)).repeat_interleave(groups)
    gap = _largest_gap(q, shared, own, scale) if scores else most
    flat = norms.transpose(0, 1).flatten(1).double()
    places = (torch.arange(_QUANTILES, dtype=torch.float64, device=flat.device) + 0.5) / _QUANTILES
    quantiles = torch.quantile(flat, places, dim=1).T
    return gap.double().cpu(), reach.double().cpu(), -own.amin((0, 2)).double().cpu(), quantiles.cpu()


def _largest_gap(q: Tensor, k: Tensor, own: Tensor, scale: float) -> Tensor:
    """The largest score of a causal pair less that of the query's own key, (Hq,)."""
    batch, heads, n, _ = q.shape
    at_once = max(1, _SCORES // (batch * heads * n))
    places = torch.arange(n, device=q.device)
    largest = []
    for start in range(0, n, at_once):
        rows = slice(start, start + at_once)
        scores = scale * (q[:, :, rows] @ k[:, :, : start + at_once].mT)
        hidden = places[None, : scores.size(-1)] > places[rows, None]
        most = scores.masked_fill_(hidden, -torch.inf).amax(-1) - own[:, :, rows]
        largest.append(most.amax((0, 2)))
    return torch.stack(largest).amax(0)


def _tensor(rows: Sequence[Any]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
