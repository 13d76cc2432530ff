"""`split` with columns that one kernel writes, on a CUDA device: bfloat16, fused backends, compiled, large tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gape
from gape.ops import attention, columns
from tests.ops.cases import Case, random_case

pytest.importorskip("triton")
from gape.ops.triton.augment import augment

pytestmark = pytest.mark.gpu
HEADS = {64: (4, 4), 80: (4, 2), 96: (3, 3), 112: (4, 1), 128: (4, 2)}
SCALE = 0.125


def drawn(dim: int, dtype: torch.dtype, n: int = 2048, strength: float = 20.0) -> Case:
    heads, kv_heads = HEADS[dim]
    case = random_case(
        batch=1, heads=heads, kv_heads=kv_heads, n_q=n, n_k=n, dim=dim, value_dim=dim, strength=strength,
        context_length=1024,
    )  # fmt: skip
    tensors = {name: x.cuda().to(dtype if name in "qkv" else torch.float32) for name, x in case.tensors.items()}
    return Case(tensors, case.options)


def distance(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", HEADS)
def test_errors_are_those_of_plain_attention(dim: int, dtype: torch.dtype) -> None:
    """Outputs and gradients at most twice as far from float64; gates' within 2%, and no matrix of logits.

    The amplitude's gradient adds up those of gates times g / Γ, and may cancel. What a backward pass rounds in each row
    of dq is independent of the others', so it may be off by a few standard deviations of that sum, and no more.
    """
    case = drawn(dim, dtype)
    g = torch.Generator("cuda").manual_seed(0)
    cotangent = torch.randn(case.tensors["q"].shape, generator=g, device="cuda").to(dtype)
    plain, exact_plain, split, exact = (), (), (), ()
    for raised in (False, True):
        leaves = {name: x.double() if raised else x for name, x in case.leaves().items()}
        qkv = [leaves[name] for name in "qkv"]
        out = attention(*qkv)
        bare = [out.detach(), *torch.autograd.grad(out, qkv, cotangent.to(out.dtype))]
        impl = "reference" if raised else "split"
        out = gape.gated_attention(**leaves, **case.options, impl=impl)
        gated = [out.detach(), *torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype))]
        if raised:
            exact_plain, exact = bare, gated
        else:
            plain, split = bare, gated
    for got, right, got_plain, right_plain in zip(split, exact, plain, exact_plain, strict=False):
        assert distance(got, right) <= 2 * distance(got_plain, right_plain)
    for got, right in zip(split[4:6], exact[4:6], strict=True):
        assert distance(got, right) < 0.02
    errors = (split[4].double() - exact[4]) * case.tensors["gate"] / case.tensors["amplitude"][:, None]
    deviation = errors.square().sum(dim=(0, 2)).sqrt()
    assert ((split[6].double() - exact[6]).abs() < 4 * deviation).all()
    plan = gape.explain(**case.leaves(), **case.options, impl="split")
    assert not plan.quadratic
    assert plan.width == dim + 8
    gape.gated_attention(**case.tensors, **case.options, impl="split", strict=True)


@pytest.mark.parametrize("n", [1, 17, 1000, 5000])
def test_lengths_and_training_in_chunks(n: int) -> None:
    case = drawn(80, torch.bfloat16, n)
    leaves = case.leaves()
    out = gape.gated_attention(**leaves, **case.options, impl="split")
    exact = gape.gated_attention(**{k: x.double() for k, x in case.tensors.items()}, **case.options, impl="reference")
    assert distance(out.detach(), exact) < 5e-3
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.float().sum(), list(leaves.values())))


def test_compiled_equals_eager() -> None:
    case = drawn(96, torch.bfloat16)

    def operator(**tensors: Tensor) -> Tensor:
        return gape.gated_attention(**tensors, **case.options, impl="split")

    torch._dynamo.reset()
    leaves = case.leaves()
    outs = [operator(**leaves), torch.compile(operator, fullgraph=True)(**leaves)]
    grads = [torch.autograd.grad(out.float().square().sum(), list(leaves.values())) for out in outs]
    assert distance(outs[1].detach(), outs[0].detach().double()) < 5e-3
    for name, a, b in zip(leaves, *grads, strict=True):
        assert distance(b, a.double()) < 2e-2, name


def test_rows_beyond_two_to_the_31_numbers() -> None:
    n, last = 2**23, 64
    q = torch.empty(1, 4, n, 64, device="cuda", dtype=torch.bfloat16).normal_()
    # Rows far apart in memory, too.
    k = torch.empty(last, 2**26, device="cuda", dtype=torch.bfloat16)[None, None, :, :64].normal_()
    rate = torch.rand(1, 4, n, device="cuda").requires_grad_()
    exposure = torch.rand(1, 1, last, device="cuda")
    rows, keys = augment(q, k, rate, exposure, columns.UNIT / SCALE, 1, -(n // 2), n, 0, 0)
    assert min(rows.numel(), k.stride(2) * last) > 2**31
    i = torch.arange(n - last, n, device="cuda") - n // 2
    part = rate[:, :, -last:].detach().requires_grad_()
    want = columns.query_columns(part, [i], SCALE, q.dtype, 8)
    assert torch.equal(rows[:, :, -last:, :70], torch.cat([q[:, :, -last:], want], -1))
    want_keys = columns.key_columns(exposure, [torch.arange(last, device="cuda") - n // 2], k.dtype, 8)
    assert torch.equal(keys[..., :70], torch.cat([k, want_keys], -1))
    grad = torch.empty_like(rows).normal_()
    (got,) = torch.autograd.grad(rows, rate, grad)
    (exact,) = torch.autograd.grad(want, part, grad[:, :, -last:, 64:70])
    torch.testing.assert_close(got[:, :, -last:], exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
