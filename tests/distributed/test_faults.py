"""A job whose processes differ, fail or are killed ends soon, names the rank, and goes on where it was saved."""

import json
import os
import random
import signal
import time

import pytest

from gape.train import verify
from tests.distributed.launch import kill, started, torchrun
from tests.train.toy import lines, outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CHILD = ("-m", "tests.distributed.child")
#: Seconds after a fault in which every rank has to end.
ENDS_WITHIN = 60


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
    done = torchrun(2, *CHILD, str(tmp_path / "run"), "--fault", fault, timeout=ENDS_WITHIN)
    assert done.returncode != 0
    assert [said in line for line in complaints(done.stderr)] == [True], done.stderr
    assert [verify(path) for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == (
        [[]] if fault in ("nan", "error") else []
    )


def last_step(log):
    """The last step of a log that is being written; 0 before the first."""
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return json.loads(whole.splitlines()[-1])["step"] if whole else 0


def wait_for(home, rank, step):
    """Until a run is past a step; the process number of a rank."""
    until = time.monotonic() + 100
    while time.monotonic() < until:
        number = home / f"{rank}.pid"
        if last_step(home / "run" / "log.jsonl") >= step and number.exists() and number.read_text():
            return int(number.read_text())
        time.sleep(0.01)
    raise AssertionError("the run does not begin")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_named_by_those_that_are_left(tmp_path, rank):
    job = started(2, *CHILD, str(tmp_path / "run"), "--steps", "100000", "--every", "50")
    try:
        os.kill(wait_for(tmp_path, rank, 60), signal.SIGKILL)
        _, err = job.communicate(timeout=ENDS_WITHIN)
    finally:
        kill(job)
    assert [f"rank {rank} is gone" in line for line in complaints(err)] == [True], err
    assert [verify(path) for path in (tmp_path / "run" / "checkpoints").glob("step-????????")]


def test_a_signal_to_the_job_saves_once_and_every_rank_exits_143(tmp_path):
    recorded = ("-m", "tests.distributed.exit_code", str(tmp_path), CHILD[1])
    job = started(4, *recorded, str(tmp_path / "run"), "--steps", "100000", "--every", "0")
    try:
        wait_for(tmp_path, 0, 5)
        began = time.monotonic()
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(timeout=ENDS_WITHIN)
    finally:
        kill(job)
    # torchrun kills what is left after 30 s.
    assert time.monotonic() - began < 30
    assert {rank: (tmp_path / f"{rank}.code").read_text() for rank in range(4)} == dict.fromkeys(range(4), "143"), err
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
    arguments = ("--steps", str(20 * KILLS), "--every", "1")
    quiet = torchrun(2, *CHILD, str(tmp_path / "quiet" / "run"), *arguments, timeout=300)
    assert quiet.returncode == 0, quiet.stderr
    draw, home = random.Random(0), tmp_path / "killed"
    for _ in range(KILLS):
        for old in home.glob("*.pid"):
            old.unlink()
        job = started(2, *CHILD, str(home / "run"), *arguments)
        try:
            steps, rank = draw.randrange(4), draw.randrange(2)
            number = wait_for(home, rank, last_step(home / "run" / "log.jsonl") + steps)
            # While processes connect and load, where no step is waited for; else within a step or as it is saved.
            time.sleep(draw.random() * (0.2 if steps else 2))
            assert job.poll() is None, "the run ended before it was killed"
            os.kill(number, signal.SIGKILL)
            job.communicate(timeout=ENDS_WITHIN)
        finally:
            kill(job)
    done = torchrun(2, *CHILD, str(home / "run"), *arguments, timeout=300)
    assert done.returncode == 0, done.stderr
    assert outcome(home / "run") == outcome(tmp_path / "quiet" / "run")
