"""Sizes of launches: the tiles of attention's kernels, and what they are computed from.

Tables are of an H200, whose matrix units read products' operands from shared memory. Where a GPU has less of that, or
has them in registers, tiles are made smaller until they fit. None of those was measured.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver


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
    "in parts, few queries": {"fwd": Tile(64, 64, 4, 3)},
    "in parts": {"fwd": Tile(128, 64, 8, 3), "bwd_dq": Tile(64, 64, 4, 3), "bwd_dkv": Tile(64, 64, 4, 2)},
    "wide": {"fwd": Tile(128, 64, 8, 3), "bwd_dq": Tile(128, 64, 8, 3), "bwd_dkv": Tile(64, 128, 8, 3)},
    "widest": {"fwd": Tile(128, 32, 8, 3), "bwd_dq": Tile(128, 32, 8, 3), "bwd_dkv": Tile(64, 64, 8, 2)},
    "small": {"fwd": Tile(32, 32, 4, 2), "bwd_dq": Tile(32, 32, 4, 2), "bwd_dkv": Tile(32, 32, 4, 2)},
    "narrow, skipping": {
        "fwd": Tile(64, 64, 4, 2, registers=168), "bwd_dq": Tile(64, 64, 4, 2, registers=168),
        "bwd_dkv": Tile(64, 64, 4, 2),
    },
    "wide, skipping": {"fwd": Tile(64, 64, 4, 2), "bwd_dq": Tile(64, 64, 4, 2), "bwd_dkv": Tile(64, 64, 4, 2)},
    "widest, skipping": {"fwd": Tile(64, 32, 4, 2), "bwd_dq": Tile(64, 32, 4, 2), "bwd_dkv": Tile(64, 32, 4, 2)},
}  # fmt: skip

#: By kind and kernel: instead of tiles that are good only with their cap, where a launch may have none.
UNCAPPED = {("narrow", "fwd"): Tile(128, 64, 4, 3)}

#: Up to so many queries, the forward kernel takes heads of 80 and 96 in small tiles: large ones are too few to keep a
#: GPU busy.
FEW_QUERIES = 1024

#: Shared memory that a kernel takes beside its tiles, at most: bytes.
BESIDE_TILES = 2048

#: Where matrix units read operands from shared memory, major numbers of compute capabilities: Hopper, and Blackwell in
#: data centres.
FROM_SHARED_MEMORY = (9, 10)

#: Shared memory that tiles may take elsewhere: what GPUs for desktops have. In larger tiles, registers are spilled.
IN_REGISTERS = 101_376

#: The fewest rows or columns of a product in matrix units.
LEAST = 16


def tiles_for(q: Tensor, v: Tensor, kernel: str, *, skip: bool = False, capped: bool = True) -> dict[str, int]:
    """Tile sizes and launch options of a kernel; widths are powers of two of at least 16, which matrix units want.

    Args:
        q, v: heads of queries and values, rows last but one.
        kernel: its name in TILES.
        skip: whether tiles may be skipped.
        capped: whether the launch may have a cap of registers.
    """
    # A compiler's symbol for a length is no int: what is compiled once serves all lengths.
    few = kernel == "fwd" and isinstance(q.size(-2), int) and q.size(-2) <= FEW_QUERIES
    return _tiles(q.size(-1), v.size(-1), q.dtype == torch.float32, kernel, few, skip, capped, shared_memory())


@functools.cache
def _tiles(
    width: int, value_width: int, single: bool, kernel: str, few: bool, skip: bool, capped: bool, limit: int | None
) -> dict[str, int]:
    rests = {"REST_D": rest_of(width), "REST_V": rest_of(value_width)}
    blocks = max(LEAST, power_of_two(width)), max(LEAST, power_of_two(value_width))
    kind = width_kind(*blocks)
    if single:
        kind = "small"
    elif skip:
        kind = f"{kind}, skipping"
    elif kind == "wide" and all(rests.values()):
        kind = "in parts, few queries" if few else "in parts"
    tiles = dict(TILES[kind])
    if not capped or (limit is not None and limit <= IN_REGISTERS):
        tiles |= {name: tile for (of, name), tile in UNCAPPED.items() if of == kind}
    if limit is not None:
        read = width if rests["REST_D"] else blocks[0], value_width if rests["REST_V"] else blocks[1]
        tiles = _fitting(tiles, read, 4 if single else 2, limit, together=skip)
    tile = tiles[kernel]
    cap = {} if tile.registers is None else {"maxnreg": tile.registers}
    sizes = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_D": blocks[0], "BLOCK_V": blocks[1]} | rests
    return sizes | {"num_warps": tile.warps, "num_stages": tile.stages} | cap


def _fitting(
    tiles: dict[str, Tile], widths: tuple[int, int], size: int, limit: int, *, together: bool
) -> dict[str, Tile]:
    """The tiles of all kernels, none of which takes more shared memory than `limit`; equal ones if `together`."""

    def fitting() -> dict[str, Tile]:
        return {kernel: fitting_tile(tile, kernel, widths, size, limit) for kernel, tile in tiles.items()}

    if together:
        rows, columns = (min(sizes) for sizes in zip(*(tile[:2] for tile in fitting().values()), strict=True))
        tiles = {kernel: tile._replace(rows=rows, columns=columns) for kernel, tile in tiles.items()}
    if limit > IN_REGISTERS:
        return fitting()
    # More warps share the operands of a product, and a cap would leave none for them.
    return {
        kernel: tile._replace(warps=min(8, _most_warps(tile)), registers=None) for kernel, tile in fitting().items()
    }


def fitting_tile(tile: Tile, kernel: str, widths: tuple[int, int], size: int, limit: int) -> Tile:
    """The tile, made smaller until its kernel takes at most `limit` bytes of shared memory.

    Two stages stay as long as there is anything else to halve: without a second one, loads wait for products.

    Args:
        tile: what to begin with.
        kernel: its name in TILES.
        widths: coordinates of a query or key, and of a value.
        size: bytes of a coordinate.
        limit: bytes.
    """
    while shared_bytes(tile, kernel, widths, size) > limit:
        rows, columns, _, stages, _ = tile
        if stages > 2 or (stages == 2 and max(rows, columns) <= LEAST):
            tile = tile._replace(stages=stages - 1)
        elif max(rows, columns) <= LEAST:
            break
        elif rows > columns or (rows == columns and kernel == "bwd_dkv"):
            tile = tile._replace(rows=rows // 2)
        else:
            tile = tile._replace(columns=columns // 2)
    return tile._replace(warps=min(tile.warps, _most_warps(tile)))


def _most_warps(tile: Tile) -> int:
    """That have 16 × 16 pairs each, and at least four."""
    return max(4, tile.rows * tile.columns // LEAST**2)


def shared_bytes(tile: Tile, kernel: str, widths: tuple[int, int], size: int) -> int:
    """Shared memory of a kernel, at most: what stays for the whole program, and what every stage has of the loop.

    Kernels of queries go through keys and values, that of keys through queries and gradients of outputs.
    """
    stay, turn = (tile.columns, tile.rows) if kernel == "bwd_dkv" else (tile.rows, tile.columns)
    staying = widths[0] if kernel == "fwd" else sum(widths)
    return (stay * staying + tile.stages * turn * sum(widths)) * size + BESIDE_TILES


def shared_memory() -> int | None:
    """Bytes that a program may take on each GPU of this machine; None before one is used.

    At most IN_REGISTERS, where operands of products are in registers.
    """
    return _shared_memory() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


@functools.cache
def _shared_memory() -> int:
    # The least of all: tensors without memory, for which launches are planned too, are on no device.
    return min(_shared_memory_of(index) for index in range(torch.cuda.device_count()))


def _shared_memory_of(index: int) -> int:
    # As Triton counts it, which refuses launches that take more.
    most = int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
    return most if torch.cuda.get_device_capability(index)[0] in FROM_SHARED_MEMORY else min(most, IN_REGISTERS)


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
