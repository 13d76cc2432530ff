"""A token written to the buffers of its heads in one launch: in the interpreter without a GPU, compiled with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.test_decode import DEVICE
from tests.ops.test_decode_apart import of_heads

pytest.importorskip("triton")
from gape.ops.triton.deposit import Deposit, write_token

K_WIDTH, V_WIDTH, CONTENT, NOTES = 80, 64, 64, 32


class Layer(NamedTuple):
    """Blocks of heads in buffers with neighbours, where each head's key goes, notes, and what a token brings."""

    heads: list[list[int]]
    around: list[Tensor]
    blocks: list[tuple[Tensor, Tensor]]
    columns: Tensor
    notes: tuple[Tensor, Tensor] | None
    noted: Tensor
    token: list[Tensor]

    def of_heads(self) -> tuple[list[Tensor], list[Tensor]]:
        return of_heads(self.blocks, self.heads)

    def deposit(self) -> Deposit:
        return Deposit(*self.of_heads(), self.notes)

    def written(self) -> list[Tensor]:
        """Everything that a launch could have written to."""
        return [*self.around, *(self.notes or ())]


def layer(
    heads: list[list[int]],
    rooms: list[int],
    columns: list[int],
    *,
    batch: int = 1,
    groups: int = 1,
    notes: bool = True,
    dtype: torch.dtype = torch.float16,
) -> Layer:
    """Blocks with rooms of their own, and between them some memory that belongs to nobody."""
    torch.manual_seed(0)
    count, around, blocks = sum(map(len, heads)), [], []
    where = torch.zeros(count, dtype=torch.int64)
    for some, room, column in zip(heads, rooms, columns, strict=True):
        pair = []
        for width in (K_WIDTH, V_WIDTH):
            size = batch * len(some) * room * width
            memory = torch.randn(size + 2 * 8 * width, device=DEVICE).to(dtype)
            around.append(memory)
            pair.append(memory[8 * width : 8 * width + size].view(batch, len(some), room, width))
        blocks.append((pair[0], pair[1]))
        where[some] = column
    # As a projection leaves them, each sample's heads side by side, q, k and v one after another.
    widths = [count * groups * K_WIDTH, count * K_WIDTH, count * V_WIDTH]
    token = torch.randn(batch, 1, sum(widths), device=DEVICE).to(dtype).split(widths, dim=-1)
    sizes = ((count * groups, K_WIDTH), (count, K_WIDTH), (count, V_WIDTH))
    q, k, v = (x.view(batch, 1, *size).transpose(1, 2) for x, size in zip(token, sizes, strict=True))
    room = [torch.randn(batch, n, NOTES, CONTENT, device=DEVICE).to(dtype) for n in (count * groups, count)]
    return Layer(
        heads, around, blocks, where.to(DEVICE), (room[0], room[1]) if notes else None,
        torch.tensor([17], device=DEVICE), [q, k, v],
    )  # fmt: skip


def by_torch(given: Layer) -> None:
    """What the launch stands in for."""
    q, k, v = given.token
    for (kept_k, kept_v), heads in zip(given.blocks, given.heads, strict=True):
        column = given.columns[heads[0] : heads[0] + 1]
        if int(column) < kept_k.size(2):
            kept_k.index_copy_(2, column, k[:, heads])
            kept_v.index_copy_(2, column, v[:, heads])
    if given.notes is not None:
        for room, x in zip(given.notes, (q, k), strict=True):
            room.index_copy_(2, given.noted, x[..., :CONTENT])


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


SIZES: dict[str, dict[str, Any]] = {
    "one block": {"heads": [[0, 1, 2]], "rooms": [40], "columns": [33], "groups": 3},
    "one block of samples": {"heads": [[0, 1, 2]], "rooms": [40], "columns": [0], "batch": 3, "groups": 3},
    "unsorted heads": {"heads": [[1, 3], [0], [2]], "rooms": [9, 70, 30], "columns": [8, 41, 29]},
    "unsorted heads of samples": {
        "heads": [[2], [0, 3], [1]], "rooms": [5, 33, 17], "columns": [2, 31, 0], "batch": 3, "groups": 3,
    },
    "a full buffer": {"heads": [[1], [0, 2]], "rooms": [12, 20], "columns": [12, 7], "batch": 3},
    "an overfull buffer": {"heads": [[1], [0]], "rooms": [12, 20], "columns": [11, 25], "groups": 3},
}  # fmt: skip


