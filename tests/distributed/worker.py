"""What processes of a test do: `python -m tests.distributed.worker COUNT TASK OUT [ARGUMENT]`.

They are forked, with what `torchrun` would put into their environment: only one process imports torch. The first of
them writes what the task gives, as JSON, to OUT.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing.connection
import os
import socket
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gape.distributed import Job, Ranks, context_parallel, leave, processes
from gape.distributed.cost import step_cost
from gape.models.attention import GAPEAttention
from gape.models.config import GPTConfig
from gape.models.gpt import GPT
from gape.train import Batch, TrainConfig
from gape.train.optimizer import build, named
from gape.train.step import Updater, held_out_loss
from gape.utils import launch

VOCAB, LENGTH, ROWS = 13, 32, 5
SCHEMES = {
    "rope": {},
    "p-rope+gape": {},
    "p-rope+gape floor": {"options": {"gate_floor": 4.0}},
    "alibi": {},
    "fox": {},
}
KINDS = ("plain", "documents", "padded")


def gpt(scheme: str, dtype=torch.float64, **changes):
    torch.manual_seed(1)
    settings = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "context_length": 16}
    settings |= {"position": scheme.split(maxsplit=1)[0]} | SCHEMES[scheme] | changes
    model = GPT(GPTConfig(vocab_size=VOCAB, **settings)).to(dtype)
    for parameter in model.parameters():
        # Far from the start, where gates would have next to no gradient.
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model


@dataclasses.dataclass
class Rows:
    """Random ids with ragged targets; documents of several lengths, or rows that are padded on the left."""

    kind: str = "plain"
    rows: int = ROWS
    length: int = LENGTH

    def batch(self, step, micro):
        draw = torch.Generator().manual_seed(1009 * step + micro)
        ids = torch.randint(VOCAB, (self.rows, self.length + 1), generator=draw)
        targets = ids[:, 1:].clone()
        # The first row has few targets, so that a mean of means would be wrong.
        targets[0, 3:] = -100
        targets[torch.rand(targets.shape, generator=draw) < 0.3] = -100
        documents = positions = None
        if self.kind == "documents":
            documents = (torch.rand(targets.shape, generator=draw) < 0.15).cumsum(1)
        if self.kind == "padded":
            pads = torch.randint(self.length // 2, (self.rows, 1), generator=draw)
            positions = torch.arange(self.length) - pads
            documents = (positions >= 0).long()
        return Batch(ids[:, :-1], targets, documents, positions)

    def fingerprint(self):
        return f"{self.kind} {self.rows} {self.length}"


def updater(job, scheme, dtype=torch.float64, **changes):
    settings = {"max_steps": 40, "learning_rate": 1e-2, "progress": "off"}
    config, model = TrainConfig(**(settings | changes)), gpt(scheme, dtype)
    device = torch.device("cpu")
    call = job.parallelize(model, low=False, compiles=False)
    return Updater(model, build(model, config), config, device, job, call)


def steps(job, scheme, kind, count, dtype, accumulation=1):
    """The losses of some steps, and the gradient of the first."""
    up = updater(job, scheme, dtype, accumulation=accumulation)
    source, losses = Rows(kind), []
    gradient = {}
    for step in range(1, count + 1):
        batches = [job.take(source, step, micro).batch for micro in range(accumulation)]
        if step == 1:
            loss = up._backward(batches)
            gradient = job.full({name: p.grad for name, p in named(up.optimizer).items() if p.grad is not None})
            gradient = {name: value.clone() for name, value in gradient.items()}
            up.optimizer.zero_grad()
        loss = up.step(batches, 1e-2)[0]
        losses.append(float(loss))
    return losses, gradient


def held_out(job):
    """A held-out loss that the processes share, measured as a validation is."""
    model = updater(job, "p-rope+gape floor").model.eval()
    with job.apart(model), torch.no_grad():
        return held_out_loss(model, Rows("padded", rows=4), 2, job)


def difference(mine, other):
    (losses, gradient), (expected, expected_gradient) = mine, other
    assert not gradient or gradient.keys() == expected_gradient.keys()
    largest = max((float((g - expected_gradient[n]).abs().max()) for n, g in gradient.items()), default=0.0)
    return [max(abs(a - b) for a, b in zip(losses, expected, strict=True)), largest]


def equal(jobs: str):
    """By job, scheme and kind of data: how far loss and gradient are from those of one process."""
    cpu, found = torch.device("cpu"), {}
    for name in jobs.split(","):
        shard, ways = name.startswith("fsdp"), int(name.partition("cp")[2] or 1)
        job = Ranks(cpu, shard=shard, context_parallel=ways)
        for scheme in SCHEMES:
            for kind in KINDS:
                exact = difference(
                    steps(job, scheme, kind, 1, torch.float64), steps(Job(), scheme, kind, 1, torch.float64)
                )
                found[f"{name} {scheme} {kind}"] = exact
    return found


def long_run(jobs: str):
    """By job and scheme: how far the losses of 20 steps in float32 are from those of one process."""
    cpu, found = torch.device("cpu"), {}
    for name in jobs.split(","):
        shard, ways = name.startswith("fsdp"), int(name.partition("cp")[2] or 1)
        job = Ranks(cpu, shard=shard, context_parallel=ways)
        for scheme in SCHEMES:
            mine = steps(job, scheme, "documents", 20, torch.float32, accumulation=2)[0]
            alone = steps(Job(), scheme, "documents", 20, torch.float32, accumulation=2)[0]
            found[f"{name} {scheme}"] = max(abs(a - b) for a, b in zip(mine, alone, strict=True))
    return found


def quick():
    """The same for one scheme and each way to be parallel, and what is refused."""
    cpu, found, job = torch.device("cpu"), {}, Job()
    for name, options in {"ddp": {}, "fsdp": {"shard": True}, "cp2": {"context_parallel": 2}}.items():
        job = Ranks(cpu, **options)
        mine = steps(job, "p-rope+gape floor", "documents", 2, torch.float64)
        found[name] = difference(mine, steps(Job(), "p-rope+gape floor", "documents", 2, torch.float64))
        found[name].append(abs(held_out(job) - held_out(Job())))
    refused = {
        "divide": lambda: Ranks(cpu, context_parallel=3),
        "samples": lambda: Ranks(cpu).take(Rows(rows=1), 1, 0),
        "length": lambda: job.take(Rows(length=LENGTH + 1), 1, 0),
        "layer": lambda: context_parallel(torch.nn.MultiheadAttention(8, 2), job.mesh["context"]),
    }
    for name, action in refused.items():
        try:
            action()
        except ValueError as error:
            found[name] = str(error)
    return found


def gates_stay_exact():
    """Under FSDP2 in bfloat16: the dtypes that a forward pass sees, and whether gates are whole without a call."""
    model, kinds = gpt("p-rope+gape", torch.float32), {}
    attention = model.layers[0].attention
    call = Ranks(torch.device("cpu"), shard=True).parallelize(model, low=True, compiles=False)

    def look(module, arguments):
        kinds["qkv"], kinds["gates"] = str(module.qkv.weight.dtype), str(module.gates.gate_projection.weight.dtype)
        # What a fused pass reads, without a call of the gates' module.
        kinds["reading"] = list(module.scheme.reading(torch.device("cpu")).gate_weight.shape)
        kinds["sharded"] = isinstance(module.gates.raw_amplitude, DTensor)

    attention.register_forward_pre_hook(look)
    batch = Rows().batch(1, 0)
    call(batch.ids, targets=batch.targets).loss.backward()
    kinds["between"] = isinstance(attention.gates.raw_amplitude, DTensor)
    kinds["gradient"] = str(attention.gates.gate_projection.weight.grad.dtype)
    return kinds


def skipped(length: str, eps: str):
    """Under floors: what skipping blocks changes in a layer, the bytes that it sends, and what the theory needs."""
    torch.manual_seed(0)
    n, eps, heads, width = int(length), float(eps), 1, 16
    mesh = init_device_mesh("cpu", (launch.size(),))
    options = {"context_length": 1024, "position": "p-rope+gape", "gate_floor": 4.0}
    layer = GAPEAttention(heads * width, heads, **options)
    contexts, outs, grads = {}, {}, {}
    rows = torch.randn(1, n * launch.size(), heads * width)
    ids = torch.zeros(rows.shape[:2], dtype=torch.int64)
    for name in (0.0, eps):
        context = contexts[name] = context_parallel(layer, mesh, eps=name)
        part = context.share(Batch(ids, ids))
        x = rows[:, part.positions].requires_grad_()
        y = layer(x, positions=part.positions)
        y.square().sum().backward()
        outs[name], grads[name] = (torch.zeros_like(rows) for _ in range(2))
        outs[name][:, part.positions], grads[name][:, part.positions] = y.detach(), x.grad
        for total in (outs[name], grads[name]):
            torch.distributed.all_reduce(total)
        context.remove()
    sent = torch.tensor([[c.traffic["gather"], c.traffic["blocks"], c.traffic["bounds"]] for c in contexts.values()])
    torch.distributed.all_reduce(sent)
    with torch.no_grad():
        q, k, v = layer.project(rows)
        score = float(layer.scale * q.norm(dim=-1).max() * k.norm(dim=-1).max())
        exposure = float(1 - layer.gates.landmark(k).max())
        rate = float(layer.gates.amplitude.min()) * 4.0 / 1024 * exposure
    return {
        "output": float((outs[0.0] - outs[eps]).abs().max()), "gradient": float((grads[0.0] - grads[eps]).abs().max()),
        "largest": float(layer.out.weight.abs().sum(1).max() * v.abs().max()), "bytes": sent.tolist(),
        "rate": rate, "score": score,
    }  # fmt: skip


def transformers_model():
    import gape.hf
    from tests.hf.tiny import tiny

    torch.manual_seed(0)
    model = gape.hf.inject(tiny("llama"), context_length=16, start="paper", gates={"gate_floor": 2.0})
    return gape.hf.LanguageModel(model.double())


def transformers_equal():
    """How far loss and gradient of a model with injected gates are from those of one process."""
    cpu, found = torch.device("cpu"), {}
    alone = transformers_step(Job())
    for name, options in {"ddp": {}, "fsdp": {"shard": True}, "cp": {"context_parallel": launch.size()}}.items():
        found[name] = difference(transformers_step(Ranks(cpu, **options)), alone)
    return found


def transformers_step(job):
    model, config = transformers_model(), TrainConfig(max_steps=1)
    call = job.parallelize(model, low=False, compiles=False)
    up = Updater(model, build(model, config), config, torch.device("cpu"), job, call)
    batch = job.take(Rows(rows=4), 1, 0).batch
    loss = float(up._backward([batch]))
    gradient = job.full({name: p.grad for name, p in named(up.optimizer).items() if p.grad is not None})
    return [loss], {name: value.clone() for name, value in gradient.items()}


def accelerate():
    """Dtypes in a forward pass after accelerate's preparation for FSDP2, which on a CPU has to be called by hand."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    import gape.hf
    from gape.distributed import shard_gates
    from tests.hf.tiny import tiny

    model = gape.hf.inject(tiny("llama"), context_length=16, start="paper")
    shard_gates(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )  # fmt: skip
    state = SimpleNamespace(fsdp_plugin=plugin)
    settings = {"mixed_precision": "bf16", "is_main_process": launch.is_first(), "device": torch.device("cpu")}
    model = fsdp2_prepare_model(SimpleNamespace(state=state, torch_device_mesh=None, **settings), model)
    layer, found = model.model.layers[0].self_attn, {}

    def look(module, arguments):
        found["gates"], found["q"] = str(module.gape.gate_projection.weight.dtype), str(module.q_proj.weight.dtype)

    layer.register_forward_pre_hook(look)
    ids = torch.randint(10, (2, 16))
    loss = model(ids, labels=ids).loss
    loss.backward()
    gradient = layer.gape.gate_projection.weight.grad
    return found | {"gradient": str(gradient.dtype), "finite": bool(gradient.full_tensor().isfinite().all())}


