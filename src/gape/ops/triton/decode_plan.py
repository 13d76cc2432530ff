"""How a call of the decode path is cut into programs, which kernel runs it, and what that is given.

One query per key head in half precision over keys in index order has a kernel of its own, :mod:`decode_lone`, if its
keys and values can be read in pieces of 16 bytes. Everything else goes through :func:`decode_kernels.partial`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gape.ops.triton.decode_kernels import partial
from gape.ops.triton.decode_lone import PIECE, TILES_UNDER_WAY, partial_lone
from gape.ops.triton.tiles import LOG2E


class Call(NamedTuple):
    """A problem as the operator of torch takes it, every tensor expanded to its full sizes.

    Without `gated` the gates are zero, and a kernel may leave them unread.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    landmark: Tensor
    amplitude: Tensor
    lengths: Tensor | None
    q_positions: Tensor | None
    k_positions: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None
    mask: Tensor | None
    causal: bool
    scale: float
    context_length: float
    gated: bool

    @property
    def units(self) -> tuple[float, float, float]:
        """Scale and 1/T for logits in base 2, and what turns a base-2 logarithm into a natural one."""
        return self.scale * LOG2E, LOG2E / self.context_length, 1 / LOG2E


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the work is cut.

    Attributes:
        kernel: that computes the parts,
        arguments: it takes after its buffers,
        flags: and by name, launch options among them.
        splits: programs along the keys.
        row_tiles: programs along the rows of a group.
        merging_steps: in which the parts of all rows of a program are merged,
        parts: so many of a row at once.
        width: the width of a value, rounded up.
    """

    kernel: Any
    arguments: list[Any]
    flags: dict[str, Any]
    splits: int
    row_tiles: int
    merging_steps: int
    parts: int
    width: int


class Tile(NamedTuple):
    """How one program of :func:`partial` works.

    Attributes:
        keys: that it looks at at once.
        warps, stages: launch options.
        programs: per multiprocessor, as many as are resident at once, so that there is one wave and none is left over.
        rows: that it has at most, as many as stay in registers.
    """

    keys: int
    warps: int
    stages: int
    programs: int
    rows: int = 32


#: Half precision with heads of up to 64, of up to 128, wider, and float32.
TILES = {
    "narrow": Tile(128, 4, 3, 2),
    "wide": Tile(64, 4, 3, 2),
    "widest": Tile(32, 4, 2, 2),
    "float32": Tile(16, 4, 2, 3, rows=16),
}

#: A split shorter than this many tiles costs more in the merging than it wins.
LEAST_TILES = 4

#: Parts of a row that are merged at once.
PARTS = 32

#: Head dims of the kernel for lone queries.
LONE_DIMS = (16, 32, 64, 128, 256)

#: Numbers in one of its tiles of keys: 16 bytes for each thread.
LONE_TILE = 1024

#: Numbers of the parts that it merges at once.
LONE_PARTS = 4096

#: Its programs per multiprocessor, and the fewest steps of one.
LONE_PROGRAMS = 6
LONE_STEPS = 2


def planned(call: Call, splits: int | None = None, *, traced: bool = False) -> Plan:
    """The cut for a call: `splits` parts, or as many as fill the device without becoming too short.

    traced: the tensors may hold nothing, and have no address.
    """
    return _lone(call, splits) if is_lone(call, traced=traced) else _stacked(call, splits)


def is_lone(call: Call, *, traced: bool = False) -> bool:
    """Whether the kernel for one query per key head can run a call."""
    q, k, v = call.q, call.k, call.v
    if q.size(1) != k.size(1) or q.size(2) != 1 or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    if any(x is not None for x in (call.q_positions, call.k_positions, call.q_documents, call.mask)):
        return False
    return k.size(3) in LONE_DIMS and k.size(3) == v.size(3) and all(in_pieces(x, traced=traced) for x in (k, v))


def in_pieces(x: Tensor, *, traced: bool = False) -> bool:
    """Whether every row of half-precision numbers is whole pieces of 16 bytes; memory of torch begins with one."""
    begin = x.storage_offset() * x.element_size() if traced else x.data_ptr()
    return begin % 16 == 0 and x.stride(-1) == 1 and all(stride % PIECE == 0 for stride in x.stride()[:-1])


def _lone(call: Call, splits: int | None) -> Plan:
    """For one query per key head."""
    q, k, v = call.q, call.k, call.v
    # Numbers that a kernel is compiled for, also where a compiler has symbols for sizes.
    d, k_row, v_row = int(k.size(3)), int(k.stride(2)) // 2, int(v.stride(2)) // 2
    block_n, parts = LONE_TILE // d, LONE_PARTS // d
    steps = -(-k.size(2) // (TILES_UNDER_WAY * block_n))
    if splits is None:
        splits = min(LONE_PROGRAMS * multiprocessors(q.device) // (q.size(0) * q.size(1)), steps // LONE_STEPS)
    splits = max(1, min(splits, steps))
    tensors = (q, k, v, call.gate, call.landmark, call.amplitude)
    pieces = [x.stride(axis) // PIECE for x in (k, v) for axis in (0, 1)]
    strides = [q.stride(0), q.stride(1), q.stride(3), *pieces, *call.gate.stride()[:2], *call.landmark.stride()]
    # A pointer that is never followed stands in for what is not there.
    lengths = q if call.lengths is None else call.lengths
    return Plan(
        kernel=partial_lone,
        arguments=[q.size(1), k.size(2), *call.units, *tensors, lengths, *strides, call.amplitude.stride(0)],
        flags={"K_ROW": k_row, "V_ROW": v_row, "GATED": call.gated}
        | {"HAS_LENGTHS": call.lengths is not None, "PARTS": parts}
        | {"BLOCK_N": block_n, "BLOCK_D": d, "num_warps": 4, "num_stages": 1},
        splits=splits,
        row_tiles=1,
        merging_steps=-(-splits // parts),
        parts=parts,
        width=d,
    )


def _stacked(call: Call, splits: int | None) -> Plan:
    """For the kernel that stacks the rows of a key head."""
    q, k, v = call.q, call.k, call.v
    d, d_v = q.size(3), v.size(3)
    width, value_width = (max(16, power_of_two(x)) for x in (d, d_v))
    rows = q.size(1) // k.size(1) * q.size(2)
    tile = tile_for(q.dtype, max(width, value_width))
    # Where pairs lie in a mask, each takes registers of its own.
    keys = tile.keys if call.mask is None else max(16, tile.keys // 2)
    block_m = min(tile.rows, max(16, power_of_two(rows)))
    row_tiles = -(-rows // block_m)
    tiles = -(-k.size(2) // keys)
    if splits is None:
        # Rounded down: a last wave of a few programs would double the time of short ones.
        wanted = tile.programs * multiprocessors(q.device) // (q.size(0) * k.size(1) * row_tiles)
        splits = max(1, min(wanted, tiles // LEAST_TILES))
    span = -(-tiles // splits) * keys
    blocks = {"BLOCK_M": block_m, "BLOCK_N": keys, "BLOCK_D": width, "BLOCK_V": value_width, "PARTS": PARTS}
    arguments, flags = _arguments(call)
    return Plan(
        kernel=partial,
        arguments=[span, k.size(1), k.size(2), d, d_v, *call.units, *arguments],
        flags=flags
        | {"PARTIAL_D": d != width, "PARTIAL_V": d_v != value_width}
        | blocks
        | {"num_warps": tile.warps, "num_stages": tile.stages},
        splits=-(-k.size(2) // span),
        row_tiles=row_tiles,
        merging_steps=min(rows, block_m) * -(-splits // PARTS),
        parts=PARTS,
        width=value_width,
    )


def _arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """What :func:`partial` takes besides sizes, in its order, and flags."""
    tensors, optional = call[:6], call[6:12]
    strides = [s for x in tensors for s in x.stride()]
    for side in (call.q_positions, call.k_positions, call.q_documents, call.k_documents):
        strides += (0, 0) if side is None else side.stride()
    strides += (0, 0, 0, 0) if call.mask is None else call.mask.stride()
    flags = {
        "CAUSAL": call.causal,
        "HAS_LENGTHS": call.lengths is not None,
        "HAS_POSITIONS": call.q_positions is not None,
        "HAS_DOCUMENTS": call.q_documents is not None,
        "HAS_MASK": call.mask is not None,
    }
    # A pointer that is never followed stands in for what is not there.
    present = [call.q if x is None else x for x in optional]
    return [*tensors, *present, *strides, call.q.size(1) // call.k.size(1), call.q.size(2)], flags


def tile_for(dtype: torch.dtype, widest: int) -> Tile:
    """How a program works that stacks rows whose keys and values are up to so wide."""
    kind = "narrow" if widest <= 64 else "wide" if widest <= 128 else "widest"
    return TILES["float32" if dtype == torch.float32 else kind]


def dealt(steps: Sequence[int], programs: int, *, least: int, most: int) -> list[int]:
    """How many programs each head has, of about so many in all, by the steps through its keys.

    None has fewer than `least` steps where there is another, and no head more than `most` programs.
    """
    total = max(1, sum(steps))
    return [max(1, min(programs * each // total, each // least, most)) for each in steps]


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; one elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
