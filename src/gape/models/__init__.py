"""Layers and models."""

from gape.cache.gpt import ForgettingCache, FullCache
from gape.cache.kv import KVCache, ModelCache
from gape.models.attention import GAPEAttention
from gape.models.config import GPTConfig
from gape.models.gpt import GPT, Output

__all__ = ["GPT", "ForgettingCache", "FullCache", "GAPEAttention", "GPTConfig", "KVCache", "ModelCache", "Output"]
