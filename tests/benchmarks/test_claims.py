"""The summary of the paper's claims: what the parts of a claim say of the whole."""

from __future__ import annotations

import pytest

from tables.evidence import NOT_MEASURED, Evidence


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [((True, True), "held"), ((False,), "not held"), ((True, False, False), "partly (1 of 3)")],
)
def test_a_claim_holds_as_far_as_its_parts_do(parts: tuple[bool, ...], verdict: str) -> None:
    assert Evidence("figure", parts).verdict == verdict


def test_a_claim_without_rows_is_not_measured() -> None:
    assert NOT_MEASURED.verdict == "not measured"
