"""The pass that writes the bias's columns beside q and k, against torch's columns; in the interpreter on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gape
from gape.ops import attention, columns, limits
from gape.ops.inputs import Problem, Visibility
from tests.ops.cases import Case, random_case

pytest.importorskip("triton")
from gape.ops.triton.augment import augment

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Of bfloat16 only the pieces' width differs here; a GPU tests it whole.
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
#: How far two runs of the same attention may be apart: on a GPU a backward pass adds up in any order.
REPEATED = 1e-5 if DEVICE.type == "cpu" else 1e-2

#: (B, Hq, Hk, Nq, Nk, D) and what else matters: `rows`, queries start … stop − 1 that are one chunk, and `tokens` of a
#: program.
SHAPES: dict[str, dict[str, Any]] = {
    "one token": {"shape": (1, 2, 2, 1, 1, 64)},
    "two tokens": {"shape": (1, 2, 2, 2, 2, 64)},
    "few": {"shape": (2, 4, 2, 17, 17, 80)},
    "1000": {"shape": (1, 2, 1, 1000, 1000, 96)},
    "last queries": {"shape": (1, 3, 1, 33, 300, 112)},
    "last query": {"shape": (1, 2, 1, 1, 70, 128)},
    "one coordinate": {"shape": (1, 1, 1, 20, 20, 1)},
    "odd width": {"shape": (2, 2, 2, 40, 40, 7)},
    "second chunk": {"shape": (1, 2, 1, 2100, 2100, 16), "rows": (2048, 2100)},
    "blocks": {"shape": (2, 2, 1, 33, 70, 16), "tokens": 16},
    "rates that saturate": {"shape": (1, 2, 1, 50, 50, 58), "strength": 1e9},
    "no queries": {"shape": (1, 2, 1, 0, 20, 16)},
    "no tokens": {"shape": (1, 2, 1, 0, 0, 16)},
}


def problem(shape: tuple[int, ...], dtype: torch.dtype, *, learns: bool = False, strength: float = 40.0) -> Problem:
    batch, heads, kv_heads, n_q, n_k, dim = shape
    g = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.rand(*size, generator=g).to(DEVICE)

    q, k = (drawn(batch, h, n, dim).sub(0.5).to(dtype) for h, n in ((heads, n_q), (kv_heads, n_k)))
    gates = {
        "gate": strength * drawn(batch, heads, n_q),
        "landmark": (1.2 * drawn(batch, kv_heads, n_k) - 0.1).clamp(0, 1),
        "amplitude": 0.5 + drawn(heads),
    }
    leaves = {name: x.requires_grad_(learns) for name, x in ({"q": q, "k": k} | gates).items()}
    visibility = Visibility(n_q=n_q, n_k=n_k, device=DEVICE)
    return Problem(**leaves, v=k.detach(), context_length=32.0, scale=0.125, visibility=visibility)


def in_one_pass(given: Problem, start: int, stop: int) -> tuple[Tensor, Tensor]:
    n_k = given.visibility.rows(start, stop).n_k
    offset = given.visibility.n_k - given.visibility.n_q
    anchors = columns.index_anchors(start, stop, offset, near=columns.learns_shortly(given))
    numbers = given.rate[:, :, start:stop], given.exposure[:, :, :n_k]
    q, k = given.q[:, :, start:stop], given.k[:, :, :n_k]
    return augment(q, k, *numbers, columns.UNIT / given.scale, *anchors, offset + start)


def by_steps(given: Problem, start: int, stop: int) -> tuple[Tensor, ...]:
    contents = given.q[:, :, start:stop], given.k[:, :, : given.visibility.rows(start, stop).n_k]
    outs = [torch.cat(parts, -1) for parts in zip(contents, columns.sides(given, start, stop), strict=True)]
    return tuple(torch.nn.functional.pad(x, (0, -x.size(-1) % 8)) for x in outs)


def assert_same_bits(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=0, atol=0, equal_nan=True)


def case_of(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Problem, tuple[int, int]]:
    """A problem and the rows of its chunk; in programs of as many tokens as the case says."""
    shape = SHAPES[name]
    if "tokens" in shape:
        monkeypatch.setattr("gape.ops.triton.augment.COPIED", shape["tokens"] * shape["shape"][-1])
        monkeypatch.setattr("gape.ops.triton.augment.BACKWARD_TOKENS", shape["tokens"])
    given = problem(shape["shape"], strength=shape.get("strength", 40.0), **options)
    return given, shape.get("rows", (0, given.q.size(2)))


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Beside the largest number there is."""
    got, want = got.detach(), want.detach()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


