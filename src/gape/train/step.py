"""One update of the weights, kernel by kernel or as one replayed CUDA graph; and the loss on held-out windows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gape.data.windows import Batch, Source
from gape.distributed.job import Job
from gape.distributed.sharding import local_tensors
from gape.gates import GAPEGates
from gape.models.loss import loss_weight
from gape.models.skipping import skip
from gape.train.config import TrainConfig
from gape.train.optimizer import named, set_rate
from gape.utils.validation import invalid_argument


class Window:
    """Loss and gradient norm of the steps since the last log line, left on the device until they are read."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._read: list[list[float]] = []

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Add a step; loss and norm are single numbers."""
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

    def restore(self, values: Sequence[Sequence[float]]) -> None:
        """Set the steps to those of a checkpoint, or to none."""
        self._waiting, self._read = [], [list(map(float, pair)) for pair in values]


class Updater:
    """Takes steps on a model.

    Args:
        model: called as model(ids, targets=, documents=, positions=) → an object with `.loss`, the mean over the
            targets that are not -100.
        optimizer: the fused AdamW over its parameters.
        config, device: of the run.
        job: the processes that take the step together; this one alone when None.
        call: what to call for a forward pass, if `job.parallelize` was asked already.

    Raises:
        ValueError: for lambda_l1 > 0 with a model that has no landmarks or does not return them, and for skip_eps > 0
            with a model that has no gates.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        config: TrainConfig,
        device: torch.device,
        job: Job | None = None,
        call: Any = None,
    ) -> None:
        self.job = job = job or Job()
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, device
        self.autocasts = config.low(device.type)
        if call is None:
            call = job.parallelize(model, low=self.autocasts, compiles=config.compiles(device.type))
        self._call = call
        replays = config.compile == "graphs" and device.type == "cuda" and job.size == 1
        self._replay = Replay(self._update, optimizer, device) if replays else None
        if config.skip_eps:
            skip(model, config.layer_eps)
        self._parameters = named(optimizer)
        self._zero = torch.zeros((), device=device)
        self._dtype = torch.promote_types(next(iter(self._parameters.values())).dtype, torch.float32)
        self.stopped = self._zero.clone()
        # The loss of this process's share.
        self.own_loss = self._zero.clone()
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

        The loss is the sum over all counted tokens divided by their number (or weight). Read the numbers before the
        next step: a replayed one writes over them.
        """
        if self._replay is not None:
            return self._replay.step(batches, rate)
        set_rate(self.optimizer, rate)
        return self._update(batches)

    def _update(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """A step at the optimiser's rates."""
        loss = self._backward(batches)
        gradients = local_tensors([p.grad for p in self._parameters.values() if p.grad is not None])
        norm = self._gradient_norm(loss, gradients)
        if self.config.clip:
            torch._foreach_mul_(gradients, torch.clamp(self.config.clip / (norm + 1e-6), max=1.0))
        # The fused AdamW reads this attribute, as it does for gradient scalers, and leaves everything alone when set.
        self.optimizer.found_inf = self.stopped  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _backward(self, batches: Sequence[Batch]) -> Tensor:
        """Leave the gradient of the window's loss in the parameters; the loss."""
        job = self.job
        tokens = self._token_sum(batches)
        total = self._zero
        for batch, share in zip(batches, self._shares(batches), strict=True):
            last = batch is batches[-1]
            with job.synchronized(self._call, last), self.autocast(), self._landmarks() as penalty:
                # Not every model takes weights.
                weights = {} if batch.weights is None else {"weights": batch.weights}
                output = self._call(
                    batch.ids, targets=batch.targets, documents=batch.documents, positions=batch.positions, **weights
                )
                loss = output.loss * share
                if penalty is not None:
                    # Every token has a landmark, counted or not, so these means are weighed by tokens.
                    loss = loss + self.config.lambda_l1 * job.size * batch.ids.numel() / tokens * penalty()
                loss.backward()
            total = total + loss.detach()
        self.own_loss.copy_(torch.where(self.stopped > 0, self.own_loss, total))
        return job.sum(total) / job.size

    def _token_sum(self, batches: Sequence[Batch]) -> int | Tensor:
        """The tokens of the window, in all processes; only a weight on landmarks needs them."""
        own = sum(batch.ids.numel() for batch in batches)
        alone = self.job.size == 1 or not self.config.lambda_l1
        return own if alone else self.job.sum(torch.tensor(own, device=self.device))

    def _shares(self, batches: Sequence[Batch]) -> list[Tensor] | list[float]:
        """How much of the window's counted tokens, or of their weight, each micro-batch has, times the processes.

        The factor is there because gradients are averaged over processes, and are to be added up.
        """
        if len(batches) == 1 and self.job.size == 1:
            return [1.0]
        counts = torch.stack([loss_weight(batch.targets, batch.weights) for batch in batches]).to(self._dtype)
        total = self.job.sum(counts.sum())
        return list((self.job.size * counts / torch.where(total > 0, total, 1)).unbind())

    def _gradient_norm(self, loss: Tensor, gradients: list[Tensor]) -> Tensor:
        """The gradient's norm; sets `stopped` where it or the loss is not finite, and keeps the norms of that step."""
        norms = iter(torch._foreach_norm(gradients))
        each = torch.stack([self._zero if p.grad is None else next(norms).float() for p in self._parameters.values()])
        each = self.job.norms(each)
        norm: Tensor = torch.linalg.vector_norm(each)
        # In place: a captured step writes to the same tensors.
        self.norms.copy_(torch.where(self.stopped > 0, self.norms, each))
        self.stopped.copy_(torch.maximum(self.stopped, (~(loss.isfinite() & norm.isfinite())).float()))
        return norm

    @contextlib.contextmanager
    def _landmarks(self) -> Iterator[Callable[[], Tensor] | None]:
        """A context that yields a function for the mean landmark of its forward pass, or None without lambda_l1."""
        if not self.config.lambda_l1:
            yield None
            return
        model: Any = self.model
        model.keep_landmarks(True)
        try:
            yield model.landmark_penalty
        finally:
            model.keep_landmarks(False)


