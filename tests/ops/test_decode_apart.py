"""Key heads whose caches lie apart: a token written and attended to in one launch, in the interpreter without a GPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from gape.ops.plain import newest_attention
from tests.ops.test_decode import BOUNDS, DEVICE, distance

pytest.importorskip("triton")
from gape.ops.triton.decode_apart import Apart, lie_apart, shares_of

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def of_heads(
    blocks: list[tuple[torch.Tensor, torch.Tensor]], heads: list[list[int]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Buffers (B, room, width) of every head, in the order of the heads, of blocks that have some each."""
    found = {
        head: (k[:, row], v[:, row])
        for (k, v), some in zip(blocks, heads, strict=True)
        for row, head in enumerate(some)
    }
    keys, values = zip(*(found[head] for head in sorted(found)), strict=True)
    return list(keys), list(values)


class Layer(NamedTuple):
    """Buffers of blocks of heads, the heads of each block, and what a token brings."""

    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    heads: list[list[int]]
    columns: torch.Tensor
    token: list[torch.Tensor]

    def of_heads(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return of_heads(self.blocks, self.heads)

    def one_by_one(self, scale: float) -> torch.Tensor:
        """What the blocks give one after another, written to as torch writes."""
        q, k, v = self.token
        out = torch.empty_like(q)
        for (block_k, block_v), heads in zip(self.blocks, self.heads, strict=True):
            column = int(self.columns[heads[0]])
            block_k[:, :, column], block_v[:, :, column] = k[:, heads, 0], v[:, heads, 0]
            lengths = torch.full((q.size(0),), column + 1, device=DEVICE)
            out[:, heads] = newest_attention(q[:, heads], block_k, block_v, lengths, scale=scale)
        return out

    def exact(self, scale: float) -> torch.Tensor:
        """The definition in float64, with the token not yet written."""
        outs = []
        for head, (kept_k, kept_v) in enumerate(zip(*self.of_heads(), strict=True)):
            n = int(self.columns[head])
            q, k, v = (x[:, head].double() for x in self.token)
            k, v = torch.cat([kept_k[:, :n].double(), k], 1), torch.cat([kept_v[:, :n].double(), v], 1)
            outs.append((q @ k.mT * scale).softmax(-1) @ v)
        return torch.stack(outs, 1)

    def copied(self) -> Layer:
        blocks = [(k.clone(), v.clone()) for k, v in self.blocks]
        return self._replace(blocks=blocks)


def layer(heads: list[list[int]], rooms: list[int], lengths: list[int], *, batch: int = 1, dim: int = 64) -> Layer:
    """Blocks with rooms and lengths of their own; what lies behind a length is not a number."""
    torch.manual_seed(0)
    blocks = []
    columns = torch.zeros(sum(map(len, heads)), dtype=torch.int64)
    for some, room, n in zip(heads, rooms, lengths, strict=True):
        kv = torch.randn(2, batch, len(some), room, dim, device=DEVICE).to(HALF)
        kv[..., n:, :] = float("nan")
        blocks.append((kv[0].clone(), kv[1].clone()))
        columns[some] = n
    # As a projection leaves them: heads side by side, q, k and v of a sample one after another.
    token = torch.randn(batch, 3, columns.numel(), dim, device=DEVICE).to(HALF)
    return Layer(blocks, heads, columns.to(DEVICE), [x.unsqueeze(2) for x in token.unbind(1)])


def attended(given: Layer, programs: int, scale: float = 0.3) -> torch.Tensor:
    """The answer in one launch, whose buffers start as NaN; tickets are zeros afterwards."""
    q, k, v = given.token
    keys, values = given.of_heads()
    assert lie_apart(keys, values)
    apart = Apart(keys, values, programs=programs)
    assert apart.takes(q, k, v)
    tickets = torch.zeros(q.size(0) * q.size(1), dtype=torch.int32, device=DEVICE)
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
        out = apart.attend(q, k, v, given.columns, tickets, scale=scale)
    assert not tickets.any()
    assert out.shape == q.shape
    return out


LAYERS = {
    "one block of samples": lambda: layer([[0, 1]], [90], [33], batch=2),
    "unsorted heads": lambda: layer([[1, 3], [0], [2]], [40, 700, 300], [1, 391, 255]),
    "unsorted heads of samples": lambda: layer([[0, 2], [1]], [9, 100], [7, 90], batch=2, dim=128),
    "at the end of the room": lambda: layer([[2], [0, 1]], [520, 9], [519, 8], dim=32),
    "nothing yet": lambda: layer([[1], [0]], [300, 16], [257, 0], dim=16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_equals_attention_block_by_block(name: str) -> None:
    given = LAYERS[name]()
    beside, exact = given.copied(), given.exact(0.3)
    got = attended(given, 16)
    assert distance(got, exact) < BOUNDS[HALF]
    assert distance(got, beside.one_by_one(0.3).double()) < BOUNDS[HALF]
    for ours, theirs in zip(given.blocks, beside.blocks, strict=True):
        for written, expected in zip(ours, theirs, strict=True):
            assert torch.equal(written.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("wrong", ["column", "head"])
def test_a_wrong_table_shows(wrong: str) -> None:
    """What the test above would not see if heads were alike."""
    given = LAYERS["unsorted heads"]()
    exact = given.exact(0.3)
    if wrong == "column":
        given.columns[1] += 1
    else:
        given = given._replace(heads=[[0, 3], [1], [2]])
    out = attended(given, 3)
    assert not distance(out[:, 1], exact[:, 1]) < 10 * BOUNDS[HALF]


def test_tokens_come_after_one_another() -> None:
    """What one launch writes the next one reads, while columns move on by themselves."""
    given = layer([[1], [0, 2]], [300, 40], [126, 30])
    beside = given.copied()
    keys, values = given.of_heads()
    apart, tickets = Apart(keys, values, programs=8), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    columns = given.columns.clone()
    for _ in range(3):
        got = apart.attend(*given.token, columns, tickets, scale=0.3)
        expected = beside.one_by_one(0.3)
        assert distance(got, expected.double()) < BOUNDS[HALF]
        columns += 1
        beside.columns.copy_(columns)
        for x in given.token:
            x.copy_(torch.randn_like(x))


def test_a_full_buffer_keeps_what_it_has() -> None:
    given = layer([[0], [1]], [40, 20], [40, 7])
    before, exact = given.copied(), given.exact(0.3)
    assert distance(attended(given, 2), exact) < BOUNDS[HALF]
    assert torch.equal(given.blocks[0][0], before.blocks[0][0])
    assert torch.equal(given.blocks[0][1], before.blocks[0][1])


def test_what_the_new_key_outweighs_is_not_read() -> None:
    """A value is left away whose key has less than 2⁻⁴⁰ of the weight of the token's own."""
    given = layer([[0]], [400], [300])
    q, k, v = given.token
    q.fill_(1.0), k.fill_(0.5)
    kept_k, kept_v = given.blocks[0]
    # In base 2 a key of x in all 64 coordinates has the logit 19.2·log₂e·x = 27.7·x, the token's own 13.8.
    kept_k[:, :, :300] = -1.0
    kept_v[:, :, :300] = float("nan")
    assert torch.equal(attended(given, 8), v)
    kept_k[:, :, 100] = -0.9
    assert attended(given, 8).isnan().all()


def test_a_broken_key_shows() -> None:
    given = layer([[0, 1]], [60], [50], batch=2)
    given.token[1][0, 1, 0, 3] = float("nan")
    out = attended(given, 2)
    assert out[0, 1].isnan().all()
    assert not out[1].isnan().any()
    assert not out[0, 0].isnan().any()


def test_a_new_key_that_is_infinitely_far_has_no_weight() -> None:
    given = layer([[0], [1]], [300, 40], [257, 0])
    given.token[0].abs_(), given.token[1][..., 5].fill_(-float("inf"))
    (q, _, v), (keys, values) = given.token, given.of_heads()
    seen = (q[:, 0].double() @ keys[0][:, :257].double().mT * 0.3).softmax(-1) @ values[0][:, :257].double()
    out = attended(given, 8)
    assert distance(out[:, 0], seen) < BOUNDS[HALF]
    assert torch.equal(out[:, 1], v[:, 1])


def test_shares_go_by_room() -> None:
    """Equal heads have equal shares, a long one most of them, a short one at least one."""
    assert shares_of([65_536] * 8, 64, 792) == [99] * 8
    assert shares_of([40, 40, 700, 300], 64, 16) == [1, 1, 5, 2]
    few, many = shares_of([100, 131_072], 64, 792)
    assert few == 1
    assert many == 512
    assert sum(shares_of([2_000, 2_000, 40_000, 131_072], 64, 400)) <= 400
    assert shares_of([0, 1], 64, 792) == [1, 1]


@pytest.mark.parametrize("dim", [128, 256])
def test_head_dims(dim: int) -> None:
    given = layer([[1], [0]], [80, 30], [70, 29], dim=dim)
    exact = given.exact(0.1)
    assert distance(attended(given, 4, 0.1), exact) < BOUNDS[HALF]


def test_what_goes_another_way() -> None:
    room = torch.zeros(1, 40, 16, device=DEVICE).to(HALF)
    assert lie_apart([room], [room])
    assert not lie_apart([room.float()], [room.float()])
    assert not lie_apart([room], [room[..., :8]])
    assert not lie_apart([room[..., :8].contiguous()], [room[..., :8].contiguous()])
    apart, row = Apart([room], [room]), torch.zeros(1, 1, 1, 16, device=DEVICE).to(HALF)
    assert apart.takes(row, row, row)
    assert not apart.takes(row.float(), row, row)
    assert not apart.takes(row.expand(1, 2, 1, 16), row, row)
    assert not torch.compile(apart.takes, backend="eager", fullgraph=True)(row, row, row)
    with pytest.raises(ValueError, match=r"^tickets: "):
        apart.attend(row, row, row, torch.zeros(1).long(), torch.zeros(0, dtype=torch.int32), scale=1.0)


@pytest.mark.gpu
def test_a_graph_of_long_caches() -> None:
    """Replays go on writing where the counters say, and the programs of one graph share its tickets."""
    given = layer([[4], [0, 2, 5, 7], [1, 3, 6]], [131_072, 3000, 20_000], [130_000, 2_800, 17_011], batch=2, dim=64)
    beside = given.copied()
    apart = Apart(*given.of_heads())
    tickets, columns = torch.zeros(16, dtype=torch.int32, device=DEVICE), given.columns.clone()
    apart.attend(*given.token, columns, tickets, scale=0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apart.attend(*given.token, columns, tickets, scale=0.125)
        columns += 1
    for _ in range(20):
        exact = beside.exact(0.125)
        graph.replay()
        assert distance(out, exact) < BOUNDS[HALF]
        beside.one_by_one(0.125)
        beside.columns.add_(1)
        for x in given.token:
            x.copy_(torch.randn_like(x))
    assert not tickets.any()
