"""Start processes of a job as users do, and wait for them no longer than a test may take."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def torchrun(count, *command, timeout=120):
    """The finished job: returncode, stdout, stderr. A hang fails the test, with all processes killed."""
    return finished(started(count, *command), timeout)


def started(count, *command):
    """The running job; its rendezvous takes a free port."""
    return python("torch.distributed.run", "--standalone", "--nproc-per-node", str(count), *command)


def python(module, *arguments):
    """A module that runs in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finished(process, timeout):
    """What a process wrote until it ended."""
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill(process)
            out, err = process.communicate()
            raise AssertionError(f"the job hangs; it wrote\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


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


def work(count, task, tmp_path, *arguments, timeout=120):
    """What a task of tests/distributed/worker.py gives in so many processes."""
    out = tmp_path / f"{task}.json"
    done = finished(python("tests.distributed.worker", str(count), task, str(out), *arguments), timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())
