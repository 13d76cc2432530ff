"""What a run writes besides log lines and checkpoints: TensorBoard files, and a dump of a step that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save as pack_tensors
from torch import Tensor

from gape.data.windows import Batch
from gape.models.loss import IGNORED
from gape.train import checkpoint
from gape.utils import files


class NonFiniteError(ArithmeticError):
    """A loss or gradient that is not finite. The weights are those of the step before.

    Attributes:
        step: the step whose loss or gradient it was.
        dump: the directory with what is needed to look into it; None where it could not be written.
    """

    #: Losses and norms are those of all processes of a job.
    in_all_ranks = True

    def __init__(self, step: int, what: str, dump: Path | None) -> None:
        hint = f"; see {dump}" if dump else ""
        super().__init__(f"step {step}: {what}; the weights are those after step {step - 1}{hint}")
        self.step, self.dump = step, dump


class TensorBoard:
    """Scalars for TensorBoard; a failure is reported once and never stops a run.

    Args:
        directory: of the event files.
        step: earlier events after this step are hidden, so that a resumed curve is one curve.
        warn: called with the reason of a failure.

    Raises:
        ImportError: without the `tensorboard` package; says how to install it.
    """

    def __init__(self, directory: Path, step: int, warn: Callable[[str], None]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
        except ImportError as error:
            raise ImportError("tensorboard=True needs TensorBoard: pip install 'gape[log]'") from error
        self._warn = warn
        self._writer: Any = None
        self._guard(lambda: SummaryWriter(str(directory), purge_step=step + 1), keep=True)

    def scalars(self, prefix: str, values: Mapping[str, Any], step: int) -> None:
        """Write the numbers among `values`."""

        def write() -> None:
            for key, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._writer.add_scalar(f"{prefix}/{key}", value, step)

        if self._writer is not None:
            self._guard(write)

    def close(self) -> None:
        """Close the event files."""
        if self._writer is not None:
            self._guard(self._writer.close)

    def _guard(self, action: Callable[[], Any], *, keep: bool = False) -> None:
        try:
            result = action()
        except Exception as error:
            self._writer = None
            self._warn(f"TensorBoard failed and is off from here on: {type(error).__name__}: {error}")
        else:
            self._writer = result if keep else self._writer


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
    """Write `dumps/step-00000123/`; None where that failed, which must not hide the error itself.

    Args:
        root: a run's `dumps/`.
        step: the step that is not finite.
        loss, norm: its loss and gradient norm.
        batches: the step's micro-batches.
        model: the weights the step began with.
        gradients: the gradient's norm per parameter.
        amplitudes: Γ per head, layer after layer.
        history: [step, loss, norm] of the steps before.
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
