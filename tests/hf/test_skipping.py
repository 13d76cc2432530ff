"""Injected models that leave tiles of keys away: the same answers within what eps allows, and no trace of it behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("triton")

from transformers import DynamicCache

import gape.hf
from gape.analysis import attended
from gape.models.skipping import skip, skipping
from gape.ops import detailed_attention
from gape.ops.inputs import Problem
from gape.ops.triton import attention
from tests.hf.tiny import FLOOR, injected, ours, tiny, tokens
from tests.ops.skipped import fractions, kept_tiles

#: Small enough for Triton's interpreter.
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
LENGTH, CHUNK = 100, 80


def llama(floor: dict[str, Any] = FLOOR, **changes: Any) -> Any:
    return injected("llama", floor, **(SIZES | changes))


def gpt() -> Any:
    return ours(n_layer=1, n_head=2, n_kv_head=1)


MODELS = pytest.mark.parametrize("made", [llama, pytest.param(gpt, marks=pytest.mark.slow)])


@torch.no_grad()
def read(model: Any, ids: Tensor, cache: Any = None, chunk: int = LENGTH) -> Tensor:
    options = {"use_cache": False} if cache is None else {"past_key_values": cache}
    return torch.cat([model(part, **options).logits for part in ids.split(chunk, dim=1)], dim=1)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The fraction of tiles that every call of the kernel has looked at."""
    return fractions(monkeypatch)


@MODELS
def test_a_model_skips_and_says_the_same(made: Callable[[], Any], tiles: list[float]) -> None:
    model, ids = made(), tokens(1, LENGTH)
    dense = read(model, ids)
    assert not tiles
    with skipping(model, 1e-4):
        actual = read(model, ids)
    assert max(tiles) < 0.9
    torch.testing.assert_close(actual, dense, atol=2e-3, rtol=0)
    assert torch.equal(read(model, ids), dense)


def test_chunks_of_a_prompt_skip_too(tiles: list[float]) -> None:
    model, ids = llama(), tokens(1, LENGTH)
    with skipping(model, 1e-4):
        actual = read(model, ids, DynamicCache(), chunk=CHUNK)
    assert max(tiles) < 0.9
    torch.testing.assert_close(actual, read(model, ids), atol=2e-3, rtol=0)


def test_pads_are_hidden_and_keep_every_tile(tiles: list[float]) -> None:
    model, ids = llama(), tokens(1, 40)
    real = torch.ones_like(ids)
    real[0, :10] = 0
    with torch.no_grad():
        dense = model(ids, attention_mask=real, use_cache=False).logits
        with skipping(model, 0.5):
            actual = model(ids, attention_mask=real, use_cache=False).logits
    assert tiles == [1.0]
    torch.testing.assert_close(actual[real.bool()], dense[real.bool()], atol=1e-4, rtol=0)


def test_steps_of_decoding_skip_nothing(tiles: list[float]) -> None:
    model, ids, cache = llama(), tokens(1, 40), DynamicCache()
    read(model, ids, cache)
    with skipping(model, 0.5):
        read(model, ids[:, :1], cache)
    assert not tiles


def test_generation_skips_in_its_prompt(tiles: list[float]) -> None:
    model, ids, settings = llama(), tokens(1, LENGTH), {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **settings)
    with skipping(model, 1e-5):
        assert torch.equal(model.generate(ids, **settings), expected)
    assert tiles[0] < 0.9


def test_gradients_go_through(tiles: list[float]) -> None:
    model, ids, grads = llama().train(), tokens(1, LENGTH), []
    for eps in (0.0, 1e-4):
        model.zero_grad()
        skip(model, eps)
        model(ids, labels=ids).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert min(tiles) < 0.9
    assert any(".gape." in name for name in grads[0])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=5e-3, rtol=0)


def test_nothing_of_it_is_saved_or_stays(tmp_path: Any) -> None:
    model = llama()
    config, state = model.config.to_dict(), set(model.state_dict())
    skip(model, 1e-3)
    assert model.config.to_dict() == config
    assert set(model.state_dict()) == state
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(layer.self_attn.skips == 0 for layer in again.model.layers)
    bare = gape.hf.remove(model).model.layers[0].self_attn
    assert vars(bare).keys() == vars(tiny("llama", **SIZES).model.layers[0].self_attn).keys()


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda: tiny("llama"), "gates"),
        (lambda: gape.hf.inject(tiny("llama"), context_length=16, position="rope"), "gates"),
        (lambda: injected("llama", implementation="eager"), "keeps every weight"),
        (lambda: injected("gemma2", attn_logit_softcapping=5.0, implementation="gape"), "caps its logits"),
    ],
)
def test_what_cannot_skip_is_refused(model: Any, match: str) -> None:
    chosen = model()
    with pytest.raises(ValueError, match=match):
        skip(chosen, 1e-3)
    assert not any(getattr(layer, "skips", None) for layer in chosen.modules())


def test_an_implementation_without_kernels_is_refused_when_it_attends() -> None:
    model = gpt()
    model.config._attn_implementation = "eager"
    with skipping(model, 1e-3), pytest.raises(ValueError, match="attn_implementation"):
        read(model, tokens(1, 30))


def problems_of(model: Any, ids: Tensor) -> list[Problem]:
    return [layer.problem(0, ids.size(1)) for layer in attended(model, ids)]


def tiles_by_the_rule(problem: Problem, eps: float) -> list[float]:
    """The fraction of the causal tiles that each head has to look at."""
    size = attention.tiles_for(problem.q, problem.v, "fwd", skip=True)
    rows, columns, n = size["BLOCK_M"], size["BLOCK_N"], problem.q.size(2)
    groups = problem.q.size(1) // problem.k.size(1)
    k, u = (x[0].double().repeat_interleave(groups, 0) for x in (problem.k, problem.exposure))
    q, rate = problem.q[0].double(), problem.rate[0].double()
    kept = kept_tiles(q, k, rate, u, problem.scale, eps, (rows, columns))
    seen = sum(-(-min(start + rows, n) // columns) for start in range(0, n, rows))
    return (kept.sum((1, 2)) / seen).tolist()


def visited_by_head(p: Problem, eps: float) -> list[float]:
    groups, given = p.q.size(1) // p.k.size(1), {"context_length": p.context_length, "scale": p.scale}
    heads = [(slice(h, h + 1), slice(h // groups, h // groups + 1)) for h in range(p.q.size(1))]
    alone = [(p.q[:, h], p.k[:, j], p.v[:, j], p.gate[:, h], p.landmark[:, j], p.amplitude[h]) for h, j in heads]
    return [float(detailed_attention(*args, **given, impl="triton", eps=eps).visited) for args in alone]


def test_tiles_are_those_of_the_rule_and_drop_at_most_eps() -> None:
    eps, problems = 1e-3, problems_of(llama({**FLOOR, "gate_floor": [96.0, 4.0]}), tokens(1, 200))
    actual = [visited_by_head(problem, eps) for problem in problems]
    assert actual == [pytest.approx(tiles_by_the_rule(problem, eps)) for problem in problems]
    assert min(actual[0]) < 0.5 < max(actual[0])
    for p in problems:
        given = {"context_length": p.context_length, "scale": p.scale}
        args = (p.q, p.k, p.v, p.gate, p.landmark, p.amplitude)
        details = detailed_attention(*args, **given, impl="triton", eps=eps)
        exact = detailed_attention(*(x.double() for x in args), **given, impl="reference")
        lost = 1 - (details.lse.double() - exact.lse).exp()
        assert lost.min() > -1e-4
        assert lost.max() <= eps
