"""What only a GPU can show: steps that never wait, and weights that a bad gradient cannot reach there either."""

import pytest
import torch

from gape.train import Batch, NonFiniteError, learning_rate
from gape.train.optimizer import build
from gape.train.step import Updater, Window
from tests.train.test_update import Poisoned
from tests.train.toy import Numbers, gpt, outcome, same, settings, trainer, weights

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


class OnDevice(Numbers):
    def batch(self, step, micro):
        return Batch(*(t.to(CUDA) for t in super().batch(step, micro)[:2]))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_replayed_updates_train_as_launched_ones_do(accumulation):
    """Also where one batch is shorter than the recorded ones."""
    trained = []
    for compiles in ("on", "graphs"):
        model = gpt(dropout=0.0).to(CUDA)
        config = settings(compile=compiles, accumulation=accumulation, lambda_l1=0.1)
        updater = Updater(model, build(model, config), config, CUDA)
        for step in range(1, 13):
            batches = [OnDevice().batch(step, micro) for micro in range(accumulation)]
            if step == 9:
                batches = [Batch(batch.ids[:1], batch.targets[:1]) for batch in batches]
            updater.step(batches, learning_rate(config, step))
        trained.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(trained[1], trained[0], atol=1e-4, rtol=1e-3)


def test_replayed_updates_drop_out_anew_and_are_stopped_by_a_bad_gradient(tmp_path):
    """Random states are read and set between replays: by validation and by checkpoints."""
    changes = {"source": OnDevice(), "compile": "graphs", "accumulation": 1, "validate_every": 2, "checkpoint_every": 3}
    run = trainer(tmp_path, model=gpt(dropout=0.5).to(CUDA), max_steps=12, log_every=1, **changes)
    run.run()
    updater = run._updater
    same_batch, losses = [OnDevice().batch(1, 0)], []
    for _ in range(4):
        losses.append(float(updater.step(same_batch, 0.0)[0]))
    assert len(set(losses)) == 4
    next(iter(run.model.parameters())).data[0, 0] = torch.nan
    before = weights(run.model)
    updater.step(same_batch, 1.0)
    assert float(updater.stopped) == 1
    for name, after in weights(run.model).items():
        torch.testing.assert_close(after, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("compiles", ["off", "on"])
def test_a_step_never_waits_for_the_device(compiles):
    model, config = gpt().to(CUDA), settings(compile=compiles, lambda_l1=0.1)
    updater, window = Updater(model, build(model, config), config, CUDA), Window()
    steps = [[OnDevice().batch(step, micro) for micro in range(2)] for step in range(1, 7)]
    for step, batches in enumerate(steps, 1):
        if step == 4:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            window.add(*updater.step(batches, learning_rate(config, step)))
        finally:
            torch.cuda.set_sync_debug_mode("default" if step < 4 or step == 6 else "error")
    assert window.first_bad() is None
    assert len(window.read()) == 6


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_that_is_not_finite_never_touches_the_weights(tmp_path, kind):
    changes = {"check": None, "source": OnDevice(), "log_every": 10, "compile": "off"}

    def poisoned(step):
        model = Poisoned(step, kind).to(CUDA)
        model.bad = model.bad.to(CUDA)
        return model

    good = trainer(tmp_path / "good", model=poisoned(99), max_steps=6, decay_steps=20, **changes)
    good.run()
    bad = trainer(tmp_path / "bad", model=poisoned(7), max_steps=20, **changes)
    with pytest.raises(NonFiniteError, match="step 7: "):
        bad.run()
    assert same(weights(bad.model), weights(good.model))


def test_resuming_restores_the_devices_random_state(tmp_path):
    changes = {"source": OnDevice(), "precision": "float32", "compile": "off"}
    for run, stops in (("whole", [12]), ("parts", [5, 12])):
        for stop in stops:
            trainer(tmp_path / run, model=gpt().to(CUDA), max_steps=stop, decay_steps=12, **changes).run()
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "parts")
