"""Parameters, gradients and moments sharded over the processes of a job: FSDP2 around a model that knows nothing of it.

Each block is a group, and the embedding, the output layer (the same tensor where they are tied) and the last norm are
the root's. Gates are groups of their own that stay float32 beside bfloat16 blocks: a group has one dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from gape.gates import GAPEGates
from gape.models.skipping import Skips
from gape.positions.biases import ForgetGate

#: Modules whose parameters stay float32.
GATES = (GAPEGates, ForgetGate)
#: Methods of language models that are called besides `forward`.
METHODS = ("hidden", "logits", "token_losses")


def shard(model: nn.Module, mesh: DeviceMesh, *, low: bool = False, compiles: bool = False) -> None:
    """Shard a model's parameters over a mesh of one dimension, in place.

    Args:
        model: a GPT, or any model whose blocks are in an `nn.ModuleList`, on its device.
        mesh: of the processes.
        low: gather parameters, but for those of gates, in bfloat16 and reduce gradients in float32.
        compiles: compile each block.
    """
    exact = MixedPrecisionPolicy()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else exact
    shard_gates(model, mesh)
    for block in blocks(model):
        if compiles:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def shard_gates(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Shard the gates of a model alone, in float32; `accelerate` or `fully_shard` may then shard the rest."""
    for gates in gate_modules(model):
        fully_shard(gates, mesh=mesh, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=False)
    for layer in model.modules():
        if isinstance(layer, Skips) and layer.gates is not None:
            # Gates are also read without a call of their module, whose hook would gather them.
            layer.register_forward_pre_hook(lambda layer, _: layer.gates.unshard())


@contextlib.contextmanager
def gathered_gates(model: nn.Module) -> Iterator[None]:
    """A context in which the gates of a sharded model are whole, and its other methods gather what they read."""
    methods = [name for name in METHODS if hasattr(model, name)]
    for gates in gate_modules(model):
        gates.unshard()
    for name in methods:
        register_fsdp_forward_method(model, name)
    try:
        yield
    finally:
        for name in methods:
            # An attribute of the instance, which hides the method.
            del vars(model)[name]
        for gates in gate_modules(model):
            gates.reshard()


def gate_modules(module: nn.Module) -> list[Any]:
    """The gates in a module, which has the methods of FSDP once it is sharded."""
    return [m for m in module.modules() if isinstance(m, GATES)]


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The repeated blocks of a model: the children of the list of modules that has most parameters."""
    lists: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        return []
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())).children())


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What this process holds of each tensor."""
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
