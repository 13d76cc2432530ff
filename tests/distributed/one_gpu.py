"""Processes that share one GPU over gloo: `torchrun --nproc-per-node N -m tests.distributed.one_gpu OUT`.

The first one writes to OUT, by scheme, how far context parallelism is from one process: loss and gradients in float64,
the loss in float32, where kernels run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gape.distributed import context_parallel
from gape.train import Batch
from tests.distributed.worker import SCHEMES, Rows, gpt

LENGTH = 1024


def loss_and_gradients(model, batch, total):
    """The sum of the losses of a batch over `total` targets, and the gradient of each parameter."""
    model.zero_grad()
    out = model(batch.ids, targets=batch.targets, documents=batch.documents, positions=batch.positions)
    loss = out.loss * (batch.targets != -100).sum() / total
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def difference(scheme, dtype, mesh, device):
    model = gpt(scheme, dtype).to(device)
    batch = Batch(*(None if x is None else x.to(device) for x in Rows("documents", 2, LENGTH).batch(1, 0)))
    total = (batch.targets != -100).sum()
    alone = [x.clone() for x in loss_and_gradients(model, batch, total)]
    shared = loss_and_gradients(model, context_parallel(model, mesh).share(batch), total)
    for x in shared:
        dist.all_reduce(x)
    return [float((x - y).abs().max() / y.abs().max()) for x, y in zip(shared, alone, strict=True)]


def main(out):
    dist.init_process_group("gloo")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    exact = {scheme: max(difference(scheme, torch.float64, mesh, device)) for scheme in SCHEMES}
    losses = {scheme: difference(scheme, torch.float32, mesh, device)[0] for scheme in SCHEMES}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"device": device.type, "float64": exact, "float32 loss": losses}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
