"""The decode kernel for one query per key head: in the interpreter without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch

from gape import gated_attention
from gape.ops import reference
from gape.ops.inputs import Problem
from tests.ops.cases import Case, random_case
from tests.ops.test_decode import BOUNDS, DEVICE, distance, problem, three_ways

pytest.importorskip("triton")
from gape.ops.triton import decode, decode_plan
from gape.ops.triton.decode_lone import partial_lone


def one_query(**sizes: object) -> Case:
    """One query per key head with heads of 16, which in half precision has a kernel of its own."""
    given = {"batch": 1, "heads": 2, "kv_heads": 2, "n_q": 1, "dim": 16, "value_dim": 16} | sizes
    return random_case(**given)  # type: ignore[arg-type]


def lone(case: Case, dtype: torch.dtype = torch.float16) -> Problem:
    """The problem, after a look that the kernel for lone queries is the one to run it."""
    given = problem(case, dtype)
    assert decode_plan.planned(decode._call(given, None)).kernel is partial_lone
    return given


@pytest.mark.parametrize("n_k", [1, 63, 127, 1000, 2049])
@pytest.mark.parametrize("strength", [0.0, 30.0], ids=["nothing forgotten", "much forgotten"])
def test_equals_reference(n_k: int, strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers start as NaN; the log-sum-exp has the weight also of values that were not read."""
    case = one_query(n_k=n_k, strength=strength)
    exact = problem(case, torch.float16, exact=True)
    given, splits = lone(case), 3 if n_k < 1000 else 2
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    out, lse = decode.attend(given, splits=splits)
    assert distance(out, reference.run(exact)) < BOUNDS[torch.float16]
    assert torch.allclose(lse.double(), reference.logits(exact).logsumexp(-1), atol=1e-5)


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_head_dims(dim: int) -> None:
    case = one_query(n_k=70, dim=dim, value_dim=dim, heads=1, kv_heads=1)
    exact = reference.run(problem(case, torch.float16, exact=True))
    assert distance(decode.run(lone(case), splits=2), exact) < BOUNDS[torch.float16]


def test_equals_the_common_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_query(n_k=300)
    given = lone(case)
    out, lse = decode.attend(given, splits=3)
    monkeypatch.setattr(decode_plan, "is_lone", lambda *_, **__: False)
    other, other_lse = decode.attend(given, splits=3)
    assert distance(out, other.double()) < BOUNDS[torch.float16]
    assert torch.allclose(lse, other_lse, atol=1e-5)


def test_samples_of_different_lengths() -> None:
    """Empty programs, an empty sample, and a length that says more than there is; what lies beyond is never read."""
    lengths = [300, 131, 1, 0, 999]
    case = one_query(batch=len(lengths), n_k=300, heads=1, kv_heads=1)
    for b, n in enumerate(lengths):
        for name in ("k", "v", "landmark"):
            case.tensors[name][b, :, n:] = float("nan")
    got, lse = decode.attend(lone(case), lengths=torch.tensor(lengths, device=DEVICE), splits=2)
    assert not got[3].any()
    assert (lse[3] == -torch.inf).all()
    for b, n in enumerate(lengths):
        if n == 0:
            continue
        alone = {m: x[b : b + 1] if m != "amplitude" else x for m, x in case.tensors.items()}
        alone |= {m: alone[m][:, :, :n] for m in ("k", "v", "landmark")}
        exact = reference.run(problem(Case(alone, case.options), torch.float16, exact=True))
        assert distance(got[b : b + 1], exact) < BOUNDS[torch.float16], n


def test_values_without_weight_are_not_read() -> None:
    """A value whose key has less than 2⁻⁴⁰ of the weight of one seen before has no say; all others have."""
    case = one_query(n_k=600, strength=0.0, heads=1, kv_heads=1)
    case.tensors["q"][:] = 1.0
    case.tensors["k"][:] = 0.0
    # In base 2 a key of x in all 16 coordinates has the logit 4·log₂e·x = 5.77·x; those of the first tile have 0.
    case.tensors["k"][:, :, 400], case.tensors["k"][:, :, 500] = -7.0, -6.9
    exact = reference.run(problem(case, torch.float16, exact=True))
    case.tensors["v"][:, :, 400] = float("nan")
    assert distance(decode.run(lone(case), splits=1), exact) < BOUNDS[torch.float16]
    case.tensors["v"][:, :, 500] = float("nan")
    assert decode.run(lone(case), splits=1).isnan().all()


def test_what_the_newest_keys_outweigh_is_not_read() -> None:
    """Under one rate and no landmarks the first tile of a program weighs least: it alone would leave nothing unread."""
    case = one_query(n_k=600, strength=0.0, heads=1, kv_heads=1)
    case.tensors["q"][:] = case.tensors["landmark"][:] = 0.0
    case.tensors["gate"][:] = case.tensors["amplitude"][:] = 1.0
    # The bias alone: 1.44 · distance / T in base 2.
    case.options["context_length"] = 10.0
    exact = reference.run(problem(case, torch.float16, exact=True))
    case.tensors["v"][:, :, : 600 - 1 - 278] = float("nan")
    assert distance(decode.run(lone(case), splits=3), exact) < BOUNDS[torch.float16]
    case.tensors["v"][:, :, 600 - 1 - 276] = float("nan")
    assert decode.run(lone(case), splits=3).isnan().all()


def test_logits_too_large_to_tell_apart_are_all_read() -> None:
    """Float32 has no number 40 below 2·10¹⁰ but that one itself."""
    case = one_query(n_k=100, strength=0.0, heads=1, kv_heads=1)
    case.tensors["q"][:], case.tensors["k"][:] = 60_000.0, -60_000.0
    exact = reference.run(problem(case, torch.float16, exact=True))
    assert distance(decode.run(lone(case), splits=1), exact) < BOUNDS[torch.float16]


