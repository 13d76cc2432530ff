"""Fixed numbers of a module that casts, moves and checkpoints must not change."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Constant:
    """A fixed vector kept as Python floats and handed out as a tensor on request.

    A buffer would be rounded by `.to(torch.bfloat16)`, lost by a construction on the meta device and written
    to checkpoints. Here the floats stay exact, and each device gets its own tensor once.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self.values = tuple(float(value) for value in values)
        self._tensors: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
        """The numbers as a tensor of shape (len(values),); not to be written to."""
        if torch.compiler.is_compiling():
            return torch.tensor(self.values, dtype=dtype, device=device)
        tensor = self._tensors.get((device, dtype))
        if tensor is None:
            # A tensor first made under inference_mode could not be saved for a later backward pass.
            with torch.inference_mode(False):
                tensor = torch.tensor(self.values, dtype=dtype, device=device)
            # A fake tensor is valid only in the trace it was made in.
            if type(tensor) is Tensor:
                self._tensors[device, dtype] = tensor
        return tensor

    def __getstate__(self) -> dict[str, tuple[float, ...]]:
        return {"values": self.values}

    def __setstate__(self, state: dict[str, tuple[float, ...]]) -> None:
        self.values = state["values"]
        self._tensors = {}

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"Constant({list(self.values)})"
