"""Additive GRAPE against the authors' formula, written out in float64."""

import math

import pytest
import torch

from gape.positions import build
from gape.positions.grape import GRAPE


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_formula_of_the_authors(n_kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scheme = build("grape", n_heads=4, n_kv_heads=n_kv_heads, head_dim=8, init_omega=0.7).requires_grad_(False)
    assert isinstance(scheme, GRAPE)
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
