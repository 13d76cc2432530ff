"""ALiBi, T5, KERPLE, FIRE and GRAPE against the owners of their definitions or slow loops over the papers' formulas."""

import math

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from gape.positions import Scheme, build
from gape.positions.biases import T5, slopes

Q = torch.tensor([[0, 5, 700, -3], [40, 900, 1, 2]])
K = torch.tensor([[0, 4, 699, -9, 12], [40, 0, 901, 1, 30]])


def make(name: str, n_heads: int = 3, **options: object) -> Scheme:
    torch.manual_seed(0)
    return build(name, n_heads=n_heads, head_dim=8, **options).requires_grad_(False)


def dense_attention(scheme: Scheme, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax over explicit logits, for tokens 0 … N − 1."""
    positions = torch.arange(q.size(2))
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = 0.3 * q @ k.mT + scheme.bias(positions, positions).to(q.dtype)
    future = positions[None, :] > positions[:, None]
    return logits.masked_fill(future, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "fire"])
def test_attend_uses_the_bias(name: str) -> None:
    scheme = make(name, n_heads=4, n_kv_heads=2).double()
    q, k, v = (torch.randn(2, heads, 40, 8, dtype=torch.float64) for heads in (4, 2, 2))
    got = scheme.attend(q, k, v, None, None, scale=0.3)
    torch.testing.assert_close(got, dense_attention(scheme, q, k, v), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 16, 20, 31])
def test_alibi_slopes_of_bloom(n_heads: int) -> None:
    # At position 1 Bloom's tensor holds the slopes themselves.
    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(slopes(n_heads)), theirs, rtol=1e-6, atol=0.0)


def test_alibi_bias() -> None:
    bias = make("alibi").bias(Q, K)
    assert bias.shape == (2, 3, 4, 5)
    assert bias.dtype == torch.float32
    assert float(bias[1, 2, 1, 0]) == pytest.approx(-slopes(3)[2] * 860)


@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (16, 100), (64, 300), (32, 256)])
def test_t5_buckets(n_buckets: int, max_distance: int) -> None:
    scheme = make("t5", n_buckets=n_buckets, max_distance=max_distance)
    assert isinstance(scheme, T5)
    away = torch.arange(-20, 5000)
    theirs = T5Attention._relative_position_bucket(
        -away, bidirectional=False, num_buckets=n_buckets, max_distance=max_distance
    )
    assert torch.equal(scheme.buckets(away), theirs)


def test_t5_bias_is_the_table() -> None:
    scheme = make("t5")
    bias = scheme.bias(Q, K)
    assert bias.shape == (2, 3, 4, 5)
    assert torch.equal(bias[0, :, 1, 1], scheme.table[1])
    assert torch.equal(bias[1, :, 1, 1], scheme.table[31])
    assert torch.equal(bias[1, :, 2, 2], scheme.table[0])


@pytest.mark.parametrize("variant", ["log", "power"])
def test_kerple(variant: str) -> None:
    scheme = make("kerple", variant=variant)
    bias = scheme.bias(Q, K)
    assert bias.shape == (2, 3, 4, 5)
    for b in range(2):
        for h in range(3):
            r1 = math.log1p(math.exp(float(scheme.raw_r1[h])))
            raw = float(scheme.raw_r2[h])
            r2 = 2 / (1 + math.exp(-raw)) if variant == "power" else math.log1p(math.exp(raw))
            assert 0 < r1 < 2
            assert 0 < r2 < 2
            for i in range(4):
                for j in range(5):
                    away = abs(int(Q[b, i]) - int(K[b, j]))
                    want = -r1 * (away**r2 if variant == "power" else math.log(1 + r2 * away))
                    assert float(bias[b, h, i, j]) == pytest.approx(want, rel=2e-5, abs=1e-6)


def test_fire() -> None:
    scheme = make("fire", hidden=5, init_c=0.2, init_threshold=300.0)
    assert float(scheme.c) == pytest.approx(0.2, rel=1e-6)
    assert float(scheme.threshold) == pytest.approx(300.0, rel=1e-6)
    bias = scheme.bias(Q, K)
    assert bias.shape == (2, 3, 4, 5)

    def psi(x: float) -> float:
        return math.log(0.2 * x + 1)

    for b in range(2):
        for i in range(4):
            for j in range(5):
                x = psi(abs(int(Q[b, i]) - int(K[b, j]))) / psi(max(300.0, int(Q[b, i])))
                inner = [
                    max(0.0, float(w) * x + float(a))
                    for w, a in zip(scheme.inner_weight, scheme.inner_bias, strict=True)
                ]
                for h in range(3):
                    want = sum(float(w) * a for w, a in zip(scheme.outer_weight[h], inner, strict=True))
                    want += float(scheme.outer_bias[h])
                    assert float(bias[b, h, i, j]) == pytest.approx(want, abs=2e-6)


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "fire"])
def test_bias_stays_float32(name: str) -> None:
    scheme = make(name)
    want = scheme.bias(Q, K)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scheme.bias(Q, K), want)
    assert scheme.bfloat16().bias(Q, K).dtype == torch.float32


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "fire"])
def test_one_row_of_positions_for_the_whole_batch(name: str) -> None:
    scheme = make(name)
    assert torch.equal(scheme.bias(Q[0], K[0]), scheme.bias(Q, K)[:1])


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grape_is_the_formula_of_its_authors(n_kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scheme = build("grape", n_heads=4, n_kv_heads=n_kv_heads, head_dim=8, init_omega=0.7).requires_grad_(False)
    q, k, v = (torch.randn(2, heads, 40, 8, dtype=dtype) for heads in (4, n_kv_heads, n_kv_heads))
    got = scheme.attend(q, k, v, None, None, scale=0.3)
    for b in range(2):
        for h in range(4):
            own, other, value = q[b, h].double(), *(x[b, h * n_kv_heads // 4].double() for x in (k, v))
            a, u = (x[h].double() / x[h].double().norm() for x in (scheme.query_direction, scheme.key_direction))
            # Slopes of four heads: 1/4, 1/16, 1/64, 1/256.
            omega = 0.7 * 4.0 ** -(h + 1)
            for i in range(40):
                rates = [
                    math.log1p(math.exp(float(a @ own[i]) / 8**0.5)) + math.log1p(math.exp(float(u @ key) / 8**0.5))
                    for key in other[: i + 1]
                ]
                penalty = torch.tensor([(i - j) * omega * rate for j, rate in enumerate(rates)], dtype=torch.float64)
                want = torch.softmax(0.3 * other[: i + 1] @ own[i] - penalty, 0) @ value[: i + 1]
                torch.testing.assert_close(got[b, h, i].double(), want, rtol=1e-4, atol=2e-6)
