"""Around a run: a directory that is a run's, deterministic algorithms, and a dump where a loss is not finite."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as pack_tensors
from torch import Tensor

from gape.data.windows import Batch
from gape.models.loss import IGNORED
from gape.train import checkpoint
from gape.utils import files
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


def write(
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
    """Write `dumps/step-00000123/`; None where even that failed, which must not hide the error itself.

    Args:
        root: a run's `dumps/`.
        step: whose loss or gradient it was.
        loss, norm: as they came.
        batches: the step's micro-batches.
        model: the weights the step began with.
        gradients: the gradient's norm per parameter.
        amplitudes: Γ per head, layer after layer.
        history: [step, loss, norm] of the steps before.
    """
    place = root / checkpoint.name(step)
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
        place.mkdir(parents=True, exist_ok=True)
        files.write(place / "report.json", files.to_json(report))
        files.write(place / "batch.safetensors", pack_tensors(batch))
        files.write(place / "model.safetensors", pack_tensors({k: v.cpu().contiguous() for k, v in model.items()}))
    except OSError:
        return None
    return place


def _largest(value: Tensor) -> float:
    """The largest magnitude in a tensor; flags and whole numbers, which buffers may hold, have one too."""
    return float((value if value.is_floating_point() else value.double()).abs().max())
