"""An update as one CUDA graph: what it launches is recorded once and replayed from then on.

Kernels of a small model run shorter than the host takes to launch them. A replay launches forward, backward and the
optimiser's step at once, so the device waits for nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gape.data.source import Batch
from gape.train.optimizer import set_rate

#: Updates before the one that is recorded: they compile, and make the optimiser's state and what libraries keep.
WARM = 3

Update = Callable[[Sequence[Batch]], tuple[Tensor, Tensor]]


class Replay:
    """Takes updates by replaying the first one it recorded.

    Args:
        update: one whole update over micro-batches at the optimiser's rates; returns two numbers on the device. It
            never waits for the device, and keeps what lasts in the same tensors.
        optimizer: the fused AdamW that it steps.
        device: the GPU.
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
        """One update; its numbers are good until the next one. Batches of another shape are not replayed, but taken."""
        # The first updates read the copies too: a compiler may ask how a tensor is laid out, and begin again.
        self._batches = self._batches or [_copied(batch) for batch in batches]
        if _shapes(batches) != _shapes(self._batches):
            return self._launch(batches, rate)
        for old, new in zip(self._batches, batches, strict=True):
            torch._foreach_copy_(_tensors(old), _tensors(new))
        if self._warm < WARM:
            self._warm += 1
            return self._launch(self._batches, rate)
        if self._graph is None:
            self._graph = self._record()
        for group, taken in zip(self._optimizer.param_groups, self._rates, strict=True):
            taken.fill_(rate * group["lr_multiplier"])
        self._graph.replay()
        return self._numbers

    def _launch(self, batches: Sequence[Batch], rate: float) -> tuple[Tensor, Tensor]:
        """An update kernel by kernel, on a stream of its own, as recording one wants those before it to be."""
        set_rate(self._optimizer, rate)
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            numbers = self._update(batches)
        here.wait_stream(self._stream)
        return numbers

    def _record(self) -> torch.cuda.CUDAGraph:
        """Record an update over the copies of batches; nothing of it happens yet."""
        # A rate that is a number would stay the one of this update.
        self._rates = [torch.zeros((), device=self._device) for _ in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"], group["capturable"] = rate, True
        graph = torch.cuda.CUDAGraph()
        # The stream that torch would take belongs to whichever GPU came first in this process.
        own = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.graph(graph, stream=own):
            self._numbers = self._update(self._batches)
        return graph


def _copied(batch: Batch) -> Batch:
    documents, positions = (None if x is None else x.clone() for x in batch[2:])
    return Batch(batch.ids.clone(), batch.targets.clone(), documents, positions)


def _tensors(batch: Batch) -> list[Tensor]:
    return [x for x in batch if x is not None]


def _shapes(batches: Sequence[Batch]) -> list[tuple[object, ...]]:
    return [tuple(None if x is None else (x.shape, x.dtype) for x in batch) for batch in batches]
