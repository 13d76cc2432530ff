"""Settings that must stand before torch is imported, what makes tests faster, and what is left out without a GPU."""

import functools
import gc
import os
from pathlib import Path

# What was measured on this machine decides nothing in tests.
os.environ.setdefault("GAPE_DISPATCH", str(Path(__file__).parents[1] / "src" / "gape" / "ops" / "dispatch.toml"))

# Some virtual CPUs advertise bfloat16 instructions and then die on them.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import pytest
import torch
import typer.main

from tests.interpreter import prepare_once_a_launch

# Without a GPU Triton kernels run in its interpreter, which must be asked for before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    prepare_once_a_launch()

# Files of tests need not outlive the machine: a run of the trainer waits longer for its disk than it computes.
os.fsync = lambda descriptor: None

# Models this small only wait for a second thread, and the processes beside them have one too.
torch.set_num_threads(1)

# Typer makes all commands anew each time one is called: 0.06 s, a few hundred times.
typer.main.get_command = functools.cache(typer.main.get_command)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Commands that documents name run whole files: what needs a CUDA device is left out without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported by now is never garbage: searches for it need not look there."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the end of the process find it, or libraries report leaks."""
    gc.unfreeze()
