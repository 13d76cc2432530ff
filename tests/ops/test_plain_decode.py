"""Few queries without gates: in the decode kernel where that runs, and elsewhere never planned by cuDNN."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gape.ops import attention, limits, sdpa
from gape.ops.inputs import Problem, Visibility
from tests.ops.cases import Case, layouts, random_case
from tests.ops.test_decode import BOUNDS, DEVICE, distance, last_queries

pytest.importorskip("triton")
from gape.ops.triton import decode

LAYOUTS = {name: last_queries(case, 1) for name, case in layouts().items()}
#: Grouped heads of unequal widths and heads of their own, positions, pads, documents, masks, a row that sees nothing.
KINDS = (
    "plain",
    "no groups",
    "shuffled",
    "left padding",
    "packed, restarting",
    "mask with empty rows",
    "mask per head",
)
CPU = torch.device("cpu")


def by_the_kernel(*given: torch.Tensor, **told: Any) -> tuple[torch.Tensor, Problem]:
    """The answer of the decode kernel, whose buffers start as NaN, also without a GPU; and what it was given."""
    problems: list[Problem] = []
    empty, run = torch.empty, decode.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "decodes", lambda *_, **__: True)
        patch.setattr(decode, "run", lambda problem, **told: (problems.append(problem), run(problem, **told))[1])
        patch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
        return attention(*given, **told), problems[0]


def exact(*given: torch.Tensor, **told: Any) -> torch.Tensor:
    return attention(*(x.double() for x in given), **told)


def tensors(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    return [case.tensors[name].to(DEVICE, dtype) for name in "qkv"]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in KINDS), ("plain", torch.float16), (KINDS[3], torch.float16)]
)
def test_equals_plain_attention(name: str, dtype: torch.dtype) -> None:
    case = LAYOUTS[name]
    given = tensors(case, dtype)
    told = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in case.options.items()}
    del told["context_length"]
    expected, (got, _) = exact(*given, **told), by_the_kernel(*given, **told)
    assert got.dtype == dtype
    assert distance(got, expected) < BOUNDS[dtype]
    assert not got[expected == 0].any()


@pytest.mark.parametrize("key_heads", [1, 4], ids=["grouped", "one head each"])
def test_a_growing_cache_is_read_where_it_lies(key_heads: int) -> None:
    """Keys are a part of the room that was made for them; what lies behind is never read."""
    room = torch.randn(2, 2, key_heads, 80, 16, device=DEVICE).half()
    room[..., 70:, :] = float("nan")
    q, k, v = torch.randn(2, 4, 1, 16, device=DEVICE).half(), *room.narrow(3, 0, 70)
    got, problem = by_the_kernel(q, k, v)
    assert distance(got, exact(q, k, v)) < BOUNDS[torch.float16]
    assert (problem.k.data_ptr(), problem.v.data_ptr()) == (k.data_ptr(), v.data_ptr())


def test_positions_that_hide_nothing_are_left_out() -> None:
    q, k = torch.randn(1, 2, 1, 16, device=DEVICE).half(), torch.randn(1, 2, 40, 16, device=DEVICE).half()
    told = {"q_positions": torch.tensor([3], device=DEVICE), "k_positions": torch.arange(40, device=DEVICE)}
    got, problem = by_the_kernel(q, k, k, **told, is_causal=False)
    assert problem.visibility.index_order
    assert distance(got, exact(q, k, k)) < BOUNDS[torch.float16]


def test_a_bias_of_keys_is_in_the_coordinates() -> None:
    given = tensors(random_case(n_q=1, dim=16, value_dim=16), torch.float16)
    bias = torch.linspace(0, 900, 63, device=DEVICE).expand(2, 4, 63)
    got, _ = by_the_kernel(*given, key_bias=bias)
    assert distance(got, exact(*given, key_bias=bias.double())) < BOUNDS[torch.float16]


def test_compiles_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(random_case(n_q=1, n_k=40), torch.float32)
    expected = exact(*given)
    monkeypatch.setattr(limits, "decodes", lambda *_, **__: True)
    monkeypatch.setattr(sdpa, "run_all", None)
    with torch.no_grad():
        compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)(*given)
    assert distance(compiled, expected) < BOUNDS[torch.float32]


def halves(n_q: int = 1, width: int = 16, batch: int = 1) -> list[torch.Tensor]:
    return [torch.zeros(batch, 1, n, width, dtype=torch.bfloat16) for n in (n_q, n_q, n_q)]


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        (halves(), True),
        (halves(16), True),
        (halves(17), False),
        (halves(width=257), False),
        (halves(batch=65_536), False),
        ([x.float() for x in halves()], False),
        ([x.double() for x in halves()], False),
    ],
)
def test_which_calls_the_kernel_takes(given: list[torch.Tensor], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not limits.decodes(*given, learns=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert limits.decodes(*given, learns=False) == runs
    assert not limits.decodes(*given, learns=True)
    monkeypatch.setattr(limits, "HAS_TRITON", False)
    assert not limits.decodes(*given, learns=False)


def test_a_caller_who_allows_cudnn_alone_gets_it() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), sdpa._without_cudnn():
        assert torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_is_allowed_again_after_an_error() -> None:
    with pytest.raises(KeyError), sdpa._without_cudnn():
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(("heads", "n_q", "width"), [(2, 1, 24), (1, 1, 16), (2, 17, 16)])
def test_shared_heads_are_as_wide_as_flash_wants_them(
    heads: int, n_q: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No backend but cuDNN takes grouped heads whose keys and values differ in width."""
    q, k = torch.zeros(1, heads, n_q, 24).half(), torch.zeros(1, 1, n_q, 24).half()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    call = sdpa.prepare(q, k, k[..., :16], Visibility(n_q=n_q, n_k=n_q, device=CPU), 1.0)
    assert call.v.size(-1) == width


