"""The random states of a process as tensors and numbers, so that they can be stored without pickle."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed torch (every device), Python's random and NumPy's global state."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def capture(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, numbers): torch's states (uint8 tensors, the CPU's and `device`'s), Python's and NumPy's (for JSON)."""
    tensors = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    numbers = {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
    }
    return tensors, numbers


def restore(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], device: torch.device) -> None:
    """Put back what :func:`capture` gave. A state of a device that is not there is left out."""
    torch.set_rng_state(tensors["torch"].cpu())
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"].cpu(), device)
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002


@contextlib.contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Whatever the block draws, the states afterwards are those from before."""
    tensors, numbers = capture(device)
    try:
        yield
    finally:
        restore(tensors, numbers, device)
