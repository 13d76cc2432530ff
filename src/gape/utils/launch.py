"""Which process of a job this is, by what `torchrun` says in the environment; needs no torch."""

from __future__ import annotations

import os


def size() -> int:
    """Processes of the job; 1 where nobody says otherwise."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK") or 0) if size() > 1 else 0


def is_first() -> bool:
    """Whether this process is the one of its job that writes files and shows progress."""
    return rank() == 0
