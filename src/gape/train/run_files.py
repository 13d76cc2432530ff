"""What a run writes to its directory besides checkpoints: settings, logs, and a dump of a step that is not finite."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save as pack_tensors
from torch import Tensor

from gape.data.windows import Batch
from gape.models.loss import IGNORED
from gape.train import checkpoint
from gape.utils import files
from gape.utils.jsonl import JSONLines


class NonFiniteError(ArithmeticError):
    """A loss or gradient of `step` that is not finite; the weights are those of the step before.

    `dump` is the directory with what is needed to look into it; None where it could not be written.
    """

    #: Losses and norms are those of all processes of a job.
    in_all_ranks = True

    def __init__(self, step: int, what: str, dump: Path | None) -> None:
        hint = f"; see {dump}" if dump else ""
        super().__init__(f"step {step}: {what}; the weights are those after step {step - 1}{hint}")
        self.step, self.dump = step, dump


class RunFiles:
    """The files of a run, locked while entered; in the processes of a job that do not write, nothing happens.

    `warn` is called with the reason when runtime.jsonl cannot be written. Entering raises BusyError where another
    process trains in the directory.
    """

    def __init__(self, run_dir: Path, warn: Callable[[str], None], *, writes: bool = True) -> None:
        self.run_dir, self._warn, self._writes = run_dir, warn, writes
        self._logs: dict[str, JSONLines] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RunFiles:
        if not self._writes:
            return self
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(files.locked(self.run_dir))
            for name in ("log", "runtime"):
                self._logs[name] = JSONLines(self.run_dir / f"{name}.jsonl")
                stack.callback(self._logs[name].close)
            for name in ("checkpoints", "figures"):
                (self.run_dir / name).mkdir(exist_ok=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the files and release the lock."""
        self._stack.close()

    def log(self, **record: Any) -> None:
        """Add a line to log.jsonl."""
        if self._writes:
            self._logs["log"].write(**record)

    def note(self, **record: Any) -> None:
        """Add a line to runtime.jsonl; a failure is only a warning."""
        if not self._writes:
            return
        try:
            self._logs["runtime"].write(time=round(time.time(), 3), **record)
        except OSError as error:
            self._warn(f"warning: runtime.jsonl: {error}")

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file."""
        if self._writes:
            files.replace(self.run_dir / name, files.to_json(value))

    def remove(self, name: str) -> None:
        """Remove a file that may be there."""
        if self._writes:
            (self.run_dir / name).unlink(missing_ok=True)

    def cut_log(self, length: int) -> bool:
        """Drop what log.jsonl has after `length` bytes; False where it is shorter."""
        return self._logs["log"].cut(length) if self._writes else True

    def settle_log(self) -> int:
        """Wait until the lines of log.jsonl are on the disk; its length in bytes."""
        return self._logs["log"].settle() if self._writes else 0


def set_newer_aside(root: Path, step: int, warn: Callable[[str], None]) -> None:
    """Move the checkpoints after a step out of the way: the run goes on from there."""
    for newer in checkpoint.available(root):
        if int(newer.name.removeprefix("step-")) > step:
            warn(f"{newer.name} is not used any more, moved to {checkpoint.set_aside(newer).name}")


def write_dump(
    root: Path,
    step: int,
    *,
    loss: float,
    norm: float,
    batches: Sequence[Batch],
    model: Mapping[str, Tensor],
    gradients: Mapping[str, float],
    amplitudes: Sequence[Sequence[float]],
    history: Sequence[Sequence[float]],
) -> Path | None:
    """Write `dumps/step-00000123/` with a report, the batch and the weights the step began with; None if that fails.

    `gradients` has the norm per parameter, `amplitudes` Γ per head, layer after layer, and `history` [step, loss, norm]
    of the steps before.
    """
    directory = root / checkpoint.name(step)
    report: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "gradient_norm": norm,
        "counted_tokens": [int((batch.targets != IGNORED).sum()) for batch in batches],
        "gradient_norms": dict(gradients),
        "amplitudes": amplitudes,
        "largest_weights": {name: _largest(value) for name, value in model.items() if value.numel()},
        "history": [dict(zip(("step", "loss", "gradient_norm"), row, strict=True)) for row in history],
    }
    batch = {
        f"{micro}/{field}": value.cpu().contiguous()
        for micro, one in enumerate(batches)
        for field, value in one._asdict().items()
        if value is not None
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files.write(directory / "report.json", files.to_json(report))
        files.write(directory / "batch.safetensors", pack_tensors(batch))
        files.write(directory / "model.safetensors", pack_tensors({k: v.cpu().contiguous() for k, v in model.items()}))
    except OSError:
        return None
    return directory


def _largest(value: Tensor) -> float:
    """The largest magnitude in a tensor; flags and whole numbers, which buffers may hold, have one too."""
    return float((value if value.is_floating_point() else value.double()).abs().max())
