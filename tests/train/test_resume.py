"""A run that is left and taken up again is the run that never stopped, to the last bit."""

import io
import json
import random
import signal

import numpy as np
import pytest
import torch
from rich.console import Console

from gape.train import CheckpointError, Interrupted, StopFlag, checkpoint, load_model, resume, verify
from tests.train.toy import Numbers, gpt, lines, outcome, same, trainer, validate, weights


@pytest.fixture(scope="module")
def uninterrupted(trained):
    return outcome(trained)


class StopAfter(StopFlag):
    """Asks for a stop when it has been polled so many times in between steps."""

    def __init__(self, polls):
        super().__init__()
        self.left = polls

    @property
    def requested(self):
        self.left -= 1
        if self.left == 0:
            self.request(signal.SIGTERM)
        return super().requested


@pytest.mark.parametrize("polls", [1, 4, 5, 13])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, uninterrupted, polls):
    run = tmp_path / "run"
    with pytest.raises(Interrupted) as caught:
        trainer(run, stop=StopAfter(polls)).run()
    assert caught.value.code == 143
    torch.rand(7)
    trainer(run, model=gpt(seed=99)).run()
    assert outcome(run) == uninterrupted


def test_more_steps_are_the_steps_that_would_have_come(tmp_path, uninterrupted):
    run = tmp_path / "run"
    trainer(run, max_steps=7, decay_steps=12).run()
    trainer(run, max_steps=12, decay_steps=12).run()
    assert outcome(run) == uninterrupted


def test_a_stop_during_validation_repeats_it(tmp_path, uninterrupted):
    run, flag = tmp_path / "run", StopFlag()

    def interrupted(model, step):
        if step == 8:
            torch.rand(5)
            flag.request(signal.SIGINT)
            flag.check()
        return validate(model, step)

    with pytest.raises(Interrupted) as caught:
        trainer(run, check=interrupted, stop=flag).run()
    assert caught.value.code == 130
    assert [r["step"] for r in lines(run / "log.jsonl") if r["event"] == "validation"] == [4]
    trainer(run).run()
    assert outcome(run) == uninterrupted


def test_after_a_stop_in_the_last_validation_the_best_is_the_one_it_found(tmp_path):
    flag, options = StopFlag(), {"patience": 3, "validate_every": 4, "checkpoint_every": 0}

    def falling(model, step):
        if step == 12 and not flag.requested:
            flag.request(signal.SIGTERM)
        return {"loss": 1 / step}

    with pytest.raises(Interrupted):
        trainer(tmp_path, check=falling, stop=flag, **options).run()
    last = trainer(tmp_path, check=falling, **options)
    assert last.run()["best"]["step"] == 12
    assert same(weights(load_model(tmp_path)), weights(last.model))


def test_a_validation_that_ends_early_when_asked_to_stop_is_not_believed(tmp_path, uninterrupted):
    run, flag = tmp_path / "run", StopFlag()

    def cut_short(model, step):
        flag.request(signal.SIGTERM)
        return {"accuracy": 1.0}

    with pytest.raises(Interrupted):
        trainer(run, check=cut_short, stop=flag).run()
    trainer(run).run()
    assert outcome(run) == uninterrupted


def test_lines_after_the_checkpoint_and_a_torn_one_are_written_again(tmp_path, uninterrupted):
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        trainer(run, stop=StopAfter(7)).run()
    with (run / "log.jsonl").open("ab") as log:
        log.write(b'{"event": "train", "step": 10, "loss": 1.0}\n{"event": "tr')
    trainer(run).run()
    assert outcome(run) == uninterrupted


def test_auto_passes_over_a_broken_checkpoint_and_says_why(run, uninterrupted):
    console = io.StringIO()
    newest = run / "checkpoints/step-00000012"
    (newest / "model.safetensors").write_bytes(b"short")
    trainer(run, console=Console(file=console), progress="plain").run()
    assert "passed over step-00000012: model.safetensors has 5 bytes" in console.getvalue()
    assert "resumed from step-00000009" in console.getvalue()
    assert (run / "checkpoints/step-00000012.aside/model.safetensors").read_bytes() == b"short"
    assert verify(newest) == []
    assert outcome(run) == uninterrupted


