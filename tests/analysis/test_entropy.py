"""Attention statistics in blocks are those of the dense weights, for every scheme and layout."""

from __future__ import annotations

import pytest
import torch

import gape
from gape.analysis import attended, entropy, statistics, tap
from gape.analysis.tap import Attended
from tests.models.tiny import model, tokens

N = 41


def dense(record: Attended, n: int) -> torch.Tensor:
    """The weights row by row in float64, (B, Hq, N, N)."""
    w = torch.zeros(*record.q.shape[:3], n, dtype=torch.float64)
    for row in range(n):
        part = record.weights(row, row + 1)
        w[:, :, row : row + 1, : part.size(-1)] = part
    return w


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("position", gape.positions.available())
@torch.no_grad()
def test_blocks_give_the_statistics_of_the_dense_weights(position: str, packed: bool) -> None:
    options = {}
    if packed:
        documents = (torch.arange(N) >= 17).long().expand(2, N)
        options = {"documents": documents, "positions": torch.arange(N) - 17 * documents}
    gpt, ids = model(position, torch.float32), tokens(2, N)
    w = dense(attended(gpt.double(), ids, **options)[1], N)
    record = attended(gpt.float(), ids, **options)[1]
    i = options.get("positions", torch.arange(N))
    i = i if i.dim() == 1 else i[0]
    away = i[:, None] - i
    for block in (5, N, None):
        actual = statistics(record, block=block)
        entropy = torch.special.entr(w).sum(-1)
        torch.testing.assert_close(actual.entropy.double(), entropy, atol=1e-5, rtol=0)
        torch.testing.assert_close(actual.distance.double(), (w * away).sum(-1), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(actual.sink.double(), w[..., 0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_share_of_the_attention_lies_beyond_the_used_distance() -> None:
    record = attended(model("p-rope+gape", torch.float32), tokens(1, 200))[0]
    w = dense(record, 200)[0, 0, -1]
    away = torch.arange(199, -1, -1)
    for share, used in zip((0.5, 0.1), statistics(record, (0.5, 0.1), block=64).used[0, 0, -1], strict=True):
        beyond = [float(w[away >= distance].sum()) for distance in (float(used) * 1.13 + 1, float(used) / 1.13 - 1)]
        assert beyond[0] <= share <= beyond[1]


def test_uniform_attention_uses_half_of_its_keys() -> None:
    record = attended(model("nope", torch.float32), tokens(1, 300))[0]
    flat = Attended(**{**vars(record), "q": torch.zeros_like(record.q)})
    used = statistics(flat, (0.5,)).used[0, 0, :, 0]
    torch.testing.assert_close(used[100:], torch.arange(100, 300) / 2, atol=1.0, rtol=0.01)


@torch.no_grad()
def test_no_block_is_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    weights = Attended.weights

    def recorded(record: Attended, start: int, stop: int) -> torch.Tensor:
        block = weights(record, start, stop)
        sizes.append(block.numel())
        return block

    monkeypatch.setattr(Attended, "weights", recorded)
    monkeypatch.setattr(entropy, "BLOCK_WEIGHTS", 4 * 8 * N)
    statistics(attended(model("fox"), tokens(1, N))[0])
    assert max(sizes) <= 4 * 8 * N
    # Keys after the last query of a block are never visited.
    assert sum(sizes) < 0.8 * 4 * N * N


@pytest.mark.parametrize(("share", "options"), [(1.5, {}), (0.1, {"positions": torch.arange(N) + 3})])
def test_shares_need_numbers_below_one_and_index_order(share: float, options: dict[str, torch.Tensor]) -> None:
    record = attended(model("rope"), tokens(1, N), **options)[0]
    with pytest.raises(ValueError, match="shares"):
        statistics(record, (share,))


@pytest.mark.gpu
@torch.no_grad()
def test_entropy_at_32k_on_a_gpu_takes_less_than_8_gib() -> None:
    torch.manual_seed(0)
    config = gape.GPTConfig(vocab_size=50304, n_layer=6, n_head=8, n_embd=512, context_length=1024)
    gpt = gape.GPT(config).cuda().eval()
    ids = torch.randint(50304, (1, 32768), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with tap(gpt, lambda layer, record: statistics(record, (0.1,))):
        gpt(ids, logits_to_keep=1)
    assert torch.cuda.max_memory_allocated() < 8 * 2**30
