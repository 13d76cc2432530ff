"""Attention without gates: torch's own, the same pairs as the operator, and biases that stay exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import gape
from gape.ops import attention, sdpa
from gape.ops.inputs import Visibility
from tests.ops.cases import layouts, random_case

LAYOUTS = layouts()


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_operator_without_gates(name: str) -> None:
    case = LAYOUTS[name]
    options = {n: x for n, x in case.options.items() if n != "context_length"}
    tensors = case.tensors | {"gate": torch.zeros_like(case.tensors["gate"])}
    expected = gape.gated_attention(**tensors, **case.options, impl="reference")
    q, k, v = (case.tensors[n] for n in "qkv")
    torch.testing.assert_close(attention(q, k, v, **options), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 5e-3), (torch.float16, 6e-4)])
@pytest.mark.parametrize("decay", [0.01, 5.0])
def test_key_bias_is_exact_however_large_it_grows(dtype: torch.dtype, bound: float, decay: float) -> None:
    """A cumulative decay of up to 40,960 logits, of which only differences between near keys matter."""
    case = random_case(batch=1, heads=4, kv_heads=2, n_q=50, n_k=8192, dim=64, value_dim=64, dtype=dtype)
    q, k, v = (case.tensors[n] for n in "qkv")
    g = torch.Generator().manual_seed(5)
    key_bias = (decay * torch.rand(1, 4, 8192, generator=g, dtype=torch.float64)).cumsum(-1)
    full = [x.double().repeat_interleave(4 // x.size(1), 1) for x in (q, k, v)]
    mask = torch.ones(50, 8192).tril(8192 - 50).bool()
    logits = key_bias[:, :, None] - key_bias[..., -1:, None]
    exact = F.scaled_dot_product_attention(*full, attn_mask=logits.masked_fill(~mask, -torch.inf), scale=0.125)
    for given in (key_bias, key_bias.float()) if dtype != torch.float64 else (key_bias,):
        error = (attention(q, k, v, key_bias=given).double() - exact).norm() / exact.norm()
        assert error < bound


def test_bias_function_is_called_on_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gape.ops.sdpa.MASK_ROWS", 20)
    case = random_case()
    q, k, v = (case.tensors[n] for n in "qkv")
    shapes = []

    def bias(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        shapes.append((len(i), len(j)))
        return -0.1 * (i[:, None] - j[None, :])[None, None].double()

    out = attention(q, k, v, bias=bias)
    assert shapes == [(20, 20), (20, 40), (20, 60), (3, 63)]
    alibi = {"gate": torch.ones(2, 4, 63), "landmark": torch.zeros(2, 2, 63), "amplitude": torch.full((4,), 0.1)}
    expected = gape.gated_attention(q, k, v, **{n: x.double() for n, x in alibi.items()}, context_length=1)
    torch.testing.assert_close(out, expected, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("value", [torch.zeros(2, 2, 63), torch.zeros(2, 4, 63).long(), 1.0])
def test_wrong_key_bias_is_named(value: object) -> None:
    case = random_case()
    with pytest.raises(ValueError, match=r"^key_bias: "):
        attention(*(case.tensors[n] for n in "qkv"), key_bias=value)


@pytest.mark.parametrize(
    ("shape", "first", "copied"),
    [((2, 5, 112), 72, False), ((2, 5, 112), 78, True), ((2, 5, 110), 72, True), ((1, 1, 112), 78, True)],
)
def test_a_gpu_gets_rows_that_begin_at_16_bytes(
    shape: tuple[int, ...], first: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    v = torch.randn(shape).half()[..., first : first + 32].unsqueeze(1)
    visibility = Visibility(n_q=shape[1], n_k=shape[1], device=v.device)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    taken = sdpa.prepare(v, v, v, visibility, 1.0).v
    assert torch.equal(taken, v)
    assert (taken.data_ptr() != v.data_ptr()) == copied
    assert taken.storage_offset() % 8 == 0
    assert taken.stride(2) % 8 == 0


@pytest.mark.parametrize(
    ("tokens", "heads", "content"),
    [((2, 5), 2, 26), ((2, 5), 4, 26), ((1, 5), 2, 26), ((2, 1), 2, 26), ((1, 1), 2, 26), ((1, 1), 1, 28)],
)
def test_values_of_a_projection_are_aligned_where_strides_alone_are_known(
    tokens: tuple[int, int], heads: int, content: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a compiler sees them: behind keys whose heads gave coordinates up, which may leave them anywhere."""
    told = torch.randn(*tokens, heads * (content + 32)).half()
    v = told.split([heads * content, heads * 32], dim=-1)[1].reshape(*tokens, heads, 32).transpose(1, 2)
    visibility = Visibility(n_q=tokens[1], n_k=tokens[1], device=v.device)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    taken = sdpa.prepare(v, v, v, visibility, 1.0).v
    assert torch.equal(taken, v)
    assert taken.storage_offset() % 8 == 0


@pytest.mark.parametrize("strides", [(1280, 64, 128, 1), (0, 0, 0, 0), (3000, 1500, 64, 1)])
def test_a_gradient_is_laid_out_as_its_tensor(strides: tuple[int, ...]) -> None:
    """Whatever it comes from: heads side by side, a sum, a part of a longer one."""
    taken = []
    x = torch.randn(2, 10, 2, 64).transpose(1, 2).requires_grad_()
    y = x * 1
    y.register_hook(taken.append)
    grad = torch.randn(6000).as_strided((2, 2, 10, 64), strides)
    sdpa.SameLayout.apply(y).backward(grad)
    assert taken[0].stride() == y.stride()
    assert torch.equal(taken[0], grad)
    assert (taken[0].data_ptr() == grad.data_ptr()) == (strides == y.stride())
