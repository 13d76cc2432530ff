"""What the operator refuses, and that it refuses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import gape
from tests.ops.cases import random_case

X = torch.zeros
WRONG: list[tuple[str, Any, str]] = [
    ("q", X(2, 4, 63), "q"),
    ("q", X(2, 4, 63, 16, dtype=torch.int64), "q"),
    ("q", "not a tensor", "q"),
    ("k", X(2, 2, 63, 15, dtype=torch.float64), "k"),
    ("k", X(2, 3, 63, 16, dtype=torch.float64), "k"),
    ("k", X(2, 2, 63, 16), "k"),
    ("k", X(2, 2, 63, 16, dtype=torch.float64, device="meta"), "k"),
    ("v", X(2, 2, 62, 16, dtype=torch.float64), "v"),
    ("gate", X(2, 2, 63), "gate"),
    ("gate", X(2, 4, 63, dtype=torch.int64), "gate"),
    ("landmark", X(2, 4, 63), "landmark"),
    ("amplitude", X(1), "amplitude"),
    ("amplitude", 1.0, "amplitude"),
    ("context_length", 0, "context_length"),
    ("context_length", -3.0, "context_length"),
    ("context_length", float("nan"), "context_length"),
    ("context_length", None, "context_length"),
    ("context_length", True, "context_length"),
    ("context_length", 10**400, "context_length"),
    ("q", X(2, 4, 63, 16, dtype=torch.float64).to_sparse(), "q"),
    ("attn_mask", torch.ones(63, 63, dtype=torch.bool).to_sparse(), "attn_mask"),
    ("q_positions", X(63), "q_positions"),
    ("q_positions", X(62, dtype=torch.int64), "q_positions"),
    ("k_positions", X(3, 63, dtype=torch.int64), "k_positions"),
    ("k_positions", X(63, dtype=torch.bool), "k_positions"),
    ("q_positions", torch.full((63,), 2**62), "q_positions"),
    ("k_positions", torch.full((2, 63), -(2**46) - 1), "k_positions"),
    ("q_documents", X(2, 63, dtype=torch.int64), "k_documents"),
    ("k_documents", X(2, 63, dtype=torch.int64), "q_documents"),
    ("attn_mask", X(63, 63), "attn_mask"),
    ("attn_mask", X(62, 63, dtype=torch.bool), "attn_mask"),
    ("attn_mask", X(1, 2, 4, 63, 63, dtype=torch.bool), "attn_mask"),
    ("is_causal", 1, "is_causal"),
    ("scale", 0.0, "scale"),
    ("scale", "big", "scale"),
    ("impl", "flash", "impl"),
    ("impl", None, "impl"),
    ("check", "yes", "check"),
    ("strict", None, "strict"),
]


@pytest.mark.parametrize(("argument", "value", "named"), WRONG)
def test_wrong_argument_is_named(argument: str, value: Any, named: str) -> None:
    case = random_case()
    arguments = case.tensors | case.options | {argument: value}
    with pytest.raises(ValueError, match=rf"^{named}: "):
        gape.gated_attention(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gate", -0.1), ("gate", float("inf")), ("landmark", 1.1), ("landmark", -0.1), ("amplitude", -1)],
)
def test_check_reads_the_gates(name: str, value: float) -> None:
    case = random_case()
    case.tensors[name].view(-1)[-1] = value
    gape.gated_attention(**case.tensors, **case.options)
    with pytest.raises(ValueError, match=rf"^{name}: "):
        gape.gated_attention(**case.tensors, **case.options, check=True)


def test_more_queries_than_keys_need_positions() -> None:
    case = random_case(n_q=8, n_k=3)
    with pytest.raises(ValueError, match=r"^q_positions: "):
        gape.gated_attention(**case.tensors, **case.options)


SIZES = st.integers(0, 5)


def mostly(right: list[Any], wrong: list[Any]) -> st.SearchStrategy[Any]:
    """A right value nine times out of ten."""
    return st.integers(0, 9).flatmap(lambda roll: st.sampled_from(right if roll else wrong))


DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])


@st.composite
def tensors(draw: st.DrawFn, right: tuple[int, ...], dtype: torch.dtype, low: int, high: int) -> Any:
    """Mostly the right tensor; sometimes a wrong shape, a wrong dtype or no tensor at all."""
    kind = draw(st.integers(0, 59))
    if kind == 0:
        return draw(st.sampled_from([None, 3, "x", [1.0]]))
    shape = tuple(draw(st.lists(SIZES, max_size=5))) if kind == 1 else right
    if kind == 2:
        dtype = draw(DTYPES)
    values = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return values.to(dtype)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    batch, kv, groups, n_q, n_k = (draw(st.integers(low, 3)) for low in (0, 1, 1, 0, 0))
    heads, dim, value_dim = kv * groups, draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    call = {
        "q": draw(tensors((batch, heads, n_q, dim), dtype, -3, 4)),
        "k": draw(tensors((batch, kv, n_k, dim), dtype, -3, 4)),
        "v": draw(tensors((batch, kv, n_k, value_dim), dtype, -3, 4)),
        "gate": draw(tensors((batch, heads, n_q), torch.float32, 0, 3)),
        "landmark": draw(tensors((batch, kv, n_k), torch.float32, 0, 2)),
        "amplitude": draw(tensors((heads,), torch.float32, 0, 3)),
        "context_length": draw(mostly([8, 0.5, 1000.0], [0, -1, None, "8", float("inf")])),
        "scale": draw(mostly([None, 0.3, 2], [0, -1.0, float("nan")])),
        "impl": draw(mostly(["auto", "reference", "rank2", "split", "triton", "decode"], ["fast", 3])),
        "is_causal": draw(mostly([True, False], [None])),
        "eps": draw(mostly([0, 0.0, 1e-3], [-1e-3, 1, None])),
        "check": draw(st.booleans()),
        "strict": draw(st.booleans()),
    }
    optional = {
        "q_positions": tensors(draw(st.sampled_from([(n_q,), (batch, n_q)])), torch.int64, -9, 99),
        "k_positions": tensors(draw(st.sampled_from([(n_k,), (batch, n_k)])), torch.int32, -9, 99),
        "q_documents": tensors((batch, n_q), torch.int64, 0, 2),
        "k_documents": tensors((batch, n_k), torch.int64, 0, 2),
        "attn_mask": tensors(draw(st.sampled_from([(n_q, n_k), (1, 1, n_q, n_k), (n_k,), ()])), torch.bool, 0, 2),
    }
    return call | {name: draw(strategy) for name, strategy in optional.items() if draw(st.booleans())}


def works_or_names_the_argument(call: dict[str, Any]) -> None:
    refusal = ""
    try:
        out = gape.gated_attention(**call)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        named = refusal.split(": ")[0]
        assert named in call.keys() | {"q_positions", "q_documents", "k_documents"}, refusal
        return
    event("worked")
    q, v = call["q"], call["v"]
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
    assert out.isfinite().all()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_works_or_names_the_argument(call: dict[str, Any]) -> None:
    works_or_names_the_argument(call)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_works_or_names_the_argument_in_2000_cases(call: dict[str, Any]) -> None:
    works_or_names_the_argument(call)
