"""Past one GPU: the processes of `torchrun`, DDP and FSDP2, context parallelism. `docs/guide/scale.md` shows them."""

from gape.distributed.context import ContextParallel, context_parallel
from gape.distributed.job import Job, Ranks, current_job
from gape.distributed.processes import RankError, connect, from_first, leave
from gape.distributed.sharding import shard, shard_gates

__all__ = [
    "ContextParallel",
    "Job",
    "RankError",
    "Ranks",
    "connect",
    "context_parallel",
    "current_job",
    "from_first",
    "leave",
    "shard",
    "shard_gates",
]