class Received(TorchDispatchMode):
    """Counts the bytes that a process gets of collectives of tensors: all but its own part."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        ways, name = launch.size(), str(func)
        if "allgather" in name:
            self.total += args[0].nbytes * (ways - 1) // ways
        elif "reduce_scatter" in name:
            self.total += args[1].nbytes * (ways - 1) // ways
        elif "allreduce" in name:
            self.total += sum(2 * x.nbytes * (ways - 1) // ways for x in args[0])
        return out


def cost():
    """Bytes of a step by collectives, and as the cost model has them."""
    cpu, found = torch.device("cpu"), {}
    source = Rows(rows=4)
    for name, options in {"ddp": {}, "fsdp": {"shard": True}, "cp": {"context_parallel": launch.size()}}.items():
        job = Ranks(cpu, **options)
        up = updater(job, "p-rope+gape", torch.float32)
        # The first step of DDP has other buckets.
        for step in (1, 2):
            batch = job.take(source, step, 0).batch
            call, before = up._call, Counter(job._context.traffic) if job._context else Counter()
            with Received() as received:
                call(batch.ids, targets=batch.targets, positions=batch.positions).loss.backward()
            up.optimizer.zero_grad()
        expected = step_cost(
            up.model.config, batch=4, length=LENGTH, processes=launch.size(), dtype=torch.float32, **options
        )
        keys = sum((job._context.traffic - before).values()) if job._context else 0
        found[name] = {
            "parameters": [received.total - keys, expected.parameter_bytes], "keys": [keys, expected.key_bytes],
        }  # fmt: skip
    return found


TASKS = {
    "cost": cost,
    "accelerate": accelerate,
    "transformers_equal": transformers_equal,
    "equal": equal, "long_run": long_run, "quick": quick, "gates_stay_exact": gates_stay_exact, "skipped": skipped,
}  # fmt: skip


def rank_main(environment: dict[str, str], task: str, out: str, *arguments: str) -> None:
    os.environ.update(environment)
    processes.connect()
    found = TASKS[task](*arguments)
    if launch.is_first():
        Path(out).write_text(json.dumps(found))
    leave()


def main(count: str, *arguments: str) -> int:
    """Fork the processes, and end the others when one of them fails."""
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=rank_main, args=(job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, *arguments))
        for rank in range(int(count))
    ]
    for process in ranks:
        process.start()
    while running := [process for process in ranks if process.exitcode is None]:
        multiprocessing.connection.wait([process.sentinel for process in running])
        if any(process.exitcode for process in ranks):
            for process in running:
                process.terminate()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
