"""Caches in pages of a GPT: the numbers of a model without a cache, budgets that hold, and errors with a name."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import gape
from gape.cache.gpt import ForgettingCache, FullCache
from gape.cache.layer import PagedLayer
from gape.cache.paged import PagedCache
from tests.cache.witness import read, witnessed
from tests.models.tiny import SCHEMES, T, interrupt, model, tokens

N = 4 * T + 7
EXACT = {"atol": 1e-9, "rtol": 1e-9}
FLOOR = {"gate_floor": 24.0, "init_landmark_bias": -3.0}
#: Everything fades within a page.
LOCAL = {"gate_floor": 400.0, "init_landmark_bias": -9.0}
#: Schemes with a bias of their own, which pages do not know.
BIASED = [name for name in SCHEMES if next(model(name, n_layer=1).blocks()).attention.has_own_bias]
ROTATING = [name for name in SCHEMES if name not in BIASED]
CHUNKS = [[7] * 10 + [1], [64, 7], [1, 3, 1, 1, 40, 0, 1, 15, *[1] * 9]]

CACHES: dict[str, Callable[[gape.GPT], PagedCache]] = {
    "full": FullCache,
    "eps": lambda gpt: ForgettingCache(gpt, eps=1e-3),
    "queries": lambda gpt: ForgettingCache(gpt, eps=1e-3, bounds="queries"),
    "keys": lambda gpt: ForgettingCache(gpt, max_keys=128),
    "bytes": lambda gpt: ForgettingCache(gpt, max_bytes=600_000, bounds="queries"),
}
each_cache = pytest.mark.parametrize("kind", CACHES)


@pytest.mark.parametrize("position", ROTATING)
@torch.no_grad()
def test_decoding_equals_prefill_in_chunks_of_any_size(position: str) -> None:
    gpt, ids = model(position), tokens(2, N)
    whole = gpt(ids).logits
    for sizes in CHUNKS if position == "p-rope+gape" else CHUNKS[-1:]:
        torch.testing.assert_close(read(gpt, FullCache(gpt), ids, sizes), whole, **EXACT)


@pytest.mark.parametrize("position", ["rope", "p-rope+gape", "yarn+gape"])
@torch.no_grad()
def test_left_padded_rows_equal_rows_alone(position: str) -> None:
    gpt, ids, pads = model(position), tokens(3, N), torch.tensor([0, 20, N - 1])
    for sizes in ([N], [15, 5, 40, *[1] * (N - 60)]):
        padded = read(gpt, FullCache(gpt), ids, sizes, pads)
        for row, pad in enumerate(pads.tolist()):
            torch.testing.assert_close(padded[row, pad:], gpt(ids[row : row + 1, pad:]).logits[0], **EXACT)


@pytest.mark.parametrize(("kind", "padded"), [("eps", True), ("queries", False)])
def test_a_small_eps_changes_nothing(kind: str, padded: bool) -> None:
    gpt, ids = model(options=LOCAL), tokens(2, 300)
    pads = torch.tensor([0, 70]) if padded else None
    cache = CACHES[kind](gpt).fresh(eps=1e-12)
    actual = read(gpt, cache, ids, [100, 100, 40, *[1] * 60], pads)
    expected = read(gpt, FullCache(gpt), ids, [300], pads)
    real = slice(70 if padded else 0, None)
    torch.testing.assert_close(actual[:, real], expected[:, real], **EXACT)
    assert max(max(keys) for keys in cache.num_keys) < 200


@pytest.mark.parametrize(
    ("kind", "drawing"),
    [
        ("full", {"temperature": 0, "eos_id": 7}),
        ("eps", {"seed": 3, "top_k": 5, "top_p": 0.8}),
        ("keys", {"temperature": 0, "eos_id": 7}),
    ],
)
def test_generation_says_the_same(kind: str, drawing: dict[str, Any]) -> None:
    gpt = model(options=LOCAL)
    prompts = [tokens(1, n, seed=n) for n in (90, 1, 57)]
    ids = torch.cat([torch.nn.functional.pad(p, (90 - p.size(1), 0), value=-1) for p in prompts])
    expected = gpt.generate(ids, 40, pad_id=-1, **drawing)
    assert torch.equal(gpt.generate(ids, 40, pad_id=-1, cache=CACHES[kind](gpt), **drawing), expected)


@each_cache
def test_gradients_may_be_off_in_two_ways(kind: str) -> None:
    """What is made in one mode without gradients is written to in the other."""
    gpt, ids = model(options=FLOOR), tokens(2, 230)
    mixed, alike = CACHES[kind](gpt), CACHES[kind](gpt)
    for number, part in enumerate(ids.split([40, 1, *[33] * 5, 1, 23], dim=1)):
        with torch.inference_mode(mode=number in (0, 1, 5)), torch.no_grad():
            found = gpt(part, cache=mixed).logits
            copied = deepcopy(mixed) if number == 5 else mixed
        with torch.no_grad():
            assert torch.equal(found, gpt(part, cache=alike).logits)
        mixed = copied


@torch.no_grad()
def test_local_heads_take_no_more_bytes_as_tokens_come() -> None:
    gpt, ids = model(options=LOCAL, n_layer=1), tokens(1, 360)
    cache = ForgettingCache(gpt, eps=1e-3)
    gpt(ids[:, :100], cache=cache)
    sizes = []
    for at in range(100, 360):
        gpt(ids[:, at : at + 1], cache=cache)
        sizes.append(cache.nbytes)
    assert max(sizes[130:]) == max(sizes[:130])
    assert max(max(keys) for keys in cache.num_keys) < 128
    assert cache.storage.reserved_bytes <= 2 * max(sizes)


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        pytest.param({"max_keys": 128}, [100, *[1] * 60], marks=pytest.mark.slow),
        ({"max_keys": 128}, [600, 7, 7, 7, 1, 300]),
        ({"max_bytes": 500_000}, [200, 1, 40, 100, 1, 1]),
        pytest.param({"max_bytes": 500_000}, [127, *[9] * 40], marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_budget_holds_behind_every_call(budget: dict[str, int], sizes: list[int]) -> None:
    gpt = model(options={"gate_floor": [24.0, 24.0, 0.0, 0.0]})
    cache, ids = ForgettingCache(gpt, **budget), tokens(2, sum(sizes))
    for part in ids.split(sizes, dim=1):
        gpt(part, cache=cache)
        for layer in range(2):
            rows = zip(*(cache.positions(layer, head) for head in range(2)), strict=True)
            mean = max(sum(len(positions) for positions in row) / 2 for row in rows)
            assert mean <= budget.get("max_keys", torch.inf)
            # A budget is used.
            assert mean >= min(100, cache.length)
        assert cache.nbytes <= budget.get("max_bytes", torch.inf)


@torch.no_grad()
def test_a_budget_below_three_pages_of_every_head_is_refused() -> None:
    gpt = model()
    cache = ForgettingCache(gpt, max_bytes=10_000)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"max_bytes: .*at least"):
            gpt(tokens(1, 4), cache=cache)


def test_landmarks_stay() -> None:
    gpt = model(options={"gate_floor": 48.0, "init_landmark_bias": 60.0})
    cache = ForgettingCache(gpt, eps=0.5)
    read(gpt, cache, tokens(1, 200), [10] * 20)
    assert cache.num_keys == [[200, 200]] * 2


@pytest.mark.parametrize(
    ("floors", "bare", "cached"),
    [
        ([400.0, 400.0, 0.0, 0.0], "layer 0, head 2", [[False, True], [False, True]]),
        ([[0.0], [400.0]], "layer 0, head 0", [[True, True], [False, False]]),
    ],
    ids=["heads", "layers"],
)
def test_heads_without_a_floor_keep_everything_on_request(floors: Any, bare: str, cached: list[list[bool]]) -> None:
    gpt = model(options={"gate_floor": floors, "init_landmark_bias": -9.0})
    with pytest.raises(ValueError, match=f"nothing fades in {bare}"):
        ForgettingCache(gpt, eps=1e-3)
    cache = ForgettingCache(gpt, eps=1e-3, partial=True)
    read(gpt, cache, tokens(2, 300), [20] * 15)
    assert [[keys == 300 for keys in layer] for layer in cache.num_keys] == cached


@pytest.mark.parametrize("kind", ["full", "eps", "queries"])
@torch.no_grad()
def test_tokens_are_taken_back(kind: str) -> None:
    gpt, ids, pads = model(options=FLOOR), tokens(2, 200), torch.tensor([0, 12])
    cache, other = CACHES[kind](gpt), CACHES[kind](gpt)
    read(gpt, cache, ids, [150, 20, *[1] * 30], pads)
    cache.truncate(185)
    assert cache.length == 185
    positions = torch.arange(185, 200) - pads[:, None]
    actual = gpt(ids[:, 185:], positions=positions, cache=cache).logits
    read(gpt, other, ids[:, :185], [150, 20, *[1] * 15], pads)
    torch.testing.assert_close(actual, gpt(ids[:, 185:], positions=positions, cache=other).logits, **EXACT)
    for length in (201, -1, 1.5, True):
        with pytest.raises(ValueError, match=r"^length: "):
            cache.truncate(length)
    if kind != "full":
        with pytest.raises(ValueError, match=r"^length: .*evicted"):
            cache.truncate(100)
    assert cache.length == 200


@each_cache
@torch.no_grad()
def test_an_emptied_cache_and_a_fresh_one_are_like_new(kind: str) -> None:
    """For another batch, too; nothing of the old text shows in what is realised."""
    gpt, ids = model(options=FLOOR), tokens(2, 252)
    new = CACHES[kind](gpt)
    expected, realised = read(gpt, new, ids[:1], [150, 98, *[1] * 4]), new.realised_eps
    for empty in (PagedCache.reset, lambda cache: cache.truncate(0), None):
        cache = CACHES[kind](gpt)
        read(gpt, cache, ids.flip(1), [150, 100, 2])
        if empty is None:
            cache = cache.fresh()
        else:
            empty(cache)
        assert (cache.length, cache.nbytes, cache.realised_eps) == (0, 0, 0.0)
        torch.testing.assert_close(read(gpt, cache, ids[:1], [150, 98, *[1] * 4]), expected, **EXACT)
        assert cache.num_keys == new.num_keys
        assert cache.realised_eps == pytest.approx(realised)


def test_a_fresh_cache_may_have_another_eps() -> None:
    gpt, ids = model(options=FLOOR), tokens(1, 200)
    used = ForgettingCache(gpt, eps=0.5)
    read(gpt, used, ids, [200])
    actual = read(gpt, used.fresh(eps=1e-6), ids, [100, 100])
    torch.testing.assert_close(actual, read(gpt, ForgettingCache(gpt, eps=1e-6), ids, [100, 100]), **EXACT)
    with pytest.raises(ValueError, match=r"^eps: "):
        used.fresh(eps=1.0)
    evicting = FullCache(gpt).fresh(eps=0.5)
    read(gpt, evicting, ids, [100, 100])
    assert max(max(keys) for keys in evicting.num_keys) < 200
    bare = model()
    with pytest.raises(ValueError, match="nothing fades"):
        FullCache(bare).fresh(eps=0.5)


@each_cache
@torch.no_grad()
def test_a_copy_goes_on_by_itself(kind: str) -> None:
    gpt, ids = model(options=FLOOR), tokens(2, 200)
    cache, alone = CACHES[kind](gpt), CACHES[kind](gpt)
    for each in (cache, alone):
        read(gpt, each, ids[:, :120], [117, *[1] * 3])
    copied = deepcopy(cache)
    read(gpt, cache, ids.flip(1)[:, :60], [57, *[1] * 3])
    del cache
    expected = read(gpt, alone, ids[:, 120:], [75, *[1] * 5])
    torch.testing.assert_close(read(gpt, copied, ids[:, 120:], [75, *[1] * 5]), expected, **EXACT)
    assert copied.realised_eps == pytest.approx(alone.realised_eps)
    copied.reset()
    assert read(gpt, copied, ids[:1, :20], [20]).shape[1] == 20


@pytest.mark.parametrize(("place", "new"), [("0.attention", 40), ("0.attention.out", 1), ("1.attention", 40)])
@each_cache
@torch.no_grad()
def test_after_a_call_that_broke_off(kind: str, new: int, place: str) -> None:
    """Nothing goes on from tokens that only some layers have; taken back, or emptied, the cache is whole again."""
    gpt, ids = model(options=FLOOR), tokens(2, 150)
    cache = CACHES[kind](gpt)
    gpt(ids[:, :100], cache=cache)
    broken = gpt.get_submodule(f"layers.{place}").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpt(ids[:, 100 : 100 + new], cache=cache)
    broken.remove()
    if place != "0.attention":
        for call in (lambda: gpt(ids[:, 100:], cache=cache), lambda: gpt.generate(ids, 3, cache=cache)):
            with pytest.raises(ValueError, match="a call broke off"):
                call()
        if kind not in ("keys", "bytes"):
            cache.truncate(100)
        else:
            cache.reset()
            gpt(ids[:, :100], cache=cache)
    whole = CACHES[kind](gpt)
    expected = read(gpt, whole, ids, [100, 50])[:, 100:]
    torch.testing.assert_close(gpt(ids[:, 100:], cache=cache).logits, expected, atol=2e-3, rtol=0)
    cache.reset()
    torch.testing.assert_close(read(gpt, cache, ids, [100, 50])[:, 100:], expected, **EXACT)


@torch.no_grad()
def test_eviction_after_a_call_that_broke_off_is_for_tokens_that_really_come() -> None:
    gpt, ids = model(options=FLOOR), tokens(1, 300)
    cache = ForgettingCache(gpt, eps=1e-2)
    with witnessed(cache) as witnesses:
        gpt(ids[:, :100], cache=cache)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PagedLayer, "_prefill", interrupt)
            with pytest.raises(KeyboardInterrupt):
                gpt(ids[:, 100:], cache=cache)
        cache.evict()
        gpt(ids[:, 100:110], cache=cache)
    assert max(witness.judged().lost for witness in witnesses) <= 1e-2


@pytest.mark.parametrize("empty", [lambda cache: cache.fresh(), lambda cache: cache.reset() or cache])
@torch.no_grad()
def test_bounds_are_those_of_the_weights_when_a_text_begins(empty: Callable[[PagedCache], PagedCache]) -> None:
    gpt, ids = model(options=FLOOR), tokens(1, 200)
    cache = ForgettingCache(gpt, eps=1e-2)
    read(gpt, cache, ids, [200])
    for block in gpt.blocks():
        block.attention.qkv.weight.data.mul_(3)
        block.attention.scheme.gates.raw_amplitude.data.fill_(-2)
    cache = empty(cache)
    with witnessed(cache) as witnesses:
        read(gpt, cache, ids, [100, 60, *[1] * 40])
    assert max(witness.judged().lost for witness in witnesses) <= 1e-2


@pytest.mark.parametrize("rule", [{"eps": 1e-2}, {"max_keys": 128}])
@torch.no_grad()
def test_nothing_is_known_after_a_query_that_is_not_a_number(rule: dict[str, Any]) -> None:
    gpt, ids = model(options=FLOOR), tokens(1, 300).clamp(min=1)
    gpt.embedding.weight[0] = torch.nan
    cache = ForgettingCache(gpt, bounds="queries", **rule)
    read(gpt, cache, ids[:, :200], [150, 50])
    gpt(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    assert cache.realised_eps == 1.0
    read(gpt, cache, ids, [50, 50, *[10] * 20])
    assert cache.realised_eps == 1.0
    assert max(sum(keys) / 2 for keys in cache.num_keys) <= rule.get("max_keys", 501)


@torch.no_grad()
def test_autocast_leaves_float64_alone() -> None:
    gpt, ids = model(options=FLOOR), tokens(1, 20)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(read(gpt, FullCache(gpt), ids, [10, 10]), gpt(ids).logits, **EXACT)


@each_cache
@torch.no_grad()
def test_what_does_not_go_with_a_cache_is_refused(kind: str) -> None:
    gpt, ids = model(options=FLOOR), tokens(1, 8)
    cache = CACHES[kind](gpt)
    with pytest.raises(ValueError, match="another model"):
        model(options=FLOOR)(ids, cache=cache)
    for wrong in (torch.arange(8).flip(0), 2 * torch.arange(8)):
        with pytest.raises(ValueError, match=r"^positions: "):
            gpt(ids, positions=wrong, cache=cache)
    with pytest.raises(ValueError, match=r"^attn_mask: "):
        next(gpt.blocks()).attention(torch.randn(1, 8, 48).double(), None, None, cache.layers[0], torch.ones(8, 8) > 0)
    for wrong in ([1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 2, 2, 2, 2, 2, 2]):
        with pytest.raises(ValueError, match=r"^documents: "):
            gpt(ids, documents=torch.tensor([wrong]), cache=cache)
    gpt(ids, cache=cache)
    with pytest.raises(ValueError, match=r"^k: got .* a batch of 1"):
        gpt(tokens(2, 8), cache=cache)
    with pytest.raises(ValueError, match="empty"):
        gpt.generate(ids, 1, cache=cache)
    with pytest.raises(ValueError, match="go back"):
        gpt(ids, positions=torch.arange(7, 15), cache=cache)
    with pytest.raises(ValueError, match="2³¹"):
        gpt(ids, positions=2**31 - 4 + torch.arange(8), cache=cache)
    with pytest.raises(ValueError, match=r"^documents: .*behind a token"):
        gpt(ids, positions=torch.arange(5, 13), documents=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]), cache=cache)
    with pytest.raises(ValueError, match=r"^k: .* in torch.float64"):
        gpt.float()(ids, cache=cache)
    assert cache.length == 8


@pytest.mark.parametrize(
    ("changed", "arguments", "match"),
    [
        ({}, {"eps": 1e-3}, "nothing fades in layer 0, head 0"),
        ({}, {"eps": 1e-3, "partial": True}, "in some head"),
        ({"position": "rope"}, {"max_keys": 200}, "^position: .*gates"),
        ({"options": FLOOR}, {"eps": 1}, "^eps: "),
        ({"options": FLOOR}, {"eps": 0.1, "partial": 1}, "^partial: "),
    ],
)
def test_what_cannot_be_promised_is_refused(changed: dict[str, Any], arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ForgettingCache(model(**changed), **arguments)


@pytest.mark.parametrize("position", BIASED)
def test_pages_know_no_bias_of_a_scheme(position: str) -> None:
    with pytest.raises(ValueError, match=r"^model: .*rotates"):
        FullCache(model(position))
