"""Around a run: nobody else in its directory, and torch's switches as asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from gape.utils import files
from gape.utils.errors import BusyError
from gape.utils.validation import invalid_argument

# Sources of difference that torch's switch does not take away, recorded with the run.
NOT_COVERED = {
    "cpu": [],
    "cuda": ["attention backends chosen by torch.compile", "another GPU, driver or version of torch"],
}


@contextlib.contextmanager
def alone(run_dir: Path, done_to_it: str = "trained") -> Iterator[None]:
    """Hold a run's directory. The system lets go of it when the process dies, however it dies.

    What a death left in a run, called `.tmp-*`, goes. Not to be nested: what leaves first lets go for both.

    Args:
        run_dir: the directory.
        done_to_it: what whoever comes meanwhile is told that is being done to it.

    Raises:
        BusyError: when another process trains or measures there; says which of the two, and the process.
    """
    if os.name == "nt":
        _tidy(run_dir)
        yield
        return
    import fcntl  # noqa: PLC0415

    with files.add_to(run_dir / ".lock") as handle:
        try:
            # Not flock: a forked worker that outlives its parent would go on holding that one.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise BusyError(f"{run_dir} is being {_told(run_dir)}; wait for it or use another") from error
        except OSError:
            # A file system without locks: better to train unguarded than not at all.
            pass
        # A note for whoever comes meanwhile; a full disk keeps it from being written, not the run from its work.
        with contextlib.suppress(OSError):
            handle.truncate(0)
            handle.write(f"{done_to_it} {os.getpid()}".encode())
        _tidy(run_dir)
        yield


def refuse_foreign(run_dir: Path) -> None:
    """Refuse a directory that holds files of a run's names and is none: every run begins with a runtime.jsonl.

    Raises:
        ValueError: names the directory and the first of the files.
    """
    there = [path for name in ("config.json", "log.jsonl", "manifest.json") if (path := run_dir / name).exists()]
    begun = (run_dir / "runtime.jsonl").exists() or (run_dir / "checkpoints").is_dir()
    if not begun and any(path.stat().st_size for path in there):
        raise invalid_argument("run_dir", str(run_dir), f"a new directory or one of a run: {there[0].name} is of none")


def _tidy(run_dir: Path) -> None:
    """Remove what a death left in a run; in a directory of another kind nothing is known to be ours."""
    if (run_dir / "checkpoints").is_dir():
        for place in (run_dir, run_dir / "checkpoints"):
            files.sweep(place)


def _told(run_dir: Path) -> str:
    """What the holder of a lock says of itself; it may not have said it yet."""
    word, _, process = (run_dir / ".lock").read_text(encoding="utf-8", errors="replace").partition(" ")
    return f"{word or 'trained'} by another process" + (f" ({process})" if process else "")


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
