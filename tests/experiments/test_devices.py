"""Which device a command works on."""

from __future__ import annotations

import pytest
import torch

from gape.experiments.experiment import pick_device


def test_processes_of_a_job_without_a_gpu_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is put on a GPU, which would be the first one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"^nproc-per-node: "):
        pick_device("auto")
