"""Landmarks and positions that travel inside keys come back exactly."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from gape.hf.packing import columns, furthest, pack, unpack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_is_packed_comes_back(dtype):
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 3, 50, 8, generator=generator).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    landmark = torch.rand(2, 3, 50, generator=generator).to(wide).requires_grad_()
    positions = torch.randint(-5, 4_000_000, (2, 50), generator=generator)
    packed = pack(k, landmark, positions)
    assert packed.shape == (2, 3, 50, 8 + columns(dtype))
    keys, found, where = unpack(packed, 8)
    assert torch.equal(keys, k)
    assert torch.equal(where, positions)
    torch.testing.assert_close(found, landmark, atol=6e-8 if dtype == torch.float16 else 0, rtol=0)
    found.sum().backward()
    assert torch.equal(landmark.grad, torch.ones_like(landmark))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_positions_that_keys_cannot_carry_are_refused(dtype):
    k = torch.zeros(1, 1, 1, 8, dtype=dtype)
    last = torch.tensor([furthest(dtype)])
    assert torch.equal(unpack(pack(k, None, last), 8)[2], last[None])
    with pytest.raises(ValueError, match="positions"):
        pack(k, None, last + 1)
