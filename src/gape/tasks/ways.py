"""Ways to read a text: densely, skipping what weighs little, or through a cache that forgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gape.cache.eviction import BOUNDS
from gape.cache.gpt import ForgettingCache
from gape.models.gpt import GPT
from gape.models.skipping import IMPL, skip
from gape.utils.jsonl import Record
from gape.utils.validation import invalid_argument, weight


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a model with gates may skip or forget while it reads; nothing by default.

    Attributes:
        skip_eps: attention that a query may lose to skipped tiles, as in :func:`gape.models.skipping.skip`.
        forget_eps: the same with a forgetting cache. Where answers are scored, texts then come in eighths at most.
        bounds: the kind of bound that such caches use.

    Raises:
        ValueError: a value that cannot be; names it.
    """

    skip_eps: float = 0.0
    forget_eps: float = 0.0
    bounds: str = "weights"

    def __post_init__(self) -> None:
        weight("skip_eps", self.skip_eps)
        weight("forget_eps", self.forget_eps)
        if self.bounds not in BOUNDS:
            raise invalid_argument("bounds", self.bounds, f"one of {', '.join(BOUNDS)}")

    def settings(self) -> Record:
        """The settings for rows and manifests; empty where nothing is skipped or forgotten."""
        skips = {"skip_eps": self.skip_eps, "impl": IMPL} if self.skip_eps else {}
        return skips | ({"forget_eps": self.forget_eps, "bounds": self.bounds} if self.forget_eps else {})

    def named(self, identity: Record) -> Record:
        """What names a model in rows, if it reads in this way: another variant than the same model read densely."""
        skips = [f"skipping {self.skip_eps:g}"] if self.skip_eps else []
        words = " ".join(skips + ([f"forgetting {self.forget_eps:g} by {self.bounds}"] if self.forget_eps else []))
        if not words:
            return identity
        variant = " ".join(filter(None, (str(identity.get("variant") or ""), words)))
        return identity | {"run": f"{identity['run']}, {words}", "variant": variant} | self.settings()

    def apply(self, model: Any) -> Callable[[], Any] | None:
        """Let a model, of ours or of transformers, skip from now on; what makes empty caches that forget, or None.

        Refused are models without gates, and those that cannot skip or forget.
        """
        if self.skip_eps:
            skip(model, self.skip_eps)
        if not self.forget_eps:
            return None
        # Heads without a floor keep all their keys.
        options: dict[str, Any] = {"eps": self.forget_eps, "bounds": self.bounds, "partial": True}
        # Others are made from an empty one, without computing limits again.
        if isinstance(model, GPT):
            own = ForgettingCache(model, **options)
            return lambda: own.fresh(self.forget_eps)
        from gape import hf  # noqa: PLC0415

        cache = hf.ForgettingCache(model.model if isinstance(model, hf.LanguageModel) else model, **options)
        return lambda: cache.fresh(self.forget_eps)


#: Nothing is skipped or forgotten.
DENSE = Way()
