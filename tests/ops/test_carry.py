"""The kernel that joins content and bias against torch's way, number for number; in the interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from gape.ops import carried, columns
from gape.ops.columns import significand_bits

pytest.importorskip("triton")
from gape.ops.triton import split_bias

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
    assert torch.equal(split_bias.augmented_keys(x, landmark, positions, width), carried._joined(x, keys, width))
    queries = columns.query_columns(amplitude[:, None] * gate / 1024, [positions], 0.125, dtype, bits)
    got = split_bias.augmented_queries(x, gate, amplitude, positions, width, context_length=1024, scale=0.125)
    assert torch.equal(got, carried._joined(x, queries, width))


def test_what_is_not_a_number_stays_so() -> None:
    """Also where every bit of it is set, as a GPU writes it: rounding that up would give zero."""
    x = torch.zeros(1, 2, 3, 16, dtype=torch.float16, device=DEVICE)
    broken = torch.full((1, 2, 3), 2**31 - 1, dtype=torch.int32, device=DEVICE).view(torch.float32)
    one, where = torch.ones(2, device=DEVICE), torch.arange(3, device=DEVICE)
    queries = split_bias.augmented_queries(x, broken, one, where, 24, context_length=1024, scale=0.125)
    keys = split_bias.augmented_keys(x, broken, where, 24)
    assert queries[..., 19:22].isnan().all()
    assert keys[..., 16:19].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "far"), [(torch.bfloat16, 2**24), (torch.float16, 2**23), (torch.bfloat16, -(2**40))]
)
def test_positions_that_cannot_be_carried_are_not_a_number(dtype: torch.dtype, far: int) -> None:
    x, side = torch.zeros(1, 2, 2, 16, dtype=dtype, device=DEVICE), torch.full((1, 2, 2), 0.5, device=DEVICE)
    one, where = torch.ones(2, device=DEVICE), torch.tensor([7, far], device=DEVICE)
    queries = split_bias.augmented_queries(x, side, one, where, 24, context_length=1024, scale=0.125)
    for rows in (queries, split_bias.augmented_keys(x, side, where, 24)):
        assert rows.isnan().any(-1).tolist() == [[[False, True]] * 2]
