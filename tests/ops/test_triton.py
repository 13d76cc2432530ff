"""The Triton kernels against the definition: in the interpreter without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch

import gape
from tests.ops.cases import Case, layouts, random_case

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = layouts()


def moved(case: Case, dtype: torch.dtype) -> Case:
    tensors = {n: x.to(DEVICE, dtype) for n, x in case.tensors.items()}
    return Case(tensors, {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in case.options.items()})


def run(case: Case, impl: str) -> dict[str, torch.Tensor]:
    leaves = case.leaves()
    out = gape.gated_attention(**leaves, **case.options, impl=impl)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    (out * weight).sum().backward()
    return {"out": out.detach()} | {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("name", LAYOUTS)
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


def test_rates_and_lengths_do_not_matter() -> None:
    """Far beyond T and with strong gates the bias is still formed in float32, from nearby positions."""
    positions = torch.arange(70) + 10**7
    case = random_case(n_q=70, n_k=70, strength=100.0, q_positions=positions, k_positions=positions)
    exact = run(moved(case, torch.float64), "reference")
    got = run(moved(case, torch.float32), "triton")
    for key, value in exact.items():
        assert (got[key].double() - value).norm() < 2e-6 * float(value.norm()), key


def test_refuses_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(n_q=3, n_k=3)
    with pytest.raises(ValueError, match=r"^impl: .*float64"):
        gape.gated_attention(**moved(case, torch.float64).tensors, **case.options, impl="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"^impl: .*CUDA"):
            gape.gated_attention(**moved(case, torch.float32).tensors, **case.options, impl="triton")
        with pytest.raises(ValueError, match=r"^impl: .*CUDA"):
            gape.explain(**moved(case, torch.float32).tensors, **case.options, impl="triton")
    monkeypatch.setattr("gape.ops.dispatch.HAS_TRITON", False)
    with pytest.raises(ValueError, match=r"^impl: .*pip install triton"):
        gape.gated_attention(**moved(case, torch.float32).tensors, **case.options, impl="triton")


def test_does_not_keep_a_matrix() -> None:
    case = moved(random_case(n_q=5, n_k=5), torch.float32)
    plan = gape.explain(**case.tensors, **case.options, impl="triton")
    assert not plan.quadratic
    assert gape.gated_attention(**case.tensors, **case.options, impl="triton", strict=True).isfinite().all()
