"""Captured decoding: what a replay says is what the model says, and nothing is replayed that has changed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import gape
from gape.cache.gpt import ForgettingCache, FullCache
from gape.cache.paged import PagedCache
from gape.models.cuda_graphs import ModelState, captured_logits
from gape.models.generate import capture_obstacle
from gape.models.gpt import MLP
from tests.models.tiny import model, on_gpu, tokens

#: Key heads that forget within a page, and later.
FLOORS = {"gate_floor": [400.0, 400.0, 32.0, 32.0], "init_landmark_bias": -9.0}
CACHES: dict[str, Callable[[gape.GPT], PagedCache]] = {
    "full": FullCache,
    "forgetting": lambda gpt: ForgettingCache(gpt, eps=1e-2),
    "queries": lambda gpt: ForgettingCache(gpt, eps=1e-2, bounds="queries"),
    "keys": lambda gpt: ForgettingCache(gpt, max_keys=128),
}
PROMPT = 90


class Adapter(torch.nn.Linear):
    """Of another package, which may wait for the host."""


OBSTACLES: dict[str, Any] = {
    "nothing": (lambda gpt: None, None),
    "a listener": (lambda gpt: setattr(gpt.layers[0].attention, "stepwise", True), "listened to"),
    "landmarks": (lambda gpt: gpt.keep_landmarks(), "listened to"),
    "adapter": (lambda gpt: setattr(gpt.layers[0].mlp, "up", Adapter(48, 192).eval()), "a Adapter"),
    "hook": (lambda gpt: gpt.norm.register_forward_pre_hook(lambda *_: None), "hooks"),
    "compiled": (lambda gpt: gpt.layers[1].compile(), "compiled"),
    "training": (lambda gpt: gpt.layers[1].train(), "training mode"),
    "wide": (lambda gpt: gpt.float(), "works in torch.float32"),
}


@pytest.mark.parametrize(("change", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_models_whose_steps_cannot_be_captured_are_told_apart(change: Any, reason: str | None) -> None:
    gpt = model(dtype=torch.bfloat16)
    change(gpt)
    actual = capture_obstacle(gpt)
    assert actual is None if reason is None else reason in str(actual)


class Around(torch.nn.Module):
    """A module around another, as adapters are."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base


def moved(x: Tensor) -> None:
    x.data = x.data.clone()


CHANGES: dict[str, Any] = {
    "written to": (lambda gpt: gpt.norm.weight.mul_(2), True),
    "around": (lambda gpt: setattr(gpt.layers[0].mlp, "up", Around(gpt.layers[0].mlp.up).eval()), False),
    "added": (lambda gpt: gpt.layers[0].add_module("adapter", torch.nn.Identity().eval()), False),
    "shared": (lambda gpt: setattr(gpt.layers[0], "mlp", gpt.layers[1].mlp), False),
    "moved": (lambda gpt: moved(gpt.norm.weight), False),
    "replaced": (lambda gpt: setattr(gpt.norm, "weight", torch.nn.Parameter(gpt.norm.weight.clone())), False),
    "buffer": (lambda gpt: gpt.norm.register_buffer("offset", torch.ones(1)), False),
    "forward": (lambda gpt: setattr(gpt.norm, "forward", gpt.norm.forward), False),
    "hook": (lambda gpt: gpt.norm.register_forward_hook(lambda *_: None), False),
    "training": (lambda gpt: gpt.layers[1].train(), False),
    "set": (lambda gpt: setattr(gpt.layers[0].attention, "stepwise", True), False),
}


