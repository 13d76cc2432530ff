"""The caches in pages of a GPT: one that keeps every key, one that evicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gape.cache.bounds import least_rates, limits_of_weights
from gape.cache.eviction import EvictionRule
from gape.cache.layer import LayerSpec
from gape.cache.paged import PagedCache
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.models.gpt import GPT


class FullCache(PagedCache):
    """The cache of a GPT that keeps every key, in pages; a ValueError for a scheme with a bias of its own."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model, gpt_specs)


class ForgettingCache(PagedCache):
    """The cache of a GPT that evicts keys for good once no future query can attend to them: `docs/results/proofs.md`.

    Every query of every layer and head attends within eps, in total variation, of what it would with all keys. Made
    for one model and its weights as they are; for any batch size, chunked prefill and left padding. Positions may
    not go back, and there are no masks.

    Args:
        model: whose scheme has gates with a floor.
        eps, max_keys, max_bytes, bounds, partial: as in :class:`gape.cache.eviction.EvictionRule`.

    Raises:
        ValueError: an argument is out of range, the scheme has no gates, or a head has no floor (or none has, under
            `partial`); names layer and head.
    """

    def __init__(
        self,
        model: GPT,
        *,
        eps: float | None = None,
        bounds: str = "weights",
        partial: bool = False,
        max_keys: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        rule = EvictionRule(eps=eps, max_keys=max_keys, max_bytes=max_bytes, bounds=bounds, partial=partial)
        super().__init__(model, gpt_specs, rule)


def gpt_specs(model: GPT, rule: EvictionRule | None) -> list[LayerSpec]:
    """The layers of a GPT as a cache sees them, with the bounds that a rule needs."""
    specs = []
    for number, block in enumerate(model.blocks()):
        attention = block.attention
        if attention.has_own_bias:
            raise invalid_argument("model", attention.position, "a scheme that rotates q and k, with gates or without")
        if rule is not None and attention.gates is None:
            raise invalid_argument("position", attention.position, "a scheme with gates, which alone fades")
        limited = rule is not None and rule.bounds == "weights"
        specs.append(
            LayerSpec(
                owner=attention, number=number, n_heads=attention.n_heads, n_kv_heads=attention.n_kv_heads,
                scale=attention.scale, gates=attention.gates, context_length=attention.context_length,
                impl=attention.impl,
                least_rate=None if rule is None else least_rates(attention),
                limits=limits_of_weights(attention, block.attention_norm) if limited else None,
            )
        )  # fmt: skip
    refuse_without_floors(specs, rule)
    return specs


def refuse_without_floors(specs: Sequence[LayerSpec], rule: EvictionRule | None) -> None:
    """Refuse layers where a tolerance is to evict keys that never fade; the ValueError names layer and head."""
    if rule is None or rule.eps is None:
        return
    rates = [(spec.number, spec.least_rate.tolist()) for spec in specs if spec.least_rate is not None]
    fades = [(number, head, rate > 0) for number, each in rates for head, rate in enumerate(each)]
    bare = next(((number, head) for number, head, fading in fades if not fading), None)
    if bare is not None and not (rule.partial and any(fading for *_, fading in fades)):
        hint = "in some head" if rule.partial else "in every head, or partial=True"
        raise ValueError(
            f"model: nothing fades in layer {bare[0]}, head {bare[1]}; expected gates with a gate_floor and an "
            f"amplitude above 0 {hint}"
        )
