"""Models of transformers by a step whose launches never change: the same logits, and caches that go on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")
pytest.importorskip("triton")

from gape.cache.slots import Slot, Slots
from gape.hf.attending import AttendingCache
from transformers import DynamicCache

import gape.hf
from gape.cache import forgetting_rack
from gape.experiments import forgetting_timing
from gape.hf import Captured, ForgettingCache, KeepingCache, LanguageModel, captured, keeping
from gape.models.skipping import skipping
from tests.hf.test_forgetting import injected, ours
from tests.hf.tiny import tiny, tokens
from tests.models.played import Played, playing

#: Key heads that forget at very different distances.
FLOORS = {"gate_floor": [96.0, 96.0, 3.0, 3.0], "init_landmark_bias": -9.0}
PLAIN = {"mistral": {"sliding_window": None}, "qwen2": {"use_sliding_window": False, "layer_types": None}}
NAMES = ("gape", "yarn", *captured.FAMILIES)
#: Others take seconds each, and are like one of these.
QUICK = ("gape", "yarn", "llama", "qwen3")
SLOW = (pytest.mark.slow, pytest.mark.families)
NEAR = {"rtol": 1e-4, "atol": 1e-4}


def made(name: str, **changes: Any) -> Any:
    if name == "gape":
        return ours(options=FLOORS | {"gate_floor": [96.0, 96.0, 12.0, 12.0]}, **changes)
    if name == "yarn":
        stretched = {"position": "yarn+gape", "factor": 4.0}
        return gape.hf.inject(tiny("llama", **changes), context_length=16, start="paper", gates=FLOORS, **stretched)
    return injected(name, FLOORS, **{**PLAIN.get(name, {}), **changes})


CACHES: dict[str, Callable[[Any], AttendingCache]] = {
    "keeping": lambda model: KeepingCache(model, 64),
    "forgetting": lambda model: ForgettingCache(model, eps=1e-2, carried=True),
}
MEASURING = {"measuring": lambda model: ForgettingCache(model, eps=1e-2, bounds="queries", carried=True)}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Played]:
    return playing(monkeypatch, captured)


def one_by_one(step: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    return torch.cat([step(token) for token in ids.split(1, dim=1)], dim=1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(pytest.param(name, "keeping", marks=() if name in QUICK else SLOW) for name in NAMES),
        *((name, kind) for name in ("gape", "llama") for kind in ("forgetting", "measuring")),
    ],
)
def test_replayed_tokens_equal_the_model(name: str, kind: str, played: list[Played]) -> None:
    """Two samples, two queries to a key; after the prompt a forgetting cache looks."""
    model, ids = made(name), tokens(2, 64)
    plain, cache = ((CACHES | MEASURING)[kind](model) for _ in range(2))
    for each in (plain, cache):
        model(ids[:, :56], past_key_values=each)
    actual = one_by_one(Captured(model, cache), ids[:, 56:58])
    expected = one_by_one(lambda token: model(token, past_key_values=plain).logits, ids[:, 56:58])
    torch.testing.assert_close(actual, expected, **NEAR)
    assert [graph.replays for graph in played] == [1]
    # What was written counts for the model itself, too.
    rest = [model(ids[:, 58:], past_key_values=each).logits for each in (cache, plain)]
    torch.testing.assert_close(*rest, **NEAR)
    assert cache.get_seq_length() == 64
    if kind != "keeping":
        assert cache.kept == plain.kept
        assert len({kept for layer in cache.kept for kept in layer}) > 1
        assert any(len(layer.held().blocks) > 1 for layer in cache.together.layers)


@torch.no_grad()
def test_keys_of_64_are_80_wide(played: list[Played]) -> None:
    """What models have; their values stay as wide as they are."""
    model, ids = made("llama", num_hidden_layers=1, head_dim=64), tokens(2, 12)
    cache = KeepingCache(model, 16)
    model(ids[:, :8], past_key_values=cache)
    actual = one_by_one(Captured(model, cache), ids[:, 8:])
    torch.testing.assert_close(actual, model(ids, use_cache=False).logits[:, 8:], **NEAR)
    assert [graph.replays for graph in played] == [3]
    ((block,),) = (layer.held().blocks for layer in cache.together.layers)
    assert (block.k.size(-1), block.v.size(-1)) == (80, 64)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "prompt", "count", "replays"),
    [("keeping", 2, 12, [3, 5, 1]), pytest.param("forgetting", 56, 38, [31, 5], marks=pytest.mark.slow)],
)
def test_a_cache_that_grows_or_looks_is_recorded_again(
    kind: str, prompt: int, count: int, replays: list[int], played: list[Played]
) -> None:
    """A forgetting cache looks at the first token and after 32, and makes room then for all until the next look."""
    model, ids = made("llama", num_hidden_layers=1), tokens(1, prompt + count)
    plain, cache = (KeepingCache(model, 6) if kind == "keeping" else CACHES[kind](model) for _ in range(2))
    for each in (plain, cache):
        model(ids[:, :prompt], past_key_values=each)
    actual = one_by_one(Captured(LanguageModel(model), cache), ids[:, prompt:])
    expected = one_by_one(lambda token: model(token, past_key_values=plain).logits, ids[:, prompt:])
    torch.testing.assert_close(actual, expected, **NEAR)
    assert [graph.replays for graph in played] == replays


class Operations(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_step_neither_waits_for_the_host_nor_brings_anything_from_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = made(name), tokens(2, 5)
    cache = KeepingCache(model, 16)
    model(ids, past_key_values=cache)
    step, together = Captured(model, cache), cache.together
    slots = Slots([layer.held() for layer in together.layers], together.length, 2, ids.device)
    # The kernel runs in an interpreter here, which does both.
    monkeypatch.setattr(Slot, "attend", lambda self, q, k, v, scale: q[..., : v.size(-1)].clone())
    # As on a GPU, where values of positions are not looked at.
    monkeypatch.setattr("gape.ops.inputs.readable", lambda x: False)
    with Operations() as heard:
        step._replayed(ids[:, :1], slots.begin(), slots)
    assert "mm" in heard.names
    assert not heard.names & {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "lift_fresh", "item"}


@torch.no_grad()
def test_a_graph_is_not_replayed_after_a_change(played: list[Played]) -> None:
    model, token = made("llama", num_hidden_layers=1), torch.tensor([[3]])
    cache = KeepingCache(model, 32)
    model(tokens(1, 5), past_key_values=cache)
    step = Captured(model, cache)
    changes: list[Callable[[], object]] = [
        lambda: model.model.norm.register_forward_hook(lambda *arguments: None),
        lambda: model.model.norm._forward_hooks.clear(),
        lambda: cache.crop(5),
        lambda: setattr(model.config, "_attn_implementation", "gape_split"),
    ]
    for change in changes:
        step(token)
        change()
        step(token)
    # None with hooks, nor behind another length; another name for the same keys changes nothing.
    assert [graph.replays for graph in played] == [0, 0, 2, 2]
    model.config._attn_implementation = "gape_triton"
    with pytest.raises(ValueError, match=r"attn_implementation: .*carry the bias"):
        step(token)


@torch.no_grad()
def test_without_a_gpu_the_model_answers() -> None:
    model, ids = made("llama"), tokens(2, 12)
    plain, cache = KeepingCache(model), KeepingCache(model)
    step = Captured(model, cache)
    expected = one_by_one(lambda token: model(token, past_key_values=plain).logits, ids)
    assert torch.equal(one_by_one(step, ids), expected)
    assert step.recordings == 0
    with pytest.raises(ValueError, match="cache: the model is on cpu"):
        step.record(ids[:, :1])


class Adapter(torch.nn.Linear):
    """Of another package, which may wait for the host."""


def with_adapter(model: Any) -> Any:
    model.model.layers[0].mlp.up_proj = Adapter(32, 48).eval()
    return model


def with_forward(model: Any) -> Any:
    model.model.norm.forward = model.model.norm.forward
    return model


def with_hook(model: Any) -> Any:
    model.model.norm.register_forward_hook(lambda *arguments: None)
    return model


def compiled(model: Any) -> Any:
    model.model.layers[0].compile()
    return model


def in_few_bits(model: Any) -> Any:
    class Bits(torch.nn.Parameter):
        """Stands in for weights of a kind of their own."""

    model.lm_head.weight = Bits(model.lm_head.weight.data)
    return model


def looking(model: Any) -> Any:
    model.model.rotary_emb.rope_type = "dynamic"
    return model


def elsewhere(model: Any) -> Any:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model, None), (with_adapter, "a Adapter"), (with_forward, "forward of a module was replaced"),
        (with_hook, "hooks"), (compiled, "compiled"), (in_few_bits, "Bits"), (looking, "dynamic look at positions"),
        (elsewhere, "on cpu and meta"),
        (lambda model: model.train(), "training mode"),
    ],
    ids=["nothing", "adapter", "forward", "hook", "compiled", "few bits", "dynamic rotation", "elsewhere", "training"],
)  # fmt: skip
def test_models_that_cannot_be_recorded_are_said(
    change: Callable[[Any], Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "wrong_place", lambda weight: None)
    model = made("llama")
    actual = captured.why_not(change(model), KeepingCache(model))
    assert actual is None if reason is None else reason in str(actual)


def test_caches_and_families_that_cannot_be_recorded_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "wrong_place", lambda weight: None)
    model = made("llama")
    assert "got a DynamicCache" in str(captured.why_not(model, DynamicCache()))
    assert "carried=True" in str(captured.why_not(model, ForgettingCache(model, eps=1e-2)))
    by_gates = ForgettingCache(model, eps=1e-2, bounds="gates", carried=True)
    assert "every gate" in str(captured.why_not(model, by_gates))
    gpt2 = made("gpt2")
    assert "of type gpt2" in str(captured.why_not(gpt2, KeepingCache(gpt2)))
    half = gape.hf.inject(tiny("llama"), context_length=16, start="paper", gates=FLOORS, layers=[1])
    partly = ForgettingCache(half, eps=1e-2, partial=True, carried=True)
    assert "layer 0 has no gates" in str(captured.why_not(half, partly))
    with pytest.raises(ValueError, match="cache: layer 0 has no gates"):
        Captured(half, partly)
    with pytest.raises(ValueError, match=r"cache: .*made for the model"):
        Captured(made("llama"), KeepingCache(model))


@torch.no_grad()
def test_a_cache_with_pads_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "wrong_place", lambda weight: None)
    model, real = made("llama"), torch.ones(2, 8, dtype=torch.int64)
    real[0, :3] = 0
    for kind, said in (("keeping", "holds documents"), ("forgetting", "positions of their own")):
        cache = CACHES[kind](model)
        model(tokens(2, 8), attention_mask=real, past_key_values=cache)
        assert said in str(captured.why_not(model, cache))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: injected("mistral"), "layer 0 has a sliding window"),
        (lambda: injected("gemma2", implementation="eager"), "layer 0 caps its logits"),
        (lambda: gape.hf.inject(tiny("llama"), context_length=16, layers=[1]), "layer 0 has no gates"),
        (lambda: injected("llama", implementation="eager"), "attn_implementation: .*carry the bias"),
        (lambda: tiny("llama"), "model: .*one with gates"),
    ],
    ids=["window", "cap", "no gates", "dense", "nothing"],
)
def test_what_a_keeping_cache_cannot_serve(model: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        KeepingCache(model())


@pytest.mark.parametrize("name", ["gape", "llama"])
@pytest.mark.parametrize("kind", CACHES)
def test_text_is_that_of_a_cache_of_transformers(name: str, kind: str) -> None:
    model, ids = made(name), tokens(2, 40)
    real = torch.ones_like(ids)
    for pads in (0, 15):
        real[0, :pads] = 0
        settings = {"max_new_tokens": 10, "do_sample": False, "attention_mask": real}
        cache = KeepingCache(model) if kind == "keeping" else ForgettingCache(model, eps=1e-6, carried=True)
        assert torch.equal(model.generate(ids, past_key_values=cache, **settings), model.generate(ids, **settings))
        assert cache.nbytes > 0


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
def test_chunks_skip_what_has_no_weight(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: list[Any] = []

    def heard(*tensors: Any, impl: str, eps: float, **options: Any) -> Tensor:
        arguments.append((impl, eps))
        return gape.gated_attention(*tensors, **options)

    model, ids = made("llama"), tokens(2, 60)
    monkeypatch.setattr(keeping if kind == "keeping" else forgetting_rack, "gated_attention", heard)
    cache = CACHES[kind](model)
    with skipping(model, 1e-4):
        actual = [model(part, past_key_values=cache).logits for part in ids.split([40, 20], dim=1)]
    torch.testing.assert_close(torch.cat(actual, 1), model(ids, use_cache=False).logits, rtol=0.02, atol=0.05)
    # What has dropped keys no longer counts positions, and skips no more.
    assert arguments == [("triton", 1e-4)] * (4 if kind == "keeping" else 2)


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
def test_keys_carry_the_bias_in_what_autocast_works_in(kind: str) -> None:
    """Rounded later, they would lose it: the two pieces that follow the first are small beside it."""
    model, ids = made("llama"), tokens(2, 40)
    cache = KeepingCache(model) if kind == "keeping" else ForgettingCache(model, eps=1e-6, carried=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = [model(part, past_key_values=cache).logits for part in ids.split([30, 10], dim=1)]
        expected = model(ids, use_cache=False).logits
    assert {block.k.dtype for layer in cache.together.layers for block in layer.held().blocks} == {torch.bfloat16}
    torch.testing.assert_close(torch.cat(actual, 1).float(), expected.float(), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("kind", CACHES)
def test_a_measurement_decodes_by_graphs(kind: str, played: list[Played]) -> None:
    model = made("llama", num_hidden_layers=1)
    row = forgetting_timing.decode(LanguageModel(model), CACHES[kind](model), tokens(1, 40), tokens=10, chunk=30)
    assert {"record_ms", "launched_ms"} <= row.keys()
    assert "unrecorded" not in row
    assert [graph.replays for graph in played] == [0, 5]


def test_a_measurement_says_why_it_does_not() -> None:
    model = LanguageModel(made("llama", num_hidden_layers=1))
    for cache, said in ((model.new_cache(), "got a FullCache"), (KeepingCache(model.model), "on cpu")):
        row = forgetting_timing.decode(model, cache, tokens(1, 20), tokens=6, chunk=14)
        assert said in row["unrecorded"]
        assert not {"record_ms", "launched_ms"} & row.keys()


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        *(pytest.param(name, {}, kind, id=f"{name}, {kind}") for name in NAMES for kind in CACHES),
        *(pytest.param("llama", {"head_dim": 64}, kind, id=f"llama of 64, {kind}") for kind in CACHES | MEASURING),
    ],
)
def test_graphs_replay_the_tokens_that_are_launched(
    name: str, changes: dict[str, Any], kind: str, autocast: bool
) -> None:
    model = made(name, **changes).cuda()
    model = model if autocast else model.bfloat16()
    ids = tokens(2, 300).cuda()
    plain, cache = ((CACHES | MEASURING)[kind](model) for _ in range(2))
    step = Captured(model, cache)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for each in (plain, cache):
            model(ids[:, :60], past_key_values=each)
        assert captured.why_not(model, cache) is None
        expected = one_by_one(lambda token: model(token, past_key_values=plain).logits, ids[:, 60:])
        actual = one_by_one(step, ids[:, 60:])
    assert step.recordings >= 2
    # Sums in another order round otherwise; logits are of size 1.
    differences = (actual.float() - expected.float()).abs()
    assert float(differences.mean()) < 0.02
    assert float(differences.max()) < 0.2
    assert cache.get_seq_length() == plain.get_seq_length() == 300
    if kind != "keeping":
        assert cache.looks == plain.looks
        assert max(max(kept) for kept in cache.kept) < 300
