"""A run that ends when its held-out loss turns keeps the best weights, and what is observed leaves training alone."""

from __future__ import annotations

import json

import pytest
import torch

from gape.train import Interrupted, StopFlag, Trainer, load_model
from gape.train.checkpoint import available
from tests.train.toy import Numbers, gpt, outcome, same, settings, trainer, weights

LOSSES = {4: 3.0, 8: 1.0, 12: 2.0, 16: 1.5, 20: 0.5}


class Held:
    """Held-out losses as listed, with the weights they are of."""

    def __init__(self):
        self.seen = {}

    def __call__(self, model, step):
        self.seen[step] = weights(model)
        return {"loss": LOSSES[step]}


def test_it_ends_when_the_loss_turns_and_the_best_is_the_model(tmp_path):
    source = Held()
    summary = trainer(tmp_path, check=source, max_steps=20, patience=2, keep_last=1, checkpoint_every=0).run()
    assert (summary["status"], summary["step"], summary["best"]) == ("stopped early", 16, {"step": 8, "loss": 1.0})
    assert [path.name for path in available(tmp_path / "checkpoints")] == ["step-00000016", "step-00000008"]
    assert same(weights(load_model(tmp_path)), source.seen[8])


def test_without_patience_nothing_ends_and_the_newest_is_the_model(tmp_path):
    source = Held()
    summary = trainer(tmp_path, check=source, max_steps=20, keep_last=1, checkpoint_every=0).run()
    assert (summary["status"], summary["step"], summary["best"]["step"]) == ("finished", 20, 20)
    assert len(available(tmp_path / "checkpoints")) == 1
    assert same(weights(load_model(tmp_path)), source.seen[20])


def test_a_stop_forgets_neither_the_best_nor_the_count(tmp_path):
    def stopping(model, step):
        if step == 12:
            stop.request()
        return {"loss": LOSSES[step]}

    stop = StopFlag()
    with pytest.raises(Interrupted):
        trainer(tmp_path / "parts", check=stopping, stop=stop, max_steps=20, patience=2, checkpoint_every=0).run()
    for place in ("parts", "whole"):
        trainer(tmp_path / place, check=Held(), max_steps=20, patience=2, checkpoint_every=0).run()
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
    summaries = [json.loads((tmp_path / place / "summary.json").read_text()) for place in ("parts", "whole")]
    assert summaries[0] == summaries[1]


def test_a_best_checkpoint_that_is_broken_is_passed_over(tmp_path):
    trainer(tmp_path, check=Held(), max_steps=20, patience=2, checkpoint_every=0).run()
    (tmp_path / "checkpoints/step-00000008/model.safetensors").write_bytes(b"")
    lines = []
    load_model(tmp_path, warn=lines.append)
    assert "passed over the best, step-00000008" in lines[0]


def test_observation_leaves_training_alone(tmp_path, trained):
    steps = []

    def observe(model, step):
        assert not model.training
        assert not torch.is_grad_enabled()
        torch.rand(3)
        steps.append(step)

    Trainer(gpt(), settings(), Numbers(), tmp_path, Held(), observe=observe, observe_every=5).run()
    assert steps == [0, 5, 10]
    assert outcome(tmp_path)["model.safetensors"] == outcome(trained)["model.safetensors"]
