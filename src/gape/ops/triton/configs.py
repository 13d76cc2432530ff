"""Sizes of launches: the tiles of attention's kernels, and what they are computed from."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """What one program takes, and with what.

    Attributes:
        rows: queries of a tile.
        columns: keys of a tile.
        warps: of 32 threads.
        stages: tiles under way at once in a pipelined loop.
        registers: most that a thread may have, if there is a cap.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


#: By kernel: half precision with heads of up to 64, of 80 or 96, up to 128, and wider. Small ones are for float32.
#: Where tiles are skipped all kernels judge the same tiles, so theirs are equal.
#: 168 registers leave room for three programs of 128 threads on a multiprocessor: one multiplies while others weigh or
#: judge. The loop over a run of tiles still has all it needs in registers, and what is put aside is read back around
#: it. In heads of more than 64 that loop itself would read numbers back for every tile, and shared memory has room for
#: two.
TILES: dict[str, dict[str, Tile]] = {
    "narrow": {
        "fwd": Tile(64, 64, 4, 3, registers=168), "bwd_dq": Tile(64, 64, 4, 3), "bwd_dkv": Tile(64, 64, 4, 2),
    },
    "in parts": {"fwd": Tile(128, 64, 8, 3), "bwd_dq": Tile(64, 64, 4, 3), "bwd_dkv": Tile(64, 64, 4, 2)},
    "wide": {"fwd": Tile(128, 64, 8, 3), "bwd_dq": Tile(128, 64, 8, 3), "bwd_dkv": Tile(64, 128, 8, 3)},
    "widest": {"fwd": Tile(64, 32, 8, 2), "bwd_dq": Tile(64, 32, 8, 2), "bwd_dkv": Tile(32, 64, 8, 2)},
    "small": {"fwd": Tile(32, 32, 4, 2), "bwd_dq": Tile(32, 32, 4, 2), "bwd_dkv": Tile(32, 32, 4, 2)},
    "narrow, skipping": {
        "fwd": Tile(64, 64, 4, 2, registers=168), "bwd_dq": Tile(64, 64, 4, 2, registers=168),
        "bwd_dkv": Tile(64, 64, 4, 2),
    },
    "wide, skipping": {"fwd": Tile(64, 64, 4, 2), "bwd_dq": Tile(64, 64, 4, 2), "bwd_dkv": Tile(64, 64, 4, 2)},
}  # fmt: skip

#: By kind and kernel: instead of tiles that are good only with their cap, where a launch may have none.
UNCAPPED = {("narrow", "fwd"): Tile(128, 64, 4, 3)}


def tiles_for(q: Tensor, v: Tensor, kernel: str, *, skip: bool = False, capped: bool = True) -> dict[str, int]:
    """Tile sizes and launch options of a kernel; widths are powers of two of at least 16, which matrix units want.

    Args:
        q, v: heads of queries and values, rows last but one.
        kernel: its name in TILES.
        skip: whether tiles may be skipped.
        capped: whether the launch may have a cap of registers.
    """
    return _tiles(q.size(-1), v.size(-1), q.dtype == torch.float32, kernel, skip, capped)


@functools.cache
def _tiles(width: int, value_width: int, single: bool, kernel: str, skip: bool, capped: bool) -> dict[str, int]:
    rests = {"REST_D": rest_of(width), "REST_V": rest_of(value_width)}
    width, value_width = (max(16, power_of_two(x)) for x in (width, value_width))
    kind = width_kind(width, value_width)
    if single or (skip and kind == "widest"):
        kind = "small"
    elif skip:
        kind = f"{kind}, skipping"
    elif kind == "wide" and all(rests.values()):
        kind = "in parts"
    tile = TILES[kind][kernel]
    if not capped:
        tile = UNCAPPED.get((kind, kernel), tile)
    cap = {} if tile.registers is None else {"maxnreg": tile.registers}
    sizes = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_D": width, "BLOCK_V": value_width} | rests
    return sizes | {"num_warps": tile.warps, "num_stages": tile.stages} | cap


def width_kind(width: int, value_width: int) -> str:
    """By which tiles are chosen in half precision: heads of up to 64, up to 128, and wider."""
    widest = max(width, value_width)
    return "narrow" if widest <= 64 else "wide" if widest <= 128 else "widest"


def rest_of(width: int) -> int:
    """What heads of 80 and 96 have behind their first 64 coordinates; 0 for others, which are taken whole."""
    return width - 64 if width in (80, 96) else 0


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; one elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