def test_lengths_may_lie_apart() -> None:
    case = one_query(n_k=100, batch=2)
    lengths = torch.tensor([[50, 7], [100, 9]], device=DEVICE)
    together = decode.run(lone(case), lengths=lengths[:, 0].clone(), splits=2)
    assert torch.equal(decode.run(lone(case), lengths=lengths[:, 0], splits=2), together)


@pytest.mark.parametrize("name", ["k", "landmark"])
@pytest.mark.parametrize("place", [0, 5, 299])
def test_a_broken_key_shows_however_far_it_is(name: str, place: int) -> None:
    case = one_query(n_k=300, strength=1000.0, heads=1, kv_heads=1)
    case.tensors[name][0, 0, place] = float("nan")
    out, lse = decode.attend(lone(case), splits=2)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_parts_are_merged_alike_by_either_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last program and by a kernel of its own; the same bits in every run, and tickets are given back."""
    case = one_query(n_k=1500, strength=10.0, heads=1, kv_heads=1)
    given = lone(case)
    (first, lse), (again, again_lse) = (decode.attend(given, splits=5) for _ in range(2))
    assert torch.equal(again, first)
    assert torch.equal(again_lse, lse)
    assert not any(held.any() for held in decode._held.values())
    monkeypatch.setattr(decode, "ALONE", 0)
    apart, apart_lse = decode.attend(given, splits=5)
    assert torch.allclose(apart, first, atol=1e-3)
    assert torch.allclose(apart_lse, lse, atol=1e-6)


def test_strides() -> None:
    """Keys beside those of other heads, as some caches keep them, and landmarks with room between."""
    case = one_query(n_k=100, batch=2)
    exact = reference.run(problem(case, torch.float16, exact=True))
    for name in ("k", "v"):
        case.tensors[name] = case.tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    case.tensors["landmark"] = case.tensors["landmark"].repeat_interleave(2, -1)[..., ::2]
    given = lone(case)
    assert given.k.stride(2) == 32
    assert distance(decode.run(given, splits=2), exact) < BOUNDS[torch.float16]


@pytest.mark.parametrize(
    "sizes",
    [{"heads": 4}, {"n_q": 2}, {"dim": 24, "value_dim": 24}, {"value_dim": 32}, {"k_positions": torch.arange(40)}],
    ids=str,
)
def test_others_have_the_common_kernel(sizes: dict[str, object]) -> None:
    given = problem(one_query(n_k=40, **sizes), torch.float16)
    assert not decode_plan.is_lone(decode._call(given, None))


def test_keys_out_of_line_have_the_common_kernel() -> None:
    """Two numbers are read at a time: rows begin where 16 bytes do."""
    case = one_query(n_k=40)
    given = problem(case, torch.float16)
    exact = reference.run(problem(case, torch.float16, exact=True))
    wide = torch.zeros(*given.v.shape[:3], 19, dtype=torch.float16, device=DEVICE)
    wide[..., :16] = given.v
    shifted = torch.zeros(given.v.numel() + 1, dtype=torch.float16, device=DEVICE)[1:].view_as(given.v).copy_(given.v)
    for v in (wide[..., :16], shifted):
        call = decode._call(given, None)._replace(v=v)
        assert not decode_plan.is_lone(call)
        assert not decode_plan.is_lone(call, traced=True)
        assert distance(decode._launched(call, 2, decode.direct, tickets=True)[0], exact) < BOUNDS[torch.float16]


def test_compiles_without_a_break() -> None:
    case = one_query(n_k=70)
    given = lone(case)
    tensors = [given.q, given.k, given.v, given.gate, given.landmark, given.amplitude]

    def operator(*given: torch.Tensor) -> torch.Tensor:
        return gated_attention(*given, **case.options, impl="decode") * 2

    with torch.no_grad():
        compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)(*tensors)
        assert torch.allclose(compiled, operator(*tensors), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("strength", [0.0, 10.0], ids=["nothing forgotten", "much forgotten"])
def test_long_cache_on_a_gpu(strength: float) -> None:
    case = one_query(batch=3, heads=4, kv_heads=4, n_k=65_536, dim=64, value_dim=64, strength=strength)
    lengths = [65_536, 40_001, 1]
    given, exact = lone(case, torch.bfloat16), problem(case, torch.bfloat16, exact=True)
    (out, lse), (again, _) = (decode.attend(given) for _ in range(2))
    assert distance(out, reference.run(exact)) < BOUNDS[torch.bfloat16]
    assert torch.allclose(lse.double(), reference.logits(exact).logsumexp(-1), atol=1e-4)
    assert torch.equal(out, again)
    ragged = decode.run(given, lengths=torch.tensor(lengths, device=DEVICE))
    for b, n in enumerate(lengths):
        alone = {m: x[b : b + 1] if m != "amplitude" else x for m, x in case.tensors.items()}
        alone |= {m: alone[m][:, :, :n] for m in ("k", "v", "landmark")}
        alone_exact = reference.run(problem(Case(alone, case.options), torch.bfloat16, exact=True))
        assert distance(ragged[b : b + 1], alone_exact) < BOUNDS[torch.bfloat16], n


@pytest.mark.gpu
def test_captured_and_compiled_on_a_gpu() -> None:
    case = one_query(n_k=5000, dim=64, value_dim=64)
    given = lone(case, torch.bfloat16)
    tensors = [given.q, given.k, given.v, given.gate, given.landmark, given.amplitude]

    plain, captured, compiled = three_ways(case, tensors)
    assert torch.allclose(captured, plain, atol=1e-2)
    assert torch.allclose(compiled, plain, atol=1e-2)
