"""Single tokens by a step whose launches never change: the same logits, and caches that go on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from gape.cache.slots import Slots

import gape
from gape.cache import forgetting_shelf
from gape.cache.kv import ForgettingCache, ModelCache
from gape.experiments import forgetting_timing
from gape.models import cuda_graphs as module
from gape.models.cuda_graphs import LEAST, Captured, why_not
from gape.ops import limits
from gape.ops.plain import newest_attention

pytest.importorskip("triton")
from tests.models.played import Played, playing

CACHES: dict[str, Any] = {
    "full": lambda model: model.new_cache(128),
    "forgetting": lambda model: ForgettingCache(model, eps=1e-2),
    "measuring": lambda model: ForgettingCache(model, eps=1e-2, bounds="queries"),
}


def small(position: str = "p-rope+gape", *, kv_heads: int = 4, groups: int = 1, **options: Any) -> gape.GPT:
    """A model whose heads forget at very different distances, and alike where they are not neighbours."""
    torch.manual_seed(0)
    heads = kv_heads * groups
    if position.endswith("+gape"):
        floors = (4.0, 4000.0, 40.0, 4000.0)
        options = {"gate_floor": [floor for floor in floors[:kv_heads] for _ in range(groups)]} | options
    config = gape.GPTConfig(
        vocab_size=50, n_layer=2, n_head=heads, n_kv_head=kv_heads, n_embd=16 * heads, context_length=16,
        position=position, options=options,
    )  # fmt: skip
    return gape.GPT(config).eval()


def sharpened(model: gape.GPT) -> gape.GPT:
    """The model with attention that tells positions apart by more than half precision rounds."""
    for block in model.blocks():
        block.attention.qkv.weight.mul_(8)
        block.attention.out.weight.mul_(10)
    return model


def taken_by_slots(model: gape.GPT, cache: ModelCache, ids: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    """Logits of single tokens by the step that a graph records, kernel by kernel."""
    slots = Slots([layer.held() for layer in cache.layers], cache.length, ids.size(0), ids.device)
    found, start = [], cache.length
    for at in range(start, start + tokens):
        found.append(model(ids[:, at : at + 1], positions=slots.begin(), cache=slots, logits_to_keep=1).logits)
        slots.end()
        cache.count()
    return found


HALF = {"rtol": 0.0, "atol": 2e-3}
SINGLE = {"rtol": 1e-4, "atol": 1e-5}


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "position", "sizes", "near"),
    [
        pytest.param("forgetting", "p-rope+gape", {}, HALF, id="forgetting, one launch"),
        pytest.param("full", "rope", {"kv_heads": 2}, HALF, id="full, one launch"),
        pytest.param("forgetting", "p-rope+gape", {"groups": 2}, SINGLE, id="forgetting, grouped"),
        pytest.param("full", "nope+gape", {"kv_heads": 2, "groups": 2}, SINGLE, id="full, grouped"),
        pytest.param("measuring", "p-rope+gape", {"groups": 2}, SINGLE, id="measuring, grouped"),
    ],
)
def test_a_step_of_fixed_launches_equals_the_model(
    kind: str, position: str, sizes: dict[str, int], near: dict[str, float]
) -> None:
    model = small(position, **sizes).to(torch.float16 if near is HALF else torch.float32)
    ids = torch.randint(50, (2, 76))
    plain, counted = CACHES[kind](model), CACHES[kind](model)
    for cache in (plain, counted):
        model(ids[:, :50], cache=cache)
        # The next token looks through the prompt.
        assert kind == "full" or cache.spare == 0
        model(ids[:, 50:51], cache=cache)
    assert counted.spare >= LEAST
    tokens = 2
    found = taken_by_slots(model, counted, ids, tokens)
    expected = [model(ids[:, at : at + 1], cache=plain).logits for at in range(51, 51 + tokens)]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), **near)
    assert counted.spare == plain.spare
    # What was written counts for the model itself, too, also when it looks through its keys.
    rest = ids[:, 51 + tokens :]
    torch.testing.assert_close(model(rest, cache=counted).logits, model(rest, cache=plain).logits, **near)
    assert counted.length == plain.length
    if kind != "full":
        assert counted.kept == plain.kept
        assert len({kept for layer in counted.kept for kept in layer}) > 1
        # Heads do not lie in their own order.
        assert model.config.n_kv_head == 2 or all(x.held().order.back is not None for x in counted.layers)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gape.ops.limits.HAS_TRITON", False), ("gape.ops.triton.decode_grouped.ROWS", 1)],
    ids=["no kernels", "more queries than a tile has rows"],
)
def test_shelf_by_shelf_a_step_is_the_same(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left without kernels for all shelves at once, or with the one that writes alone."""
    monkeypatch.setattr(name, value)
    by_shelf = MagicMock(wraps=newest_attention)
    monkeypatch.setattr("gape.cache.slots.newest_attention", by_shelf)
    test_a_step_of_fixed_launches_equals_the_model("measuring", "p-rope+gape", {"groups": 2}, SINGLE)
    assert by_shelf.called


