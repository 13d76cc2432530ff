"""What `gape doctor --tune` measures and stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gape
from gape.experiments.dispatch_tuning import tune
from gape.ops import dispatch, implementations
from gape.utils import run_info
from gape.utils.progress import Progress
from tests.ops.test_dispatch import problem

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"head_dims": (8,), "lengths": (4,), "tokens": 4, "heads": 1, "seconds": 0.001}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    return tmp_path / "gape"


@pytest.mark.parametrize("learns", [False, True], ids=["inference", "training"])
def test_what_was_measured_is_what_runs(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tune(CPU, dtypes=("float16",), **TINY)
    assert path is not None
    table = dispatch.load(path, implementations.IMPLEMENTATIONS)
    assert [(rule.gradient, rule.dim_at_most, rule.length_at_least) for rule in table] == [(False, 8, 4), (True, 8, 4)]
    tables = dispatch.read(implementations.IMPLEMENTATIONS)
    monkeypatch.setattr(implementations, "RULES", (*tables.here, *tables.packaged))
    monkeypatch.setattr(implementations, "device_of", lambda problem: run_info.device_name(CPU))
    chosen = implementations.choose(problem(torch.float16, learns=learns))
    assert chosen == (table[learns].impl, table[learns].reason)


def test_an_implementation_that_cannot_run_does_not_end_the_measurement() -> None:
    """On a CPU there is no kernel for bfloat16."""
    path = tune(CPU, dtypes=("bfloat16",), **TINY)
    assert path is not None
    assert {rule.impl for rule in dispatch.load(path, implementations.IMPLEMENTATIONS)} == {"split"}


def test_what_is_interrupted_leaves_the_table_as_it_was(cache: Path) -> None:
    class Interrupting(Progress):
        def log(self, message: str) -> None:
            raise KeyboardInterrupt

    path = dispatch.local_table(run_info.device_name(CPU))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"as it was")
    with pytest.raises(KeyboardInterrupt):
        tune(CPU, dtypes=("bfloat16",), progress=Interrupting(), **TINY)
    assert path.read_bytes() == b"as it was"
    assert not list(cache.rglob(".tmp-*"))


@pytest.mark.gpu
def test_the_table_of_a_gpu_is_written_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    path = tune(device, head_dims=(64,), lengths=(1024,), dtypes=("bfloat16",), seconds=0.05)
    assert path is not None
    tables = dispatch.read(implementations.IMPLEMENTATIONS)
    monkeypatch.setattr(implementations, "RULES", tables.here)
    q, gate = torch.zeros(1, 1, 1024, 64, dtype=torch.bfloat16, device=device), torch.zeros(1, 1, 1024, device=device)
    plan = gape.explain(q, q, q, gate, gate, gate[0, :, 0], context_length=1024)
    assert (plan.impl, plan.reason) == (tables.here[0].impl, tables.here[0].reason)
