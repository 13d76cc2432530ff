"""The Triton kernels against the definition: in the interpreter without a GPU, compiled with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gape
from tests.ops.cases import GROUPED, REPEATED, SMALL, Case, layouts, random_case

pytest.importorskip("triton")
launch = pytest.importorskip("gape.ops.triton.attention")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = {name: (layouts() if name in GROUPED else layouts(**SMALL))[name] for name in layouts()}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in REPEATED else name for name in LAYOUTS]
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
#: The interpreter has no products in bfloat16.
HALVES = list(BOUNDS) if DEVICE == "cuda" else [torch.float16]


def moved(case: Case, dtype: torch.dtype, content: torch.dtype | None = None) -> Case:
    """The case on the device in `dtype`, q, k and v rounded to `content` first."""
    tensors = {n: x.to(content) if content and n in "qkv" else x for n, x in case.tensors.items()}
    tensors = {n: x.to(DEVICE, dtype) for n, x in tensors.items()}
    return Case(tensors, {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in case.options.items()})


def run(case: Case, impl: str) -> dict[str, torch.Tensor]:
    leaves = case.leaves()
    out = gape.gated_attention(**leaves, **case.options, impl=impl)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    (out * weight).sum().backward()
    return {"out": out.detach()} | {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("name", NAMES)
def test_float32_equals_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers start as NaN, so that an element nobody wrote shows."""
    empty_like, empty = torch.empty_like, torch.empty
    exact = run(moved(LAYOUTS[name], torch.float64), "reference")
    case = moved(LAYOUTS[name], torch.float32)
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    got = run(case, "triton")
    for key, value in exact.items():
        error = (got[key].double() - value).norm()
        # Gradients that are exactly zero (a lone key) have no size of their own to compare with.
        assert error < 3e-6 * max(float(value.norm()), 1.0), key


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("dim", "value_dim", "documents"),
    [(16, 13, 1), (96, 16, 1), (80, 128, 1), (96, 96, 1), (16, 200, 1), (64, 64, 2), (128, 96, 2)],
    ids=["narrow", "wide", "mixed", "in parts", "widest", "narrow, masked", "wide, masked"],
)
def test_half_precision_is_as_exact_as_its_content(
    dim: int, value_dim: int, documents: int, dtype: torch.dtype
) -> None:
    """Every choice of tiles, with lengths that do not fill them."""
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "n_q": 70, "n_k": 140, "dim": dim, "value_dim": value_dim}
    which = torch.arange(140)[None] * documents // 150
    packed = {"q_documents": which[:, 70:], "k_documents": which} if documents > 1 else {}
    case = random_case(**sizes, **packed)
    exact = run(moved(case, torch.float64, dtype), "reference")
    rounded = moved(case, torch.float32, dtype)
    rounded.tensors |= {n: rounded.tensors[n].to(dtype) for n in "qkv"}
    got = run(rounded, "triton")
    for key, value in exact.items():
        assert (got[key].double() - value).norm() < BOUNDS[dtype] * float(value.norm()), key


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_logits_far_above_those_at_the_diagonal(dtype: torch.dtype, eps: float) -> None:
    """Weights against the level of the diagonal overflow, so those queries are done again, by several programs."""
    case = random_case(batch=1, heads=2, kv_heads=1, n_q=300, n_k=330, dim=16, strength=0.1)
    case.tensors["k"][:, :, 3] *= 120.0
    exact, case = run(moved(case, torch.float64, dtype), "reference"), moved(case, torch.float32, dtype)
    case.tensors |= {n: case.tensors[n].to(dtype) for n in "qkv"}
    leaves = case.leaves()
    out = gape.gated_attention(**leaves, **case.options, impl="triton", eps=eps)
    assert (out.double() - exact["out"]).norm() < BOUNDS.get(dtype, 1e-5) * float(exact["out"].norm())
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves.values())


def test_values_may_be_large_where_weights_are() -> None:
    case = random_case(batch=1, heads=1, kv_heads=1, n_q=70, n_k=140, dim=16, strength=0.1)
    case.tensors["k"][:, :, 3] *= 30.0
    case.tensors["v"] *= 1e25
    exact = run(moved(case, torch.float64), "reference")["out"]
    got = run(moved(case, torch.float32), "triton")["out"]
    assert (got.double() - exact).norm() < 1e-5 * float(exact.norm())


def test_rows_of_any_width() -> None:
    case = random_case(batch=1, heads=1, kv_heads=1, n_q=3, n_k=3, dim=58, value_dim=13)
    exact, got = run(moved(case, torch.float64), "reference"), run(moved(case, torch.float32), "triton")
    for key, value in exact.items():
        torch.testing.assert_close(got[key].double(), value, atol=2e-5, rtol=2e-5)


def test_far_positions_keep_the_bias() -> None:
    """Far beyond T and with strong gates the bias is still formed in float32, from nearby positions."""
    positions = torch.arange(40) + 10**7
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "n_q": 40, "n_k": 40}
    case = random_case(**sizes, strength=100.0, q_positions=positions, k_positions=positions)
    exact = run(moved(case, torch.float64), "reference")
    got = run(moved(case, torch.float32), "triton")
    for key, value in exact.items():
        assert (got[key].double() - value).norm() < 2e-6 * float(value.norm()), key


