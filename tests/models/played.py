"""Graphs that are recorded and replayed without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from gape.models import cuda_graphs


class Played:
    """Stands in for a graph: a replay takes the step that was recorded."""

    def __init__(self, step: Callable[[], torch.Tensor], reset: Callable[[], None], device: torch.device) -> None:
        self.step, self.replays, self.broken = step, 0, False
        self.answer = step()
        reset()

    def replay(self) -> None:
        self.replays += 1
        self.answer.copy_(self.step())
        if self.broken:
            raise KeyboardInterrupt


def playing(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[Played]:
    """Every graph recorded from now on, after the first token, by the `Captured` of a module."""
    graphs: list[Played] = []

    def recorded(*told: Any) -> tuple[Played, torch.Tensor]:
        graphs.append(Played(*told))
        return graphs[-1], graphs[-1].answer

    monkeypatch.setattr(cuda_graphs, "_capture", recorded)
    monkeypatch.setattr(cuda_graphs, "LEAST", 1)
    monkeypatch.setattr(module, "why_not", lambda model, cache: None)
    return graphs
