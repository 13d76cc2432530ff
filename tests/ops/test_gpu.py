"""On a CUDA device: real fused kernels, half precision, TF32, memory."""

from __future__ import annotations

import pytest
import torch

import gape
from gape.ops import attention
from gape.ops.columns import UNIT
from tests.ops.cases import Case, layouts, random_case

pytestmark = pytest.mark.gpu
LAYOUTS = layouts()


def on_gpu(case: Case, dtype: torch.dtype) -> Case:
    def move(x: object) -> object:
        return x.cuda() if isinstance(x, torch.Tensor) else x

    tensors = {n: x.cuda().to(dtype if n in "qkv" else torch.float32) for n, x in case.tensors.items()}
    return Case(tensors, {n: move(x) for n, x in case.options.items()})


def results(case: Case, impl: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    leaves = {n: x.detach().clone().to(dtype or x.dtype).requires_grad_() for n, x in case.tensors.items()}
    out = gape.gated_attention(**leaves, **case.options, impl=impl)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out * weight.to(torch.bfloat16).to(out.dtype)).sum().backward()
    return {"out": out.detach()} | {n: x.grad for n, x in leaves.items()}


def at_rounded_gates(case: Case, dtype: torch.dtype) -> Case:
    """The case in float64, with rates and exposures as `split` has them: rounded once to `dtype`.

    The amplitude's gradient is the sum of dS_ij·c_i·u_j·(j − i) / Γ over all pairs. An exposure is rounded once for
    all queries, by δ_j of at most a unit roundoff, so the gradient that belongs to the output differs from the one at
    exact gates by Σ_j δ_j·u_j·du_j / Γ: whole columns, which do not average out. "far from zero" in bfloat16 has
    columns of norm 3.8 where rows have 0.46 and everything adds up to 0.31; 2⁻⁸ of such columns is more than arithmetic
    with those rows may lose. A single gate's gradient has no such sum in it.
    """
    x = {n: t.double() for n, t in case.tensors.items()}
    scale = case.options.get("scale", x["q"].size(-1) ** -0.5)
    rate = x["amplitude"][:, None] * x["gate"] / (case.options["context_length"] * scale)

    def rounded(y: torch.Tensor) -> torch.Tensor:
        return (y * UNIT).to(dtype).double() / UNIT

    x["gate"] = x["gate"] * rounded(rate) / rate.clamp(min=1e-30)
    x["landmark"] = 1 - rounded(1 - x["landmark"])
    return Case(x, case.options)


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_definition_without_math_backend(name: str, dtype: torch.dtype) -> None:
    case = on_gpu(LAYOUTS[name], dtype)
    exact = results(case, "reference", torch.float64)
    exact["amplitude"] = results(at_rounded_gates(case, dtype), "reference")["amplitude"]
    got = results(case, "split")
    bound = {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 1e-4}[dtype]
    # The amplitude's gradient is a sum that may cancel, and a lone key has none: errors are measured beside the
    # terms that were added up.
    terms = {"amplitude": float((exact["gate"] * case.tensors["gate"]).norm()), "q": float(exact["v"].norm())}
    terms["k"] = terms["q"]
    for key, value in exact.items():
        assert got[key].isfinite().all(), key
        error = (got[key].double() - value).norm()
        assert error < bound * max(float(value.norm()), terms.get(key, 0.0), 1e-5), key
    gape.gated_attention(**case.tensors, **case.options, impl="split", strict=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pieces_keep_the_bias_over_a_thousand_tokens(dtype: torch.dtype) -> None:
    """What short cases cannot show: without its second piece a distance of hundreds is off by whole tokens."""
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "n_q": 2048, "n_k": 2048, "dim": 58, "value_dim": 64}
    case = on_gpu(random_case(**sizes, strength=200.0, context_length=1024), dtype)
    q, k, v = (case.tensors[n] for n in "qkv")
    plain = distance(attention(q, k, v), attention(q.double(), k.double(), v.double()))
    leaves = case.leaves()
    exact = gape.gated_attention(**{n: x.double() for n, x in case.tensors.items()}, **case.options, impl="reference")
    for learning in (case.tensors, leaves):
        out = gape.gated_attention(**learning, **case.options, impl="split").detach()
        assert distance(out, exact) < 2 * plain


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_stays_out_of_the_bias(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "n_q": 64, "n_k": 65536, "dim": 64, "value_dim": 64}
    case = on_gpu(random_case(**sizes, strength=100.0, context_length=1024), torch.float32)
    plan = gape.explain(**case.tensors, **case.options)
    assert plan.impl == ("split" if tf32 else "rank2")
    q, k, v = (case.tensors[n] for n in "qkv")
    plain = distance(attention(q, k, v), attention(q.double(), k.double(), v.double()))
    exact = gape.gated_attention(**{n: x.double() for n, x in case.tensors.items()}, **case.options, impl="reference")
    error = distance(gape.gated_attention(**case.tensors, **case.options), exact)
    assert error < max(2 * plain, 1e-3)


