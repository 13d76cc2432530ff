"""Layers and models."""

from gape.cache.kv import ForgettingCache, KVCache, ModelCache
from gape.models.attention import GAPEAttention
from gape.models.config import GPTConfig
from gape.models.gpt import GPT, Output

__all__ = ["GPT", "ForgettingCache", "GAPEAttention", "GPTConfig", "KVCache", "ModelCache", "Output"]
