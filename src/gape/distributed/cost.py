"""What a training step costs each process of a job: operations, bytes received, and the time they predict.

Bytes are those that a process receives from others. Collectives of P processes move (P − 1) / P of a tensor to each,
an all-reduce twice that. Activations are not exchanged but for keys and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gape.distributed.forgotten import BLOCK
from gape.models.config import GPTConfig
from gape.models.cost import side_bytes
from gape.models.gpt import GPT
from gape.ops import columns, rank2
from gape.ops.inputs import bias_dtype
from gape.positions import is_gated
from gape.utils.validation import invalid_argument, whole


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a GPU can do; the defaults are those of an H100 in nodes of eight, and assumptions about their use.

    `flops` are operations a second in bfloat16, of which matrix products and attention reach the fractions `matmul_use`
    and `attention_use`; `link` and `network` bytes a second that a GPU receives from the `node` GPUs beside it and from
    others.
    """

    flops: float = 989e12
    matmul_use: float = 0.6
    attention_use: float = 0.4
    link: float = 400e9
    network: float = 45e9
    node: int = 8


class StepCost(NamedTuple):
    """Of one training step and one process: operations forward and backward, and bytes received.

    `parameter_bytes` are gradients and, sharded, parameters; `key_bytes` keys, values and what belongs to them, in
    context parallelism. `processes` and `context_parallel` are those of the job.
    """

    matmul_flops: float
    attention_flops: float
    parameter_bytes: float
    key_bytes: float
    processes: int
    context_parallel: int

    def seconds(self, machine: Machine | None = None) -> float:
        """The time that a step takes: parameters are exchanged during the computation, keys before each layer's."""
        machine = machine or Machine()
        compute = self.matmul_flops / machine.matmul_use + self.attention_flops / machine.attention_use
        parameters = self.parameter_bytes / (machine.link if self.processes <= machine.node else machine.network)
        keys = self.key_bytes / (machine.link if self.context_parallel <= machine.node else machine.network)
        return max(compute / machine.flops, parameters) + keys


def step_cost(
    config: GPTConfig,
    *,
    batch: int,
    length: int,
    processes: int = 1,
    shard: bool = False,
    context_parallel: int = 1,
    accumulation: int = 1,
    horizon: float = math.inf,
    dtype: torch.dtype = torch.bfloat16,
) -> StepCost:
    """The cost of a step over `accumulation` micro-batches of (batch, length) tokens.

    Args:
        config: the model.
        batch, length: B rows, shared by processes / K of them, and N tokens, shared by K.
        processes, context_parallel: P and K.
        shard: FSDP2 instead of DDP.
        accumulation: micro-batches.
        horizon: distance beyond which keys are skipped, by kernels and between processes; infinite without floors.
        dtype: in which a model computes; gradients are float32 (float64 beside float64).
    """
    ways, total = whole("context_parallel", context_parallel), whole("processes", processes)
    if total % ways or length % ways:
        raise invalid_argument("context_parallel", ways, f"a divisor of {total} processes and {length} tokens")
    tokens, reach = whole("batch", batch) * whole("length", length), min(horizon, length)
    # Pairs of a query and a key before it and within the horizon.
    matmuls, attention = _forward_flops(config, tokens, batch * reach * (2 * length - reach) / 2, dtype)
    passes = 3 * accumulation / total
    keys = _key_bytes(config, batch * ways / total, length, ways, horizon, dtype)
    parameters = _parameter_bytes(config, total, shard, accumulation, dtype)
    return StepCost(passes * matmuls, passes * attention, parameters, accumulation * keys, total, ways)


def _forward_flops(config: GPTConfig, tokens: int, pairs: float, dtype: torch.dtype) -> tuple[float, float]:
    """Operations of matrix products and of attention in a forward pass, all layers together; not of norms and gates."""
    width, content = config.head_dim, config.head_dim - config.reserved
    projected = (config.n_head + config.kv_heads) * content + config.kv_heads * width + config.n_embd
    layers = 2 * tokens * config.n_embd * projected + 16 * tokens * config.n_embd**2
    attention = 2 * pairs * config.n_head * (max(width, content + _columns(config, dtype)) + width)
    return config.n_layer * layers + 2 * tokens * config.n_embd * config.vocab_size, config.n_layer * attention


def _columns(config: GPTConfig, dtype: torch.dtype) -> int:
    """Coordinates that a bias adds to q and k."""
    if config.position == "fox":
        return 3
    if config.position != "alibi" and not is_gated(config.position):
        return 0
    return columns.COLUMNS if dtype in (torch.bfloat16, torch.float16) else rank2.COLUMNS


def parameter_count(config: GPTConfig) -> tuple[int, int]:
    """Parameters of all blocks together, and of the rest: embedding, output layer and last norm."""
    with torch.device("meta"):
        model = GPT(config)
    blocks = sum(parameter.numel() for parameter in model.layers.parameters())
    return blocks, model.count_parameters() - blocks


def _parameter_bytes(config: GPTConfig, total: int, shard: bool, accumulation: int, dtype: torch.dtype) -> float:
    blocks, rest = parameter_count(config)
    reduced, others = bias_dtype(dtype).itemsize, (total - 1) / total
    if not shard:
        return 2 * others * (blocks + rest) * reduced
    # Blocks are gathered for both passes, the root for the forward pass alone, whose weights stay.
    gathered = (2 * blocks + rest) * dtype.itemsize
    return accumulation * others * (gathered + (blocks + rest) * reduced)


def _key_bytes(config: GPTConfig, rows: float, length: int, ways: int, horizon: float, dtype: torch.dtype) -> float:
    """Bytes of all layers, forward and backward, averaged over the K slices."""
    if ways == 1:
        return 0.0
    part = length // ways
    wide = config.kv_heads * (2 * config.head_dim - config.reserved) * dtype.itemsize
    tokens: float = length - part
    sides = tokens * side_bytes(config, dtype)
    if is_gated(config.position) and math.isfinite(horizon):
        block = min(BLOCK, part)
        reach = math.ceil(horizon / block + 1) * block
        tokens = sum(min(rank * part, reach) for rank in range(ways)) / ways
    return 2 * config.n_layer * rows * (tokens * wide + sides)
