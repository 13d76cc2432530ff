"""Start processes of a job as users do, and wait for them no longer than a test may take."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def torchrun(count, *command, timeout=120, **environment):
    """The finished job: returncode, stdout, stderr. A hang fails the test, with all processes killed."""
    with started(count, *command, **environment) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill(process)
            out, err = process.communicate()
            raise AssertionError(f"the job hangs; it wrote\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def started(count, *command, **environment):
    """The running job; its rendezvous takes a free port."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), *command]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def kill(process):
    """Kill a job with its ranks, each of which leads a process group of its own; one that is over is left alone."""
    if process.poll() is not None:
        return
    ranks = [
        int(rank) for file in Path(f"/proc/{process.pid}/task").glob("*/children") for rank in file.read_text().split()
    ]
    for group in (process.pid, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def work(count, task, tmp_path, *arguments, timeout=120, **environment):
    """What a task of tests/distributed/worker.py gives in so many processes."""
    out = tmp_path / f"{task}.json"
    done = torchrun(count, "-m", "tests.distributed.worker", task, str(out), *arguments, timeout=timeout, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())
