"""Errors of the operator: what is promised, and how float64 gradients are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import precision

ROOT = Path(__file__).parents[2]


def test_stored_errors_keep_what_is_promised() -> None:
    rows = precision.load(ROOT)
    assert precision.verdict(rows) == []
    outputs = [row for row in rows if row["quantity"] == "output" and row["dtype"] == "bfloat16"]
    assert {int(row["keys"]) for row in outputs} >= {1024, 8192, 131072}


@pytest.mark.parametrize("impl", ["reference", None])
def test_gradients_by_rows_are_those_of_the_whole(impl: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's float64 gradients do not depend on how many queries are held at once."""
    x = precision.exactly(precision.inputs(63, 63, 1, torch.bfloat16, 10, "cpu"))
    cotangent = precision.random_cotangent(63, 1, torch.float64, "cpu")
    whole = precision.gradients(x, impl, cotangent)
    monkeypatch.setattr(precision, "PAIRS", 63 * 10)
    for name, grad in precision.by_rows(x, impl, cotangent).items():
        torch.testing.assert_close(grad, whole[name], atol=1e-12, rtol=1e-12)
    assert set(whole) == ({"q", "k", "v"} if impl is None else set(x))


def test_the_verdict_names_what_is_broken() -> None:
    row = {"dtype": "bfloat16", "keys": "131072", "strength": "100", "plain": "2.00e-03"}
    kept = [
        row | {"quantity": "dk", "triton": "3.9e-03"},
        row | {"quantity": "dgate", "split": "0.5", "triton": "0.01"},
    ]
    broken = [row | {"quantity": "dk", "triton": "4.1e-03"}, row | {"quantity": "dgate", "triton": "0.03"}]
    assert precision.verdict(kept) == []
    assert [line.split(":")[0] for line in precision.verdict(broken)] == [
        "dk bfloat16 131072 keys Γg 100",
        "dgate bfloat16 131072 keys Γg 100",
    ]
