"""The kernel that joins content and bias against torch's way, number for number; in the interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from gape.ops import carried, columns
from gape.ops.rounding import significand_bits

pytest.importorskip("triton")
from gape.ops.triton import carry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

POSITIONS = {
    "far": torch.arange(20) + 131_000,
    "each sample its own": torch.randint(0, 2**22, (2, 20), generator=torch.Generator().manual_seed(0)),
    "negative": -torch.arange(20),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize(("dtype", "strength"), [(torch.bfloat16, 50.0), (torch.float16, 50.0), (torch.float16, 1e6)])
def test_numbers_are_those_of_torch(dtype: torch.dtype, strength: float, positions: torch.Tensor) -> None:
    g = torch.Generator().manual_seed(0)
    # Heads beside tokens in memory, as a projection leaves them.
    x = torch.randn(2, 20, 3, 58, generator=g).to(DEVICE, dtype).transpose(1, 2)
    gate, landmark = (torch.rand(2, 3, 20, generator=g).to(DEVICE) for _ in range(2))
    landmark[0, 0, :3] = torch.tensor([0.0, 0.5, 1.0])
    amplitude, positions = torch.rand(3, generator=g).to(DEVICE) * strength, positions.to(DEVICE)
    bits, width = significand_bits(x), 72
    keys = columns.key_columns(1 - landmark, [positions], dtype, bits)
    assert torch.equal(carry.joined_keys(x, landmark, positions, width), carried._joined(x, keys, width))
    queries = columns.query_columns(amplitude[:, None] * gate / 1024, [positions], 0.125, dtype, bits)
    got = carry.joined_queries(x, gate, amplitude, positions, width, context_length=1024, scale=0.125)
    assert torch.equal(got, carried._joined(x, queries, width))