#: Of these also with one anchor among the quick tests.
ONE_ANCHOR = ("one token", "odd width", "blocks", "rates that saturate")


@pytest.mark.parametrize(
    ("name", "learns"),
    [pytest.param(name, False, marks=[pytest.mark.slow] * (name not in ONE_ANCHOR)) for name in SHAPES]
    + [(name, True) for name in SHAPES],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_those_of_torch(
    name: str, dtype: torch.dtype, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, rows = case_of(name, monkeypatch, dtype=dtype, learns=learns)
    got = in_one_pass(given, *rows)
    assert all(x.is_contiguous() and x.dtype == dtype for x in got)
    assert_same_bits(got, by_steps(given, *rows))


def half(*size: int) -> Tensor:
    return torch.randn(*size).to(DEVICE, torch.float16)


LAYOUTS = {
    "token first": lambda b, h, n, d: half(b, n, h, d).transpose(1, 2),
    "every other token": lambda b, h, n, d: half(b, h, 2 * n, d)[:, :, ::2],
    "part of a projection": lambda b, h, n, d: half(b, h, n, 3 * d)[..., 1 : d + 1],
    "coordinates first": lambda b, h, n, d: half(b, h, d, n).mT,
    "one for all heads": lambda b, h, n, d: half(b, 1, n, d).expand(b, h, n, d),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[pytest.mark.slow] * (x in ("token first", "every other token"))) for x in LAYOUTS]
)
def test_any_strides(layout: str) -> None:
    given = problem((2, 4, 2, 20, 20, 24), torch.float16)
    q, k = (LAYOUTS[layout](*x.shape) for x in (given.q, given.k))
    assert not q.is_contiguous()
    gate, landmark = (x.mT.contiguous().mT for x in (given.gate, given.landmark))
    strided = Problem(**vars(given) | {"q": q, "k": k, "gate": gate, "landmark": landmark})
    assert_same_bits(in_one_pass(strided, 0, 20), by_steps(strided, 0, 20))


