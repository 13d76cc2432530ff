"""Layers and models."""

from gape.models.attention import GAPEAttention
from gape.models.cache import ForgettingCache, KVCache, ModelCache
from gape.models.gpt import GPT, GPTConfig, Output

__all__ = ["GPT", "ForgettingCache", "GAPEAttention", "GPTConfig", "KVCache", "ModelCache", "Output"]
