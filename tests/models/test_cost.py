"""Costs: the paper's formulas, those of RoPE and GAPE beside each other, and what is measured."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import gape
from gape.models import cost
from tests.models.tiny import SCHEMES, config, model, tokens

SIZES = {"vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 64, "n_kv_head": None}
B, N = 3, 32


def measured(made: gape.GPTConfig, dtype: torch.dtype, backward: bool = False) -> int:
    """What torch counts, with attention written out as products. It counts all N² pairs."""
    gpt, ids = gape.GPT(made).to(dtype), torch.zeros(B, N, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        out = gpt(ids, ids)
        if backward:
            out.loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("position", "reserve"), [("rope", 0), ("p-rope+gape", 6), ("nope", 0)])
def test_forward_is_what_torch_counts(position: str, reserve: int, kv_heads: int, dtype: torch.dtype) -> None:
    made = config(position, **SIZES | {"n_kv_head": kv_heads, "reserve": reserve})
    counted = cost.breakdown(made, B, N, dtype)
    assert sum(counted) + counted.attention == measured(made, dtype)


def test_training_is_three_times_as_much() -> None:
    made = config("rope", **SIZES)
    counted = cost.breakdown(made, B, N)
    everything = measured(made, torch.float32, backward=True)
    # Without coordinates to pad, the products of the backward pass are twice those of the forward pass.
    assert 3 * cost.flops(made, B, N) == everything - 3 * counted.attention


def test_formulas_are_those_of_the_paper() -> None:
    made = config("rope", **SIZES)
    layers, heads, width, head = 2, 4, 64, 16
    vocabulary = 2 * width * 64
    pass_over = layers * (2 * B * heads * N**2 * head + 24 * B * N * width**2)
    assert cost.flops(made, B, N) == pass_over + B * N * vocabulary
    assert cost.decode_flops(made, 1000) == layers * (24 * width**2 + 4 * width * 1000) + vocabulary
    assert cost.cache_bytes(made, 1000, B, torch.float16) == 4 * layers * B * 1000 * width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("reserve", "impl"), [(6, "auto"), (6, "split"), (2, "rank2")])
def test_gape_costs_what_rope_does(reserve: int, impl: str, kv_heads: int, dtype: torch.dtype) -> None:
    """Less the projections of the coordinates that carry the bias."""
    sizes = SIZES | {"n_kv_head": kv_heads}
    rope, gated = config("rope", **sizes), config("p-rope+gape", **sizes, reserve=reserve, impl=impl)
    parts = cost.breakdown(rope, B, N, dtype), cost.breakdown(gated, B, N, dtype)
    assert parts[0][1:] == parts[1][1:]
    saved = 2 * 2 * 64 * reserve * (4 + kv_heads)
    assert parts[0].projections - parts[1].projections == B * N * saved
    assert cost.decode_flops(rope, N, dtype=dtype) - cost.decode_flops(gated, N, dtype=dtype) == saved


def test_growing_heads_cost_more() -> None:
    rope, grown = config("rope", **SIZES), config("rope+gape", **SIZES, reserve=0)
    plain = cost.breakdown(rope, B, N).attention // 32
    assert cost.breakdown(grown, B, N).attention == plain * (32 + 6)
    assert cost.breakdown(grown, B, N, torch.float32).attention == plain * (32 + 2)
    assert cost.breakdown(config("alibi", **SIZES), B, N).attention == plain * (32 + 6)
    assert cost.breakdown(config("fox", **SIZES), B, N).attention == plain * (32 + 3)


@pytest.mark.parametrize(("reserve", "dtype"), [(0, torch.float32), (6, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("position", SCHEMES)
@torch.no_grad()
def test_cache_bytes_are_those_of_a_cache(position: str, reserve: int, dtype: torch.dtype) -> None:
    gpt = model(position, reserve=reserve, dtype=dtype)
    cache = gpt.new_cache()
    gpt(tokens(3, 9), cache=cache)
    gpt(tokens(3, 1), cache=cache)
    assert cache.nbytes == cost.cache_bytes(gpt.config, 10, 3, dtype)


@pytest.mark.parametrize(("argument", "value"), [("batch", 0), ("length", 0), ("length", 1.5)])
def test_wrong_argument_is_named(argument: str, value: object) -> None:
    given = {"batch": 1, "length": 1} | {argument: value}
    for function in (cost.flops, cost.decode_flops, cost.cache_bytes):
        with pytest.raises(ValueError, match=f"^{argument}: "):
            function(config(), **given)