@pytest.mark.parametrize(("change", "same"), CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_step_is_captured_anew_where_a_replay_would_do_something_else(change: Any, same: bool) -> None:
    gpt = model()
    kept, state = [*gpt.modules(), *gpt.parameters()], ModelState(gpt)
    assert state.is_that_of(gpt)
    change(gpt)
    assert state.is_that_of(gpt) is same
    assert kept


@pytest.mark.parametrize("position", ["alibi", "fox", "t5"])
def test_a_bias_of_a_scheme_is_not_captured(position: str) -> None:
    assert "a bias of its own" in str(capture_obstacle(model(position, dtype=torch.bfloat16)))


def test_without_a_gpu_a_cache_says_so() -> None:
    gpt = model()
    cache = FullCache(gpt)
    gpt.generate(tokens(2, 5), 3, cache=cache)
    assert "cpu" in str(cache.uncaptured)


@contextmanager
def uncaptured(gpt: torch.nn.Module) -> Iterator[None]:
    """Hooks are not called by a replay, so with one nothing is captured."""
    hook = gpt.register_forward_hook(lambda *_: None)
    yield
    hook.remove()


@torch.no_grad()
def stepped(gpt: gape.GPT, cache: PagedCache, ids: Tensor, pads: Tensor | None = None) -> Tensor:
    """Logits of ids (B, N) token by token, by captured steps where they can be."""

    def step(ids: Tensor, positions: Tensor) -> Tensor:
        return gpt(ids, positions=positions, cache=cache, logits_to_keep=1).logits

    logits = []
    for token in ids.split(1, dim=1):
        positions = torch.full_like(token, cache.length) - (0 if pads is None else pads[:, None])
        found = captured_logits(gpt, cache, step, token, positions, lambda: capture_obstacle(gpt))
        logits.append(step(token, positions) if found is None else found)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def prompted(gpt: gape.GPT, cache: PagedCache, ids: Tensor, pads: Tensor | None = None) -> PagedCache:
    """The cache with a prompt, rows beginning with so many pads (B,)."""
    given = {}
    if pads is not None:
        places = torch.arange(ids.size(1), device=ids.device) - pads[:, None]
        given = {"positions": places.clamp(min=0), "documents": (places >= 0).long()}
    gpt(ids, cache=cache, **given)
    return cache


def check_alike(actual: Tensor, expected: Tensor) -> None:
    """Logits (B, N, V) up to rounding, and the same greedy tokens where one is ahead by more than that."""
    actual, expected = actual.float(), expected.float()
    near = 2**-6 * float(expected.abs().max())
    assert not actual.isnan().any()
    assert float((actual - expected).abs().max()) <= near
    best, second = expected.topk(2, dim=-1).values.unbind(-1)
    clear = best - second > 2 * near
    assert clear.float().mean() > 0.3
    assert torch.equal(actual.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("position", "reserve"), [("p-rope+gape", 6), ("p-rope+gape", 0), ("rope", 0)])
@pytest.mark.parametrize("padded", [False, True])
def test_captured_tokens_are_those_of_the_model(
    position: str, reserve: int, batch: int, kind: str, padded: bool
) -> None:
    """Over many pages, evictions and tables that grow wider."""
    if kind != "full" and position == "rope":
        pytest.skip("without gates nothing is evicted")
    options = {} if position == "rope" else FLOORS
    gpt, ids = on_gpu(position, torch.bfloat16, reserve=reserve, options=options), tokens(batch, PROMPT + 400).cuda()
    pads = torch.tensor([0, 64, 70][-batch:]).cuda() if padded else None
    prompt, rest = ids.split([PROMPT, 400], dim=1)
    plain, cache = (prompted(gpt, CACHES[kind](gpt), prompt, pads) for _ in range(2))
    with uncaptured(gpt):
        expected = stepped(gpt, plain, rest, pads)
    assert "hooks" in str(plain.uncaptured)
    check_alike(stepped(gpt, cache, rest, pads), expected)
    assert cache.uncaptured is None
    assert cache.length == plain.length
    assert cache.num_keys == plain.num_keys
    assert cache.realised_eps == pytest.approx(plain.realised_eps, rel=0.2, abs=1e-6)
    if kind != "full":
        assert min(min(keys) for keys in cache.num_keys) < PROMPT


@pytest.mark.gpu
@pytest.mark.parametrize("position", ["p-rope+gape", "rope"])
def test_generate_captures_by_itself(position: str) -> None:
    gpt = on_gpu(position, torch.bfloat16)
    ids = tokens(3, 40).cuda()
    ids[0, :7] = -1
    cache = FullCache(gpt)
    for each in (None, cache):
        text = gpt.generate(ids, 200, temperature=0, pad_id=-1, cache=each)
        with torch.no_grad():
            for row, start in zip(text, (7, 0, 0), strict=True):
                logits = gpt(row[None, start:-1]).logits[0].float()[39 - start :]
                chosen = logits.gather(-1, row[40:, None]).squeeze(-1)
                assert float((logits.amax(-1) - chosen).max()) < 2**-5 * float(logits.abs().max())
    assert cache.uncaptured is None


@pytest.mark.gpu
def test_autocast_is_captured_too() -> None:
    gpt, ids = on_gpu(dtype=torch.float32, options=FLOORS), tokens(2, PROMPT + 100).cuda()
    prompt, rest = ids.split([PROMPT, 100], dim=1)
    with torch.autocast("cuda", torch.bfloat16):
        plain, cache = (prompted(gpt, FullCache(gpt), prompt) for _ in range(2))
        with uncaptured(gpt):
            expected = stepped(gpt, plain, rest)
        check_alike(stepped(gpt, cache, rest), expected)
        assert cache.uncaptured is None
    stepped(gpt, prompted(gpt, FullCache(gpt), prompt), rest[:, :5])


@pytest.mark.gpu
def test_logits_are_not_written_to_again() -> None:
    gpt, ids = on_gpu(dtype=torch.bfloat16), tokens(2, PROMPT + 20).cuda()
    cache = prompted(gpt, FullCache(gpt), ids[:, :PROMPT])
    stepped(gpt, cache, ids[:, PROMPT : PROMPT + 5])
    first = stepped(gpt, cache, ids[:, PROMPT + 5 : PROMPT + 6])
    before = first.clone()
    stepped(gpt, cache, ids[:, PROMPT + 6 :])
    assert torch.equal(first, before)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CACHES)
