"""Every implementation is the same function: outputs and gradients against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gape
from tests.ops.cases import Case, layouts, random_case

LAYOUTS = layouts()
FUSED = ["rank2", "split"]


def run(case: Case, impl: str) -> dict[str, torch.Tensor]:
    leaves = case.leaves()
    out = gape.gated_attention(**leaves, **case.options, impl=impl)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    return {"out": out.detach()} | {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("impl", FUSED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_float64_equals_reference(name: str, impl: str) -> None:
    expected, got = run(LAYOUTS[name], "reference"), run(LAYOUTS[name], impl)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, atol=1e-9, rtol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("impl", FUSED)
def test_chunked_queries_equal_reference(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gape.ops.sdpa.MASK_ROWS", 17)
    for name in ("packed", "shuffled", "mask with empty rows", "left padding", "mask per head"):
        expected, got = run(LAYOUTS[name], "reference"), run(LAYOUTS[name], impl)
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_anchors_equal_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What half precision does where gates learn, in float64: several chunks, two anchors each."""
    monkeypatch.setattr("gape.ops.columns.SHORT_BITS", 53)
    monkeypatch.setattr("gape.ops.columns.ANCHORED_ROWS", 25)
    expected, got = run(LAYOUTS[name], "reference"), run(LAYOUTS[name], "split")
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, atol=1e-9, rtol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("impl", FUSED)
def test_masks_are_drawn_for_few_queries_at_a_time(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the triangle of queries that come last, which a CPU cannot be told of."""
    monkeypatch.setattr("gape.ops.sdpa.MASK_ROWS", 8)
    drawn = []
    prepare = gape.ops.sdpa.prepare
    monkeypatch.setattr("gape.ops.sdpa.prepare", lambda *a: (drawn.append(prepare(*a)), drawn[-1])[1])
    case = random_case(n_q=40, n_k=63)
    got = gape.gated_attention(**case.tensors, **case.options, impl=impl)
    assert max(call.mask.size(2) for call in drawn if call.mask is not None) == 8
    torch.testing.assert_close(got, gape.gated_attention(**case.tensors, **case.options, impl="reference"))


def test_reference_passes_gradcheck() -> None:
    case = random_case(batch=1, heads=2, kv_heads=1, n_q=4, n_k=6, dim=3, value_dim=2)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2] = False

    def operator(*tensors: torch.Tensor) -> torch.Tensor:
        return gape.gated_attention(*tensors, context_length=5, attn_mask=mask, impl="reference")

    assert torch.autograd.gradcheck(operator, tuple(case.leaves().values()))


@pytest.mark.parametrize("impl", ["reference", *FUSED])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_see_nothing_are_zero(impl: str, dtype: torch.dtype) -> None:
    case = random_case(attn_mask=torch.zeros(1, 1, 63, 63, dtype=torch.bool))
    leaves = case.leaves(dtype)
    out = gape.gated_attention(**leaves, **case.options, impl=impl)
    out.sum().backward()
    assert (out == 0).all()
    assert all((x.grad == 0).all() for x in leaves.values())


@pytest.mark.parametrize("impl", ["reference", *FUSED])
def test_documents_share_no_gradient(impl: str) -> None:
    case = LAYOUTS["packed"]
    leaves = case.leaves()
    gape.gated_attention(**leaves, **case.options, impl=impl)[0, :, 20:50].sum().backward()
    for name in ("k", "v", "landmark"):
        assert (leaves[name].grad[0, :, :20] == 0).all(), name
        assert (leaves[name].grad[0, :, 50:] == 0).all(), name


def test_padding_side_does_not_matter() -> None:
    """The same 40 tokens alone, behind 23 pads and before 23 pads."""
    alone = random_case(batch=1, n_q=40, n_k=40)
    expected = gape.gated_attention(**alone.tensors, **alone.options)
    for side, pads in (("left", (23, 0)), ("right", (0, 23))):
        padded = {n: x if n == "amplitude" else _pad(x, pads) for n, x in alone.tensors.items()}
        positions = torch.arange(63)[None] - pads[0]
        real = (positions >= 0) & (positions < 40)
        out = gape.gated_attention(
            **padded, **alone.options, q_positions=positions, k_positions=positions, attn_mask=real[:, None, None]
        )
        torch.testing.assert_close(out[:, :, real[0]], expected, atol=1e-12, rtol=1e-12, msg=side)


def _pad(x: torch.Tensor, pads: tuple[int, int]) -> torch.Tensor:
    before, after = (torch.randn(*x.shape[:2], n, *x.shape[3:], dtype=x.dtype) for n in pads)
    return torch.cat([before, x, after], dim=2)


def broken_rows(out: torch.Tensor) -> list[bool]:
    return out.isnan().any(-1)[0, 0].tolist()


@pytest.mark.parametrize("impl", ["reference", *FUSED])
@pytest.mark.parametrize("n", [1, 15, 20])
@pytest.mark.parametrize("name", ["q", "k", "gate", "landmark"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_not_a_number_shows_in_every_row_that_sees_it(dtype: torch.dtype, name: str, n: int, impl: str) -> None:
    """Also where keys are few, of which torch's kernel for a CPU makes zeros, and in no earlier row."""
    case, at = random_case(batch=1, n_q=n, n_k=n, dtype=dtype), n // 2
    case.tensors[name][:, :, at] = torch.nan
    own = name in ("q", "gate")
    seeing = [row == at if own else row >= at for row in range(n)]
    assert broken_rows(gape.gated_attention(**case.tensors, **case.options, impl=impl)) == seeing


@pytest.mark.parametrize("impl", ["reference", *FUSED])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_hidden_key_reaches_no_more_rows_than_in_plain_attention(value: float, impl: str) -> None:
    """Hidden by a mask; a broken landmark is no worse than a broken key."""
    mask = torch.ones(63, 63, dtype=torch.bool).tril()
    mask[:, 5] = False
    for name in ("k", "v", "landmark"):
        case = random_case(batch=1, heads=2, dtype=torch.float32, attn_mask=mask)
        case.tensors[name][:, :, 5] = value
        out = broken_rows(gape.gated_attention(**case.tensors, **case.options, impl=impl))
        k, v = (case.tensors[x].clone() for x in "kv")
        if name == "landmark":
            k[:, :, 5] = value
        plain = broken_rows(torch.nn.functional.scaled_dot_product_attention(case.tensors["q"], k, v, attn_mask=mask))
        assert all(worst for row, worst in zip(out, plain, strict=True) if row)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=12),
    st.sampled_from([0, 2**40, -(2**40), 2**45]),
    st.floats(0, 100),
    st.sampled_from([(torch.float64, 1e-9), (torch.float32, 5e-5)]),
)
def test_any_positions_equal_reference(
    positions: list[int], offset: int, strength: float, precision: tuple[torch.dtype, float]
) -> None:
    """Shuffled, repeated, negative, far from zero and far apart."""
    dtype, tolerance = precision
    where = torch.tensor(positions) + offset
    case = random_case(
        n_q=len(positions), n_k=len(positions), strength=strength, dtype=dtype, q_positions=where, k_positions=where
    )
    got = gape.gated_attention(**case.tensors, **case.options)
    exact = gape.gated_attention(
        **{name: x.double() for name, x in case.tensors.items()}, **case.options, impl="reference"
    )
    torch.testing.assert_close(got.double(), exact, atol=tolerance, rtol=tolerance)
