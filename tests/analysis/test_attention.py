"""What is seen of attention from outside is what the model does: weights, statistics, maps and horizons."""

from __future__ import annotations

import pytest
import torch

from gape.analysis import attended, attention_map, tap
from gape.analysis.routing import effective_context
from gape.models import FullCache
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
