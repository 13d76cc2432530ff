"""Context parallelism of two processes that share one GPU, over gloo."""

import json

import pytest

from tests.distributed.launch import torchrun


@pytest.mark.gpu
def test_two_processes_on_one_gpu_give_the_loss_and_gradient_of_one(tmp_path):
    done = torchrun(2, "-m", "tests.distributed.one_gpu", str(tmp_path / "out.json"), timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["device"] == "cuda"
    assert max(found["float64"].values()) < 1e-10, found
    assert max(found["float32 loss"].values()) < 1e-5, found
