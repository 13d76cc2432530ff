"""One thread, since models this small only wait for a second one; and a run of 12 steps to begin from."""

import shutil

import pytest
import torch

from tests.train.toy import trainer


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The directory of a run that is over; not to be written to."""
    run = tmp_path_factory.mktemp("runs") / "run"
    trainer(run).run()
    return run


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "run")
