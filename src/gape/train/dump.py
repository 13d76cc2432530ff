"""What is left behind when a loss or gradient was not finite: enough to make it happen again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save as pack_tensors
from torch import Tensor

from gape.data.source import Batch
from gape.models.loss import IGNORED
from gape.train import checkpoint
from gape.utils import files


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
