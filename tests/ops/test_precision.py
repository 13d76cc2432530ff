"""Half precision: the split bias loses nothing that plain attention keeps, at any length; rank2 does."""

from __future__ import annotations

import multiprocessing
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gape
from gape.ops import attention, columns
from gape.ops.columns import pieces, round_significand
from tests.ops.cases import Case, random_case

HALF = [torch.bfloat16, torch.float16]


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def long_case(keys: int, strength: float, dtype: torch.dtype, **options: object) -> Case:
    return random_case(
        batch=1, heads=2, kv_heads=2, n_q=16, n_k=keys, dim=64, value_dim=64, strength=strength,
        context_length=1024, dtype=dtype, **options,
    )  # fmt: skip


def output_error(case: Case, impl: str) -> float:
    exact = gape.gated_attention(
        **{name: x.double() for name, x in case.tensors.items()}, **case.options, impl="reference"
    )
    return distance(gape.gated_attention(**case.tensors, **case.options, impl=impl), exact)


FAR = [pytest.param(131072, strength, marks=pytest.mark.slow) for strength in (1.0, 10.0, 100.0)]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("keys", "strength"), [(1000, 1.0), (1000, 100.0), (8192, 10.0), *FAR])
def test_split_is_as_exact_as_attention_without_bias(keys: int, strength: float, dtype: torch.dtype) -> None:
    case = long_case(keys, strength, dtype)
    q, k, v = (case.tensors[n] for n in "qkv")
    plain = distance(attention(q, k, v), attention(q.double(), k.double(), v.double()))
    assert output_error(case, "split") <= 2 * plain


def test_rank2_degrades_with_length_in_bfloat16() -> None:
    errors = [output_error(long_case(keys, 10.0, torch.bfloat16), "rank2") for keys in (1024, 8192, 65536)]
    assert errors[1] > 3 * errors[0]
    assert errors[2] > 3 * errors[1]


@pytest.mark.parametrize("dtype", HALF)
def test_rates_beyond_the_dtype_saturate(dtype: torch.dtype) -> None:
    """A rate that float16 cannot hold still means: only the nearest unprotected key."""
    case = long_case(16384, 1e9, dtype)
    case.tensors["landmark"].zero_()
    case.tensors["gate"] += 1e8
    out = gape.gated_attention(**case.tensors, **case.options, impl="split")
    torch.testing.assert_close(out, case.tensors["v"][:, :, -16:], atol=2e-2, rtol=0)


@pytest.mark.parametrize("impl", ["auto", "split"])
@pytest.mark.parametrize("offset", [10**5, 2**24, 10**9])
def test_float32_keeps_the_bias_at_large_positions(offset: int, impl: str) -> None:
    positions = torch.arange(63) + offset
    case = random_case(dtype=torch.float32, q_positions=positions, k_positions=positions)
    assert output_error(case, impl) < 1e-6


