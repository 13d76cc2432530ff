"""What a trainer asks of the processes it runs in: its share of a batch, sums, full tensors, and agreement.

:class:`Job` answers for one process, :class:`Ranks` for the processes of `torchrun`. Every method of `Ranks` is called
by all processes at the same point.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from gape.data.recall import RecallSource
from gape.data.windows import Batch, Source, WindowSource
from gape.distributed import processes, sharding
from gape.distributed.context import ContextParallel, context_parallel
from gape.utils import launch
from gape.utils.random import key
from gape.utils.run_info import code_hash
from gape.utils.signals import Interrupted, StopFlag
from gape.utils.validation import invalid_argument, whole

DATA, CONTEXT = "data", "context"
# Buffers are the same in every process; torch 2.13 renamed the option that says so.
_DDP_OPTIONS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_FIXED_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False
}


class Share(NamedTuple):
    """A process's share of a micro-batch, and the tokens of the whole micro-batch."""

    batch: Batch
    tokens: int


class Job:
    """One process, which has all of everything; also what :class:`Ranks` extends.

    `rank` is the number of this process of `size`; `stop` is polled while it waits for another.
    """

    rank = 0
    size = 1

    def __init__(self, stop: StopFlag | None = None) -> None:
        self.stop = stop or StopFlag()

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def check(self, model: nn.Module, facts: Mapping[str, Any]) -> None:
        """Refuse processes with other weights, code or facts than the first."""

    def parallelize(self, model: nn.Module, *, low: bool, compiles: bool) -> Any:
        """What to call for a forward pass in training, in bfloat16 if `low`; parameters may be sharded in place."""
        return torch.compile(model) if compiles else model

    def seed(self, seed: int, step: int) -> None:
        """Seed what a step draws at random; one process goes on with its own state."""

    def take(self, source: Source, step: int, micro: int) -> Share:
        """This process's share of a micro-batch."""
        batch = source.batch(step, micro)
        return Share(batch, batch.ids.numel())

    def share(self, batch: Batch) -> Batch:
        """This process's share of a batch that it has whole."""
        return batch

    def synchronized(self, call: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
        """A context for the backward pass of a micro-batch; gradients are exchanged in the `last` one."""
        return contextlib.nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        return values

    def norms(self, norms: Tensor) -> Tensor:
        """Norms (P,) of whole gradients from those of what this process holds of each."""
        return norms

    def agree(self, code: int | None) -> int | None:
        """The exit code that a signal asks for in any process, None where none has come."""
        return code

    def stop_code(self) -> int | None:
        """The exit code that a signal to any process asks for, None where none has come; the processes agree."""
        return self.agree((self.stop.code or 143) if self.stop.requested else None)

    def poll(self) -> None:
        """Go on, or raise Interrupted in all processes because a signal came to one."""
        if code := self.stop_code():
            raise Interrupted(code)

    def bad_ranks(self, value: Tensor) -> list[int]:
        """Processes in which a number, this process's own, is not finite."""
        return [] if bool(value.isfinite()) else [0]

    def from_first(self, action: Callable[[], Any]) -> Any:
        """What an action gives in the first process, for all; it is called there alone."""
        return action()

    def full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, in the first process alone."""
        return dict(tensors)

    def put(self, target: Tensor, value: Tensor | None) -> None:
        """Write a whole tensor, which the first process has, into `target`."""
        assert value is not None
        target.copy_(value)

    @contextlib.contextmanager
    def apart(self, model: nn.Module) -> Iterator[None]:
        """A context in which methods of the model may be called on whole sequences and its gates be read."""
        yield

    @contextlib.contextmanager
    def parallel(self) -> Iterator[None]:
        """A context inside :meth:`apart` in which the model reads this process's :meth:`share` of a batch."""
        yield


class Ranks(Job):
    """The processes of `torchrun`: `size / K` of them share the rows of a batch, K the tokens of a row.

    Args:
        device: where tensors are.
        shard: shard parameters, gradients and moments (FSDP2); without, every process has all of them (DDP).
        context_parallel: K, which divides the number of processes.
        skip_eps: attention that a query may lose to keys that are not sent to it.
        stop: of the run.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        shard: bool = False,
        context_parallel: int = 1,
        skip_eps: float = 0.0,
        stop: StopFlag | None = None,
    ) -> None:
        super().__init__(stop)
        self.skip_eps = skip_eps
        processes.connect()
        self.rank, self.size, self.device, self.sharded = launch.rank(), launch.size(), device, shard
        if self.size % context_parallel:
            raise invalid_argument("context_parallel", context_parallel, f"a divisor of the {self.size} processes")
        shape = (self.size // context_parallel, context_parallel)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=(DATA, CONTEXT))
        self._ways, self._row = shape[0], self.mesh.get_local_rank(DATA)
        self._context: ContextParallel | None = None
        self._all: DeviceMesh = init_device_mesh(device.type, (self.size,))

    def check(self, model: nn.Module, facts: Mapping[str, Any]) -> None:
        """Raise a RankError that names the first process with other weights, code or facts than rank 0, and which."""
        own = {**facts, "weights": _digest(model), "code": [torch.__version__, code_hash()]}
        processes.equal_everywhere(own, self.stop)

    def parallelize(self, model: nn.Module, *, low: bool, compiles: bool) -> Any:
        """The model under DDP, or itself, sharded in place; context parallel where the job is."""
        if self.mesh.size(1) > 1:
            self._context = context_parallel(model, self.mesh[CONTEXT], eps=self.skip_eps)
        if self.sharded:
            sharding.shard(model, self._all, low=low, compiles=compiles)
            return model
        devices = None if self.device.index is None else [self.device.index]
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=devices, **_FIXED_BUFFERS)
        return torch.compile(wrapped) if compiles else wrapped

    def seed(self, seed: int, step: int) -> None:
        """Seed by seed, step and rank: no state to save, and no two ranks drop the same."""
        torch.manual_seed(key("rank", seed, step, self.rank) % 2**63)

    def take(self, source: Source, step: int, micro: int) -> Share:
        """This process's rows of a micro-batch, and of them its slice of tokens."""
        if isinstance(source, WindowSource | RecallSource):
            batch = source.batch(step, micro, rows=self._rows(source.batch_size))
            return Share(self._slice(batch), source.batch_size * source.length)
        batch = source.batch(step, micro)
        return Share(self.share(batch), batch.ids.numel())

    def share(self, batch: Batch) -> Batch:
        """This process's share of a batch that it has whole; as :meth:`take`."""
        rows = self._rows(batch.ids.size(0))
        # Positions may be those of all rows, (N,).
        return self._slice(batch.mapped(lambda x: x[rows] if x.dim() > 1 else x))

    def _rows(self, count: int) -> slice:
        if count < self._ways:
            raise invalid_argument("batch_size", count, f"at least {self._ways}, the processes that share a batch")
        return slice(self._row * count // self._ways, (self._row + 1) * count // self._ways)

    def _slice(self, batch: Batch) -> Batch:
        return batch if self._context is None else self._context.share(batch)

    def synchronized(self, call: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
        """A context for the backward pass of a micro-batch; sharded gradients are exchanged each time."""
        wrapped = getattr(call, "_orig_mod", call)
        idle = not last and isinstance(wrapped, nn.parallel.DistributedDataParallel)
        return wrapped.no_sync() if idle else contextlib.nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        total = values.clone()
        dist.all_reduce(total)
        return total

    def norms(self, norms: Tensor) -> Tensor:
        """Norms (P,) of whole gradients from those of their shards."""
        return self.sum(norms.square()).sqrt() if self.sharded else norms

    def agree(self, code: int | None) -> int | None:
        """The highest exit code that a signal asks for in any process."""
        codes = torch.tensor([code or 0])
        dist.all_reduce(codes, dist.ReduceOp.MAX)
        return int(codes) or None

    def bad_ranks(self, value: Tensor) -> list[int]:
        """Processes in which a number, this process's own, is not finite."""
        flags = torch.zeros(self.size)
        flags[self.rank] = float(not bool(value.isfinite()))
        return self.sum(flags).nonzero().flatten().tolist()

    def from_first(self, action: Callable[[], Any]) -> Any:
        """What an action gives in the first process, for all; JSON has to hold it."""
        return processes.from_first(action, self.stop)

    def full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the CPU of the first process, gathered one by one; empty in the others."""
        whole = {}
        for name, value in tensors.items():
            gathered = value.full_tensor() if isinstance(value, DTensor) else value
            if self.is_first:
                whole[name] = gathered.detach().cpu()
        return whole

    def put(self, target: Tensor, value: Tensor | None) -> None:
        """Write a whole tensor, which the first process has, into `target` or this process's shard of it."""
        whole = torch.empty(target.shape, dtype=target.dtype, device=self.device)
        if self.is_first:
            assert value is not None
            whole.copy_(value)
        if isinstance(target, DTensor):
            target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
        else:
            dist.broadcast(whole, 0)
            target.copy_(whole)

    @contextlib.contextmanager
    def apart(self, model: nn.Module) -> Iterator[None]:
        """A context in which methods of the model may be called on whole sequences and its gates be read."""
        gates = sharding.gathered_gates(model) if self.sharded else contextlib.nullcontext()
        with gates, self._sliced(False):
            yield

    @contextlib.contextmanager
    def parallel(self) -> Iterator[None]:
        """A context inside :meth:`apart` in which the model reads this process's share of a batch."""
        with self._sliced(True):
            yield

    def _sliced(self, active: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._context is None else self._context.sliced(active)


def current_job(device: torch.device, *, stop: StopFlag | None = None, **options: Any) -> Job:
    """The job that this process belongs to: :class:`Ranks` where `torchrun` started several, else :class:`Job`.

    The options are `shard`, `context_parallel` and `skip_eps` of :class:`Ranks`.
    """
    ways = whole("context_parallel", options.get("context_parallel", 1))
    if launch.size() > 1:
        return Ranks(device, stop=stop, **options)
    if ways > 1:
        raise invalid_argument("context_parallel", ways, "1 in a single process; torchrun starts several")
    return Job(stop)


def _digest(model: nn.Module) -> str:
    """A checksum of all weights: their bits as whole numbers, added up on their device."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    sums = [
        f"{name} {int(value.detach().contiguous().view(kinds[value.itemsize]).sum(dtype=torch.int64))}"
        for name, value in model.state_dict().items()
    ]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()
