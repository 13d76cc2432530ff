"""What runs can be asked, and a quadratic backend can be refused."""

from __future__ import annotations

import logging

import pytest
import torch

import gape
from gape.ops import sdpa
from tests.ops.cases import layouts, random_case


@pytest.mark.parametrize(
    ("dtype", "impl"),
    [(torch.float64, "rank2"), (torch.float32, "rank2"), (torch.bfloat16, "split"), (torch.float16, "split")],
)
def test_auto_goes_by_dtype(dtype: torch.dtype, impl: str) -> None:
    case = random_case(dtype=dtype)
    plan = gape.explain(**case.tensors, **case.options)
    assert plan.impl == impl
    assert str(dtype).removeprefix("torch.") in plan.reason
    assert plan.backends == ("flash",)
    assert not plan.quadratic
    assert "flash" in str(plan)


@pytest.mark.parametrize(("name", "case"), layouts().items())
def test_no_layout_falls_to_the_math_backend(name: str, case: object) -> None:
    for impl in ("rank2", "split"):
        out = gape.gated_attention(**case.tensors, **case.options, impl=impl, strict=True)
        assert out.isfinite().all()


def test_strict_refuses_quadratic_ways(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sdpa, "_warned", set())
    case = random_case()
    with pytest.raises(ValueError, match=r"^strict: .*reference"):
        gape.gated_attention(**case.tensors, **case.options, impl="reference", strict=True)
    monkeypatch.setattr(sdpa.Call, "backend", lambda self: "math")
    assert gape.explain(**case.tensors, **case.options).quadratic
    with pytest.raises(ValueError, match=r"^strict: .*math backend"):
        gape.gated_attention(**case.tensors, **case.options, strict=True)
    with caplog.at_level(logging.WARNING, logger="gape.ops"):
        for _ in range(3):
            gape.gated_attention(**case.tensors, **case.options)
    assert len(caplog.records) == 1
    assert "math backend" in caplog.text


def test_queries_too_far_apart_are_explained_and_refused() -> None:
    positions = torch.tensor([0, 1, 10**7, 10**7 + 1])
    case = random_case(
        n_q=4, n_k=4, strength=100.0, dtype=torch.float32, q_positions=positions, k_positions=positions
    )  # fmt: skip
    plan = gape.explain(**case.tensors, **case.options)
    assert plan.backends == ("reference",)
    assert plan.quadratic
    assert "definition" in plan.reason
    with pytest.raises(ValueError, match=r"^strict: .*reference"):
        gape.gated_attention(**case.tensors, **case.options, strict=True)


def test_explain_refuses_what_the_operator_refuses() -> None:
    case = random_case()
    with pytest.raises(TypeError, match="dropout"):
        gape.explain(**case.tensors, **case.options, dropout=0.1)
    for name in ("fast", "flex", "anchored"):
        with pytest.raises(ValueError, match=r"^impl: "):
            gape.explain(**case.tensors, **case.options, impl=name)


@pytest.mark.parametrize("impl", ["auto", "split"])
def test_long_training_goes_in_calls_whose_queries_are_near_an_anchor(impl: str) -> None:
    case = random_case(batch=1, heads=1, kv_heads=1, n_q=2049, n_k=2049, dim=8, value_dim=8, dtype=torch.bfloat16)
    plan = gape.explain(**case.leaves(), **case.options, impl=impl)
    assert (plan.impl, plan.chunks) == ("split", 2)
    assert gape.explain(**case.tensors, **case.options, impl=impl).chunks == 1