def test_when_no_checkpoint_is_whole_the_run_is_not_thrown_away(run):
    log = (run / "log.jsonl").read_bytes()
    for path in run.glob("checkpoints/*/state.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"step-00000012: state\.json is missing.*step-00000009"):
        trainer(run).run()
    assert (run / "log.jsonl").read_bytes() == log


def test_never_does_not_run_over_checkpoints(tmp_path):
    trainer(tmp_path, max_steps=1).run("never")
    with pytest.raises(ValueError, match="resume: got str 'never', expected 'auto' or another directory"):
        trainer(tmp_path, max_steps=1).run("never")


def test_a_path_goes_back_and_keeps_what_was_newer(run, uninterrupted):
    with pytest.raises(Interrupted):
        trainer(run, stop=StopAfter(1)).run(run / "checkpoints/step-00000009")
    assert [path.name for path in checkpoint.available(run / "checkpoints")] == ["step-00000009"]
    trainer(run).run()
    assert verify(run / "checkpoints/step-00000012.aside") == []
    assert outcome(run) == uninterrupted
    with pytest.raises(ValueError, match="resume: got str '/elsewhere/step-00000009'"):
        trainer(run).run("/elsewhere/step-00000009")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rate": 2e-2}, "learning_rate was 0.01 and is now 0.02"),
        ({"max_steps": 20}, "decay_steps was 12 and is now 20 .to add steps, give decay_steps=12"),
        ({"max_steps": 6, "decay_steps": 12}, "max_steps is 6 and the run is at step 12"),
        ({"source": Numbers(seed=1)}, "data was 'numbers 0 4 8' and is now 'numbers 1 4 8'"),
        ({"model": gpt(n_head=4)}, "model.n_head was 2 and is now 4"),
    ],
)
def test_another_run_is_refused_by_the_key_that_differs(run, uninterrupted, changes, said):
    with pytest.raises(ValueError, match=said):
        trainer(run, **changes).run()
    assert outcome(run) == uninterrupted


def test_logging_and_keeping_may_change(run):
    changed = trainer(run, max_steps=14, decay_steps=12, log_every=2, keep_last=1, checkpoint_every=0)
    assert changed.run()["step"] == 14
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000014"]


def test_perfect_validation_in_a_row_ends_a_run_for_good(tmp_path):
    scores = {2: 1.0, 4: 0.9, 6: 1.0, 8: 1.0}

    def check(model, step):
        return {"accuracy": scores[step]}

    for _ in range(2):
        summary = trainer(tmp_path, check=check, validate_every=2, stop_after_perfect=2).run()
        assert (summary["status"], summary["step"]) == ("stopped early", 8)
    assert [r["step"] for r in lines(tmp_path / "log.jsonl") if r["event"] == "validation"] == [2, 4, 6, 8]


def test_a_compiled_model_is_saved_and_resumed_under_plain_names(tmp_path, uninterrupted):
    first = trainer(tmp_path, model=torch.compile(gpt(), backend="eager"), max_steps=6, decay_steps=12)
    first.run()
    assert not any("_orig_mod" in name for name in load_model(tmp_path).state_dict())
    inner = gpt(seed=3)
    inner.layers[0] = torch.compile(inner.layers[0], backend="eager")
    trainer(tmp_path, model=inner).run()
    assert outcome(tmp_path) == uninterrupted


def test_load_model_gives_the_trained_weights(tmp_path):
    run = trainer(tmp_path)
    run.run()
    for path in (tmp_path, tmp_path / "checkpoints/step-00000012"):
        loaded = load_model(path)
        assert same(weights(loaded), weights(run.model))
        assert loaded.config == run.model.config
        assert not loaded.training


def test_random_states_come_back_through_json():
    tensors, numbers = resume.random_states(torch.device("cpu"))
    drawn = [torch.rand(1).item(), random.gauss(0, 1), np.random.normal()]  # noqa: NPY002
    resume.restore_random_states(tensors, json.loads(json.dumps(numbers)), torch.device("cpu"))
    assert [torch.rand(1).item(), random.gauss(0, 1), np.random.normal()] == drawn  # noqa: NPY002


def test_a_trainer_that_has_run_does_not_start_over_from_trained_weights(tmp_path):
    done = trainer(tmp_path, max_steps=1)
    done.run()
    with pytest.raises(RuntimeError, match="a Trainer runs once"):
        done.run()


def test_a_run_directory_holds_what_it_should(trained):
    assert {path.name for path in trained.iterdir()} - {".lock"} == {
        "checkpoints", "config.json", "figures", "log.jsonl", "manifest.json", "runtime.jsonl", "summary.json",
    }  # fmt: skip
    assert [p.name for p in sorted((trained / "checkpoints").iterdir())] == ["step-00000009", "step-00000012"]
    assert [(r["event"], r["step"]) for r in lines(trained / "log.jsonl")] == [
        ("validation", 4), ("train", 5), ("validation", 8), ("train", 10), ("validation", 12),
    ]  # fmt: skip