def test_the_exclusion_can_be_compiled() -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        told = {"mask": None, "kind": "full", "scale": 1.0, "empty": None, "value_width": 16}
        return sdpa.Call(q=q, k=q, v=q, **told, unplanned=True).run()

    q = torch.randn(1, 2, 1, 16)
    assert torch.equal(torch.compile(attend, backend="aot_eager", fullgraph=True)(q), attend(q))


def gpu(name: str, *values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.gpu, id=name)


def slope(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return -0.001 * (i[:, None] - j[None, :]).float()[None, None]


@pytest.mark.parametrize(
    ("key_heads", "told"),
    [gpu("one head each", 8, {}), gpu("grouped", 2, {}), gpu("a bias, by torch", 8, {"bias": slope})],
)
@torch.no_grad()
def test_decoding_is_not_planned_for_every_length(key_heads: int, told: dict[str, Any]) -> None:
    """64 tokens behind 5,000, each with another number of keys: cuDNN would take some 30 ms for every one of them."""
    room = torch.randn(2, 1, key_heads, 5100, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(100, 1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    outs = []
    for n in range(80):
        if n == 16:
            torch.cuda.synchronize()
            start = perf_counter()
        outs.append(attention(q[n], *room[..., : 5000 + n, :], **told))
    torch.cuda.synchronize()
    assert (perf_counter() - start) / 64 < 5e-3
    for n in (0, 16, 79):
        expected = attention(q[n].double(), *room[..., : 5000 + n, :].double(), **told)
        assert distance(outs[n], expected) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("key_heads", [gpu("one head each", 8), gpu("grouped", 2)])
@torch.no_grad()
def test_compiled_and_captured_on_a_gpu(key_heads: int) -> None:
    q = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    room = torch.randn(2, 1, key_heads, 2048, 64, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(attention, fullgraph=True)
    for n in (1000, 1001, 2048):
        k, v = room[..., :n, :]
        assert distance(compiled(q, k, v), attention(q.double(), k.double(), v.double())) < BOUNDS[torch.bfloat16]
    plain, graph = attention(q, k, v), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(q, k, v)
    graph.replay()
    assert distance(captured, plain.double()) < BOUNDS[torch.bfloat16]
