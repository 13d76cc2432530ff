"""Layers and models."""

from gape.models.attention import GAPEAttention
from gape.models.cache import KVCache, ModelCache
from gape.models.gpt import GPT, GPTConfig, Output

__all__ = ["GPT", "GAPEAttention", "GPTConfig", "KVCache", "ModelCache", "Output"]
