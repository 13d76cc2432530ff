"""The coordinates of the bias as kernels write them against torch's numbers; in the interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from gape.ops import columns
from gape.ops.columns import UNIT, significand_bits

pytest.importorskip("triton")
import triton
import triton.language as tl

from gape.ops.triton.split_bias import split_bias

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.125


@triton.jit
def _write_kernel(
    x_ptr, position_ptr, out_ptr, N: tl.constexpr, QUERIES: tl.constexpr, BITS: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    near = tl.arange(0, N)
    position = tl.load(position_ptr + near).to(tl.float32)
    c0, c1, c2, c3, c4, c5 = split_bias(tl.load(x_ptr + near), position, 0, 0, QUERIES, 1, BITS, LIMIT)
    tl.store(out_ptr + near * 6, c0)
    tl.store(out_ptr + near * 6 + 1, c1)
    tl.store(out_ptr + near * 6 + 2, c2)
    tl.store(out_ptr + near * 6 + 3, c3)
    tl.store(out_ptr + near * 6 + 4, c4)
    tl.store(out_ptr + near * 6 + 5, c5)


def written(x: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype, *, queries: bool) -> torch.Tensor:
    """Coordinates (N, 6) in `dtype` for rates of queries or exposures of keys."""
    out = torch.full((len(x), 6), float("nan"), device=DEVICE)
    bits, limit = significand_bits(torch.empty(0, dtype=dtype)), torch.finfo(dtype).max / 2
    x = x * (UNIT / SCALE) if queries else x
    _write_kernel[(1,)](x, positions, out, len(x), queries, bits, limit, enable_fp_fusion=False)
    return out.to(dtype)


POSITIONS = {
    "far": torch.arange(16) + 131_000,
    "anywhere": torch.randint(0, 2**22, (16,), generator=torch.Generator().manual_seed(0)),
    "negative": -torch.arange(16),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize(("dtype", "strength"), [(torch.bfloat16, 50.0), (torch.float16, 50.0), (torch.float16, 1e6)])
def test_numbers_are_those_of_torch(dtype: torch.dtype, strength: float, positions: torch.Tensor) -> None:
    """Bit for bit, also where a rate saturates."""
    positions, g = positions.to(DEVICE), torch.Generator().manual_seed(0)
    rate, exposure = torch.rand(16, generator=g).to(DEVICE) * strength, torch.rand(16, generator=g).to(DEVICE)
    exposure[:3] = torch.tensor([0.0, 0.5, 1.0])
    bits = significand_bits(torch.empty(0, dtype=dtype))
    expected = columns.query_columns(rate[None, None], [positions], SCALE, dtype, bits)[0, 0]
    assert torch.equal(written(rate, positions, dtype, queries=True), expected)
    expected = columns.key_columns(exposure[None, None], [positions], dtype, bits)[0, 0]
    assert torch.equal(written(exposure, positions, dtype, queries=False), expected)


@pytest.mark.parametrize("queries", [True, False], ids=["queries", "keys"])
def test_what_is_not_a_number_stays_so(queries: bool) -> None:
    """Also where every bit of it is set, as a GPU writes it: rounding that up would give zero."""
    broken = torch.full((16,), 2**31 - 1, dtype=torch.int32, device=DEVICE).view(torch.float32)
    got = written(broken, torch.arange(16, device=DEVICE), torch.float16, queries=queries)
    assert got.isnan().any(-1).all()
