"""The decode kernel against the definition: in the interpreter without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch

from gape import gated_attention
from gape.ops import reference
from gape.ops.api import _problem
from gape.ops.inputs import Problem
from tests.ops.cases import GROUPED, REPEATED, SMALL, Case, layouts, random_case

pytest.importorskip("triton")
from gape.ops.triton import decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def three_ways(case: Case, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The answer of the decode path as it is, from a replayed CUDA graph, and compiled."""

    def operator(*given: torch.Tensor) -> torch.Tensor:
        return gated_attention(*given, **case.options, impl="decode")

    plain = operator(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = operator(*tensors)
    graph.replay()
    return plain, captured, torch.compile(operator, fullgraph=True)(*tensors)


def last_queries(case: Case, count: int) -> Case:
    """The case with its last `count` queries only, as decoding has them."""
    cuts = {
        "q": (2, None),
        "gate": (2, None),
        "q_positions": (-1, None),
        "q_documents": (1, None),
        "attn_mask": (-2, 1),
    }

    def cut(name: str, x: object) -> object:
        dim, broadcast = cuts.get(name, (None, None))
        if dim is None or not isinstance(x, torch.Tensor) or x.size(dim) == broadcast:
            return x
        return x.narrow(dim, max(0, x.size(dim) - count), min(count, x.size(dim)))

    tensors = {name: cut(name, x) for name, x in case.tensors.items()}
    return Case(tensors, {name: cut(name, x) for name, x in case.options.items()})


LAYOUTS = {name: last_queries((layouts() if name in GROUPED else layouts(**SMALL))[name], 5) for name in layouts()}
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(case: Case, dtype: torch.dtype, *, exact: bool = False) -> Problem:
    """The case with q, k and v rounded to `dtype`, and then raised to float64 where `exact`."""
    tensors = {n: x.to(DEVICE, dtype) if n in "qkv" else x.to(DEVICE) for n, x in case.tensors.items()}
    if exact:
        tensors = {n: x.double() for n, x in tensors.items()}
    options = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in case.options.items()}
    context_length, scale = options.pop("context_length"), options.pop("scale", None)
    return _problem(*tensors.values(), context_length, scale, False, **options)


def decoded(given: Problem, splits: int | None = None) -> torch.Tensor:
    return decode.run(given, splits=splits)[0]


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1.0))


HALF = [("plain", torch.float16), ("packed, restarting", torch.float16), ("mask with empty rows", torch.float16)]
SINGLE_PRECISION = [
    pytest.param(name, torch.float32, marks=[pytest.mark.slow] * (name in REPEATED)) for name in LAYOUTS
]


@pytest.mark.parametrize(("name", "dtype"), [*SINGLE_PRECISION, *HALF], ids=str)
def test_equals_reference(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers start as NaN, so that an element nobody wrote shows."""
    exact = reference.run(problem(LAYOUTS[name], dtype, exact=True))
    given = problem(LAYOUTS[name], dtype)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    assert distance(decoded(given, 3), exact) < BOUNDS[dtype]


@pytest.mark.parametrize("dim", [pytest.param(32, marks=pytest.mark.slow), 96, 128])
def test_head_dims_and_many_splits(dim: int) -> None:
    case = random_case(batch=1, n_q=2, n_k=150, dim=dim, value_dim=dim - 7, heads=3, kv_heads=1)
    exact = reference.run(problem(case, torch.float32, exact=True))
    for splits in (None, 15):
        assert distance(decoded(problem(case, torch.float32), splits), exact) < 1e-6


SINGLE = {"batch": 1, "n_q": 1, "heads": 2, "kv_heads": 2}


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        (SINGLE | {"n_k": 99}, 1),
        # More parts than are merged at once.
        (SINGLE | {"n_k": 550, "dim": 40, "heads": 1, "kv_heads": 1}, 40),
        ({"batch": 1, "n_q": 2, "n_k": 99, "heads": 2, "kv_heads": 1}, 3),
    ],
    ids=["one row, one part", "one row, many parts", "several rows"],
)
def test_parts_are_merged_alike_by_either_kernel(
    sizes: dict[str, int], splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last program to finish and by a kernel of their own; the same bits in every run."""
    case = random_case(**sizes, strength=10.0)
    given, exact = problem(case, torch.float32), reference.run(problem(case, torch.float32, exact=True))
    monkeypatch.setattr(decode, "MERGE_STEPS", 1000)
    (first, lse), (again, again_lse) = (decode.run(given, splits=splits) for _ in range(2))
    assert distance(first, exact) < 1e-6
    assert torch.equal(again, first)
    assert torch.equal(again_lse, lse)
    monkeypatch.setattr(decode, "MERGE_STEPS", 0)
    apart, apart_lse = decode.run(given, splits=splits)
    assert torch.allclose(apart, first, atol=1e-6)
    assert torch.allclose(apart_lse, lse, atol=1e-6)


def test_tickets_are_given_back() -> None:
    """Also where later calls are larger or smaller."""
    for heads, n_q in ((1, 1), (4, 2), (3, 1)):
        case = random_case(batch=1, n_q=n_q, n_k=70, heads=heads, kv_heads=heads // n_q)
        decode.run(problem(case, torch.float32), splits=4)
        assert not decode.stream_tickets(1, torch.device(DEVICE)).any()


def test_launches_outside_an_operator_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps an entry for each launch of a wrapped kernel, for as long as the process lives."""
    case = random_case(batch=1, n_q=2, n_k=70, heads=2, kv_heads=1)
    monkeypatch.setattr(decode, "traceable", None)
    for steps in (0, 1000):
        monkeypatch.setattr(decode, "MERGE_STEPS", steps)
        decode.run(problem(case, torch.float32), splits=3)


def test_kernels_run_where_their_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several devices Triton would take the current one."""
    entered: list[torch.Tensor] = []
    device_of = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: (entered.append(x), device_of(x))[1])
    given = problem(random_case(n_k=70, **SINGLE), torch.float32)
    decode.run(given)
    assert not entered
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    decode.run(given)
    assert [x.device for x in entered] == [given.q.device]


def test_compiles_without_a_break() -> None:
    case = random_case(n_k=70, **SINGLE)
    tensors = [x.to(DEVICE, torch.float32) for x in case.tensors.values()]

    def operator(*given: torch.Tensor) -> torch.Tensor:
        return gated_attention(*given, **case.options, impl="decode") * 2

    with torch.no_grad():
        compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)(*tensors)
        assert torch.allclose(compiled, operator(*tensors), atol=1e-6)


