"""The layer under every scheme: the last tokens alone, gradients, reserved coordinates, and wrong input is named.

That cached, padded and packed tokens are those of a whole pass stands in `test_decode.py`, on a model.
"""

from __future__ import annotations

import pytest
import torch

import gape
from gape.analysis.tap import tap
from gape.cache.kv import KVCache
from tests.wrong import each_wrong

T, N, E = 16, 40, 48
SCHEMES = gape.positions.available()
GATED = [name for name in SCHEMES if gape.positions.is_gated(name)]


def layer(position: str, **options: object) -> gape.GAPEAttention:
    torch.manual_seed(0)
    made = gape.GAPEAttention(E, 4, 2, context_length=T, position=position, **options).double()
    # Gates and biases as large as trained ones, so that losing them would show.
    for name, parameter in made.named_parameters():
        if "qkv" in name or "projection" in name:
            parameter.data.normal_(std=0.5)
    return made


def tokens(batch: int = 2, n: int = N) -> torch.Tensor:
    return torch.randn(batch, n, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("position", SCHEMES)
@torch.no_grad()
def test_the_last_tokens_alone_are_answered_as_among_all(position: str) -> None:
    """With positions, documents, a mask or a cache; and whoever listens still hears every query."""
    attention, x = layer(position), tokens()
    where, documents = torch.arange(N) * 2 + 5, (torch.arange(N) >= N // 3).long().expand(2, N)
    mask = torch.rand(1, 1, N, N, generator=torch.Generator().manual_seed(2)) > 0.3
    for seen in ({}, {"positions": where}, {"documents": documents}, {"attn_mask": mask}):
        for keep in (1, 7, N):
            torch.testing.assert_close(attention(x, keep=keep, **seen), attention(x, **seen)[:, -keep:])
    cache = KVCache()
    attention(x[:, :9], cache=cache, keep=2)
    torch.testing.assert_close(attention(x[:, 9:], cache=cache, keep=3), attention(x)[:, -3:])
    heard = []
    with tap(attention, lambda _, attended: heard.append(attended.q.size(2))):
        assert attention(x, keep=2).size(1) == 2
    assert heard == [N]


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_the_projection_are_called_where_few_are_answered(hook: str) -> None:
    attention, called = layer("rope"), []
    getattr(attention.qkv, hook)(lambda *_: called.append(hook))
    attention(tokens().requires_grad_(), keep=2).sum().backward()
    assert called == [hook]


@pytest.mark.parametrize("position", ["rope+gape", "alibi", "fox"])
@torch.no_grad()
def test_bias_at_decode_is_missed_when_absent(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That decoding equals a whole pass must be able to fail: without the keys' side it is another function."""
    attention, x = layer(position), tokens()
    whole = attention(x)
    cache = KVCache()
    attention(x[:, :-1], cache=cache)
    plain = gape.ops.attention
    drop = ("bias", "key_bias", "impl", "context_length")

    def without_bias(q, k, v, *_, **keywords):
        return plain(q, k, v, **{name: value for name, value in keywords.items() if name not in drop})

    for module in ("gated", "biases"):
        monkeypatch.setattr(f"gape.positions.{module}.gated_attention", without_bias)
    monkeypatch.setattr("gape.positions.base.attention", without_bias)
    assert (attention(x[:, -1:], cache=cache) - whole[:, -1:]).abs().max() > 1e-6


@pytest.mark.parametrize("position", GATED)
def test_reserved_coordinates_keep_the_head_dim(position: str) -> None:
    """The bias fits into the head: the backend sees the width of a head without gates."""
    attention = gape.GAPEAttention(256, 4, context_length=T, position=position, impl="split")
    seen = []
    call = gape.ops.sdpa.prepare

    def spy(*arguments, **keywords):
        seen.append(call(*arguments, **keywords))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gape.ops.sdpa.prepare", spy)
        attention(torch.randn(1, 5, 256))
    assert {(c.q.size(-1), c.v.size(-1), c.scale) for c in seen} == {(64, 64, 64**-0.5)}


@each_wrong(
    n_embd=(50,), n_kv_heads=(3,), reserve=(12,), context_length=(0, None), name=("ropee",), flavour=(1,), n_heads=(0,),
    impl=("fast",),
)  # fmt: skip
def test_wrong_argument_is_named(argument: str, value: object) -> None:
    arguments = {"n_embd": E, "n_heads": 4, "context_length": T}
    arguments["position" if argument == "name" else argument] = value
    with pytest.raises(ValueError, match=f"^{argument}: "):
        gape.GAPEAttention(**arguments)


@pytest.mark.parametrize("shape", [(0, 5, E), (2, 0, E)])
@pytest.mark.parametrize("position", ["p-rope+gape", "alibi", "fox", "t5"])
def test_nothing_in_gives_nothing_out(position: str, shape: tuple[int, ...]) -> None:
    assert layer(position)(torch.randn(shape, dtype=torch.float64)).shape == shape


def test_a_cache_refuses_to_lose_gradients() -> None:
    with pytest.raises(ValueError, match=r"^cache: .*no_grad"):
        layer("rope")(tokens(), cache=KVCache())


@torch.no_grad()
def test_wrong_input_is_named_and_leaves_the_cache_whole() -> None:
    attention, x = layer("p-rope+gape"), tokens()
    cache = KVCache()
    attention(x[:, :5], positions=torch.arange(5), cache=cache)
    with pytest.raises(ValueError, match=r"^x: "):
        attention(x[0], cache=cache)
    with pytest.raises(ValueError, match=r"^positions: "):
        attention(x[:, 5:], cache=cache)
    with pytest.raises(ValueError, match=r"^positions: "):
        attention(x[:, 5:], positions=torch.arange(3), cache=cache)
    with pytest.raises(ValueError, match=r"^documents: "):
        attention(x[:, 5:6], positions=torch.tensor([5]), documents=torch.zeros(2, 1).long(), cache=cache)
    for wrong in (torch.ones(3, 9).bool(), torch.ones(2, 1, 1, 6)):
        with pytest.raises(ValueError, match=r"^attn_mask: "):
            attention(x[:, 5:6], positions=torch.tensor([5]), cache=cache, attn_mask=wrong)
    with pytest.raises(ValueError, match=r"^k: "):
        attention(x[:1, 5:6], positions=torch.tensor([5]), cache=cache)
    assert cache.length == 5
    rest = attention(x[:, 5:], positions=torch.arange(5, N), cache=cache)
    torch.testing.assert_close(rest, attention(x)[:, 5:], atol=1e-9, rtol=1e-9)


def decode_error(position: str, **options: object) -> float:
    """Of eight tokens behind 16,384 others in a bfloat16 layer, one by one, against the same weights in float64."""
    torch.manual_seed(0)
    layer = gape.GAPEAttention(64, 1, context_length=1024, position=position, **options).bfloat16()
    torch.nn.init.normal_(layer.qkv.weight, std=0.2)
    x, cache = torch.randn(1, 16384 + 8, 64).bfloat16(), KVCache(16384 + 8)
    layer(x[:, :-8], cache=cache)
    steps = torch.cat([layer(x[:, at : at + 1], cache=cache) for at in range(16384, 16384 + 8)], dim=1)
    exact = layer.double()(x.double())[:, -8:]
    return float((steps.double() - exact).norm() / exact.norm())


@pytest.mark.slow
@torch.no_grad()
def test_bfloat16_layer_decodes_as_exactly_far_out() -> None:
    """With strong gates, and rank2 beside it to show that the comparison can fail."""
    bare = decode_error("p-rope")
    assert decode_error("p-rope+gape", gate_floor=20.0) <= 2 * bare
    assert decode_error("p-rope+gape", gate_floor=20.0, impl="rank2") > 4 * bare
