"""What a recorded step makes of q and k in one launch against gates, rotation and bias one by one.

The kernel runs in the interpreter without a GPU, which cuts numbers off where they become bfloat16: float16 there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("triton")

from gape.hf.captured import SlotLayer
from gape.hf.forgetting import places_of

from gape.hf import Captured, KeepingCache, captured
from gape.ops import prologue
from gape.ops.columns import UNIT, significand_bits
from gape.ops.triton import split_bias
from tests.hf.test_captured import PLAIN, made, one_by_one
from tests.hf.tiny import opened, tiny, tokens
from tests.models.played import Played, playing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
CONTENT = 8
FIXED = {"learn_gate": False, "learn_landmark": False, "init_landmark_bias": -1.0, "gate_floor": [0.0, 0.5, 2.0, 80.0]}
STRETCHED = {"position": "yarn+gape", "factor": 4.0}
#: Family, changes of its config, and how it is injected.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "yarn": ("llama", {}, STRETCHED),
    "p-rope": ("llama", {}, {"position": "p-rope+gape"}),
    "no positions": ("llama", {}, {"position": "nope+gape"}),
    "a layer without rotation": ("smollm3", {"no_rope_layers": [0, 1]}, {}),
    "a layer without rotation, yarn": ("smollm3", {"no_rope_layers": [0, 1]}, STRETCHED),
    "fixed gates, a floor for each head": ("llama", {}, {"gates": FIXED}),
    **{family: (family, PLAIN.get(family, {}), {}) for family in captured.FAMILIES},
}


class Heard:
    """Stands in for what a layer holds, and keeps what it is given."""

    length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        self.given = (q, k, v)
        return torch.empty(*q.shape[:3], v.size(-1), dtype=v.dtype, device=v.device)


class Cache(captured.SlotCache):
    """A cache as a recorded step finds it, of the first layer alone."""

    def __init__(self, model: Any) -> None:
        self.heard, (seat, _) = Heard(), places_of(model, limited=False, carried=True)[0]
        captured.AttendingCache.__init__(self, layers=[SlotLayer(seat, self.heard)])


@contextmanager
def in_one_launch() -> Iterator[list[Any]]:
    """Rows are made by the kernel without a GPU too, and with one where the model says so; what it is told is noted."""
    taken: list[Any] = []
    run = split_bias.step_rows
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(captured, "steps", lambda q, k, dtype: prologue.ready(q.device, dtype))
        patch.setattr(
            split_bias, "step_rows", lambda q, k, step, **how: (taken.append(step), run(q, k, step, **how))[1]
        )
        yield taken


@contextmanager
def one_by_one_launches() -> Iterator[list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "steps", lambda *_: False)
        yield []


def built(case: str, **injected: Any) -> Any:
    """A model with gates of every strength, also none at all."""
    family, changes, options = CASES[case]
    model = opened(tiny(family, **changes), start="paper", **options, **injected)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "strength"):
                module.strength.copy_(torch.tensor([-1.5, 0.0, 0.25, 3.0]))
    return model.to(DEVICE)


class Attended(NamedTuple):
    """Queries, keys and values that the first layer attends with, and how often the kernel was asked."""

    q: Tensor
    k: Tensor
    v: Tensor
    launches: int


@torch.no_grad()
def attended(model: Any, way: Any, *, autocast: bool = False, apart: bool = False) -> Attended:
    """Of one token of two samples that read different things, at the same or at different positions."""
    x = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x = x if autocast else x.to(model.lm_head.weight.dtype)
    where = torch.tensor([[1003], [70]] if apart else [[1003]], device=DEVICE)
    layer, cache = model.model.layers[0].self_attn, Cache(model)
    embeddings = model.model.rotary_emb(x, where)
    with way() as taken, torch.autocast(DEVICE.type, torch.float16, enabled=autocast):
        layer(x, position_embeddings=embeddings, past_key_values=cache, position_ids=where)
    return Attended(*cache.heard.given, len(taken))


def assert_rows_agree(got: Attended, expected: Attended, turned: dict[str, float]) -> None:
    """Content to what its turning rounds; gates to their last bits, so that they may round to the next number."""
    assert (got.launches, expected.launches) == (1, 0)
    assert torch.equal(got.v, expected.v)
    near = 2.0 ** (1 - significand_bits(expected.q))
    for actual, wanted, once, pieces in ((got.q, expected.q, 3, 0), (got.k, expected.k, 0, 3)):
        assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
        torch.testing.assert_close(actual[..., :CONTENT], wanted[..., :CONTENT], **turned)
        bias, right = (x[..., CONTENT : CONTENT + 6].double() for x in (actual, wanted))
        for part, size in ((slice(once, once + 3), UNIT), (slice(pieces, pieces + 3), 1.0)):
            # What a key is not spared is a difference to 1, whose last bit is large beside a small one.
            close = {"atol": size * 2**-16, "rtol": 2 * near}
            torch.testing.assert_close(bias[..., part].sum(-1), right[..., part].sum(-1), **close)
        assert not actual[..., CONTENT + 6 :].any()


EXACT = {"rtol": 0.0, "atol": 0.0}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_steps(case: str, dtype: torch.dtype) -> None:
    """A model that turns by itself rounds twice on the way, in half precision."""
    model = built(case).to(dtype)
    own = model.model.layers[0].self_attn.gape_wiring.scheme is None and "without" not in case
    near = 4 * torch.finfo(dtype).eps
    got, expected = (attended(model, way) for way in (in_one_launch, one_by_one_launches))
    assert_rows_agree(got, expected, {"rtol": near, "atol": near} if own else EXACT)


@pytest.mark.parametrize("case", ["yarn", "llama", "qwen3"])
def test_rows_are_in_what_autocast_works_in(case: str) -> None:
    """Weights and angles stay in float32; Qwen3's norms make q and k of it, too."""
    got, expected = (attended(built(case), way, autocast=True) for way in (in_one_launch, one_by_one_launches))
    assert got.q.dtype == torch.float16
    assert_rows_agree(got, expected, EXACT)


