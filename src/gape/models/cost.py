"""The cost of a GPT's cache by its configuration."""

from __future__ import annotations

import torch

from gape.models.config import GPTConfig
from gape.ops.inputs import bias_dtype
from gape.positions import is_gated
from gape.utils.validation import whole


def cache_bytes(config: GPTConfig, length: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that all layers of :meth:`gape.GPT.new_cache` cache for (batch, length) tokens.

    That is keys without the reserved coordinates, values, and what the scheme stores beside each key: gates a landmark
    for each key head in float32 (float64 beside float64), FoX its running sum for each query head in float64. Batches
    padded on the left also store nine bytes a token and layer. Caches in pages have
    :attr:`gape.ops.paged.PageLayout.nbytes` per page of 64 keys. A ValueError names a size below 1.
    """
    per_token = config.kv_heads * (2 * config.head_dim - config.reserved) * dtype.itemsize + side_bytes(config, dtype)
    return config.n_layer * whole("batch", batch) * whole("length", length) * per_token


def side_bytes(config: GPTConfig, dtype: torch.dtype) -> int:
    """Bytes that a layer stores beside the k and v of one token."""
    if is_gated(config.position):
        return config.kv_heads * bias_dtype(dtype).itemsize
    return config.n_head * torch.float64.itemsize if config.position == "fox" else 0