#: Updates before the one that is captured: they compile, and make the state of the optimiser and of libraries.
WARM = 3

Update = Callable[[Sequence[Batch]], tuple[Tensor, Tensor]]


class Replay:
    """Takes updates by replaying a captured one (CUDA graph).

    `update` is one whole update over micro-batches at the optimiser's rates. It returns two numbers on the device,
    never waits for it, and writes to the same tensors each time.
    """

    def __init__(self, update: Update, optimizer: torch.optim.AdamW, device: torch.device) -> None:
        self._update, self._optimizer, self._device = update, optimizer, device
        self._warm = 0
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batches: list[Batch] = []
        self._rates: list[Tensor] = []
        self._numbers: tuple[Tensor, Tensor]

    def step(self, batches: Sequence[Batch], rate: float) -> tuple[Tensor, Tensor]:
        """One update; its numbers are valid until the next one. Batches of another shape do not use the graph."""
        # The first updates read the copies too: a compiler specialises on the strides of its inputs.
        self._batches = self._batches or [batch.mapped(torch.clone) for batch in batches]
        if _shapes(batches) != _shapes(self._batches):
            return self._launch(batches, rate)
        for old, new in zip(self._batches, batches, strict=True):
            torch._foreach_copy_(_tensors(old), _tensors(new))
        if self._warm < WARM:
            self._warm += 1
            return self._launch(self._batches, rate)
        if self._graph is None:
            self._graph = self._capture()
        for group, stored in zip(self._optimizer.param_groups, self._rates, strict=True):
            stored.fill_(rate * group["lr_multiplier"])
        self._graph.replay()
        return self._numbers

    def _launch(self, batches: Sequence[Batch], rate: float) -> tuple[Tensor, Tensor]:
        """An update kernel by kernel, on a stream of its own, as a capture requires of those before it."""
        set_rate(self._optimizer, rate)
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            numbers = self._update(batches)
        here.wait_stream(self._stream)
        return numbers

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture an update over the copies of batches, without doing it."""
        # A rate that is a Python number would be fixed in the graph.
        self._rates = [torch.zeros((), device=self._device) for _ in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"], group["capturable"] = rate, True
        graph = torch.cuda.CUDAGraph()
        # The default stream of torch.cuda.graph belongs to the GPU that was used first in this process.
        own = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.graph(graph, stream=own):
            self._numbers = self._update(self._batches)
        return graph


def _tensors(batch: Batch) -> list[Tensor]:
    return [x for x in batch if x is not None]


def _shapes(batches: Sequence[Batch]) -> list[tuple[object, ...]]:
    return [tuple(None if x is None else (x.shape, x.dtype) for x in batch) for batch in batches]


def held_out_loss(model: Any, source: Source, batches: int, job: Job) -> float:
    """The mean over the first batches of a source of the mean loss of a batch, shared by the processes of a job.

    `model` has `hidden` and `token_losses` as :class:`gape.GPT`; all targets count. Interrupted after a signal.
    """
    means = []
    for number in range(1, batches + 1):
        job.poll()
        batch, tokens = job.take(source, number, 0)
        with job.parallel():
            hidden = model.hidden(batch.ids, batch.positions)
        losses = model.token_losses(hidden, batch.targets).double()
        means.append(job.sum(losses.sum()) / tokens)
    return float(torch.stack(means).mean())