@pytest.mark.parametrize(("kind", "by_block"), [("full", True), ("measuring", False)])
def test_one_block_goes_where_it_fills_a_device(kind: str, by_block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch attends to a full cache either way; to several shelves only where all go together."""
    monkeypatch.setattr("gape.ops.triton.decode_grouped.multiprocessors", lambda device: 10**6)
    monkeypatch.setattr("gape.ops.triton.decode_grouped.MERGING", 0)
    alone = MagicMock(wraps=newest_attention)
    monkeypatch.setattr("gape.cache.slots.newest_attention", alone)
    test_a_step_of_fixed_launches_equals_the_model(kind, "p-rope+gape", {"groups": 2}, SINGLE)
    assert alone.called == by_block


def test_what_cannot_be_recorded_is_said() -> None:
    model = small()
    assert "on cpu" in str(why_not(model, model.new_cache()))
    assert small("alibi").layers[0].attention.unrecordable == "alibi adds a bias of its own"
    assert small(kv_heads=4).layers[0].attention.unrecordable is None
    by_gates = ForgettingCache(model, eps=1e-2, bounds="gates")
    assert "every gate" in str(by_gates.layers[0].unrecordable)
    model.layers[0].attention.stepwise = True
    assert "listened to" in str(model.layers[0].attention.unrecordable)
    model.layers[1].attention.reserve = 0
    assert model.layers[1].attention.unrecordable == "keys do not carry the bias in six coordinates"


def test_modules_of_others_are_not_recorded() -> None:
    class Adapter(torch.nn.Linear):
        """Of another package, which may wait for the host."""

    assert all(module._known(each) for position in ("p-rope+gape", "fox", "t5") for each in small(position).modules())
    assert not module._known(Adapter(2, 2))


def test_a_compiled_model_is_not_recorded() -> None:
    model = small()
    assert module._unfit(model) is None
    model.layers[1].compile()
    assert module._unfit(model) == "a module is compiled"


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    ("told", "said"),
    [({"positions": torch.arange(3)}, "positions"), ({"documents": torch.zeros(1, 3, dtype=torch.int64)}, "holds")],
    ids=["positions", "documents"],
)
def test_a_cache_with_more_than_keys_and_values_cannot_be_recorded(kind: str, told: Any, said: str) -> None:
    model = small()
    cache = CACHES[kind](model)
    model(torch.zeros(1, 3, dtype=torch.int64), cache=cache, **told)
    assert said in str(cache.layers[0].unrecordable)


@torch.no_grad()
def test_the_shelf_with_least_room_says_how_many_tokens_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer that looks first knows nothing of others, which hold more, and makes room for a short time."""
    monkeypatch.setattr(forgetting_shelf, "STRIDE", 1)
    model = small(gate_floor=[[4000.0], [1.0]])
    cache = ForgettingCache(model, eps=1e-2)
    for ids in torch.randint(50, (1, 201)).split([200, 1], dim=1):
        model(ids, cache=cache)
    rooms = [min(block.k.size(2) - block.width for block in layer.held().blocks) for layer in cache.layers]
    held = [count for kept in cache.kept for count in kept]
    assert cache.spare == cache.due == min(rooms) < forgetting_shelf.slack(sum(held) // len(held)) - 1


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
    with pytest.raises(ValueError, match="cache: the model is on cpu"):
        captured.record(ids[:, :1])


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Played]:
    return playing(monkeypatch, module)


def told_positions(model: gape.GPT, cache: ModelCache) -> None:
    cache.truncate(cache.length - 1)
    model(torch.tensor([[1]]), positions=torch.tensor([cache.length]), cache=cache)


CHANGES: dict[str, Callable[[gape.GPT, ModelCache], object]] = {
    "nothing": lambda model, cache: None,
    "a hook": lambda model, cache: model.norm.register_forward_hook(lambda *told: None),
    "a listener": lambda model, cache: setattr(model.layers[0].attention, "stepwise", True),
    "landmarks to keep": lambda model, cache: model.keep_landmarks(),
    "training": lambda model, cache: model.layers[1].train(),
    "weights elsewhere": lambda model, cache: setattr(model.norm.weight, "data", model.norm.weight.data.clone()),
    "fewer tokens": lambda model, cache: cache.truncate(cache.length - 1),
    "room": lambda model, cache: model(torch.zeros(1, 40, dtype=torch.int64), cache=cache),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_is_not_replayed_after_a_change(change: str, played: list[Played]) -> None:
    model, token = small("rope"), torch.tensor([[1]])
    if change == "landmarks to keep":
        model = small()
    cache = model.new_cache(20)
    model(torch.zeros(1, 5, dtype=torch.int64), cache=cache)
    captured = Captured(model, cache)
    captured(token)
    CHANGES[change](model, cache)
    captured(token)
    assert played[0].replays == (1 if change == "nothing" else 0)


@torch.no_grad()
def test_positions_are_asked_for_as_the_model_does(played: list[Played]) -> None:
    model, token = small("rope"), torch.tensor([[1]])
    cache = model.new_cache(20)
    model(torch.zeros(1, 5, dtype=torch.int64), cache=cache)
    captured = Captured(model, cache)
    captured(token)
    told_positions(model, cache)
    with pytest.raises(ValueError, match="positions: got None"):
        captured(token)


@torch.no_grad()
def test_a_cache_that_grows_is_recorded_again(played: list[Played]) -> None:
    model, ids = small("rope"), torch.randint(50, (1, 7))
    plain, cache = model.new_cache(), model.new_cache(4)
    captured = Captured(model, cache)
    found = [captured(ids[:, at : at + 1]) for at in range(7)]
    expected = [model(ids[:, at : at + 1], cache=plain).logits for at in range(7)]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), rtol=1e-4, atol=1e-5)
    assert len(played) == 2
    assert all(graph.replays for graph in played)


