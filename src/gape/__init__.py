"""Gated Adaptive Positional Encoding: rotary attention that learns what to forget.

The public names are imported when they are first used, so `import gape` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gape import (
        analysis,
        cache,
        data,
        experiments,
        explore,
        gates,
        models,
        ops,
        positions,
        report,
        tasks,
        theory,
        train,
    )
    from gape.gates import GAPEGates
    from gape.models.attention import GAPEAttention
    from gape.models.config import GPTConfig
    from gape.models.gpt import GPT
    from gape.ops import detailed_attention, explain, gated_attention

_HOMES = {
    "gated_attention": "gape.ops",
    "detailed_attention": "gape.ops",
    "explain": "gape.ops",
    "GAPEGates": "gape.gates",
    "GAPEAttention": "gape.models.attention",
    "GPT": "gape.models.gpt",
    "GPTConfig": "gape.models.config",
}

__all__ = [
    "GPT",
    "GAPEAttention",
    "GAPEGates",
    "GPTConfig",
    "__version__",
    "analysis",
    "cache",
    "data",
    "detailed_attention",
    "experiments",
    "explain",
    "explore",
    "gated_attention",
    "gates",
    "models",
    "ops",
    "positions",
    "report",
    "tasks",
    "theory",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__ or name == "hf":
        return import_module(f"gape.{name}")
    raise AttributeError(f"module 'gape' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
