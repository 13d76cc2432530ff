"""FlexAttention against the definition, and the bound on tiles: what it leaves out never weighs more than eps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from gape.ops import flex, reference
from gape.ops.api import _problem
from gape.ops.problem import Problem
from tests.ops.cases import Case, layouts, random_case

LAYOUTS = layouts()
#: One of each way to say who sees whom; the rest differ in sizes only.
KINDS = ("plain", "last queries", "shuffled", "packed, restarting", "mask with empty rows", "not causal")


def problem(case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Problem:
    tensors = {
        n: x.to(device, dtype if n in "qkv" or dtype == torch.float64 else None) for n, x in case.tensors.items()
    }
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in case.options.items()}
    context_length, scale = options.pop("context_length"), options.pop("scale", None)
    return _problem(*tensors.values(), context_length, scale, False, **options)


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1.0))


def forgetful(seed: int = 0, *, landmarks: float = 0.0) -> Case:
    """Gates so strong that most of 500 tokens are forgotten, with some keys spared."""
    case = random_case(seed=seed, n_q=500, n_k=500, heads=4, kv_heads=2, dim=8, value_dim=8, context_length=1)
    g = torch.Generator().manual_seed(seed)
    case.tensors["gate"] = 0.5 + torch.rand(2, 4, 500, generator=g, dtype=torch.float64)
    case.tensors["landmark"] = (torch.rand(2, 2, 500, generator=g) < landmarks).double()
    return case


@pytest.mark.parametrize("name", KINDS)
def test_equals_reference(name: str) -> None:
    given = problem(LAYOUTS[name])
    assert distance(flex.run(given), reference.run(given)) < 1e-12


@pytest.mark.parametrize("name", ["plain", "packed, restarting"])
def test_the_formula_as_a_score_mod_equals_reference(name: str) -> None:
    given = problem(LAYOUTS[name])
    assert distance(flex.exact(given), reference.run(given)) < 1e-12


def test_many_tiles_with_documents() -> None:
    documents = torch.stack([torch.arange(500) // 130, torch.arange(500) // 499])
    given = problem(random_case(n_q=500, n_k=500, q_documents=documents, k_documents=documents))
    assert distance(flex.run(given), reference.run(given)) < 1e-12


def test_half_precision_keeps_the_bias() -> None:
    """The error is that of bfloat16 content, at strong gates and far positions."""
    positions = torch.arange(200) + 10**6
    case = random_case(n_q=200, n_k=200, strength=100.0, q_positions=positions, k_positions=positions)
    case.tensors = {n: x.to(torch.bfloat16) if n in "qkv" else x for n, x in case.tensors.items()}
    exact = reference.run(problem(case))
    assert distance(flex.run(problem(case, torch.bfloat16)), exact) < 8e-3


@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_hold_every_visible_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "TILE", 8)
    given = problem(LAYOUTS[name])
    some, full = (spread(x, given) for x in flex.tile_kinds(given.seen))
    mask = given.seen.mask()
    visible = torch.ones_like(some) if mask is None else mask.expand_as(some)
    assert (some | ~visible).all()
    assert (visible | ~full).all()


def spread(tiles: torch.Tensor, given: Problem) -> torch.Tensor:
    """What is said of tiles, for every pair."""
    tiles = tiles.expand(*given.q.shape[:2], -1, -1)
    pairs = tiles.repeat_interleave(flex.TILE, -2).repeat_interleave(flex.TILE, -1)
    return pairs[..., : given.seen.n_q, : given.seen.n_k]


@pytest.mark.parametrize("landmarks", [0.0, 0.002])
def test_what_is_left_out_weighs_at_most_eps(landmarks: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "TILE", 16)
    for seed in range(15):
        given = problem(forgetful(seed, landmarks=landmarks))
        dropped = reference.weights(given).masked_fill(spread(flex.tile_bound(given, 1e-3), given), 0.0).sum(-1)
        assert float(dropped.max()) <= 1e-3
    assert 0.01 < flex.visited(given, 1e-3) < (0.5 if not landmarks else 0.7)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bound_holds_in_every_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "TILE", 8)
    case = LAYOUTS[name]
    strong = case.tensors | {"gate": 20 + 200 * case.tensors["gate"], "landmark": 0.1 * case.tensors["landmark"]}
    given = problem(Case(strong, case.options))
    dropped = reference.weights(given).masked_fill(spread(flex.tile_bound(given, 1e-2), given), 0.0).sum(-1)
    assert float(dropped.max()) <= 1e-2


def test_a_landmark_keeps_its_tile() -> None:
    case = forgetful()
    case.tensors["landmark"][:, :, 3] = 1.0
    kept = flex.tile_bound(problem(case), 1e-3)
    assert kept[..., 0].all()
    assert not kept[..., 3, 1].any()


def test_skipping_changes_the_answer_by_no_more_than_eps() -> None:
    given = problem(forgetful())
    size = given.v.abs().max()
    assert flex.visited(given, 1e-6) < 0.8
    assert float((flex.run(given, 1e-6) - reference.run(given)).abs().max()) <= 2e-6 * size


def test_lengths_do_not_compile_without_end() -> None:
    before = None
    for n in (200, 300, 401, 257, 511):
        flex.run(problem(random_case(n_q=n, n_k=n, heads=1, kv_heads=1), torch.float32))
        compiled = counters["stats"]["unique_graphs"]
        before = compiled if before is None else before
    assert compiled - before <= 1


def test_gradients_on_a_cpu_are_refused() -> None:
    case = random_case(n_q=3, n_k=3)
    case.tensors["gate"].requires_grad_()
    with pytest.raises(ValueError, match=r"^impl: 'flex' .*CPU"):
        flex.run(problem(case))
    with torch.no_grad():
        assert flex.run(problem(case)).isfinite().all()


def test_inside_a_compiled_graph() -> None:
    given = problem(random_case(n_q=200, n_k=200), torch.float32)

    def operator(q: torch.Tensor) -> torch.Tensor:
        return flex.run(replace(given, q=q))

    out = torch.compile(operator, backend="eager", fullgraph=True)(given.q)
    assert torch.allclose(out, flex.run(given), atol=1e-6)


@pytest.mark.slow
def test_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it runs where the dense form would be too large."""
    monkeypatch.setattr(flex, "DENSE_PAIRS", 0)
    given = problem(random_case(n_q=300, n_k=300), torch.float32)
    assert distance(flex.run(given), reference.run(given).double()) < 1e-5


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("form", ["run", "exact"])
    @pytest.mark.parametrize("name", ["plain", "packed, restarting", "mask with empty rows"])
    def test_gradients_equal_reference(self, name: str, form: str) -> None:
        exact = self.gradients(LAYOUTS[name], torch.float64, reference.run)
        got = self.gradients(LAYOUTS[name], torch.float32, getattr(flex, form))
        for key, value in exact.items():
            assert distance(got[key], value) < 1e-3, key

    def gradients(self, case: Case, dtype: torch.dtype, run: object) -> dict[str, torch.Tensor]:
        leaves = {n: x.to("cuda", dtype).requires_grad_() for n, x in case.tensors.items()}
        out = run(problem(Case(leaves, case.options), dtype, "cuda"))
        weight = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=out.dtype).view_as(out)
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), weight), strict=True))

    def test_long_and_skipping(self) -> None:
        case = random_case(batch=1, heads=2, kv_heads=2, n_q=8192, n_k=8192, dim=58, value_dim=64, context_length=1)
        case.tensors["gate"] = torch.full_like(case.tensors["gate"], 0.05)
        case.tensors["landmark"] *= 0.3
        given = problem(case, torch.bfloat16, "cuda")
        whole, skipped = flex.run(given), flex.run(given, 1e-4)
        assert flex.visited(given, 1e-4) < 0.5
        assert distance(skipped, whole.double()) < 4e-3
