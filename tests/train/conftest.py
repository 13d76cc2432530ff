"""A run of 12 steps to begin from."""

import shutil

import pytest

from tests.train.toy import trainer


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