@pytest.mark.parametrize("case", ["yarn", "llama"])
def test_samples_may_stand_apart(case: str) -> None:
    model = built(case).half()
    got, expected = (attended(model, way, apart=True) for way in (in_one_launch, one_by_one_launches))
    near = 4 * torch.finfo(torch.float16).eps
    assert_rows_agree(got, expected, EXACT if case == "yarn" else {"rtol": near, "atol": near})


def in_part(model: Any) -> Any:
    return opened(tiny("phi3", partial_rotary_factor=0.5, pad_token_id=0)).half().to(DEVICE)


def of_another_family(model: Any) -> Any:
    return opened(tiny("gemma")).half().to(DEVICE)


@pytest.mark.parametrize(
    "change",
    [lambda model: model.float(), in_part, of_another_family],
    ids=["single precision", "a part of each head", "another family"],
)
def test_others_go_step_by_step(change: Any) -> None:
    model = change(built("llama"))
    got, expected = (attended(model, way) for way in (in_one_launch, one_by_one_launches))
    assert (got.launches, expected.launches) == (0, 0)
    assert torch.equal(got.q, expected.q)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gape", "llama", pytest.param("yarn", marks=pytest.mark.slow)])
def test_replayed_tokens_equal_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision; the model itself goes step by step."""
    played: list[Played] = playing(monkeypatch, captured)
    model, ids = made(name).half().to(DEVICE), tokens(2, 22).to(DEVICE)
    plain, cache = KeepingCache(model, 32), KeepingCache(model, 32)
    for each in (plain, cache):
        model(ids[:, :20], past_key_values=each)
    with in_one_launch() as taken:
        actual = one_by_one(Captured(model, cache), ids[:, 20:])
    expected = one_by_one(lambda token: model(token, past_key_values=plain).logits, ids[:, 20:])
    assert [graph.replays for graph in played] == [1]
    # Once for the graph, and once by it.
    assert len(taken) == 2 * 2
    assert float((actual - expected).norm() / expected.norm()) < 2**-7


@torch.no_grad()
def test_a_layer_that_others_listen_to_goes_step_by_step() -> None:
    attention = next(made("gape").half().to(DEVICE).gpt.blocks()).attention
    q, k = (torch.randn(1, heads, 1, attention.content_dim, device=DEVICE).half() for heads in (4, 2))
    actual = []
    for listened in (False, True):
        attention.stepwise = listened
        with in_one_launch():
            actual.append(captured.rows_of(attention, q, k, torch.tensor([3], device=DEVICE), None))
    assert [each is None for each in actual] == [False, True]


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["gape", "yarn", "llama", "qwen3", "smollm3"])
def test_graphs_with_rows_in_one_launch_say_the_same(name: str, autocast: bool) -> None:
    model, ids = made(name, **({} if name == "gape" else {"head_dim": 64})).cuda(), tokens(8, 200).cuda()
    model = model if autocast else model.bfloat16()
    logits = []
    for way in (in_one_launch, one_by_one_launches):
        cache = KeepingCache(model, 256)
        with way() as taken, torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            model(ids[:, :100], past_key_values=cache)
            recorder = Captured(model, cache)
            logits.append(one_by_one(recorder, ids[:, 100:]).float())
        assert recorder.recordings == 1
        # Once to compile, and once for the graph.
        assert len(taken) == (2 * 2 if way is in_one_launch else 0)
    assert float((logits[0] - logits[1]).abs().mean()) < 0.02
    assert float((logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean()) > 0.9