@pytest.mark.parametrize("learns", [False, True], ids=["inference", "training"])
def test_what_is_not_a_number_stays_so(learns: bool) -> None:
    given = problem((1, 2, 2, 20, 20, 16), torch.float16, learns=learns)
    with torch.no_grad():
        given.q[0, 0, 3, 5] = given.k[0, 1, 4, 6] = given.gate[0, 1, 7] = given.landmark[0, 0, 8] = torch.nan
    broken = {0: [(0, 3), (1, 7)], 1: [(1, 4), (0, 8)]}
    for side, (got, want) in enumerate(zip(in_one_pass(given, 0, 20), by_steps(given, 0, 20), strict=True)):
        rows = got.isnan().any(-1)
        assert rows[0].nonzero().tolist() == sorted(map(list, broken[side]))
        # Which of the pieces are not numbers is left open.
        assert torch.equal(got[~rows], want[~rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["two tokens", "few", "last queries", "last query", "second chunk", "blocks"])
def test_gradients_are_those_of_the_steps(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit for q and k; the gates' to the order in which float32 numbers are added up."""
    found = []
    for way in (by_steps, in_one_pass):
        given, rows = case_of(name, monkeypatch, dtype=dtype, learns=True)
        outs = way(given, *rows)
        g = torch.Generator().manual_seed(1)
        # Every other row of the gradients: they come in any layout.
        grads = [torch.randn(*x.shape[:2], 2 * x.size(2), x.size(3), generator=g).to(x)[:, :, ::2] for x in outs]
        leaves = [getattr(given, leaf) for leaf in ("q", "k", "gate", "landmark", "amplitude")]
        found.append(torch.autograd.grad(outs, leaves, grads))
    assert_same_bits(found[1][:2], found[0][:2])
    for want, got in zip(found[0][2:], found[1][2:], strict=True):
        assert_close(got, want, 1e-5)


def test_rates_that_saturate_have_no_gradient() -> None:
    found = []
    for way in (by_steps, in_one_pass):
        given = problem((1, 2, 2, 40, 40, 16), torch.float16, learns=True, strength=1000.0)
        out = way(given, 0, 40)[0]
        found.append(torch.autograd.grad(out.float().sum(), given.gate)[0])
    assert 0 < int((found[0] == 0).sum()) < found[0].numel()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_gates_that_do_not_learn() -> None:
    given = problem((1, 2, 2, 20, 20, 16), torch.float16)
    q = given.q.requires_grad_()
    out = in_one_pass(given, 0, 20)[0]
    assert torch.equal(torch.autograd.grad(out.float().sum(), q)[0], torch.ones_like(q))


def test_samples_that_one_launch_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (65_535, 2):
        monkeypatch.setattr("gape.ops.triton.custom_ops.MOST_PROGRAMS", most)
        given = problem((5, 2, 1, 20, 20, 16), torch.float16, learns=True)
        outs = in_one_pass(given, 0, 20)
        loss = sum(x.float().square().sum() for x in outs)
        found.append((*outs, *torch.autograd.grad(loss, [given.gate, given.landmark])))
    assert_same_bits(found[1], found[0])


#: Calls of the operator, whose queries are in index order or not.
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"n_q": 40, "n_k": 40},
    "last queries": {"n_q": 9, "n_k": 40},
    "all pairs": {"is_causal": False},
    "documents": dict.fromkeys(("q_documents", "k_documents"), torch.arange(63).expand(2, -1) // 20),
    "positions": dict.fromkeys(("q_positions", "k_positions"), torch.arange(63) + 7),
}


def on_device(case: Case, dtype: torch.dtype) -> Case:
    def move(x: object) -> object:
        return x.to(DEVICE) if isinstance(x, Tensor) else x

    tensors = {n: x.to(DEVICE, dtype if n in "qkv" else torch.float32) for n, x in case.tensors.items()}
    return Case(tensors, {n: move(x) for n, x in case.options.items()})


@pytest.mark.parametrize("learns", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "name", [name if name == "causal" else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)
def test_split_is_the_same_without_triton(name: str, learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = on_device(random_case(**CALLS[name]), torch.float16)
    monkeypatch.setattr(columns, "ANCHORED_ROWS", 32)
    found = []
    for triton in (True, False):
        monkeypatch.setattr(limits, "HAS_TRITON", triton)
        leaves = case.leaves() if learns else case.tensors
        out = gape.gated_attention(**leaves, **case.options, impl="split")
        found.append((out, *(torch.autograd.grad(out.float().square().sum(), list(leaves.values())) if learns else ())))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, REPEATED)


@pytest.mark.parametrize(
    ("dim", "heads"),
    [
        (80, (2, 1)),
        (112, (3, 1)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((64, (2, 2)), (96, (2, 2)), (128, (2, 1)))),
    ],
)
def test_errors_are_those_of_plain_attention(dim: int, heads: tuple[int, int]) -> None:
    """At most twice as far from float64, over a thousand tokens of steep gates."""
    case = random_case(
        batch=1, heads=heads[0], kv_heads=heads[1], n_q=257, n_k=1000, dim=dim, value_dim=dim, strength=100.0,
        context_length=256,
    )  # fmt: skip
    case, exact = on_device(case, torch.float16), {}
    q, k, v = (case.tensors[n] for n in "qkv")

    def distance(got: Tensor, exact: Tensor) -> float:
        return float((got.double() - exact).norm() / exact.norm())

    plain = distance(attention(q, k, v), attention(q.double(), k.double(), v.double()))
    tensors = {n: x.double() for n, x in case.tensors.items()}
    exact = gape.gated_attention(**tensors, **case.options, impl="reference")
    assert distance(gape.gated_attention(**case.tensors, **case.options, impl="split"), exact) <= 2 * plain


def test_a_compiler_traces_it_whole() -> None:
    case = on_device(random_case(n_q=20, n_k=20), torch.float16)
    found = []
    torch._dynamo.reset()
    for operator in (gape.gated_attention, torch.compile(gape.gated_attention, backend="aot_eager", fullgraph=True)):
        leaves = case.leaves()
        out = operator(**leaves, **case.options, impl="split")
        found.append((out, *torch.autograd.grad(out.float().square().sum(), list(leaves.values()))))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, max(1e-3, REPEATED))
