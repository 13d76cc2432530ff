"""FoX against flash-linear-attention's definition of forgetting attention."""

import pytest
import torch

from gape.positions import build
from gape.positions.biases import FoX

naive_forgetting_attn = pytest.importorskip("fla.ops.forgetting_attn.naive").naive_forgetting_attn


def make(n_kv_heads: int = 2, **options: object) -> FoX:
    torch.manual_seed(0)
    scheme = build("fox", n_heads=4, n_kv_heads=n_kv_heads, head_dim=8, n_embd=12, **options)
    assert isinstance(scheme, FoX)
    torch.nn.init.normal_(scheme.forget.weight)
    return scheme.requires_grad_(False)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_definition_of_fla(n_kv_heads: int, dtype: torch.dtype) -> None:
    scheme = make(n_kv_heads=n_kv_heads)
    x = torch.randn(2, 50, 12, dtype=dtype)
    q, k, v = (torch.randn(2, heads, 50, 8, dtype=dtype) for heads in (4, n_kv_heads, n_kv_heads))
    log_f = torch.nn.functional.logsigmoid(x @ scheme.forget.weight.to(dtype).T + scheme.forget.bias.to(dtype))
    want = naive_forgetting_attn(*(t.transpose(1, 2) for t in (q, k, v)), log_f, scale=0.3).transpose(1, 2)
    positions = torch.arange(50)
    k, total = scheme.keys(k, positions, x)
    got = scheme.attend(q, k, v, None, total, scale=0.3)
    torch.testing.assert_close(got, want.to(dtype), rtol=1e-4, atol=2e-5)


def test_sum_is_float64_and_continues() -> None:
    scheme = make(init_forget_bias=4.0).bfloat16()
    x, positions = torch.randn(2, 3000, 12).bfloat16(), torch.arange(3000)
    k = torch.randn(2, 2, 3000, 8).bfloat16()
    _, whole = scheme.keys(k, positions, x)
    assert whole.dtype == torch.float64
    assert whole.shape == (2, 4, 3000)
    _, first = scheme.keys(k[:, :, :1999], positions[:1999], x[:, :1999])
    _, second = scheme.keys(k[:, :, 1999:], positions[1999:], x[:, 1999:], past=first)
    torch.testing.assert_close(torch.cat((first, second), -1), whole, rtol=1e-6, atol=0.0)


def test_autocast_does_not_shorten_the_sum() -> None:
    scheme = make()
    k, x, positions = torch.randn(1, 2, 9, 8), torch.randn(1, 9, 12), torch.arange(9)
    _, want = scheme.keys(k, positions, x)
    with torch.autocast("cpu", torch.bfloat16):
        _, got = scheme.keys(k, positions, x)
    assert torch.equal(got, want)


def test_starts_at_the_authors_bias() -> None:
    fresh = build("fox", n_heads=2, head_dim=8, n_embd=4)
    assert torch.equal(fresh.forget.bias, torch.zeros(2))
    log_f = fresh.forget(torch.zeros(1, 1, 4))
    torch.testing.assert_close(log_f.exp(), torch.full((1, 2, 1), 0.5))


def test_decay_is_kept_in_half_precision() -> None:
    scheme = make(init_forget_bias=5.0)
    x, positions = torch.randn(1, 2048, 12) * 0.1, torch.arange(2048)
    q, k, v = (torch.randn(1, heads, 2048, 8).bfloat16() for heads in (4, 2, 2))
    _, total = scheme.keys(k, positions, x)
    want = scheme.attend(q.double(), k.double(), v.double(), None, total, scale=0.3)
    got = scheme.attend(q, k, v, None, total, scale=0.3).double()
    assert float((got - want).norm() / want.norm()) < 0.01


def test_refusals() -> None:
    with pytest.raises(ValueError, match="n_embd"):
        build("fox", n_heads=2, head_dim=8)
    with pytest.raises(ValueError, match="x: "):
        make().keys(torch.randn(1, 2, 3, 8), torch.arange(3))
    with pytest.raises(ValueError, match="k_side"):
        make().attend(*torch.randn(3, 1, 2, 3, 8), None, None, scale=1.0)
