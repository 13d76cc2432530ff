"""The processes of a job that `torchrun` started: who they are, what the first one decides, and why one failed.

Small things go through the store that `torchrun` keeps: it outlives any process of the job, so the others can still
say who is gone. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gape.utils import launch
from gape.utils.signals import Interrupted, StopFlag
from gape.utils.validation import invalid_argument

#: How long a collective may wait for a process before it fails.
TIMEOUT = timedelta(minutes=30)
#: Seconds in which processes that lost a connection tell the others that they are there.
ROLL_CALL = 5.0
#: Seconds that a process waits for the first one after SIGTERM; torchrun kills after 30.
PATIENCE = 20.0
_POLL = 0.05
# Typed as private there, documented as public.
_c10d: Any = dist
_CONNECTION = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "ProcessGroup")


class RankError(RuntimeError):
    """Another process of the job failed, or has other weights, code, settings or data; one process `prints` it."""

    names_rank = True

    def __init__(self, message: str, *, prints: bool = True) -> None:
        super().__init__(message)
        self.prints = prints


class _Processes(NamedTuple):
    rank: int
    size: int
    store: Any


_current: list[_Processes] = []
_calls = 0


def take_gpu() -> None:
    """Make this process's own GPU the current one, so that nothing is put on the first; a lone process keeps its own.

    Raises:
        ValueError: more processes on a machine than it has GPUs.
    """
    if launch.size() == 1 or not torch.cuda.is_available():
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise invalid_argument("nproc-per-node", local + 1, f"at most the {torch.cuda.device_count()} GPUs here")
    torch.cuda.set_device(local)


def connect() -> bool:
    """Join the process group of the job, on GPUs over NCCL and on CPUs over gloo; once, and not for a lone process.

    True where this call joined it, and whoever made it should :func:`leave`. RankError where the others do not answer,
    ValueError for more processes on a machine than it has GPUs.
    """
    if _current or launch.size() == 1:
        return False
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    take_gpu()
    try:
        store, own, count = next(_c10d.rendezvous("env://", timeout=TIMEOUT))
        dist.init_process_group(backend, store=store, rank=own, world_size=count, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {launch.rank()} cannot reach the other processes: {error}") from error
    _current.append(_Processes(own, count, _c10d.PrefixStore("gape", store)))
    return True


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if _current:
        _current.clear()
        dist.destroy_process_group()


def from_first(action: Callable[[], Any], stop: StopFlag | None = None) -> Any:
    """Do something in the first process and give its result, which JSON can hold, to all.

    Every process calls this at the same point. The first process raises what the action raises; once `stop` is set, the
    others wait for it `PATIENCE` seconds more.

    Raises:
        RankError: in the other processes, where the action failed or the first process is gone.
        Interrupted: in the other processes, where a signal ended the action.
    """
    global _calls  # noqa: PLW0603
    if launch.size() == 1:
        return action()
    connect()
    _calls += 1
    me, key = _current[0], f"first/{_calls}"
    if me.rank > 0:
        answer = _read(me.store, key, 0, stop)
        if answer.get("code"):
            raise Interrupted(answer["code"], answer["error"])
        if "error" in answer:
            raise RankError(f"rank 0: {answer['error']}", prints=False)
        return answer["result"]
    try:
        result = action()
    except BaseException as error:
        # Interrupted and Stopped have one.
        code = getattr(error, "code", None)
        me.store.set(key, json.dumps({"error": _line(error), "code": code}))
        raise
    me.store.set(key, json.dumps({"result": result}))
    return result


def _read(store: Any, key: str, of: int, stop: StopFlag | None) -> Any:
    """What a rank wrote, once it is there; not blocked in C, where no handler of signals would run."""
    signalled: float | None = None
    while not store.check([key]):
        if store.check(["failed"]):
            raise _failed(store)
        time.sleep(_POLL)
        if stop is not None and stop.requested:
            signalled = signalled or time.monotonic()
            if time.monotonic() - signalled > PATIENCE:
                raise RankError(f"rank {of} is gone, or did not answer {PATIENCE:.0f} s after the signal")
    return json.loads(store.get(key))


def _failed(store: Any) -> RankError:
    """The error of the rank that failed first."""
    number = store.get("failed").decode()
    return RankError(f"rank {number}: {store.get(f'failed/{number}').decode()}", prints=False)


def equal_everywhere(facts: dict[str, Any], stop: StopFlag | None = None) -> None:
    """Raise a RankError that names the first rank with other facts than rank 0, and which, unless all have the same."""
    global _calls  # noqa: PLW0603
    connect()
    me = _current[0]
    _calls += 1
    me.store.set(f"facts/{_calls}/{me.rank}", json.dumps(facts, sort_keys=True))
    everyone = [_read(me.store, f"facts/{_calls}/{each}", each, stop) for each in range(me.size)]
    for number, theirs in enumerate(everyone):
        other = [name for name in everyone[0] if theirs.get(name) != everyone[0][name]]
        if other:
            raise RankError(f"rank {number} has other {' and '.join(other)} than rank 0", prints=me.rank == 0)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """A context for work that processes do together: what fails in one is told to all, and each ends with one error.

    A RankError names the process that is gone or failed where a collective failed for it.
    """
    try:
        yield
    except BaseException as error:
        if not _current or isinstance(error, RankError):
            raise
        me = _current[0]
        if _lost_connection(error):
            raise _blame(me, error) from error
        # Every process raises some errors at the same point, as after a signal: the first one shows them.
        if not (hasattr(error, "code") or getattr(error, "in_all_ranks", False)):
            _announce(me, error)
        raise


def _announce(me: _Processes, error: BaseException) -> None:
    """Tell the others why this process fails; of several that do, the first to say so shows its message."""
    with contextlib.suppress(RuntimeError):
        me.store.set(f"failed/{me.rank}", _line(error))
        error.prints = me.store.compare_set("failed", "", str(me.rank)) == str(me.rank).encode()  # type: ignore[attr-defined]


def _lost_connection(error: BaseException) -> bool:
    """Whether an error is that of a collective whose other side is gone."""
    by_words = isinstance(error, RuntimeError) and any(word in str(error) for word in _CONNECTION)
    return by_words or isinstance(error, dist.DistError)


def _blame(me: _Processes, error: BaseException) -> RankError:
    """The error that names the rank which is gone, or the one that failed first and why."""
    _current.clear()
    # Whoever waits for this process in a collective shall notice too.
    closing = threading.Thread(target=dist.destroy_process_group, daemon=True)
    closing.start()
    closing.join(ROLL_CALL)
    until = time.monotonic() + ROLL_CALL
    everyone = set(range(me.size))
    try:
        me.store.set(f"present/{me.rank}", "1")
        while True:
            if me.store.check(["failed"]):
                return _failed(me.store)
            gone = sorted(each for each in everyone if not me.store.check([f"present/{each}"]))
            if not gone or time.monotonic() > until:
                break
            time.sleep(_POLL)
    except RuntimeError:
        # The store was the first process's own.
        gone = [0]
    names = ", ".join(map(str, gone))
    what = f"rank {names} is gone: killed, or its machine is" if gone else f"a connection broke: {_line(error)}"
    first = me.rank == min(everyone - set(gone))
    return RankError(f"{what}; start again to go on from the last checkpoint", prints=first)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
