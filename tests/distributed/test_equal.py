"""Several processes compute what one does: losses and gradients, over schemes, documents and padding."""

import pytest

from tests.distributed.launch import work


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return work(2, "quick", tmp_path_factory.mktemp("quick"))


@pytest.mark.parametrize("job", ["ddp", "fsdp", "cp2"])
def test_two_processes_compute_what_one_does(quick, job):
    assert max(quick[job]) < 1e-10


def test_what_does_not_fit_is_refused_by_name(quick):
    assert quick["divide"] == "context_parallel: got int 3, expected a divisor of the 2 processes"
    assert quick["samples"].startswith("batch_size: got int 1, expected at least 2")
    assert quick["length"].startswith("length: got int 33, expected a multiple of 4")
    assert "MultiheadAttention" in quick["layer"]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "jobs"), [(2, "ddp,fsdp,cp2"), (4, "ddp,fsdp,cp4"), (4, "ddp-cp2,fsdp-cp2")])
def test_every_scheme_gives_the_loss_and_gradient_of_one_process(tmp_path, count, jobs):
    found = work(count, "equal", tmp_path, jobs, timeout=280)
    assert {name: pair for name, pair in found.items() if max(pair) >= 1e-10} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("count", "jobs"), [(2, "ddp,fsdp,cp2"), (4, "ddp,fsdp,cp4"), (4, "ddp-cp2,fsdp-cp2")])
def test_twenty_steps_have_the_losses_of_one_process(tmp_path, count, jobs):
    found = work(count, "long_run", tmp_path, jobs, timeout=580)
    assert {name: gap for name, gap in found.items() if gap >= 1e-5} == {}


@pytest.mark.slow
def test_gates_stay_float32_and_are_whole_where_they_are_read_without_a_call(tmp_path):
    assert work(2, "gates_stay_exact", tmp_path) == {
        "qkv": "torch.bfloat16", "gates": "torch.float32", "reading": [4, 2], "sharded": False, "between": True,
        "gradient": "torch.float32",
    }  # fmt: skip


@pytest.mark.slow
def test_a_model_of_transformers_gives_the_loss_and_gradient_of_one_process(tmp_path):
    found = work(2, "transformers_equal", tmp_path)
    assert {name: pair for name, pair in found.items() if max(pair) >= 1e-10} == {}
