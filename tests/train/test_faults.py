"""Real processes that are stopped, killed and crowded."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gape.train import BusyError, Interrupted, StopFlag, checkpoint, verify
from tests.train.child import KINDS
from tests.train.toy import Numbers, outcome, trainer

ROOT = Path(__file__).parents[2]


def child(run, kind):
    command = [sys.executable, "-m", "tests.train.child", str(run), kind]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process, word):
    for line in process.stdout:
        if line.strip() == word:
            return
    pytest.fail(f"the process ended before it was {word}: {process.communicate()[1]}")


class Signalling(Numbers):
    """Batches of which that of step 5 comes with a signal to this process."""

    sent: int = signal.SIGTERM

    def batch(self, step, micro):
        if step == 5 and micro == 0:
            os.kill(os.getpid(), self.sent)
        return super().batch(step, micro)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_training_finishes_the_step_and_saves(tmp_path, sent, code):
    source = Signalling()
    source.sent = sent
    with pytest.raises(Interrupted, match="after step 5; saved") as stopped:
        trainer(tmp_path, source=source, **KINDS["training"]).run()
    assert stopped.value.code == code
    assert checkpoint.newest(tmp_path / "checkpoints").step == 5
    more = KINDS["training"] | {"max_steps": 7, "decay_steps": 100_000}
    assert trainer(tmp_path, **more).run()["step"] == 7


def test_a_second_signal_ends_it_at_once(tmp_path):
    processes = multiprocessing.get_context("fork")
    validating = processes.Event()

    def deaf(model, step):
        validating.set()
        time.sleep(20)

    process = processes.Process(target=lambda: trainer(tmp_path, check=deaf, **KINDS["validating"]).run())
    process.start()
    assert validating.wait(timeout=20)
    process.terminate()
    process.join(timeout=0.5)
    assert process.is_alive()
    process.terminate()
    process.join(timeout=5)
    assert process.exitcode == 143


def test_handlers_come_back_and_other_threads_install_none():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    flag = StopFlag()
    with flag:
        with flag:
            pass
        signal.raise_signal(signal.SIGTERM)
        assert flag.code == 143
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    steps = []

    def elsewhere():
        with StopFlag() as other:
            steps.append(signal.getsignal(signal.SIGTERM))
            other.request(signal.SIGTERM)
            steps.append(other.code)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert steps == [before[1], 143]


def test_one_process_at_a_time(tmp_path):
    tmp_path.joinpath(".lock").touch()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.lockf(f, fcntl.LOCK_EX); print('held'); input()"
    process = subprocess.Popen(
        [sys.executable, "-uc", hold, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for(process, "held")
    with pytest.raises(BusyError, match="is being trained by another process"):
        trainer(tmp_path, max_steps=1).run()
    process.communicate("\n")
    assert trainer(tmp_path, max_steps=1).run()["step"] == 1


@pytest.mark.slow
def test_killed_at_twenty_moments_nothing_is_lost(tmp_path):
    run, moments = tmp_path / "run", random.Random(0)
    reached, inside = [], 0
    for kill in range(20):
        process = child(run, "saving")
        if kill % 7:
            wait_for(process, "training")
            time.sleep(moments.uniform(0.0, 0.4))
        else:
            time.sleep(moments.uniform(0.5, 3.0))
        process.kill()
        process.communicate()
        inside += len(list(run.glob("checkpoints/.tmp-*")))
        remaining = checkpoint.available(run / "checkpoints")
        assert all(verify(path) == [] for path in remaining)
        reached.append(checkpoint.newest(run / "checkpoints").step if remaining else 0)
    assert reached == sorted(reached), "a kill took steps back"
    assert inside, "no kill fell into a save, the test has lost its point"
    assert reached[-1] < 600, "the run was over too soon"
    assert child(run, "saving").wait(timeout=120) == 0
    trainer(tmp_path / "whole", **KINDS["saving"]).run()
    assert outcome(run) == outcome(tmp_path / "whole")
