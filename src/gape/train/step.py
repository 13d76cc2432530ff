"""One update: forward, backward, clip, and a step that a non-finite gradient cannot take.

Nothing here waits for the device. Whether loss and gradient are finite is decided on the device, and the fused AdamW
skips the update there; the flag stays up, so no later update touches the weights either. The host learns of it when it
next reads :class:`Window`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gape.data.source import Batch
from gape.gates import GAPEGates
from gape.models.loss import IGNORED
from gape.models.skipping import skip
from gape.train.config import TrainConfig
from gape.train.optimizer import named, set_rate
from gape.train.replay import Replay
from gape.utils.validation import invalid_argument


class Window:
    """Loss and gradient norm of the steps since the last log line, on the device until somebody asks."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._read: list[list[float]] = []

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Remember a step; loss and norm are single numbers."""
        self._waiting.append(torch.stack([loss.float(), norm.float()]))

    def read(self) -> list[list[float]]:
        """[loss, norm] of each step; waits for the device."""
        if self._waiting:
            self._read += torch.stack(self._waiting).tolist()
            self._waiting = []
        return self._read

    def first_bad(self) -> int | None:
        """Index of the first step whose loss or norm is not finite."""
        return next((i for i, pair in enumerate(self.read()) if not all(map(math.isfinite, pair))), None)

    def clear(self) -> None:
        """Begin anew."""
        self._waiting, self._read = [], []

    def restore(self, values: Sequence[Sequence[float]]) -> None:
        """Go on where a checkpoint was."""
        self._waiting, self._read = [], [list(map(float, pair)) for pair in values]


class Updater:
    """Takes steps on a model.

    Args:
        model: called as model(ids, targets=, documents=, positions=) → an object with `.loss`, the mean over the
            targets that are not -100.
        optimizer: the fused AdamW over its parameters.
        config: of the run.
        device: where the parameters are.

    Raises:
        ValueError: for lambda_l1 > 0 with a model that has no landmarks, or none that it would hand out, and for
            skip_eps > 0 with a model that has no gates.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.AdamW, config: TrainConfig, device: torch.device
    ) -> None:
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, device
        self.autocasts = config.precision == "bfloat16" or (config.precision == "auto" and device.type == "cuda")
        self.compiles = config.compile == "on" or (config.compile != "off" and device.type == "cuda")
        self._call: Any = torch.compile(model) if self.compiles else model
        replays = config.compile == "graphs" and device.type == "cuda"
        self._replay = Replay(self._update, optimizer, device) if replays else None
        if config.skip_eps:
            skip(model, config.skip_eps)
        self._parameters = named(optimizer)
        self._zero = torch.zeros((), device=device)
        self.stopped = self._zero.clone()
        self.norms = torch.zeros(len(self._parameters), device=device)
        if config.lambda_l1 and not any(isinstance(module, GAPEGates) for module in model.modules()):
            raise invalid_argument("lambda_l1", config.lambda_l1, "0, since the model has no landmarks to weigh")
        if config.lambda_l1 and not (hasattr(model, "keep_landmarks") and hasattr(model, "landmark_penalty")):
            wanted = f"0, since {type(model).__name__} lacks the methods keep_landmarks and landmark_penalty"
            raise invalid_argument("lambda_l1", config.lambda_l1, wanted)

    def autocast(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocasts)

    def step(self, batches: Sequence[Batch], rate: float) -> tuple[Tensor, Tensor]:
        """One update over micro-batches; (loss, gradient norm before clipping), single numbers on the device.

        The loss is the sum over all counted tokens divided by their number, whatever the micro-batches they came in.
        Read or copy the numbers before the next step: a replayed one writes over them.
        """
        if self._replay is not None:
            return self._replay.step(batches, rate)
        set_rate(self.optimizer, rate)
        return self._update(batches)

    def _update(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """A step at the optimiser's rates."""
        loss = self._backward(batches)
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = self._judge(loss, gradients)
        if self.config.clip:
            torch._foreach_mul_(gradients, torch.clamp(self.config.clip / (norm + 1e-6), max=1.0))
        # The fused AdamW reads this attribute, as it does for gradient scalers, and leaves everything alone when set.
        self.optimizer.found_inf = self.stopped  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _backward(self, batches: Sequence[Batch]) -> Tensor:
        """Leave the gradient of the window's loss in the parameters; the loss."""
        tokens = sum(batch.ids.numel() for batch in batches)
        total = self._zero
        for batch, share in zip(batches, _shares(batches), strict=True):
            with self.autocast(), self._landmarks() as penalty:
                output = self._call(
                    batch.ids, targets=batch.targets, documents=batch.documents, positions=batch.positions
                )
                loss = output.loss * share
                if penalty is not None:
                    # Every token has a landmark, counted or not, so these means are weighed by tokens.
                    loss = loss + self.config.lambda_l1 * batch.ids.numel() / tokens * penalty()
            loss.backward()
            total = total + loss.detach()
        return total

    def _judge(self, loss: Tensor, gradients: list[Tensor]) -> Tensor:
        """The gradient's norm; raises the flag where it or the loss is not finite, and keeps that step's norms."""
        norms = iter(torch._foreach_norm(gradients))
        each = torch.stack([self._zero if p.grad is None else next(norms).float() for p in self._parameters.values()])
        norm: Tensor = torch.linalg.vector_norm(each)
        # In place, so that a recorded step finds them again.
        self.norms.copy_(torch.where(self.stopped > 0, self.norms, each))
        self.stopped.copy_(torch.maximum(self.stopped, (~(loss.isfinite() & norm.isfinite())).float()))
        return norm

    @contextlib.contextmanager
    def _landmarks(self) -> Iterator[Callable[[], Tensor] | None]:
        """What gives the mean landmark of the forward pass in the block; nothing is kept where it is not weighed."""
        if not self.config.lambda_l1:
            yield None
            return
        model: Any = self.model
        model.keep_landmarks(True)
        try:
            yield model.landmark_penalty
        finally:
            model.keep_landmarks(False)


def _shares(batches: Sequence[Batch]) -> list[Tensor] | list[float]:
    """How much of the window's counted tokens each micro-batch has."""
    if len(batches) == 1:
        return [1.0]
    counts = torch.stack([(batch.targets != IGNORED).sum() for batch in batches])
    return list((counts / counts.sum().clamp(min=1)).unbind())
