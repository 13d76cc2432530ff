"""Layers and models."""

from gape.models.attention import GAPEAttention
from gape.models.cache import KVCache

__all__ = ["GAPEAttention", "KVCache"]