def test_a_second_cache_replays_from_its_first_token(kind: str) -> None:
    """Also after reset(); not for another batch, whose step is captured anew."""
    gpt, ids = on_gpu(dtype=torch.bfloat16, options=FLOORS), tokens(3, PROMPT + 30).cuda()
    cache = prompted(gpt, CACHES[kind](gpt), ids[:, :PROMPT])
    expected = stepped(gpt, cache, ids[:, PROMPT:])
    for empty in (None, PagedCache.reset):
        if empty is None:
            cache = CACHES[kind](gpt)
            gc.collect()
        else:
            empty(cache)
        prompted(gpt, cache, ids[:, :PROMPT])
        first = stepped(gpt, cache, ids[:, PROMPT : PROMPT + 1])
        assert cache.uncaptured is None
        actual = torch.cat([first, stepped(gpt, cache, ids[:, PROMPT + 1 :])], dim=1)
        check_alike(actual, expected)
    other = prompted(gpt, CACHES[kind](gpt), ids[:2, :PROMPT])
    check_alike(stepped(gpt, other, ids[:2, PROMPT:]), expected[:2])
    assert other.uncaptured is None


@pytest.mark.gpu
def test_a_step_that_measured_nothing_is_not_replayed_where_queries_are_measured() -> None:
    gpt, ids = on_gpu(dtype=torch.bfloat16, options=FLOORS), tokens(2, PROMPT + 200).cuda()
    prompt, rest = ids.split([PROMPT, 200], dim=1)
    stepped(gpt, prompted(gpt, FullCache(gpt), prompt), rest[:, :5])
    gc.collect()
    plain, cache = CACHES["queries"](gpt), CACHES["queries"](gpt)
    stepped(gpt, prompted(gpt, cache, prompt), rest)
    with uncaptured(gpt):
        stepped(gpt, prompted(gpt, plain, prompt), rest)
    assert cache.uncaptured is None
    assert cache.realised_eps == pytest.approx(plain.realised_eps, rel=0.2, abs=1e-6)


