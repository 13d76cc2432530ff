"""Blocks of keys that are not sent: they have no more attention than was allowed, and the bytes are saved."""

import math

import pytest
import torch

from gape.distributed.forgotten import block_size, key_bounds, needed_blocks, query_bounds
from tests.distributed.launch import work


@pytest.mark.parametrize("groups", [1, 2])
def test_unneeded_blocks_hold_less_attention_than_eps(groups):
    torch.manual_seed(0)
    ways, n, heads, width, eps, scale = 4, 256, 2, 8, 1e-3, 0.3
    q = torch.randn(1, heads * groups, ways * n, width, dtype=torch.float64)
    k = torch.randn(1, heads, ways * n, width, dtype=torch.float64)
    landmark = torch.rand(1, heads, ways * n, dtype=torch.float64) * 0.5
    rate = 0.3 + 0.1 * torch.rand(1, heads * groups, ways * n, dtype=torch.float64)
    place, wide = torch.arange(ways * n), [x.repeat_interleave(groups, dim=1) for x in (k, landmark)]
    logits = scale * q @ wide[0].mT - rate[..., None] * (1 - wide[1])[:, :, None] * (place[:, None] - place)
    weights = logits.masked_fill(place > place[:, None], -math.inf).softmax(-1)
    size = block_size(n)
    parts = [slice(r * n, (r + 1) * n) for r in range(ways)]
    keys = [key_bounds(k[:, :, part], landmark[:, :, part], size) for part in parts]
    keys = type(keys[0])(*(torch.stack(bounds) for bounds in zip(*keys, strict=True)))
    dropped = 0
    for rank, part in enumerate(parts):
        queries = query_bounds(q[:, :, part], k[:, :, part], rate[:, :, part], scale, size)
        needed = needed_blocks(queries, keys, rank, size, eps)
        assert not needed[rank:].any()
        lost = ~needed[:rank].movedim(0, 2).flatten(2).repeat_interleave(size, dim=-1).repeat_interleave(groups, dim=1)
        assert float((weights[:, :, part, : rank * n] * lost[:, :, None]).sum(-1).amax()) <= eps if rank else True
        dropped += int(lost.sum())
    assert dropped > 0


def test_a_key_that_is_not_a_number_is_sent():
    bounds = torch.full((2, 1, 1, 1), torch.nan), torch.ones(2, 1, 1, 1)
    queries = torch.ones(1, 1, 1), torch.full((1, 1, 1), 1e9), torch.zeros(1, 1, 1)
    from gape.distributed.forgotten import KeyBounds, QueryBounds

    assert needed_blocks(QueryBounds(*queries), KeyBounds(*bounds), 1, 128, 1e-3)[0].all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_floors_eight_slices_send_a_fraction_of_the_keys(tmp_path):
    ways, n, eps = 8, 8192, 1e-4
    found = work(ways, "skipped", tmp_path, str(n), str(eps), timeout=580)
    (dense, _, _), (_, blocks, bounds) = found["bytes"]
    # Forward and backward, in which dense attention gathers and scatters as much.
    fraction, rest = blocks / 2 / dense, bounds / dense
    # Beyond this distance a key has at most eps / N of a query's attention, whatever its content.
    horizon = (2 * found["score"] + math.log(ways * n / eps)) / found["rate"]
    most = sum(min(rank * n, math.ceil(horizon / 128 + 2) * 128) for rank in range(ways)) / (ways * (ways - 1) * n)
    print(f"fraction of the bytes of keys and values sent: {fraction:.3f}, at most {most:.3f}; bounds {rest:.4f}")
    assert 0 < fraction <= most < 0.5
    assert rest < 0.02
    assert found["output"] <= 2 * eps * found["largest"] + 1e-5
    assert found["gradient"] < 1e-3
