"""The data behind a page: one text read by one model, as a JSON header and arrays. Imports no torch.

A view is a safetensors file: eight bytes with the length of a JSON object, that object, then the bytes of the arrays.
The object names each array with its dtype, shape and place; its `__metadata__` has the header of the view as JSON under
`view`.

Header: `tokens` (N), `model` (`layers` L, `n_heads` Hq, `n_kv_heads` Hk, …), `vocabulary` (texts of tokens), `marks`,
`eps` (values of the slider), `cell` (tokens of a cell of a whole map, a power of two), `tile` (256), `least_weight`,
`bytes_per_key` and `full` (finest level by "LAYER.HEAD").

| array | shape | meaning |
|---|---|---|
| `token`, `next`, `plain` | N; N × P | places in `vocabulary`: the text, likely next tokens, the same without gates |
| `next_probability`, `plain_probability` | N × P | in 255ths |
| `gate`, `score` | L × Hq × N | bytes, evenly by logarithm between two ends: g, and a bound on scores |
| `gate_range`, `score_range` | L × Hq × 2 | the two ends |
| `rate_per_gate`, `horizon` | L × Hq | Γ/T; 1 / mean rate |
| `entropy_KIND`, `retrieval_KIND` | L × Hq | with gates (`gated`) and without (`plain`) |
| `landmark`, `evicted_at` | L × Hk × N | l in 255ths; the first step of `eps` that evicts a key, 255 for none |
| `density`, `floor` | L × Hk | share of l > 0.5; whether all gates of a key head have a floor |
| `map_KIND` | L × Hq × S × S | largest attention of a cell, queries by rows, as :func:`weight_bytes` has it |
| `tiles_KIND/L/H`, `index_KIND/L/H` | T × 256 × 256; T × 3 | finer parts of maps: level, row, column |

Cells of level z have `cell` / 2^z tokens. Tiles that are missing are empty.

Shapes: N tokens, L layers, Hq / Hk query / key heads, S cells along a side of a map, P predictions, T tiles.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as from_safetensors
from safetensors.numpy import save as to_safetensors

from gape.utils import files
from gape.utils.validation import invalid_argument

FORMAT, VERSION = "gape-view", 1
#: Cells along a side of a tile, and of the map of a whole text.
TILE = 256
#: The least attention that a byte of a map can tell from none; the largest is 1.
LEAST_WEIGHT = 1e-4
#: A key that no eps of the view evicts.
NEVER = 255
#: Values of eps that the slider has.
EPS = tuple(float(f"{10 ** (-6 + step / 4):.2g}") for step in range(23))
#: With the gates of the model, and with all gates of a layer at zero.
KINDS = ("gated", "plain")

Bytes = npt.NDArray[np.uint8]


@dataclass
class View:
    """One text read by one model: a header of plain JSON, and arrays by name."""

    header: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The safetensors file."""
        text = json.dumps(files.plain(self.header), allow_nan=False)
        return to_safetensors({k: np.ascontiguousarray(v) for k, v in self.arrays.items()}, {"view": text})

    @classmethod
    def from_bytes(cls, data: bytes) -> View:
        """The view in the bytes of a file; refuses what is none, or of another version."""
        try:
            entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            header = json.loads(entries["__metadata__"]["view"])
            arrays = from_safetensors(data)
            kind = (header.get("format"), header.get("version"))
        except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise ValueError(f"view: got {len(data):,} bytes, expected a view of gape explore: {error}") from error
        if kind != (FORMAT, VERSION):
            raise invalid_argument("view", kind, f"{FORMAT}, version {VERSION}")
        return cls(header, arrays)

    def save(self, path: Path) -> None:
        """Write the view; a file that ends in .gz is compressed."""
        data = self.to_bytes()
        # Without a time in it, so that the same view gives the same bytes.
        files.replace(path, gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)

    @classmethod
    def load(cls, path: Path) -> View:
        """Read a file of :meth:`save`; refuses what holds no view."""
        with files.open_decompressed(path) as file:
            return cls.from_bytes(file.read())


def cell_size(n: int) -> int:
    """Tokens of a cell on the map of a whole text: the least power of two that makes at most :data:`TILE` cells."""
    return 1 << max(0, math.ceil(math.log2(max(1, n) / TILE)))


def levels(n: int) -> Iterator[tuple[int, int]]:
    """(level, tokens of a cell), the whole text first, single tokens last."""
    cell = cell_size(n)
    for level in range(cell.bit_length()):
        yield level, cell >> level


def weight_bytes(weights: npt.NDArray[Any]) -> Bytes:
    """Attention as bytes on a logarithmic scale: 0 below :data:`LEAST_WEIGHT`, 255 for 1."""
    with np.errstate(divide="ignore"):
        scaled = 1 - np.log(weights) / math.log(LEAST_WEIGHT)
    return np.asarray(np.rint(255 * np.clip(scaled, 0, 1)), dtype=np.uint8)


def parsed_heads(text: str, layers: int, heads: int) -> list[tuple[int, int]]:
    """Heads of a text such as "3.1,5.0": LAYER.HEAD, counted from 0, each once; refuses heads that there are not."""
    chosen = []
    for part in filter(None, text.split(",")):
        layer, _, head = part.strip().partition(".")
        if not (layer.isdecimal() and head.isdecimal() and int(layer) < layers and int(head) < heads):
            raise invalid_argument("heads", part, f"LAYER.HEAD, such as 0.1, of {layers} layers of {heads} heads")
        chosen.append((int(layer), int(head)))
    return list(dict.fromkeys(chosen))


def default_heads(header: dict[str, Any]) -> list[tuple[int, int]]:
    """Every head where their full maps are small, 16M cells in all; else none."""
    layers, heads = header["model"]["layers"], header["model"]["n_heads"]
    if header["tokens"] ** 2 * layers * heads > 2**24:
        return []
    return [(layer, head) for layer in range(layers) for head in range(heads)]