def test_log_sum_exp() -> None:
    case = random_case(n_q=3, n_k=77, is_causal=False)
    exact = reference.logits(problem(case, torch.float32, exact=True)).logsumexp(-1)
    _, lse = decode.run(problem(case, torch.float32), splits=2)
    assert torch.allclose(lse.double(), exact, atol=1e-5)


def test_far_positions_keep_the_bias() -> None:
    """Distances are integers before they are floats, so a strong bias is right beyond a million tokens."""
    positions = torch.arange(70) + 2**40
    case = random_case(n_q=2, n_k=70, strength=100.0, k_positions=positions)
    exact = reference.run(problem(case, torch.float32, exact=True))
    assert distance(decoded(problem(case, torch.float32)), exact) < 1e-6


def test_positions_of_pads_do_not_matter() -> None:
    """Also where the first query is a pad, far from the others."""
    positions = torch.arange(70)
    positions[:9] = -(2**40)
    real = positions >= 0
    rows = [0, 1, 68, 69]
    case = random_case(
        n_q=4, n_k=70, q_positions=positions[rows], k_positions=positions, attn_mask=real[rows, None] & real
    )
    exact = reference.run(problem(case, torch.float32, exact=True))
    assert distance(decoded(problem(case, torch.float32)), exact) < 1e-6


def test_no_keys_give_zeros() -> None:
    case = random_case(n_q=2, n_k=0, q_positions=torch.arange(2))
    out, lse = decode.run(problem(case, torch.float32))
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(("dtype", "learns", "why"), [(torch.float64, False, "float64"), (None, True, "backward")])
def test_refuses_what_it_cannot(dtype: torch.dtype | None, learns: bool, why: str) -> None:
    tensors = random_case(n_q=1, n_k=9, dtype=dtype or torch.float32).tensors
    tensors["gate"].requires_grad_(learns)
    with pytest.raises(ValueError, match=rf"^impl: .*{why}"):
        gated_attention(**tensors, context_length=32, impl="decode")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_long_cache_on_a_gpu(dtype: torch.dtype, kv_heads: int) -> None:
    sizes = {"batch": 2, "heads": 8, "kv_heads": kv_heads, "n_q": 1, "n_k": 40_001, "dim": 64, "value_dim": 64}
    case = random_case(**sizes, strength=10.0, context_length=1024)
    exact = reference.run(problem(case, dtype, exact=True))
    given = problem(case, dtype)
    outs = [decoded(given) for _ in range(20)]
    assert distance(outs[0], exact) < BOUNDS[dtype]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
def test_captured_and_compiled_on_a_gpu() -> None:
    """A captured graph holds no tickets that another stream could take."""
    case = random_case(n_k=5000, **SINGLE)
    tensors = [x.to("cuda", torch.float32) for x in case.tensors.values()]

    plain, captured, compiled = three_ways(case, tensors)
    assert torch.allclose(captured, plain, atol=1e-5)
    assert torch.allclose(compiled, plain, atol=1e-5)