@pytest.mark.parametrize("spread", [10**7, 2**40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_queries_far_apart_keep_the_bias(dtype: torch.dtype, spread: int) -> None:
    """Clusters of near keys, which decide, at any distance from an anchor; no worse than twice the definition."""
    positions = (torch.linspace(0, 1, 8, dtype=torch.float64) * spread).long().repeat_interleave(8)
    positions += torch.arange(8).repeat(8)
    case = random_case(
        n_q=64, n_k=64, strength=200.0, context_length=1024, dtype=dtype, q_positions=positions, k_positions=positions
    )
    assert output_error(case, "auto") <= 2 * output_error(case, "reference") + 1e-9


def test_float32_chunks_have_their_own_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries in order, which a mask cuts into chunks: each is near its own anchor."""
    monkeypatch.setattr("gape.ops.sdpa.MASK_ROWS", 64)
    positions = torch.arange(1024)
    case = random_case(
        batch=1, n_q=1024, n_k=1024, strength=2000.0, context_length=256, dtype=torch.float32,
        q_positions=positions, k_positions=positions,
    )  # fmt: skip
    assert gape.explain(**case.tensors, **case.options).backends == ("flash",)
    assert output_error(case, "auto") < 3e-6


@pytest.mark.parametrize("pad", [-(10**6), -(2**31), 2**31 - 1])
def test_positions_of_pads_do_not_matter(pad: int) -> None:
    positions = torch.arange(100)
    positions[:30] = pad
    real = torch.arange(100) >= 30
    case = random_case(
        n_q=100, n_k=100, dtype=torch.bfloat16, q_positions=positions, k_positions=positions,
        attn_mask=real[None, :] & real[:, None],
    )  # fmt: skip
    assert output_error(case, "split") < 6e-3


def test_scattered_positions_keep_learning_gates_exact() -> None:
    g = torch.Generator().manual_seed(2)
    positions = torch.randperm(131072, generator=g)[:512].sort().values
    case = random_case(
        batch=1, n_q=512, n_k=512, dim=64, value_dim=64, strength=200.0, context_length=1024, dtype=torch.bfloat16,
        q_positions=positions, k_positions=positions,
    )  # fmt: skip
    still = gape.gated_attention(**case.tensors, **case.options)
    learning = gape.gated_attention(**case.leaves(), **case.options)
    assert distance(learning.detach(), still.double()) < 4e-3


def gate_gradients(case: Case, impl: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    leaves = case.leaves(dtype)
    out = gape.gated_attention(**leaves, **case.options, impl=impl)
    g = torch.Generator().manual_seed(3)
    out.backward(torch.randn(out.shape, generator=g).to(torch.bfloat16).to(out.dtype))
    return {name: leaves[name].grad for name in ("gate", "landmark", "amplitude")}


@pytest.mark.parametrize(
    ("length", "strength"),
    [(1024, 10.0), (2049, 10.0), *(pytest.param(n, 1.0, marks=pytest.mark.slow) for n in (1024, 2049))],
)
def test_gate_gradients_at_training_lengths(length: int, strength: float) -> None:
    case = random_case(
        batch=1, heads=2, kv_heads=2, n_q=length, n_k=length, dim=64, value_dim=64, strength=2 * strength,
        context_length=1024, dtype=torch.bfloat16,
    )  # fmt: skip
    exact = gate_gradients(case, "reference", torch.float64)
    got = gate_gradients(case, "auto", torch.bfloat16)
    for name, grad in got.items():
        assert distance(grad, exact[name]) < 0.02, name


def test_anchors_are_what_keeps_gate_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(
        batch=1, heads=1, kv_heads=1, n_q=2049, n_k=2049, dim=64, value_dim=64, strength=200.0,
        context_length=1024, dtype=torch.bfloat16,
    )  # fmt: skip
    exact = gate_gradients(case, "reference", torch.float64)["gate"]
    errors = []
    for rows in (256, 4096):
        monkeypatch.setattr(columns, "ANCHORED_ROWS", rows)
        errors.append(distance(gate_gradients(case, "split", torch.bfloat16)["gate"], exact))
    assert errors[0] < 0.02
    assert errors[1] > 3 * errors[0]


@given(
    st.lists(st.floats(-(2.0**30), 2.0**30, width=32).filter(lambda x: x == 0 or abs(x) > 1e-20), min_size=1),
    st.sampled_from([8, 11]),
)
@settings(deadline=None, max_examples=80)
def test_pieces_add_up_and_fit(values: list[float], bits: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    first, second, third = pieces(x, bits)
    assert (first.double() + second.double() + third.double() == x.double()).all()
    # Eleven bits reach below bfloat16's eight; float64 arithmetic shows that no more are used.
    for piece in (first, second, third):
        mantissa, _ = torch.frexp(piece.double())
        assert (mantissa * 2**bits == (mantissa * 2**bits).round()).all()


def test_rounding_is_the_casts() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100
    assert (round_significand(x, 8) == x.to(torch.bfloat16).float()).all()
    assert (round_significand(x, 11) == x.to(torch.float16).float()).all()


def test_autocast_casts_content_and_spares_the_bias() -> None:
    case = random_case(n_q=63, n_k=63, dtype=torch.float32)
    low = {n: x.to(torch.bfloat16) if n in "qkv" else x for n, x in case.tensors.items()}
    expected = gape.gated_attention(**low, **case.options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gape.gated_attention(**case.tensors, **case.options)
        assert gape.explain(**case.tensors, **case.options).impl == "split"
    assert out.dtype == torch.bfloat16
    assert (out == expected).all()


@pytest.mark.slow
def test_one_compilation_serves_many_lengths() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gape.gated_attention, backend=counter, fullgraph=True)
    for length in (33, 57, 64, 101):
        case = random_case(n_q=length, n_k=length, dtype=torch.bfloat16)
        compiled(**case.tensors, **case.options)
    assert counter.frame_count <= 2


def is_seen(name: str, value: object) -> None:
    before = columns.tf32_allowed()
    setattr(torch.backends.cuda.matmul, name, value)
    sys.exit((before, columns.tf32_allowed()) != (False, True))


@pytest.mark.parametrize(("name", "value"), [("fp32_precision", "tf32"), ("allow_tf32", True)])
def test_tf32_is_seen_in_both_ways_of_setting_it(name: str, value: object) -> None:
    """In processes of their own: the two ways exclude one another in one."""
    process = multiprocessing.get_context("fork").Process(target=is_seen, args=(name, value))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0


@pytest.mark.slow
def test_compiled_split_keeps_its_pieces() -> None:
    """Compilers remove casts there and back; the pieces must survive that, and no graph may break."""
    case = long_case(16384, 100.0, torch.bfloat16)
    leaves = case.leaves()

    def operator(**tensors: torch.Tensor) -> torch.Tensor:
        return gape.gated_attention(**tensors, **case.options, impl="split")

    eager = operator(**leaves)
    compiled = torch.compile(operator, fullgraph=True)(**leaves)
    assert distance(compiled.detach(), eager.detach().double()) < 5e-3
    grads = [torch.autograd.grad(out.float().square().sum(), list(leaves.values())) for out in (eager, compiled)]
    for name, a, b in zip(leaves, *grads, strict=True):
        assert distance(b, a.double()) < 2e-2, name