@torch.no_grad()
def test_a_replay_that_breaks_off_does_not_count(played: list[Played]) -> None:
    model, ids = small("rope"), torch.randint(50, (1, 9))
    plain, cache = model.new_cache(20), model.new_cache(20)
    captured = Captured(model, cache)
    expected = [model(ids[:, at : at + 1], cache=plain).logits for at in range(9)]
    found = [captured(ids[:, at : at + 1]) for at in range(5)]
    played[0].broken = True
    with pytest.raises(KeyboardInterrupt):
        captured(ids[:, 5:6])
    found += [captured(ids[:, at : at + 1]) for at in range(5, 9)]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), rtol=1e-4, atol=1e-5)
    assert all(graph.replays for graph in played)


def test_a_measurement_with_looks_is_a_mean() -> None:
    model = small()
    row = forgetting_timing.decode(
        model, ForgettingCache(model, eps=1e-2), torch.randint(50, (1, 100)), tokens=64, chunk=36
    )
    assert row["every"] < 63
    assert row["looked"] == 1
    assert row["lasting_ms"] == row["mean_ms"]


@pytest.mark.slow
def test_a_measurement_waits_until_keys_have_moved(played: list[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 64 tokens is when a small cache looks through its keys."""
    monkeypatch.setattr(forgetting_timing, "why_not", lambda model, cache: None)
    monkeypatch.setattr(forgetting_timing, "_LAUNCHED", 32)
    model = small()
    row = forgetting_timing.decode(
        model, ForgettingCache(model, eps=1e-2), torch.randint(50, (1, 100)), tokens=64, chunk=36
    )
    look = row["forget_ms"] + row["record_ms"] + row["launched_ms"] - row["ms"]
    assert row["lasting_ms"] == pytest.approx(row["mean_ms"] + look / row["every"])
    assert [graph.replays for graph in played] == [0, 31]


@torch.no_grad()
def test_graphs_are_not_recorded_for_tokens_taken_back(played: list[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST", 4)
    model = small("rope")
    cache = model.new_cache(40)
    model(torch.zeros(1, 5, dtype=torch.int64), cache=cache)
    captured = Captured(model, cache)
    for token in range(12):
        captured(torch.tensor([[token]]))
        cache.truncate(5)
    assert captured.recordings == 3


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("position", "groups"), [("p-rope+gape", 1), ("p-rope+gape", 2), ("rope", 1)])
def test_replayed_tokens_equal_the_model(position: str, groups: int, kind: str, autocast: bool) -> None:
    if kind != "full" and position == "rope":
        pytest.skip("without gates nothing is forgotten")
    model = small(position, groups=groups).cuda()
    model = sharpened(model) if kind == "full" else model
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
    if kind != "full":
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


@pytest.mark.gpu
def test_text_comes_also_where_the_decode_kernel_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HAS_TRITON", False)
    monkeypatch.setattr(Captured, "record", lambda *told: pytest.fail("recorded"))
    model = small().cuda().bfloat16()
    assert model.generate(torch.randint(50, (1, 4), device="cuda"), 24, temperature=0).shape == (1, 28)
