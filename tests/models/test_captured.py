"""Single tokens by a step whose launches never change: the same logits, and caches that go on from there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gape
from gape.models.cache import ForgettingCache, ModelCache
from gape.models.captured import LEAST, Captured, why_not
from gape.models.slots import Slots

pytest.importorskip("triton")

CACHES: dict[str, Any] = {
    "full": lambda model: model.new_cache(128),
    "forgetting": lambda model: ForgettingCache(model, eps=1e-2),
}


def small(position: str = "p-rope+gape", *, kv_heads: int = 4, **options: Any) -> gape.GPT:
    """A model whose heads forget at very different distances."""
    torch.manual_seed(0)
    if position.endswith("+gape"):
        options = {"gate_floor": [4.0, 40.0, 400.0, 4000.0]} | options
    config = gape.GPTConfig(
        vocab_size=50, n_layer=2, n_head=4, n_kv_head=kv_heads, n_embd=64, context_length=16, position=position,
        options=options,
    )  # fmt: skip
    return gape.GPT(config).eval()


def taken_by_slots(model: gape.GPT, cache: ModelCache, ids: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    """Logits of single tokens by the step that a graph records, kernel by kernel."""
    slots = Slots([layer.held() for layer in cache.layers], cache.length, ids.size(0), ids.device)
    found, start = [], cache.length
    for at in range(start, start + tokens):
        found.append(model(ids[:, at : at + 1], positions=slots.begin(), cache=slots, logits_to_keep=1).logits)
        slots.end()
        cache.count()
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("position", "kv_heads"), [("p-rope+gape", 4), ("nope+gape", 2), ("rope", 4)])
def test_a_step_of_fixed_launches_equals_the_model(position: str, kv_heads: int, kind: str) -> None:
    if kind == "forgetting" and position == "rope":
        pytest.skip("without gates nothing is forgotten")
    model = small(position, kv_heads=kv_heads)
    ids = torch.randint(50, (2, 76))
    plain, counted = CACHES[kind](model), CACHES[kind](model)
    for cache in (plain, counted):
        model(ids[:, :50], cache=cache)
        model(ids[:, 50:51], cache=cache)
    tokens = min(counted.spare, LEAST)
    assert tokens == LEAST
    found = taken_by_slots(model, counted, ids, tokens)
    expected = [model(ids[:, at : at + 1], cache=plain).logits for at in range(51, 51 + tokens)]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), rtol=1e-4, atol=1e-5)
    # What was written counts for the model itself, too, also when it looks through its keys.
    rest = ids[:, 51 + tokens :]
    torch.testing.assert_close(model(rest, cache=counted).logits, model(rest, cache=plain).logits, rtol=1e-4, atol=1e-5)
    assert counted.length == plain.length
    if kind == "forgetting":
        assert counted.kept == plain.kept
        assert len({kept for layer in counted.kept for kept in layer}) > 1


def test_what_cannot_be_recorded_is_said() -> None:
    model = small()
    assert "on cpu" in str(why_not(model, model.new_cache()))
    assert small("alibi").layers[0].attention.unrecordable == "alibi adds a bias of its own"
    assert small(kv_heads=4).layers[0].attention.unrecordable is None
    by_queries = ForgettingCache(model, eps=1e-2, bounds="queries")
    assert "every query" in str(by_queries.layers[0].unrecordable)
    with torch.no_grad():
        explicit = model.new_cache()
        model(torch.zeros(1, 3, dtype=torch.int64), positions=torch.arange(3), cache=explicit)
    assert "positions" in str(explicit.layers[0].unrecordable)


@torch.no_grad()
def test_without_a_gpu_the_model_answers() -> None:
    model, ids = small(), torch.randint(50, (2, 40))
    plain, cache = model.new_cache(), model.new_cache()
    captured = Captured(model, cache)
    for at in range(40):
        assert torch.equal(captured(ids[:, at : at + 1]), model(ids[:, at : at + 1], cache=plain).logits)
    assert captured.recordings == 0
    with pytest.raises(ValueError, match=r"ids: .*\(batch, 1\)"):
        captured(ids)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("position", ["p-rope+gape", "rope"])
def test_replayed_tokens_equal_the_model(position: str, kind: str, autocast: bool) -> None:
    if kind == "forgetting" and position == "rope":
        pytest.skip("without gates nothing is forgotten")
    model = small(position).cuda()
    model = model if autocast else model.bfloat16()
    ids = torch.randint(50, (2, 400), device="cuda")
    plain, cache = CACHES[kind](model), CACHES[kind](model)
    captured = Captured(model, cache)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        expected = [model(ids[:, :60], cache=each).logits[:, -1:] for each in (plain, cache)][:1]
        found = list(expected)
        for at in range(60, 400):
            if at == 300:
                for each in (plain, cache):
                    each.truncate(at - 1)
                    model(ids[:, at - 1 : at], cache=each)
            expected.append(model(ids[:, at : at + 1], cache=plain).logits)
            found.append(captured(ids[:, at : at + 1]))
    assert captured.recordings >= 3
    assert cache.length == plain.length
    torch.testing.assert_close(torch.cat(found, 1).float(), torch.cat(expected, 1).float(), rtol=2e-2, atol=2e-2)
    if kind == "forgetting":
        assert cache.kept == plain.kept
        assert cache.looks == plain.looks


@pytest.mark.gpu
def test_text_comes_from_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorded = small().cuda().bfloat16(), []
    record = Captured.record
    monkeypatch.setattr(Captured, "record", lambda *told: (recorded.append(1), record(*told)))
    ids = torch.randint(50, (3, 20), device="cuda")
    text = model.generate(ids, 200, temperature=0)
    assert recorded == [1]
    with torch.no_grad():
        logits = model(text[:, :-1]).logits[:, 19:].float()
    chosen = logits.gather(-1, text[:, 20:, None]).squeeze(-1)
    assert float((logits.amax(-1) - chosen).max()) < 0.05
