"""A job whose processes differ, fail or are killed ends soon, names the rank, and goes on where it was saved."""

import os
import random
import signal
import time

import pytest

from gape.train import verify
from tests.distributed.launch import started, torchrun
from tests.train.toy import lines, outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CHILD = ("-m", "tests.distributed.child")


def complaints(text):
    return [line for line in text.splitlines() if line.startswith("gape: ")]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("weights", "rank 1 has other weights than rank 0"),
        ("code", "rank 1 has other code than rank 0"),
        ("data", "rank 1 has other data than rank 0"),
        ("nan", "rank 1"),
        ("error", "batch: got a broken file"),
    ],
)
def test_a_process_that_differs_or_fails_ends_all_with_one_message(tmp_path, fault, said):
    began = time.monotonic()
    done = torchrun(2, *CHILD, str(tmp_path / "run"), "--fault", fault, timeout=110)
    assert done.returncode != 0
    assert [said in line for line in complaints(done.stderr)] == [True], done.stderr
    assert time.monotonic() - began < 110
    assert [verify(path) for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == (
        [[]] if fault in ("nan", "error") else []
    )


def wait_for(tmp_path, rank, step):
    """Until a run is past a step; the process number of a rank."""
    log = tmp_path / "run" / "log.jsonl"
    until = time.monotonic() + 100
    while time.monotonic() < until:
        if log.exists() and any(line["step"] >= step for line in lines(log)[:-1]):
            return int((tmp_path / f"{rank}.pid").read_text())
        time.sleep(0.02)
    raise AssertionError("the run does not begin")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_named_by_those_that_are_left(tmp_path, rank):
    job = started(2, *CHILD, str(tmp_path / "run"), "--steps", "100000", "--every", "50")
    try:
        os.kill(wait_for(tmp_path, rank, 60), signal.SIGKILL)
        _, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert [f"rank {rank} is gone" in line for line in complaints(err)] == [True], err
    assert [verify(path) for path in (tmp_path / "run" / "checkpoints").glob("step-????????")]


def test_a_signal_to_the_job_saves_once_and_every_rank_says_143(tmp_path):
    job = started(2, *CHILD, str(tmp_path / "run"), "--steps", "100000", "--every", "0")
    try:
        wait_for(tmp_path, 0, 5)
        began = time.monotonic()
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert time.monotonic() - began < 30
    assert sum("stopped by a signal after step" in line for line in complaints(err)) == 1, err
    saved = list((tmp_path / "run" / "checkpoints").glob("step-????????"))
    assert [verify(path) for path in saved] == [[]]


def test_saved_on_four_ranks_a_run_goes_on_with_the_same_tokens_on_any_number(tmp_path):
    losses = {}
    for count in (4, 1, 2):
        home = tmp_path / str(count) / "run"
        for ranks, steps in ((4, 6), (count, 12)):
            done = torchrun(ranks, *CHILD, str(home), "--steps", str(steps), "--shard")
            assert done.returncode == 0, done.stderr
        losses[count] = {line["step"]: (line["tokens"], line["loss"]) for line in lines(home / "log.jsonl")}
    for count in (1, 2):
        assert {step: tokens for step, (tokens, _) in losses[count].items()} == {
            step: tokens for step, (tokens, _) in losses[4].items()
        }
        assert max(abs(loss - losses[4][step][1]) for step, (_, loss) in losses[count].items()) < 1e-5


def test_a_checkpoint_of_another_model_is_refused_by_all(tmp_path):
    assert torchrun(2, *CHILD, str(tmp_path / "run"), "--steps", "3").returncode == 0
    weights = next((tmp_path / "run" / "checkpoints").glob("step-*")) / "model.safetensors"
    weights.write_bytes(b"other")
    done = torchrun(2, *CHILD, str(tmp_path / "run"), "--steps", "6")
    assert done.returncode != 0
    assert ["model.safetensors" in line for line in complaints(done.stderr)] == [True]


#: Moments at which some rank is killed.
KILLS = int(os.environ.get("GAPE_TEST_KILLS", "20"))


def test_killed_at_random_moments_a_run_ends_as_if_never_killed(tmp_path):
    arguments = ("--steps", "60", "--every", "1")
    quiet = torchrun(2, *CHILD, str(tmp_path / "quiet" / "run"), *arguments, timeout=300)
    assert quiet.returncode == 0, quiet.stderr
    draw, home = random.Random(0), tmp_path / "killed"
    for _ in range(KILLS):
        numbers = [home / f"{rank}.pid" for rank in range(2)]
        for old in numbers:
            old.unlink(missing_ok=True)
        job = started(2, *CHILD, str(home / "run"), *arguments)
        try:
            until = time.monotonic() + 100
            while not all(file.exists() and file.read_text() for file in numbers):
                assert time.monotonic() < until
                time.sleep(0.05)
            # From the first collective to well into training.
            time.sleep(4 * draw.random())
            if job.poll() is None:
                os.kill(int(draw.choice(numbers).read_text()), signal.SIGKILL)
            job.communicate(timeout=90)
        finally:
            job.kill()
    done = torchrun(2, *CHILD, str(home / "run"), *arguments, timeout=300)
    assert done.returncode == 0, done.stderr
    assert outcome(home / "run") == outcome(tmp_path / "quiet" / "run")