@pytest.mark.parametrize("layout", ["causal", "packed"])
def test_memory_is_linear(layout: str) -> None:
    peaks = []
    for n in (4096, 16384):
        sizes = {"batch": 1, "heads": 8, "kv_heads": 2, "n_q": n, "n_k": n, "dim": 64, "value_dim": 64}
        options = {}
        if layout == "packed":
            documents = (torch.arange(n) // 1000)[None]
            options = {"q_documents": documents, "k_documents": documents}
        case = on_gpu(random_case(**sizes, context_length=1024, **options), torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            gape.gated_attention(**case.tensors, **case.options, impl="split")
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 6 * peaks[0]


def test_gradients_do_not_depend_on_how_an_earlier_one_was_laid_out() -> None:
    """cuDNN plans a backward pass for the layout of the first gradient it sees."""
    q, k, v = (torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    for rows in (512, 4096, 8192):
        grad = torch.randn(1, 2, rows, 64, device="cuda", dtype=torch.bfloat16)[:, :, :512]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        got = torch.autograd.grad(attention(*leaves), leaves, grad)
        wanted = torch.autograd.grad(attention(*exact), exact, grad.double())
        for name, a, b in zip("qkv", got, wanted, strict=True):
            assert distance(a, b) < 1e-2, (rows, name)


@pytest.mark.parametrize("impl", ["split", "triton"])
def test_compiled_equals_eager(impl: str) -> None:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "n_q": 2048, "n_k": 2048, "dim": 58, "value_dim": 64}
    case = on_gpu(random_case(**sizes, strength=20.0, context_length=1024), torch.bfloat16)
    leaves = case.leaves()

    def operator(**tensors: torch.Tensor) -> torch.Tensor:
        return gape.gated_attention(**tensors, **case.options, scale=0.125, impl=impl)

    outs = [operator(**leaves), torch.compile(operator, fullgraph=True)(**leaves)]
    grads = [torch.autograd.grad(out.float().square().sum(), list(leaves.values())) for out in outs]
    assert distance(outs[1].detach(), outs[0].detach()) < 5e-3
    for name, a, b in zip(leaves, *grads, strict=True):
        assert distance(b, a) < 2e-2, name


@pytest.mark.parametrize(("impl", "n_q", "eps"), [("triton", 4096, 0.0), ("triton", 4096, 1e-3), ("decode", 1, 0.0)])
def test_tensors_that_reach_beyond_two_to_the_31_elements(impl: str, n_q: int, eps: float) -> None:
    n, far = 4096, 2**20
    memory = torch.empty(3, n * far, device="cuda", dtype=torch.bfloat16)
    strided = [row.as_strided((1, 1, n, 64), (0, 0, far, 1)).normal_() for row in memory]
    gate, landmark = torch.rand(1, 1, n_q, device="cuda"), torch.rand(1, 1, n, device="cuda")
    strided[0] = strided[0][:, :, n - n_q :]
    assert max(x.storage_offset() + (x.size(2) - 1) * x.stride(2) for x in strided) > 2**31
    outs = []
    for tensors in (strided, [x.contiguous() for x in strided]):
        leaves = [x.detach().requires_grad_(impl == "triton") for x in tensors]
        amplitude, options = torch.ones(1, device="cuda"), {"context_length": 64, "impl": impl, "eps": eps}
        out = gape.gated_attention(*leaves, gate, landmark, amplitude, **options)
        outs.append([out, *(torch.autograd.grad(out.sum(), leaves) if impl == "triton" else ())])
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("dim", "dtype", "eps"),
    [
        (64, torch.bfloat16, 0.0),
        (80, torch.bfloat16, 0.0),
        (96, torch.bfloat16, 0.0),
        (96, torch.float16, 0.0),
        (96, torch.bfloat16, 1e-6),
        (128, torch.bfloat16, 0.0),
        (128, torch.bfloat16, 1e-6),
    ],
    ids=str,
)
def test_logits_far_above_those_at_the_diagonal(dim: int, dtype: torch.dtype, eps: float) -> None:
    """The loop that is seldom run: compilers have read wrong rows in it where heads are taken in two parts."""
    case = on_gpu(random_case(batch=1, heads=2, kv_heads=1, n_q=1100, n_k=1500, dim=dim, strength=0.1), dtype)
    case.tensors["k"][:, :, 3] *= 60.0
    options = case.options | {"impl": "reference"}
    exact = gape.gated_attention(**{n: x.double() for n, x in case.tensors.items()}, **options)
    got = gape.gated_attention(**case.tensors, **case.options | {"impl": "triton", "eps": eps})
    assert distance(got, exact) < 1e-2
