"""What tiles are judged by, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from gape.ops.triton.configs import tiles_for
from gape.ops.triton.tiles import LOG2E, SLACK, bounds
from tests.ops.test_prologue import DEVICE, DTYPES

SCALE = 0.3


@pytest.mark.parametrize(("n", "dtype"), [(1, DTYPES[0]), (127, DTYPES[1]), (300, DTYPES[0])])
def test_norms_and_exposures_of_rows_and_tiles(n: int, dtype: torch.dtype) -> None:
    """To the last bits of float32, and never below; rows of any strides."""
    q = torch.randn(2, n, 4, 20, device=DEVICE, dtype=dtype).transpose(1, 2)
    k = torch.randn(2, 2, 20, n, device=DEVICE, dtype=dtype).transpose(2, 3)
    u = torch.rand(2, 2, n, device=DEVICE)
    reach, k_reach, u_least = bounds(q, k, k, u, SCALE)
    q_norms, k_norms = (torch.linalg.vector_norm(x.double(), dim=-1) for x in (q, k))
    size = tiles_for(q, k, "fwd", skip=True)["BLOCK_N"]
    longest = torch.stack([tile.amax(-1) for tile in k_norms.split(size, -1)], -1)
    for got, norms in ((reach, q_norms * SCALE * LOG2E), (k_reach, longest)):
        assert (got.double() >= norms).all()
        torch.testing.assert_close(got.double(), norms * SLACK, rtol=2e-6, atol=0)
    assert torch.equal(u_least, torch.stack([tile.amin(-1) for tile in u.split(size, -1)], -1))


def test_what_is_not_a_number_keeps_its_tile() -> None:
    q, u = torch.randn(1, 2, 130, 16, device=DEVICE), torch.rand(1, 2, 130, device=DEVICE)
    k = q.clone()
    q[0, 0, 5, 3] = k[0, 1, 70, 4] = u[0, 0, 129] = torch.nan
    reach, k_reach, u_least = bounds(q, k, k, u, SCALE)
    size = tiles_for(q, k, "fwd", skip=True)["BLOCK_N"]
    assert reach.isnan().nonzero().tolist() == [[0, 0, 5]]
    assert (~k_reach.isfinite()).nonzero().tolist() == [[0, 1, 70 // size]]
    assert (~(u_least >= 0)).nonzero().tolist() == [[0, 0, 129 // size]]
