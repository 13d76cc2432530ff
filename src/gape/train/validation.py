"""The loss on held-out windows, shared by the processes of a job."""

from __future__ import annotations

from typing import Any

import torch

from gape.data.windows import Source
from gape.distributed.job import Job


def held_out_loss(model: Any, source: Source, batches: int, job: Job) -> float:
    """The mean over batches of the mean loss of a batch, whose targets all count.

    Args:
        model: with `hidden` and `token_losses`, as :class:`gape.GPT` has them; in eval mode, without gradients.
        source: of the batches; the first `batches` steps are read.
        batches: how many, at least 1.
        job: the processes that share each batch.

    Raises:
        Interrupted: a signal came to any process.
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