@pytest.mark.parametrize("pad", [-(2**31), 2**46])
def test_positions_of_pads_do_not_matter(pad: int) -> None:
    """Also where a tile begins with a pad and its other keys are far from it."""
    positions = torch.arange(50)
    positions[:5] = pad
    real = torch.arange(50) >= 5
    case = random_case(
        batch=1, heads=1, kv_heads=1, n_q=50, n_k=50, q_positions=positions, k_positions=positions,
        attn_mask=real[None, :] & real[:, None],
    )  # fmt: skip
    exact = run(moved(case, torch.float64), "reference")
    got = run(moved(case, torch.float32), "triton")
    for key, value in exact.items():
        assert (got[key].double() - value).norm() < 3e-6 * float(value.norm()), key


def test_views_and_constants() -> None:
    """Strides of every kind, expanded values, and inputs of which only some learn."""
    case = moved(random_case(batch=2, heads=2, kv_heads=2, n_q=40, n_k=40, dim=16, value_dim=16), torch.float32)
    x = case.tensors
    x["q"] = x["q"].transpose(1, 2).contiguous().transpose(1, 2)
    x["k"] = x["k"].mT.contiguous().mT
    x["v"] = x["v"][:, :1, :1].expand_as(x["v"])
    x["gate"] = x["gate"].mT.contiguous().mT.requires_grad_()
    found = []
    for impl in ("triton", "reference"):
        out = gape.gated_attention(**x, **case.options, impl=impl)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), x["gate"])))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_two_runs_give_the_same_bits_and_have_no_second_derivative() -> None:
    case = moved(random_case(batch=1, heads=2, kv_heads=1, n_q=40, n_k=40), torch.float32)
    leaves = case.leaves()
    runs = []
    for _ in range(2):
        out = gape.gated_attention(**leaves, **case.options, impl="triton")
        runs.append(torch.autograd.grad(out.square().sum(), list(leaves.values()), create_graph=True))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(runs[0][0].sum(), leaves["q"])


@pytest.mark.parametrize("eps", [0.0, pytest.param(1e-2, marks=pytest.mark.slow)])
def test_compiles_in_one_graph_for_all_lengths(eps: float) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def operator(options: dict[str, float], **tensors: torch.Tensor) -> torch.Tensor:
        return gape.gated_attention(**tensors, **options, impl="triton", eps=eps)

    compiled = torch.compile(operator, backend=counter, fullgraph=True)
    for n in (20, 33, 47):
        case = moved(random_case(batch=1, heads=2, kv_heads=1, n_q=n, n_k=n), torch.float32)
        leaves = case.leaves()
        outs = [form(case.options, **leaves) for form in (operator, compiled)]
        grads = [torch.autograd.grad(out.square().sum(), list(leaves.values())) for out in outs]
        for got, want in zip((outs[1], *grads[1]), (outs[0], *grads[0]), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("sizes", "reason"), [({"heads": 65_536}, "65,535"), ({"dim": 257}, "256"), ({"value_dim": 300}, "256")]
)
def test_refuses_sizes_that_no_launch_takes(sizes: dict[str, int], reason: str) -> None:
    small = {"batch": 1, "heads": 1, "kv_heads": 1, "n_q": 1, "n_k": 1, "dim": 2, "value_dim": 2}
    case = moved(random_case(**(small | sizes)), torch.float32)
    with pytest.raises(ValueError, match=rf"^impl: .*{reason}"):
        gape.gated_attention(**case.tensors, **case.options, impl="triton")


@pytest.mark.slow
@pytest.mark.parametrize("eps", [pytest.param(0.0, marks=pytest.mark.slow), 0.01], ids=["all", "skipping"])
def test_samples_that_one_launch_has_no_room_for(eps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes 65,535 programs along its second axis; the bits are those of one that takes all."""
    case = moved(random_case(batch=5, heads=2, kv_heads=1, n_q=33, n_k=40), torch.float32)
    grids: list[tuple[int, ...]] = []

    class Spy:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return traceable(self.kernel)[grid]

    traceable = launch.traceable
    monkeypatch.setattr(launch, "traceable", Spy)
    found = []
    for most in (65_535, 4):
        grids.clear()
        monkeypatch.setattr("gape.ops.triton.custom_ops.MOST_PROGRAMS", most)
        leaves = case.leaves()
        details = gape.detailed_attention(**leaves, **case.options, eps=eps)
        found.append([*details, *torch.autograd.grad(details.out.square().sum(), list(leaves.values()))])
    assert max(grid[1] for grid in grids if len(grid) > 1) <= 4
    assert all(torch.equal(parts, whole) for whole, parts in zip(*found, strict=True))


def test_refuses_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(n_q=3, n_k=3)
    with pytest.raises(ValueError, match=r"^impl: .*float64"):
        gape.gated_attention(**moved(case, torch.float64).tensors, **case.options, impl="triton")
    if DEVICE == "cpu":
        short = random_case(n_q=3, n_k=3, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"^impl: .*interpreter"):
            gape.gated_attention(**short.tensors, **short.options, impl="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"^impl: .*CUDA"):
            gape.gated_attention(**moved(case, torch.float32).tensors, **case.options, impl="triton")
        with pytest.raises(ValueError, match=r"^impl: .*CUDA"):
            gape.explain(**moved(case, torch.float32).tensors, **case.options, impl="triton")
    monkeypatch.setattr("gape.ops.limits.HAS_TRITON", False)
    with pytest.raises(ValueError, match=r"^impl: .*pip install triton"):
        gape.gated_attention(**moved(case, torch.float32).tensors, **case.options, impl="triton")


def test_does_not_keep_a_matrix() -> None:
    case = moved(random_case(n_q=5, n_k=5), torch.float32)
    plan = gape.explain(**case.tensors, **case.options, impl="triton")
    assert not plan.quadratic
    assert gape.gated_attention(**case.tensors, **case.options, impl="triton", strict=True).isfinite().all()
