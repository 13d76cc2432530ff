"""Costs: operations of RoPE and GAPE as torch counts them, and the bytes of a cache."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import gape
from gape.models import cost
from tests.models.tiny import SCHEMES, config, model, tokens
from tests.wrong import each_wrong

SIZES = {"vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 64, "n_kv_head": None}
B, N = 3, 32


def operations(made: gape.GPTConfig, dtype: torch.dtype) -> int:
    """Of a forward pass as torch counts them, with attention written out as products of all N² pairs."""
    gpt, ids = gape.GPT(made).to(dtype), torch.zeros(B, N, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        gpt(ids, ids)
    return counter.get_total_flops()


def test_operations_are_those_of_the_papers_formula() -> None:
    layers, heads, width, head = 2, 4, 64, 16
    # The paper counts half of the pairs, and no vocabulary.
    expected = layers * (4 * B * heads * N**2 * head + 24 * B * N * width**2) + B * N * 2 * width * 64
    assert operations(config("rope", **SIZES), torch.float32) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("reserve", "impl"), [(6, "auto"), (6, "split"), (2, "rank2")])
def test_gape_costs_what_rope_does(reserve: int, impl: str, kv_heads: int, dtype: torch.dtype) -> None:
    """Less the projections of the coordinates that carry the bias."""
    sizes = SIZES | {"n_kv_head": kv_heads}
    rope, gated = config("rope", **sizes), config("p-rope+gape", **sizes, reserve=reserve, impl=impl)
    assert operations(rope, dtype) - operations(gated, dtype) == B * N * 2 * 2 * 64 * reserve * (4 + kv_heads)


@pytest.mark.parametrize(("reserve", "dtype"), [(0, torch.float32), (6, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("position", SCHEMES)
@torch.no_grad()
def test_cache_bytes_are_those_of_a_cache(position: str, reserve: int, dtype: torch.dtype) -> None:
    gpt = model(position, reserve=reserve, dtype=dtype)
    cache = gpt.new_cache()
    gpt(tokens(3, 9), cache=cache)
    gpt(tokens(3, 1), cache=cache)
    assert cache.nbytes == cost.cache_bytes(gpt.config, 10, 3, dtype)


@each_wrong(batch=(0,), length=(0, 1.5))
def test_wrong_argument_is_named(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        cost.cache_bytes(config(), **{"batch": 1, "length": 1} | {argument: value})
