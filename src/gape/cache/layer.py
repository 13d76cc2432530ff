"""The cache of one attention layer, in pages: attend to new tokens and to cached keys, and store the new ones.

A prompt is attended to as it comes, among its own tokens, by the kernel that skips; what was cached before is read from
pages, and both parts are merged. Then its keys are written to pages once, without those that can be evicted at once.
A single token is written first and reads pages only.

Shapes: B rows, Hq / Hk query / key heads, n new tokens, D and Dv widths of keys and values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.cache.bounds import Limits
from gape.ops.api import Plan, explain, gated_attention
from gape.ops.paged import causal_attention, causal_in_kernels, paged_attention, runs_in_kernels, write_keys
from gape.ops.plain import attention
from gape.ops.prologue import GateReading, Step, decode_prologue, projected_attention, projects, prologue_runs

if TYPE_CHECKING:
    from gape.cache.paged import PagedCache

#: Rotated q and k, the queries' rate (B, Hq, n) and the keys' landmark (B, Hk, n); None without gates.
Rotated = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSpec:
    """An attention layer as its cache sees it.

    Attributes:
        owner, number: the module that the cache serves, no other, and its number in the model.
        n_heads, n_kv_heads, scale, context_length: Hq and Hk, of the softmax, and T.
        gates: of the layer; None without.
        least_rate: float64 (Hq,), what no query's rate falls below; None where nothing is evicted.
        limits: bounds on its queries from weights; None where they are measured, or nothing is evicted.
        impl: the implementation of the operator that the layer uses where no kernel of the cache runs.
    """

    owner: Any
    number: int
    n_heads: int
    n_kv_heads: int
    scale: float
    gates: Any = None
    context_length: float = 1.0
    least_rate: Tensor | None = None
    limits: Limits | None = None
    impl: str = "auto"


class Run(NamedTuple):
    """What a call runs.

    `new` says how new tokens attend to each other: "operator" as without a cache, "causal" with a log-sum-exp by which
    cached keys are added, "pages" for a single token, which is written first and read with the others. `fused`: kernels
    read the gates and rotate, not the layer's own steps. `kernels`: they attend, not PyTorch. `cached`: pages are read.
    """

    new: str
    fused: bool
    kernels: bool
    cached: bool


class PagedLayer:
    """The cache of one attention layer, `spec`, with a number among the layers of the cache.

    Of its `length` tokens, cached or evicted, the pages count `stored`: those of a call are counted for all layers at
    its end, but for calls with pads or many tokens.
    """

    def __init__(self, cache: PagedCache, index: int, spec: LayerSpec) -> None:
        self._cache: PagedCache = weakref.proxy(cache)
        self.index, self.spec, self.length, self.stored = index, spec, 0, 0

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotate: Callable[[], Rotated], *,
        step: Step | None = None, real: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Add tokens and attend to them and to everything cached: (B, Hq, n, Dv).

        Args:
            q, k, v: (B, Hq, n, D), (B, Hk, n, D) and (B, Hk, n, Dv) as projected.
            positions: integer (n,) or (B, n); of a row they rise by one.
            rotate: gives rotated q and k, rate and landmark, where no kernel does that.
            step: what `rotate` does, for kernels; None where they cannot.
            real: bool (B, n), False for pads, which stand on the left; None where there are none.
        """
        cache, width = self._cache, v.size(-1)
        if not cache.capturing:
            if self.index == 0:
                cache.begin(k, v, positions, real)
            if not q.size(2):
                return v.new_empty(*q.shape[:3], width)
            if cache.call is None:
                raise ValueError("cache: a layer was called alone, expected all of a model, first to last")
        run = self._choose(q, k, v, step, real)
        if run.new == "pages":
            out = self._decode(run, q, k, v, positions, rotate, step)
        else:
            out = self._prefill(run, q, k, v.to(cache.storage.layout.dtype), positions, rotate, step, real)
        if not cache.capturing:
            cache.end(self)
        return out if out.size(-1) == width else out[..., :width]

    def _choose(self, q: Tensor, k: Tensor, v: Tensor, step: Step | None, real: Tensor | None) -> Run:
        """What a call runs, before and after the cache has pages."""
        layout = self._cache.layout(k, v)
        cached = self.stored > 0 and bool(self._cache.storage.counts[self.index].any())
        kernels = runs_in_kernels(layout, k.device)
        if self._cache.capturing or (q.size(2) == 1 and real is None):
            fused = step is not None and prologue_runs(q, k, v, layout)
            return Run("pages", fused=fused, kernels=kernels, cached=True)
        if step is not None and real is None and kernels and projects(q, k, v.to(layout.dtype)):
            return Run("causal", fused=True, kernels=True, cached=cached)
        if not kernels and not cached:
            return Run("operator", fused=False, kernels=False, cached=False)
        return Run("causal", fused=False, kernels=causal_in_kernels(q.to(layout.dtype), v), cached=cached)

    def explain(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotate: Callable[[], Rotated], *,
        step: Step | None = None, real: Tensor | None = None,
    ) -> Plan:  # fmt: skip
        """Say what :meth:`attend` would run for these arguments; nothing is added."""
        run, width = self._choose(q, k, v, step, real), (k.size(-1), v.size(-1))
        prologue = "fused" if run.fused else "steps"
        if run.new == "operator":
            rotated_q, rotated_k, rate, landmark = rotate()
            if rate is None or landmark is None:
                raise ValueError("cache: a layer without gates runs scaled_dot_product_attention")
            sides, spec = (rate, landmark, rate.new_ones(q.size(1))), self.spec
            plan = explain(rotated_q, rotated_k, v, *sides, context_length=1, scale=spec.scale, impl=spec.impl)
            return replace(plan, prologue=prologue)
        single = run.new == "pages"
        skips = run.kernels and self._skips(q.size(2))
        prompt = "a prompt attends to itself" + (", skipping tiles" if skips else "")
        reason = "a single token reads all pages" if single else prompt
        if run.cached and not single:
            reason += ", and to the pages before it"
        return Plan(
            impl="pages", reason=reason, backends=("triton" if run.kernels else "torch",), quadratic=False,
            pairs="full" if single else "causal", chunks=1 + (run.cached and not single), width=width[0],
            value_width=width[1], prologue=prologue,
        )  # fmt: skip

    def _decode(
        self, run: Run, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotate: Callable[[], Rotated],
        step: Step | None,
    ) -> Tensor:  # fmt: skip
        """Write one token and attend to all pages. The token is counted later."""
        cache, scale = self._cache, self.spec.scale
        storage = cache.storage
        pages = storage.pages(self.index)
        if run.fused and step is not None:
            reach, own = storage.query_range[self.index].unbind()
            measured = (reach, own) if cache.measures else None
            q, rate = decode_prologue(q, k, v, step, pages, scale=scale, measured=measured)
        else:
            q, k, rate, landmark = self._rotated(rotate)
            write_keys(pages, k, v, 1 - landmark, positions)
            if cache.measures:
                cache.evictor.include(self.index, q, k, scale, None)
        return paged_attention(q, rate, positions, pages, scale=scale, new=1, tickets=storage.tickets)[0]

    def _rotated(self, rotate: Callable[[], Rotated]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated q and k in the dtype of the pages, rate and landmark: zeros without gates, where nothing fades."""
        q, k, rate, landmark = rotate()
        layout = self._cache.storage.layout
        if rate is None or landmark is None:
            rate, landmark = (x.new_zeros(x.shape[:3], dtype=layout.side_dtype) for x in (q, k))
        return q.to(layout.dtype), k.to(layout.dtype), rate, landmark

    def _prefill(
        self, run: Run, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotate: Callable[[], Rotated],
        step: Step | None, real: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attend among new tokens and to the pages, and store the new keys."""
        cache = self._cache
        if run.fused and step is not None:
            reading, eps = cache.reading(self.index), self._own_eps(q.size(2))
            new = projected_attention(q, k, v, step.angles, reading, scale=self.spec.scale, eps=eps)
            out = self._with_pages(new.q, new.rate, positions, new.out, new.lse) if run.cached else new.out
            self._store(new.q, new.k, v, new.exposure, positions, None)
            return out
        q, k, rate, landmark = self._rotated(rotate)
        if real is None:
            out = self._attend_prompt(run, q, k, v, rate, landmark, positions)
            self._store(q, k, v, 1 - landmark, positions, None)
            return out
        # Pads last: then causality hides them, and no mask is needed.
        to_front, back = _rolls(real)
        q, k, v, rate, landmark = (_rolled(x, to_front) for x in (q, k, v, rate, landmark))
        positions = positions.expand(real.shape).gather(1, to_front)
        out = self._attend_prompt(run, q, k, v, rate, landmark, positions)
        self._store(q, k, v, 1 - landmark, positions, real.gather(1, to_front))
        return _rolled(out, back)

    def _attend_prompt(
        self, run: Run, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, landmark: Tensor, positions: Tensor
    ) -> Tensor:
        """Attend among new tokens in index order, and to the pages."""
        spec = self.spec
        if run.new == "operator":
            if spec.gates is None:
                return attention(q, k, v, scale=spec.scale)
            ones = rate.new_ones(q.size(1))
            return gated_attention(q, k, v, rate, landmark, ones, context_length=1, scale=spec.scale, impl=spec.impl)
        out, lse = causal_attention(q, k, v, rate, 1 - landmark, scale=spec.scale, eps=self._own_eps(q.size(2)))
        return self._with_pages(q, rate, positions, out, lse) if run.cached else out

    def _skips(self, n: int) -> bool:
        """Whether tiles are skipped among n new tokens.

        Floors are planned so that a head looks as far as the model was trained: within that, there is little to skip.
        """
        return n > self.spec.context_length

    def _own_eps(self, n: int) -> float:
        """What queries may lose to tiles that are skipped among n new tokens."""
        return self._cache.skip_eps / 2 if self._skips(n) else 0.0

    def _with_pages(self, q: Tensor, rate: Tensor, positions: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        """The output of queries over the keys of pages too, from that over new ones and its log-sum-exp."""
        storage = self._cache.storage
        eps = self._cache.skip_eps / 2
        pages = storage.pages(self.index)
        return paged_attention(q, rate, positions, pages, scale=self.spec.scale, prior=(out, lse), eps=eps)[0]

    def _store(self, q: Tensor, k: Tensor, v: Tensor, exposure: Tensor, positions: Tensor, real: Tensor | None) -> None:
        """Write new keys, without pads and without those that can be evicted early."""
        cache, storage, call = self._cache, self._cache.storage, self._cache.call
        assert call is not None
        if cache.measures:
            cache.evictor.include(self.index, q, k, self.spec.scale, real)
        if call.together:
            storage.write(self.index, k, v, exposure, positions)
            return
        keep = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device)
        if real is not None:
            keep = keep & real[:, None]
        by_eps = cache.rule is not None and cache.rule.eps is not None
        if call.early and by_eps:
            keep = cache.evictor.keys_to_store(self.index, k, exposure, positions, keep, call.next_position)
        with cache.writing():
            storage.append(self.index, k, v, exposure, positions, keep)
            self.stored += k.size(2)
            if call.early and not by_eps:
                cache.evictor.evict(call.next_position, cache.evictor.interval, self.index)


def gate_readings(specs: Sequence[LayerSpec]) -> list[GateReading]:
    """What kernels read the gates of all layers by, in a few launches, and anew for every call: weights may change."""
    gates = [spec.gates for spec in specs]
    amplitude = F.softplus(torch.stack([x.raw_amplitude for x in gates]).float())
    strengths = [strength for x in gates if (strength := getattr(x, "strength", None)) is not None]
    if strengths:
        amplitude = amplitude * torch.stack(strengths).float().abs()
    # Rows begin at multiples of 16 bytes: launches are looked up by how tensors lie.
    amplitude = F.pad(amplitude, (0, -amplitude.size(1) % 4))[:, : amplitude.size(1)]
    queries, keys = _weights(gates, "gate", "n_heads"), _weights(gates, "landmark", "n_kv_heads")
    return [
        GateReading(*query, *key, each, spec.gates.floors(each.device), spec.context_length)
        for spec, query, key, each in zip(specs, queries, keys, amplitude.unbind(), strict=True)
    ]


def _weights(gates: Sequence[Any], name: str, heads: str) -> list[tuple[Tensor, Tensor]]:
    """Weights (H, D) and biases (H,) of a gate in each layer; one that is fixed has zeros and its number."""
    projections = [getattr(x, f"{name}_projection") for x in gates]
    fixed, like = [getattr(x, f"init_{name}_bias") for x in gates], gates[0]
    known: dict[float, tuple[Tensor, Tensor]] = {}
    if None in projections:
        zeros = like.raw_amplitude.new_zeros(getattr(like, heads), like.head_dim, dtype=torch.float32)
        known = {number: (zeros, zeros.new_full(zeros.shape[:1], number)) for number in set(fixed)}
    return [known[number] if x is None else (x.weight, x.bias) for x, number in zip(projections, fixed, strict=True)]


def _rolls(real: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (B, n) that bring the tokens of each row to its front and pads to its end, and those that undo it."""
    n = real.size(1)
    pads = n - real.sum(1, keepdim=True)
    places = torch.arange(n, device=real.device)
    return (places + pads) % n, (places - pads) % n


def _rolled(x: Tensor, index: Tensor) -> Tensor:
    """x (B, H, n, …) with the tokens of each row in the order of index (B, n)."""
    index = index[:, None] if x.dim() == 3 else index[:, None, :, None]
    return x.gather(2, index.expand(x.shape))
