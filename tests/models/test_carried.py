"""Keys that carry their bias: as exact as attention without one, and no bytes more than RoPE's."""

from __future__ import annotations

import pytest
import torch

import gape
from gape.cache.kv import KVCache
from gape.models.cost import cache_bytes
from gape.ops import attention
from gape.ops.carried import carried_attention, carried_form, carry
from tests.models.tiny import SCHEMES, config, model, tokens
from tests.ops.cases import random_case


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def carried(tensors: dict[str, torch.Tensor], form: str, first: int, T: float) -> torch.Tensor:
    """Decode the last queries over keys that begin at position `first`."""
    q, k, v, gate, landmark, amplitude = tensors.values()
    positions = torch.arange(first, first + k.size(2))
    k = carry(k, landmark.float(), positions, form=form, context_length=T)
    given = {"form": form, "context_length": T, "scale": q.size(-1) ** -0.5}
    return carried_attention(q, k, v, gate.float(), amplitude.float(), positions[-q.size(2) :], **given)


def plain_error(tensors: dict[str, torch.Tensor]) -> float:
    q, k, v = (tensors[name] for name in "qkv")
    return error(attention(q, k, v), attention(q.double(), k.double(), v.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strength", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("first", [0, 114688], ids=["at 16k", "at 131k"])
def test_split_decodes_as_exactly_as_without_bias(first: int, strength: float, dtype: torch.dtype) -> None:
    case = random_case(
        batch=1, heads=2, kv_heads=2, n_q=16, n_k=16384, dim=64, value_dim=64, strength=strength, dtype=dtype
    )
    exact = gape.gated_attention(
        **{name: x.double() for name, x in case.tensors.items()}, context_length=1024, impl="reference"
    )
    assert error(carried(case.tensors, "split", first, 1024), exact) <= 2 * plain_error(case.tensors)


def test_rank2_in_bfloat16_does_not() -> None:
    """The test above must be able to fail."""
    case = random_case(
        batch=1, heads=2, kv_heads=2, n_q=16, n_k=16384, dim=64, value_dim=64, strength=10.0, dtype=torch.bfloat16
    )
    exact = gape.gated_attention(
        **{name: x.double() for name, x in case.tensors.items()}, context_length=1024, impl="reference"
    )
    assert error(carried(case.tensors, "rank2", 0, 1024), exact) > 10 * plain_error(case.tensors)


@pytest.mark.parametrize(
    ("dtype", "form", "far"),
    [
        (torch.bfloat16, "split", 2**24),
        (torch.float16, "split", 2**23),
        (torch.float32, "rank2", 2**24),
        (torch.float64, "split", 2**46 + 1),
    ],
)
def test_positions_too_far_from_zero_are_refused(dtype: torch.dtype, form: str, far: int) -> None:
    case = random_case(batch=1, n_q=1, n_k=4, value_dim=16, dtype=dtype)
    assert carried(case.tensors, form, 0, 1024).isfinite().all()
    for first in (far, -far):
        with pytest.raises(ValueError, match=r"^positions: "):
            carried(case.tensors, form, first, 1024)


@torch.no_grad()
def test_a_compiled_graph_gives_no_number_for_them() -> None:
    """It cannot look at positions without breaking."""
    k, landmark = torch.zeros(1, 1, 2, 8), torch.rand(1, 1, 2)

    def keys(positions: torch.Tensor) -> torch.Tensor:
        return carry(k, landmark, positions, form="split", context_length=1024)

    rows = torch.compile(keys, backend="eager", fullgraph=True)(torch.tensor([7, 2**24]))
    assert rows.isnan().any(-1).tolist() == [[[False, True]]]


def decode_error(position: str, **options: object) -> float:
    """Of eight tokens behind 16,384 others in a bfloat16 layer, one by one, against the same weights in float64."""
    torch.manual_seed(0)
    layer = gape.GAPEAttention(64, 1, context_length=1024, position=position, **options).bfloat16()
    torch.nn.init.normal_(layer.qkv.weight, std=0.2)
    x, cache = torch.randn(1, 16384 + 8, 64).bfloat16(), KVCache(16384 + 8)
    layer(x[:, :-8], cache=cache)
    steps = [layer(x[:, at : at + 1], cache=cache) for at in range(16384, 16384 + 8)]
    return error(torch.cat(steps, dim=1), layer.double()(x.double())[:, -8:])


@pytest.mark.slow
@torch.no_grad()
def test_bfloat16_layer_decodes_as_exactly_far_out() -> None:
    """With strong gates, and rank2 beside it to show that the comparison can fail."""
    bare = decode_error("p-rope")
    assert decode_error("p-rope+gape", gate_floor=20.0) <= 2 * bare
    assert decode_error("p-rope+gape", gate_floor=20.0, impl="rank2") > 4 * bare


@torch.no_grad()
def test_paper_form_is_rank2_bit_for_bit() -> None:
    """Nothing but the place of the columns differs from the operator without a cache, which in half precision too
    counts positions from 0 under this form.
    """
    gpt, ids = model(reserve=2, impl="rank2", dtype=torch.bfloat16), tokens(2, 50)
    torch.testing.assert_close(gpt(ids, cache=gpt.new_cache()).logits, gpt(ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", SCHEMES)
@torch.no_grad()
def test_cache_bytes_are_those_counted(position: str, dtype: torch.dtype) -> None:
    for reserve in (0, 6):
        gpt = model(position, reserve=reserve, dtype=dtype)
        cache = gpt.new_cache()
        gpt(tokens(3, 9), cache=cache)
        gpt(tokens(3, 1), cache=cache)
        assert cache.nbytes == cache_bytes(gpt.config, 10, 3, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("reserve", "impl"), [(6, "auto"), (6, "split"), (2, "rank2"), (6, "rank2")])
@torch.no_grad()
def test_reserved_coordinates_cost_no_bytes(reserve: int, impl: str, dtype: torch.dtype) -> None:
    """The keys that are read are the keys that are kept, as wide as RoPE's, and nothing is kept beside them."""
    gpt, rope = model(reserve=reserve, impl=impl, dtype=dtype), model("rope", dtype=dtype)
    caches = gpt.new_cache(capacity=2), rope.new_cache(capacity=2)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gape.ops.sdpa.Call.run", lambda call: (seen.append(call), call.q)[1])
        for made, cache in zip((gpt, rope), caches, strict=True):
            made(tokens(1, 1), cache=cache)
    assert caches[0].nbytes == caches[1].nbytes == cache_bytes(config("rope"), 1, 1, dtype)
    assert seen[0].k.data_ptr() == caches[0].layers[0].append(seen[0].k, seen[0].v).k.data_ptr()


def test_form_is_what_fits() -> None:
    wide, half = torch.empty(0), torch.empty(0, dtype=torch.bfloat16)
    forms = {room: (carried_form("auto", room, wide), carried_form("auto", room, half)) for room in (0, 2, 6)}
    assert forms == {0: (None, None), 2: ("rank2", None), 6: ("split", "split")}
    assert carried_form("split", 5, half) is None
    assert carried_form("rank2", 2, half) == "rank2"
    assert carried_form("reference", 6, half) is None


@pytest.mark.parametrize(("argument", "value"), [("form", "rank3"), ("width", 9)])
def test_wrong_argument_is_named(argument: str, value: object) -> None:
    k, landmark = torch.randn(1, 1, 4, 8), torch.rand(1, 1, 4)
    given = {"form": "split", "context_length": 4, "width": 14} | {argument: value}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        carry(k, landmark, torch.arange(4), **given)
