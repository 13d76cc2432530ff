"""Queries that share key heads whose caches lie apart, in one launch: in the interpreter without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.test_decode import BOUNDS, DEVICE, distance
from tests.ops.test_decode_apart import of_heads

pytest.importorskip("triton")
from gape.ops.triton import decode_grouped
from gape.ops.triton.decode_grouped import ROWS, Grouped, lie_grouped

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


class Layer(NamedTuple):
    """Buffers (B, room, width) of every key head, its newest key, and queries."""

    keys: list[Tensor]
    values: list[Tensor]
    columns: Tensor
    q: Tensor

    def exact(self, scale: float) -> Tensor:
        """The definition in float64."""
        groups, outs = self.q.size(1) // len(self.keys), []
        for head, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            n = int(self.columns[head]) + 1
            q = self.q[:, head * groups : (head + 1) * groups, 0].double()
            outs.append((q @ k[:, :n].double().mT * scale).softmax(-1) @ v[:, :n].double())
        return torch.cat(outs, 1).unsqueeze(2)

    def attended(self, programs: int | None = 16, scale: float = 0.2) -> Tensor:
        """The answer in one launch, whose buffers start as NaN; tickets are zeros afterwards."""
        assert lie_grouped(self.keys, self.values)
        grouped = Grouped(self.keys, self.values, programs=programs)
        assert grouped.takes(self.q)
        tickets = torch.zeros(self.q.size(0) * len(self.keys), dtype=torch.int32, device=DEVICE)
        empty = torch.empty
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
            out = grouped.attend(self.q, self.columns, tickets, scale=scale)
        assert not tickets.any()
        return out


def layer(
    heads: list[list[int]],
    rooms: list[int],
    lengths: list[int],
    *,
    batch: int = 1,
    groups: int = 3,
    widths: tuple[int, int] = (80, 64),
    dtype: torch.dtype = HALF,
) -> Layer:
    """Blocks of heads with rooms and lengths of their own; what lies behind a length is not a number."""
    torch.manual_seed(0)
    count = sum(map(len, heads))
    columns, blocks = torch.zeros(count, dtype=torch.int64), []
    for some, room, n in zip(heads, rooms, lengths, strict=True):
        k, v = (torch.randn(batch, len(some), room, width, device=DEVICE).to(dtype) for width in widths)
        k[:, :, n:], v[:, :, n:] = float("nan"), float("nan")
        blocks.append((k, v))
        columns[some] = n - 1
    q = torch.randn(batch, 1, count * groups, widths[0], device=DEVICE).to(dtype).transpose(1, 2)
    return Layer(*of_heads(blocks, heads), columns.to(DEVICE), q)


LAYERS = {
    "one block of samples": lambda: layer([[0, 1]], [90], [33], batch=3),
    "unsorted heads": lambda: layer([[1, 3], [0], [2]], [40, 700, 300], [1, 391, 256]),
    "unsorted heads of samples": lambda: layer([[0, 2], [1]], [9, 600], [9, 511], batch=2, groups=2, widths=(16, 8)),
    "single": lambda: layer([[1], [0]], [100, 300], [100, 129], dtype=torch.float32),
    "queries of their own": lambda: layer([[1], [0]], [40, 300], [40, 300], groups=1),
    "many queries": lambda: layer([[0]], [100], [65], groups=ROWS, widths=(64, 64)),
    "wide": lambda: layer([[0, 1]], [200], [150], widths=(136, 24)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_definition(name: str) -> None:
    given = LAYERS[name]()
    assert distance(given.attended(), given.exact(0.2)) < BOUNDS[given.q.dtype]


def test_more_parts_than_are_merged_at_once() -> None:
    given = layer([[1], [0]], [1200, 20], [1190, 3], groups=2, widths=(16, 256), dtype=torch.float32)
    assert Grouped(given.keys, given.values, programs=20)._programs.size(0) > 17
    assert distance(given.attended(20), given.exact(0.2)) < 1e-6


@pytest.mark.parametrize("wrong", ["column", "head"])
def test_a_wrong_table_shows(wrong: str) -> None:
    """What the tests above would not see if heads were alike."""
    given = LAYERS["unsorted heads"]()
    exact = given.exact(0.2)
    if wrong == "column":
        given.columns[1] += 1
    else:
        given.values[1], given.values[3] = given.values[3], given.values[1]
    assert not distance(given.attended()[:, 3:6], exact[:, 3:6]) < 10 * BOUNDS[HALF]


def test_of_a_full_buffer_all_is_seen() -> None:
    given = layer([[0], [1]], [40, 70], [40, 7])
    exact = given.exact(0.2)
    given.columns[0] += 5
    assert distance(given.attended(), exact) < BOUNDS[HALF]


def test_a_share_without_weight_has_no_say() -> None:
    """Its logits are all −inf, and its values are not numbers."""
    given = layer([[0]], [640], [640], groups=2)
    given.q.abs_()
    exact = given._replace(columns=given.columns - 320).exact(0.2)
    given.keys[0][:, 320:], given.values[0][:, 320:] = -float("inf"), float("nan")
    assert distance(given.attended(2), exact) < BOUNDS[HALF]


def test_what_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    room, narrow = (torch.zeros(1, 40, width, device=DEVICE).to(HALF) for width in (16, 8))
    assert lie_grouped([room], [narrow])
    assert not lie_grouped([room], [narrow.float()])
    assert not lie_grouped([room.double()], [narrow.double()])
    assert not lie_grouped([room[..., 1:].contiguous()], [narrow])
    assert not lie_grouped([room, narrow], [room, narrow])
    assert not lie_grouped([room[:, ::2]], [room])
    grouped, row = Grouped([room] * 2, [narrow] * 2), torch.zeros(1, 6, 1, 16, device=DEVICE).to(HALF)
    assert grouped.takes(row)
    assert not grouped.takes(row.float())
    assert not grouped.takes(row[:, :5])
    assert not grouped.takes(row.repeat(1, ROWS, 1, 1))
    with pytest.raises(ValueError, match=r"^tickets: "):
        grouped.attend(row, torch.zeros(2).long(), torch.zeros(1, dtype=torch.int32), scale=1.0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not grouped.takes(row)


@pytest.mark.parametrize(
    ("batch", "heads", "room", "width", "fills"),
    [(1, 3, 65_536, 64, True), (1, 1, 65_536, 128, False), (4, 1, 65_536, 128, True), (1, 1, 2_048, 128, True)],
)
def test_long_heads_that_are_few_leave_a_device_idle(
    batch: int, heads: int, room: int, width: int, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_grouped, "multiprocessors", lambda device: 132)
    one = torch.zeros(batch, room, width, dtype=HALF, device=DEVICE)
    assert Grouped([one] * heads, [one] * heads).fills == fills


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [3, 8])
def test_a_graph_of_long_caches(groups: int) -> None:
    """Replays attend to one key more each, and the programs of one graph share its tickets."""
    given = layer([[2], [0, 3], [1]], [131_072, 3_000, 20_000], [130_000, 2_800, 17_011], batch=2, groups=groups)
    for k, v in zip(given.keys, given.values, strict=True):
        k.nan_to_num_(nan=0.5), v.nan_to_num_(nan=-0.5)
    grouped, tickets = Grouped(given.keys, given.values), torch.zeros(8, dtype=torch.int32, device=DEVICE)
    columns = given.columns.clone()
    grouped.attend(given.q, columns, tickets, scale=0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped.attend(given.q, columns, tickets, scale=0.125)
        columns += 1
    for _ in range(20):
        graph.replay()
        assert distance(out, given.exact(0.125)) < BOUNDS[HALF]
        given.columns.add_(1)
        given.q.copy_(torch.randn_like(given.q))
    assert not tickets.any()


# In a process of its own: here kernels are interpreted.
SCRIPT = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gape.ops.triton.decode_grouped import partial_grouped
from gape.ops.triton.deposit import write_token

KINDS = {"ticket_ptr": "*i32", "scale": "fp32", "unit": "fp32"}
KINDS |= dict.fromkeys(("part_ptr", "lse_ptr", "whole_lse_ptr"), "*fp32")
KINDS |= dict.fromkeys(("columns_ptr", "noted_ptr", "heads_ptr", "programs_ptr"), "*i64")
HEADS = {"GROUPS": 3, "K_WIDTH": 80, "V_WIDTH": 64}


def compiled(kernel, told, **options):
    names = kernel.arg_names
    kinds = {x: "constexpr" if x in told else KINDS.get(x, "*bf16" if x.endswith("_ptr") else "i32") for x in names}
    places = {(names.index(x),): value for x, value in told.items()}
    compile(ASTSource(kernel, kinds, places), target=GPUTarget("cuda", 90, 32), options=options)


compiled(write_token, HEADS | {"CONTENT": 64, "BLOCK": 128})
blocks = {"PARTS": 64, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_D": 128, "BLOCK_V": 64}
compiled(partial_grouped, HEADS | blocks, num_warps=4, num_stages=3)
"""


@pytest.mark.slow
def test_kernels_of_a_recorded_token_compile_for_a_gpu() -> None:
    ours = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = subprocess.run([sys.executable, "-c", SCRIPT], env=ours, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
