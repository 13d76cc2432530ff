"""Around a run: a directory that is a run's, and deterministic algorithms where they are wanted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from gape.utils.validation import invalid_argument

# Sources of difference that torch's switch does not take away, recorded with the run.
NOT_COVERED = {
    "cpu": [],
    "cuda": ["attention backends chosen by torch.compile", "another GPU, driver or version of torch"],
}


def refuse_foreign(run_dir: Path) -> None:
    """Refuse a directory that holds files of a run's names and is none: every run begins with a runtime.jsonl.

    Raises:
        ValueError: names the directory and the first of the files.
    """
    there = [path for name in ("config.json", "log.jsonl", "manifest.json") if (path := run_dir / name).exists()]
    begun = (run_dir / "runtime.jsonl").exists() or (run_dir / "checkpoints").is_dir()
    if not begun and any(path.stat().st_size for path in there):
        raise invalid_argument("run_dir", str(run_dir), f"a new directory or one of a run: {there[0].name} is of none")


@contextlib.contextmanager
def determinism(asked: bool, device: torch.device) -> Iterator[None]:
    """Ask torch for deterministic algorithms while a run lasts.

    Raises:
        ValueError: on a GPU without CUBLAS_WORKSPACE_CONFIG, without which the promise is empty.
    """
    if not asked:
        yield
        return
    if device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise ValueError(
            "deterministic: got True, expected CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment beside it"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