@pytest.mark.gpu
def test_memory_does_not_grow_while_tokens_are_replayed() -> None:
    gpt, ids = on_gpu(dtype=torch.bfloat16, options=FLOORS | {"gate_floor": 400.0}), tokens(2, PROMPT + 500).cuda()
    cache = prompted(gpt, ForgettingCache(gpt, eps=1e-2), ids[:, :PROMPT])
    stepped(gpt, cache, ids[:, PROMPT : PROMPT + 200])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for at in range(PROMPT + 200, PROMPT + 500):
        stepped(gpt, cache, ids[:, at : at + 1])
    after = torch.cuda.memory_stats()
    assert cache.uncaptured is None
    for name in ("num_device_alloc", "reserved_bytes.all.current"):
        assert after[name] <= before[name], name
    assert after["allocated_bytes.all.current"] <= before["allocated_bytes.all.current"] + 2**20


CHANGES: dict[str, Callable[[gape.GPT], object]] = {
    "weights written to": lambda gpt: gpt.layers[0].attention.qkv.weight.mul_(1.5),
    "weights elsewhere": lambda gpt: setattr(gpt.norm.weight, "data", gpt.norm.weight.data * 1.5),
    "another module": lambda gpt: setattr(gpt.layers[1], "mlp", on_gpu(dtype=torch.bfloat16).layers[0].mlp),
    "a listener": lambda gpt: setattr(gpt.layers[0].attention, "stepwise", True),
    "training": lambda gpt: gpt.layers[1].train(),
    "a hook": lambda gpt: gpt.layers[1].mlp.register_forward_hook(lambda _, __, out: 2 * out),
}


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_changed_model_says_what_it_says_now(change: Callable[[gape.GPT], object]) -> None:
    gpt, ids = on_gpu(dtype=torch.bfloat16), tokens(2, PROMPT + 20).cuda()
    prompt, first, rest = ids.split([PROMPT, 5, 15], dim=1)
    plain, cache = (prompted(gpt, FullCache(gpt), prompt) for _ in range(2))
    stepped(gpt, cache, first)
    with uncaptured(gpt):
        stepped(gpt, plain, first)
    change(gpt)
    actual = stepped(gpt, cache, rest)
    with uncaptured(gpt):
        check_alike(actual, stepped(gpt, plain, rest))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.gpu
def test_an_error_in_a_layer_leaves_a_cache_that_says_so() -> None:
    gpt, ids = on_gpu(dtype=torch.bfloat16), tokens(2, PROMPT + 20).cuda()
    prompt, rest = ids.split([PROMPT, 20], dim=1)
    cache = prompted(gpt, FullCache(gpt), prompt)
    expected = stepped(gpt, cache, rest)
    hook = gpt.layers[1].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        stepped(gpt, cache, rest[:, :1])
    hook.remove()
    with pytest.raises(ValueError, match="a call broke off"):
        stepped(gpt, cache, rest[:, :1])
    cache.reset()
    check_alike(stepped(gpt, prompted(gpt, cache, prompt), rest), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["while it compiles", "while it captures"])
def test_a_capture_that_breaks_off_changes_nothing(when: str) -> None:
    gpt, ids = on_gpu(dtype=torch.bfloat16), tokens(2, PROMPT + 20).cuda()
    prompt, rest = ids.split([PROMPT, 20], dim=1)
    with uncaptured(gpt):
        expected = stepped(gpt, prompted(gpt, FullCache(gpt), prompt), rest)
    gc.collect()
    # Pages that have taken single tokens before: the first one is captured.
    cache, forward = prompted(gpt, FullCache(gpt), prompt), MLP.forward

    def broken(self: MLP, x: Tensor) -> Tensor:
        if when == "while it compiles" or torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt
        return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MLP, "forward", broken)
        with pytest.raises(KeyboardInterrupt):
            stepped(gpt, cache, rest[:, :1])
    assert cache.length == PROMPT
    check_alike(stepped(gpt, cache, rest), expected)
    assert cache.uncaptured is None
