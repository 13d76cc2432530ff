"""What is seen of attention from outside is what the model does: weights, statistics, maps and horizons."""

from __future__ import annotations

import pytest
import torch

from gape.analysis import attended, attention_map, statistics, tap
from gape.analysis.routing import effective_context
from gape.analysis.tap import Attended
from gape.models import FullCache
from gape.ops.inputs import Visibility
from gape.positions import build
from tests.models.tiny import SCHEMES, model, tokens

N = 24


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("position", SCHEMES)
@torch.no_grad()
def test_weights_times_values_are_what_the_layer_computes(position: str, packed: bool) -> None:
    gpt, ids = model(position), tokens(2, N)
    options = {}
    if packed:
        documents = (torch.arange(N) >= 10).long().expand(2, N)
        options = {"documents": documents, "positions": torch.arange(N) - 10 * documents}
    caught: dict[str, torch.Tensor] = {}
    layer = gpt.layers[1].attention
    layer.qkv.register_forward_hook(lambda _, args, out: caught.__setitem__("qkv", out))
    layer.out.register_forward_pre_hook(lambda _, args: caught.__setitem__("y", args[0]))
    record = attended(gpt, ids, **options)[1]
    v = caught["qkv"][..., -2 * 12 :].view(2, N, 2, 12).transpose(1, 2).repeat_interleave(2, dim=1)
    y = record.weights(0, N) @ v
    torch.testing.assert_close(y.transpose(1, 2).reshape(2, N, -1), caught["y"], atol=1e-9, rtol=1e-9)


def test_a_map_as_large_as_the_sequence_is_the_attention() -> None:
    record = attended(model("rope+gape"), tokens(2, N))[0]
    torch.testing.assert_close(attention_map(record, N, block=7), record.weights(0, N))


def test_a_small_map_holds_all_the_attention() -> None:
    record = attended(model("rope+gape"), tokens(2, N))[0]
    cells = attention_map(record, 5, block=7)
    assert cells.shape == (2, 4, 5, 5)
    torch.testing.assert_close(cells.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))
    torch.testing.assert_close(cells, attention_map(record, 5, block=1))
    # The first cell of rows: queries 0 … 4 see nothing but keys 0 … 4.
    torch.testing.assert_close(cells[..., 0, 0], torch.ones(2, 4, dtype=torch.float64))


def test_a_tap_changes_nothing_and_ends() -> None:
    gpt, other = model("p-rope+gape"), model("p-rope+gape")
    calls: list[int] = []
    before = gpt(tokens(2, N)).logits
    with tap(gpt, lambda layer, record: calls.append(layer)):
        assert torch.equal(gpt(tokens(2, N)).logits, before)
        other(tokens(2, N))
    gpt(tokens(2, N))
    assert calls == [0, 1]
    assert all("attend" not in block.attention.scheme.__dict__ for block in gpt.layers)


def test_a_tap_ends_when_the_model_fails() -> None:
    gpt = model("nope")
    with pytest.raises(ValueError, match="ids"), tap(gpt, lambda layer, record: None):
        gpt(torch.full((1, 3), 99))
    assert "attend" not in gpt.layers[0].attention.scheme.__dict__


def test_taps_may_be_nested() -> None:
    gpt, calls = model("p-rope+gape"), list[str]()
    with tap(gpt, lambda layer, record: calls.append(f"outer {layer}")):
        with tap(gpt, lambda layer, record: None):
            pass
        gpt(tokens(2, N))
    gpt(tokens(2, N))
    assert calls == ["outer 0", "outer 1"]


@torch.no_grad()
def test_a_cache_in_pages_is_refused() -> None:
    gpt = model("p-rope+gape")
    assert len(attended(gpt, tokens(2, N), cache=gpt.new_cache())) == 2
    with pytest.raises(ValueError, match="cache: got"):
        attended(gpt, tokens(2, N), cache=FullCache(gpt))


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="GAPEAttention"), tap(torch.nn.Linear(2, 2), lambda layer, record: None):
        pass


@pytest.mark.parametrize(("position", "options"), [("rope", {}), ("rope+gape", {"positions": torch.arange(N) + 5})])
def test_an_effective_context_needs_gates_and_tokens_in_order(position: str, options: dict[str, torch.Tensor]) -> None:
    assert effective_context(attended(model(position), tokens(2, N), **options)[0]) is None


def plain(q: torch.Tensor, k: torch.Tensor) -> Attended:
    """Attention without any position over given queries and keys (B, H, N, D)."""
    visibility = Visibility(n_q=q.size(2), n_k=k.size(2), device=q.device)
    scheme = build("nope", n_heads=q.size(1), head_dim=q.size(3))
    return Attended(scheme=scheme, q=q, k=k, v=k, q_side=None, k_side=None, scale=1.0, visibility=visibility)


def test_uniform_attention_has_the_entropy_of_its_number_of_keys() -> None:
    actual = statistics(plain(torch.zeros(1, 2, N, 4), torch.randn(1, 2, N, 4)), block=5)
    i = torch.arange(N)
    torch.testing.assert_close(actual.entropy, (i + 1.0).log().expand(1, 2, N))
    torch.testing.assert_close(actual.distance, (i / 2).expand(1, 2, N))
    torch.testing.assert_close(actual.sink, (1 / (i + 1)).expand(1, 2, N))


def test_attention_to_one_key_has_no_entropy() -> None:
    each = 100 * torch.eye(N)[None, None]
    actual = statistics(plain(each, each))
    assert float(actual.entropy.abs().max()) < 1e-6
    assert float(actual.distance.abs().max()) < 1e-6


@torch.no_grad()
def test_keys_beyond_the_effective_context_hold_next_to_nothing() -> None:
    options = {"learn_landmark": False, "init_landmark_bias": -40.0, "gate_floor": 40.0}
    record = attended(model("nope+gape", options=options), tokens(2, 200))[0]
    effective = effective_context(record, 0.01)
    away = 199 - torch.arange(200)
    beyond = away[None, None] >= effective[:, :, -1:]
    assert bool(beyond.any())
    mass = (record.weights(199, 200)[:, :, 0] * beyond).sum(-1)
    assert bool((mass <= 0.01).all())
