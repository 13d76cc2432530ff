"""The decode kernel against the definition: in the interpreter without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch

from gape.ops import reference
from gape.ops.api import _problem
from gape.ops.problem import Problem
from tests.ops.cases import Case, layouts, random_case

pytest.importorskip("triton")
from gape.ops.triton import decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def last_queries(case: Case, count: int) -> Case:
    """The case with its last `count` queries only, as decoding has them."""
    cuts = {
        "q": (2, None),
        "gate": (2, None),
        "q_positions": (-1, None),
        "q_documents": (1, None),
        "attn_mask": (-2, 1),
    }

    def cut(name: str, x: object) -> object:
        dim, broadcast = cuts.get(name, (None, None))
        if dim is None or not isinstance(x, torch.Tensor) or x.size(dim) == broadcast:
            return x
        return x.narrow(dim, max(0, x.size(dim) - count), min(count, x.size(dim)))

    tensors = {name: cut(name, x) for name, x in case.tensors.items()}
    return Case(tensors, {name: cut(name, x) for name, x in case.options.items()})


LAYOUTS = {name: last_queries(case, 5) for name, case in layouts().items()}
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(case: Case, dtype: torch.dtype, *, exact: bool = False) -> Problem:
    """The case with q, k and v rounded to `dtype`, and then raised to float64 where `exact`."""
    tensors = {n: x.to(DEVICE, dtype) if n in "qkv" else x.to(DEVICE) for n, x in case.tensors.items()}
    if exact:
        tensors = {n: x.double() for n, x in tensors.items()}
    options = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in case.options.items()}
    context_length, scale = options.pop("context_length"), options.pop("scale", None)
    return _problem(*tensors.values(), context_length, scale, False, **options)


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1.0))


HALF = [("plain", torch.float16), ("packed, restarting", torch.float16), ("mask with empty rows", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in LAYOUTS), *HALF], ids=str)
def test_equals_reference(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers start as NaN, so that an element nobody wrote shows."""
    exact = reference.run(problem(LAYOUTS[name], dtype, exact=True))
    given = problem(LAYOUTS[name], dtype)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    assert distance(decode.run(given, splits=3), exact) < BOUNDS[dtype]


@pytest.mark.parametrize("dim", [32, 96, 128])
def test_head_dims_and_many_splits(dim: int) -> None:
    case = random_case(n_q=2, n_k=150, dim=dim, value_dim=dim - 7, heads=6, kv_heads=2)
    exact = reference.run(problem(case, torch.float32, exact=True))
    for splits in (None, 15):
        assert distance(decode.run(problem(case, torch.float32), splits=splits), exact) < 1e-6


def test_samples_of_different_lengths() -> None:
    """Each sample answers as if it were alone with a cache of its own length; what lies beyond is never read."""
    case = random_case(batch=4, n_q=2, n_k=200, heads=2, kv_heads=1)
    # The last says more than there is.
    lengths = [200, 131, 2, 999]
    for b, n in enumerate(lengths):
        for name in "kv":
            case.tensors[name][b, :, n:] = float("nan")
        case.tensors["landmark"][b, :, n:] = float("nan")
    given = torch.tensor(lengths, device=DEVICE)
    got = decode.run(problem(case, torch.float32), lengths=given, splits=3)
    for b, n in enumerate(lengths):
        alone = {m: x[b : b + 1] if m != "amplitude" else x for m, x in case.tensors.items()}
        alone |= {m: alone[m][:, :, :n] for m in ("k", "v", "landmark")}
        exact = reference.run(problem(Case(alone, case.options), torch.float32, exact=True))
        assert distance(got[b : b + 1], exact) < 1e-6, n


def test_log_sum_exp() -> None:
    case = random_case(n_q=3, n_k=77, is_causal=False)
    exact = reference.logits(problem(case, torch.float32, exact=True)).logsumexp(-1)
    _, lse = decode.attend(problem(case, torch.float32), splits=2)
    assert torch.allclose(lse.double(), exact, atol=1e-5)


def test_far_positions_keep_the_bias() -> None:
    """Distances are integers before they are floats, so a strong bias is right beyond a million tokens."""
    positions = torch.arange(70) + 2**40
    case = random_case(n_q=2, n_k=70, strength=100.0, k_positions=positions)
    exact = reference.run(problem(case, torch.float32, exact=True))
    assert distance(decode.run(problem(case, torch.float32)), exact) < 1e-6


def test_positions_of_pads_do_not_matter() -> None:
    """Also where the first query is a pad, far from the others."""
    positions = torch.arange(70)
    positions[:9] = -(2**40)
    real = positions >= 0
    rows = [0, 1, 68, 69]
    case = random_case(
        n_q=4, n_k=70, q_positions=positions[rows], k_positions=positions, attn_mask=real[rows, None] & real
    )
    exact = reference.run(problem(case, torch.float32, exact=True))
    assert distance(decode.run(problem(case, torch.float32)), exact) < 1e-6


def test_no_keys_give_zeros() -> None:
    case = random_case(n_q=2, n_k=0, q_positions=torch.arange(2))
    out, lse = decode.attend(problem(case, torch.float32))
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_refuses_what_it_cannot() -> None:
    case = random_case(n_q=1, n_k=9)
    with pytest.raises(ValueError, match=r"^q: .*float64"):
        decode.run(problem(case, torch.float64))
    with pytest.raises(ValueError, match=r"^lengths: .*\(2,\)"):
        decode.run(problem(case, torch.float32), lengths=torch.ones(3, dtype=torch.int64, device=DEVICE))
    learning = problem(case, torch.float32)
    learning.gate.requires_grad_()
    with pytest.raises(ValueError, match=r"^q: .*no_grad"):
        decode.run(learning)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_long_cache_on_a_gpu(dtype: torch.dtype) -> None:
    sizes = {"batch": 2, "heads": 8, "kv_heads": 2, "n_q": 1, "n_k": 40_001, "dim": 64, "value_dim": 64}
    case = random_case(**sizes, strength=10.0, context_length=1024)
    exact = reference.run(problem(case, dtype, exact=True))
    assert distance(decode.run(problem(case, dtype)), exact) < BOUNDS[dtype]
