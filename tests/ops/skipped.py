"""How much of a call the kernel that skips has looked at."""

from __future__ import annotations

from typing import Any

import pytest

from gape.ops.problem import Problem
from gape.ops.triton import launch


def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The fraction of tiles that every call of the kernel looks at from now on; 1 where nothing may be left away."""
    seen: list[float] = []
    attended = launch._attended

    def counted(problem: Problem, eps: float) -> Any:
        found = attended(problem, eps)
        visits, tiles = found[3], launch._tiles_seen(problem.q, problem.k, problem.v)
        seen.append(float(visits.sum()) / tiles if visits.numel() else 1.0)
        return found

    monkeypatch.setattr(launch, "_attended", counted)
    return seen
