"""Running maxima over queries: by the kernel and by PyTorch, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from gape.ops.query_range import measure_queries

pytest.importorskip("triton")
from gape.ops.triton import query_range

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.3
#: Where pads are possible, PyTorch measures.
REAL = torch.ones(1, 70, dtype=torch.bool, device=DEVICE)


def measured(run: object, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    reach, own = torch.zeros(q.size(1), device=DEVICE), torch.full((q.size(1),), -torch.inf, device=DEVICE)
    run(q, k, reach, own, scale=SCALE)  # type: ignore[operator]
    return reach, own


@pytest.mark.parametrize(
    ("heads", "n", "dim", "dtype"),
    [((4, 2), 1, 64, torch.float16), ((3, 3), 300, 24, torch.float32), ((6, 2), 600, 80, torch.float16)],
)
def test_maxima_are_those_of_the_definition(heads: tuple[int, int], n: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, n, h, dim, device=DEVICE).to(dtype).transpose(1, 2) for h in heads)
    wide_q, wide_k = q.double(), k.double().repeat_interleave(heads[0] // heads[1], dim=1)
    want = SCALE * wide_q.norm(dim=-1).amax((0, 2)), (-SCALE * (wide_q * wide_k).sum(-1)).amax((0, 2))
    for run in (measure_queries, query_range.measure_queries):
        for actual, expected in zip(measured(run, q, k), want, strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", [query_range.measure_queries, partial(measure_queries, real=REAL)])
def test_what_is_known_stays_and_what_is_no_number_is_infinite(run: Callable[..., None]) -> None:
    q, k = (torch.ones(1, 2, 70, 16, device=DEVICE, dtype=torch.float16) for _ in range(2))
    q[0, 1, 65, 3] = torch.nan
    reach, own = torch.full((2,), 100.0, device=DEVICE), torch.full((2,), 50.0, device=DEVICE)
    run(q, k, reach, own, scale=SCALE)
    assert reach.tolist() == [100.0, torch.inf]
    assert own.tolist() == [50.0, torch.inf]