@pytest.mark.parametrize("notes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_writes_what_torch_writes(name: str, dtype: torch.dtype, notes: bool) -> None:
    """Bit for bit, also where a number is none, and nothing beside it."""
    given, expected = (layer(**SIZES[name], notes=notes, dtype=dtype) for _ in range(2))
    for each in (given, expected):
        each.token[1][0, 0, 0, 3] = float("nan")
    by_torch(expected)
    given.deposit().write(*given.token, given.columns, given.noted)
    for ours, theirs in zip(given.written(), expected.written(), strict=True):
        assert torch.equal(bits(ours), bits(theirs))


def test_rows_that_are_not_neighbours() -> None:
    given, expected = (layer(**SIZES["one block"]) for _ in range(2))
    by_torch(expected)
    apart = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in given.token]
    given.deposit().write(*apart, given.columns, given.noted)
    assert all(torch.equal(*each) for each in zip(given.written(), expected.written(), strict=True))


REFUSED: dict[str, Callable[[Layer], object]] = {
    "keys: .*one buffer for each": lambda x: Deposit([], []),
    "keys: .*row after row": lambda x: Deposit([k[:, ::2] for k in x.of_heads()[0]], x.of_heads()[1]),
    "values: .*one buffer for each": lambda x: Deposit(x.of_heads()[0], x.of_heads()[1][:1]),
    "values: .*of one dtype": lambda x: Deposit(x.of_heads()[0], [v.float() for v in x.of_heads()[1]]),
    "values: .*room for": lambda x: Deposit(x.of_heads()[0], [v[:, 1:] for v in x.of_heads()[1]]),
    "notes: .*keys": lambda x: Deposit(*x.of_heads(), (x.notes[0], x.notes[1][:, :2])),  # type: ignore[index]
    "notes: .*queries": lambda x: Deposit(*x.of_heads(), (x.notes[0][..., :9], x.notes[1])),  # type: ignore[index]
    "q: .*80": lambda x: told(x, q=x.token[0][..., 1:]),
    "q: .*notes": lambda x: told(x, q=x.token[0][:, :6]),
    "k: ": lambda x: told(x, k=x.token[1].float()),
    "v: ": lambda x: told(x, v=x.token[2][:, :2]),
    "columns: ": lambda x: told(x, columns=x.columns.int()),
    "noted: ": lambda x: told(x, noted=x.columns),
}


def told(given: Layer, **other: Tensor) -> None:
    q, k, v = given.token
    given.deposit().write(**{"q": q, "k": k, "v": v, "columns": given.columns, "noted": given.noted} | other)


@pytest.mark.parametrize("said", REFUSED)
def test_refuses(said: str) -> None:
    with pytest.raises(ValueError, match=rf"^{said}"):
        REFUSED[said](layer(**SIZES["one block"]))


@pytest.mark.gpu
def test_replays_write_what_torch_writes() -> None:
    """Token after token, where the counters say, until the first buffer is full and beyond."""
    sizes: dict[str, Any] = {"heads": [[2], [0, 3], [1]], "rooms": [3000, 40, 260], "columns": [2_000, 30, 250]}
    given, expected = (layer(**sizes, batch=3, groups=3, dtype=torch.bfloat16) for _ in range(2))
    deposit = given.deposit()

    def step() -> None:
        deposit.write(*given.token, given.columns, given.noted)
        given.columns.add_(1)
        given.noted.add_(1)

    # Compiles what a capture could not.
    step()
    by_torch(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(14):
        expected.columns.add_(1)
        expected.noted.add_(1)
        for ours, theirs in zip(given.token, expected.token, strict=True):
            theirs.copy_(ours.copy_(torch.randn_like(ours)))
        graph.replay()
        by_torch(expected)
        for ours, theirs in zip(given.written(), expected.written(), strict=True):
            assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.gpu
def test_layers_and_recordings_share_a_kernel() -> None:
    """Where counters and buffers begin, and how many columns there are, makes no other kernel."""
    counters = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    given = layer(**SIZES["one block"], dtype=torch.bfloat16)
    given.deposit().write(*given.token, given.columns, given.noted)
    known = compiled()
    for at, room in enumerate((17, 64, 333)):
        given = layer([[2], [0, 1]], [room, 48], [3, 5], batch=at + 1, groups=3, dtype=torch.bfloat16)
        given.deposit().write(*given.token, counters[at + 1 : at + 4], counters[at + 7 : at + 8])
    assert compiled() == known


def compiled() -> int:
    """Kernels that have been compiled for the device so far."""
    return len(write_token.device_caches[torch.cuda.current_device()][0])
