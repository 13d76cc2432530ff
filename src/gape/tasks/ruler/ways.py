"""Ways to run a model on samples: dense, leaving tiles of keys away, or through caches that forget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gape.cache.kv import BOUNDS, ForgettingCache
from gape.models.skipping import IMPL, skip
from gape.tasks.ruler.readers import GPTReader, TransformersReader
from gape.utils.validation import invalid_argument, weight


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model with gates reads; the default is dense.

    Attributes:
        skip_eps: attention that a query may lose to tiles that are left away, as in :func:`gape.models.skipping.skip`.
        forget_eps: the same for keys that a forgetting cache drops. Prompts then are read in eighths at most.
        bounds: what such caches go by.

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

    def settings(self) -> dict[str, Any]:
        """What tells it from the dense way, in rows and manifests; empty for that one."""
        skips = {"skip_eps": self.skip_eps, "impl": IMPL} if self.skip_eps else {}
        return skips | ({"forget_eps": self.forget_eps, "bounds": self.bounds} if self.forget_eps else {})

    def words(self) -> str:
        """It in a few words; none for the dense way."""
        skips = [f"skipping {self.skip_eps:g}"] if self.skip_eps else []
        return " ".join(skips + ([f"forgetting {self.forget_eps:g} by {self.bounds}"] if self.forget_eps else []))

    def take(self, reader: GPTReader | TransformersReader) -> None:
        """Let a reader read so from now on.

        Raises:
            ValueError: its model has no gates, or none that can skip or forget.
        """
        if self.skip_eps:
            skip(reader.model, self.skip_eps)
        if self.forget_eps:
            made = self._cache(reader)
            reader.forgetting = lambda: made.fresh(self.forget_eps)

    def _cache(self, reader: GPTReader | TransformersReader) -> Any:
        """An empty cache, from which others are made without working limits out again."""
        # Heads without a floor keep all their keys.
        told: dict[str, Any] = {"eps": self.forget_eps, "bounds": self.bounds, "partial": True}
        if isinstance(reader, GPTReader):
            return ForgettingCache(reader.model, **told)
        from gape.hf import ForgettingCache as OfTransformers  # noqa: PLC0415

        return OfTransformers(reader.model, **told)


#: Nothing is left away.
DENSE = Way()
