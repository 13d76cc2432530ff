"""What a run writes to its directory besides checkpoints: logs, settings, TensorBoard. One process of a job writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gape.train import checkpoint
from gape.train.logging import TensorBoard
from gape.utils import files, locks
from gape.utils.jsonl import JSONLines


class NoFiles:
    """The files of a process that writes none; every method does nothing."""

    def __enter__(self) -> NoFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        """Close what is open."""

    def log(self, **record: Any) -> None:
        """Add a line to log.jsonl."""

    def note(self, **record: Any) -> None:
        """Add a line to runtime.jsonl; a failure is only a warning."""

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file."""

    def remove(self, name: str) -> None:
        """Remove a file that may be there."""

    def scalars(self, prefix: str, values: Mapping[str, Any], step: int) -> None:
        """Write numbers for TensorBoard, if that is open."""

    def open_tensorboard(self, step: int, warn: Callable[[str], None]) -> None:
        """Write TensorBoard files from here on; events after `step` are hidden."""

    def cut_log(self, length: int) -> bool:
        """Drop what log.jsonl has after `length` bytes; False where it is shorter."""
        return True

    def settle_log(self) -> int:
        """Wait until the lines of log.jsonl are on the disk; its length in bytes."""
        return 0


class RunFiles(NoFiles):
    """The files of a run, locked while entered.

    Args:
        run_dir: the run's directory, made when missing.
        warn: called with the reason when runtime.jsonl cannot be written.

    Raises:
        BusyError: on entering, where another process trains in the directory.
    """

    def __init__(self, run_dir: Path, warn: Callable[[str], None]) -> None:
        self.run_dir, self._warn = run_dir, warn
        self._tensorboard: TensorBoard | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RunFiles:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(locks.locked(self.run_dir))
            self._log, self._runtime = (JSONLines(self.run_dir / f"{name}.jsonl") for name in ("log", "runtime"))
            stack.callback(self._log.close)
            stack.callback(self._runtime.close)
            for name in ("checkpoints", "figures"):
                (self.run_dir / name).mkdir(exist_ok=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the files and release the lock."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._stack.close()

    def log(self, **record: Any) -> None:
        """Add a line to log.jsonl."""
        self._log.write(**record)

    def note(self, **record: Any) -> None:
        """Add a line to runtime.jsonl; a failure is only a warning."""
        try:
            self._runtime.write(time=round(time.time(), 3), **record)
        except OSError as error:
            self._warn(f"warning: runtime.jsonl: {error}")

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file."""
        files.replace(self.run_dir / name, files.to_json(value))

    def remove(self, name: str) -> None:
        """Remove a file that may be there."""
        (self.run_dir / name).unlink(missing_ok=True)

    def scalars(self, prefix: str, values: Mapping[str, Any], step: int) -> None:
        """Write numbers for TensorBoard, if that is open."""
        if self._tensorboard is not None:
            self._tensorboard.scalars(prefix, values, step)

    def open_tensorboard(self, step: int, warn: Callable[[str], None]) -> None:
        """Write TensorBoard files from here on; events after `step` are hidden."""
        self._tensorboard = TensorBoard(self.run_dir / "tensorboard", step, warn)

    def cut_log(self, length: int) -> bool:
        """Drop what log.jsonl has after `length` bytes; False where it is shorter."""
        return self._log.cut(length)

    def settle_log(self) -> int:
        """Wait until the lines of log.jsonl are on the disk; its length in bytes."""
        return self._log.settle()


def set_newer_aside(root: Path, step: int, warn: Callable[[str], None]) -> None:
    """Move the checkpoints after a step out of the way: the run goes on from there."""
    for newer in checkpoint.available(root):
        if int(newer.name.removeprefix("step-")) > step:
            warn(f"{newer.name} is not used any more, moved to {checkpoint.set_aside(newer).name}")
