"""The cost of a GPT by its configuration: floating-point operations and bytes of cache.

Matrix products count, with two operations per multiplication and addition, and attention with the causal pairs (half of
N²). Operations that are linear in the tokens do not count, such as norms, rotations and gates; nor do the dense biases
of KERPLE, FIRE and T5, nor the zeros with which a backend pads a head. Per layer, with one key head per query head and
RoPE, that is the paper's 2·B·H·N²·d + 24·B·N·C²; its vocabulary is not in that formula and is here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gape.models.config import GPTConfig
from gape.ops import columns, rank2
from gape.ops.inputs import bias_dtype
from gape.positions import is_gated
from gape.utils.validation import whole


class Flops(NamedTuple):
    """Operations by what they are for, all layers together.

    Attributes:
        projections: q, k, v and the output of attention.
        attention: logits and weighted values.
        mlp: both layers.
        head: the logits over the vocabulary.
    """

    projections: int
    attention: int
    mlp: int
    head: int


def breakdown(config: GPTConfig, batch: int, length: int, dtype: torch.dtype = torch.bfloat16) -> Flops:
    """Operations of a forward pass over (batch, length) tokens, by what they are for.

    `dtype` is that of q and k; where no coordinates are reserved, it decides how many the bias adds.

    Raises:
        ValueError: a size below 1; so in all functions here.
    """
    tokens = whole("batch", batch) * whole("length", length)
    return _flops(config, tokens, tokens * length // 2, dtype)


def flops(config: GPTConfig, batch: int, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Operations of a forward pass over (batch, length) tokens; with the backward pass three times as many.

    GAPE with reserved coordinates costs what RoPE does, less the projections of these coordinates, which it does
    without: 2 · batch · length · n_embd · reserve for each query head and key head.
    """
    return sum(breakdown(config, batch, length, dtype))


def decode_flops(config: GPTConfig, length: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> int:
    """Operations of one more token for each of `batch` rows, itself the last of `length` keys."""
    return sum(_flops(config, whole("batch", batch), batch * whole("length", length), dtype))


def cache_bytes(config: GPTConfig, length: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that all layers cache for (batch, length) tokens.

    That is of :meth:`gape.GPT.new_cache`: keys without the reserved coordinates, values, and what the scheme stores
    beside each key: gates a landmark for each key head in float32 (float64 beside float64), FoX its running sum for
    each query head in float64. Batches padded on the left also store positions and documents, nine bytes a token and
    layer under any scheme. Caches in pages: :attr:`gape.ops.paged.PageLayout.nbytes` per page of 64 keys.
    """
    per_token = config.kv_heads * (2 * config.head_dim - config.reserved) * dtype.itemsize
    if is_gated(config.position):
        per_token += config.kv_heads * bias_dtype(dtype).itemsize
    elif config.position == "fox":
        per_token += config.n_head * torch.float64.itemsize
    return config.n_layer * whole("batch", batch) * whole("length", length) * per_token


def _flops(config: GPTConfig, tokens: int, pairs: int, dtype: torch.dtype) -> Flops:
    """`tokens` new tokens that make `pairs` pairs of a query and a key it may see, over all rows."""
    width, content = config.head_dim, config.head_dim - config.reserved
    projected = (config.n_head + config.kv_heads) * content + config.kv_heads * width + config.n_embd
    layers = config.n_layer
    return Flops(
        projections=layers * 2 * tokens * config.n_embd * projected,
        attention=layers * 2 * pairs * config.n_head * (max(width, content + _columns(config, dtype)) + width),
        mlp=layers * 16 * tokens * config.n_embd**2,
        head=2 * tokens * config.n_embd * config.vocab_size,
    )


def _columns(config: GPTConfig, dtype: torch.dtype) -> int:
    """Coordinates that a bias adds to q and k."""
    if config.position == "fox":
        return 3
    if config.position != "alibi" and not is_gated(config.position):
        return 0
    half = dtype in (torch.bfloat16, torch.float16)
    impl = ("split" if half else "rank2") if config.impl == "auto" else config.impl
    return {"rank2": rank2.COLUMNS, "split": columns.COLUMNS}.get(impl, 0)
