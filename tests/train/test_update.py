"""One update: what the gradient is, and when it may not touch the weights."""

import functools
import itertools
import json
import math

import pytest
import torch
import torch._dynamo.testing
from safetensors.torch import load_file

from gape.train import Batch, NonFiniteError, TrainConfig, learning_rate, parameter_groups, verify
from gape.train.optimizer import build
from gape.train.step import Updater
from tests.train.toy import Numbers, gpt, same, settings, trainer, weights

CPU = torch.device("cpu")


def gradient(batches, **changes):
    """What backward leaves, and the loss."""
    model = gpt(dropout=0.0)
    config = settings(clip=0.0, **changes)
    updater = Updater(model, build(model, config), config, CPU)
    loss = updater._backward(batches)
    assert not model.layers[0].attention.keep_landmark
    return {name: p.grad.clone() for name, p in model.named_parameters()}, loss


def pieces(whole, n):
    weights = [None] * n if whole.weights is None else whole.weights.chunk(n)
    parts = zip(whole.ids.chunk(n), whole.targets.chunk(n), weights, strict=True)
    return [Batch(ids, targets, weights=weights) for ids, targets, weights in parts]


@pytest.mark.parametrize(
    ("accumulation", "lambda_l1", "weighted"), [(2, 0.0, False), (4, 0.7, True), (8, 0.7, False), (8, 0.0, True)]
)
def test_accumulation_does_not_change_the_gradient(accumulation, lambda_l1, weighted):
    whole = Numbers(batch_size=8).batch(1, 0)
    if weighted:
        whole = whole._replace(weights=torch.linspace(0.5, 4, 64).view(8, 8))
    # Ragged to the extreme: some pieces count nothing at all, one counts everything.
    whole.targets[2:5] = -100
    whole.targets[5] = 3
    expected, loss = gradient([whole], lambda_l1=lambda_l1)
    got, other = gradient(pieces(whole, accumulation), lambda_l1=lambda_l1)
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_lambda_l1_adds_the_mean_landmark():
    model = gpt(dropout=0.0)
    batch = Numbers().batch(1, 0)
    model.keep_landmarks()
    alone = model(batch.ids, targets=batch.targets).loss + 0.7 * model.landmark_penalty()
    alone.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    got, loss = gradient([batch], lambda_l1=0.7)
    torch.testing.assert_close(loss, alone.detach())
    torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match=r"lambda_l1: got float 0\.7, expected 0"):
        trainer("unused", model=gpt(position="rope"), lambda_l1=0.7)
    with pytest.raises(ValueError, match=r"lambda_l1: .* since Poisoned lacks the methods keep_landmarks"):
        trainer("unused", model=Poisoned(1, "loss"), lambda_l1=0.7)


def test_compiled_it_is_the_same_gradient_from_one_graph(monkeypatch):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    batches = [Numbers().batch(1, micro) for micro in range(3)]
    expected, _ = gradient(batches, lambda_l1=0.7)
    got, _ = gradient(batches, lambda_l1=0.7, compile="on")
    torch.testing.assert_close(got, expected)
    assert counter.frame_count == 1


def test_the_update_is_that_of_plain_adamw_with_clipping():
    ours, theirs = gpt(dropout=0.0), gpt(dropout=0.0)
    config = settings(clip=0.1, gate_lr_multiplier=3.0)
    updater = Updater(ours, build(ours, config), config, CPU)
    groups = parameter_groups(theirs, weight_decay=0.1, gate_lr_multiplier=3.0)
    plain = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=False, foreach=False)
    for step in range(1, 4):
        batch, rate = Numbers().batch(step, 0), learning_rate(config, step)
        updater.step([batch], rate)
        plain.zero_grad()
        theirs(batch.ids, targets=batch.targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        for group in plain.param_groups:
            group["lr"] = rate * group["lr_multiplier"]
        plain.step()
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=1e-6)


def test_the_rate_rises_falls_and_stays():
    config = TrainConfig(max_steps=20, learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4, decay_steps=14)
    rates = [learning_rate(config, step) for step in range(1, 21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[9] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.5)) / 2)
    assert all(a > b for a, b in itertools.pairwise(rates[4:15]))
    assert rates[14:] == [0.1] * 6


def test_groups():
    model = gpt(bias=True)
    groups = parameter_groups(model, weight_decay=0.1, gate_lr_multiplier=2.0)
    settings = {"decayed": (0.1, 1.0), "plain": (0.0, 1.0), "gates": (0.0, 2.0)}
    assert {g["name"]: (g["weight_decay"], g["lr_multiplier"]) for g in groups} == settings
    kinds = {name: group["name"] for group in groups for name in group["names"]}
    for name, parameter in model.named_parameters():
        assert kinds[name] == ("gates" if ".gates." in name else "decayed" if parameter.dim() > 1 else "plain"), name
    assert len(kinds) == 20


def test_foxs_gate_is_a_gate_and_frozen_parameters_are_in_no_group():
    model = gpt(position="fox")
    model.embedding.weight.requires_grad_(False)
    groups = {g["name"]: g["names"] for g in parameter_groups(model)}
    assert [name.split(".")[-1] for name in groups["gates"]] == ["weight", "bias"]
    assert "embedding.weight" not in groups["decayed"]


class Poisoned(torch.nn.Module):
    """A GPT of which only the loss, or only the gradient, is not finite on one batch."""

    def __init__(self, step, kind):
        super().__init__()
        self.inner, self.kind = gpt(), kind
        self.bad = Numbers().batch(step, 1).ids

    def forward(self, ids, **inputs):
        output = self.inner(ids, **inputs)
        if torch.equal(ids, self.bad):
            if self.kind == "loss":
                return output._replace(loss=output.loss + float("inf"))
            weight = self.inner.layers[0].mlp.up.weight
            return output._replace(loss=output.loss + (weight * 0).sum().sqrt())
        return output


@pytest.mark.parametrize(("kind", "check_every"), [("loss", 1), ("gradient", 1), ("gradient", 100)])
def test_a_step_that_is_not_finite_never_touches_the_weights(tmp_path, kind, check_every):
    changes = {"check": None, "check_every": check_every, "log_every": 10, "checkpoint_every": 4}
    good = trainer(tmp_path / "good", model=Poisoned(99, kind), max_steps=6, decay_steps=20, **changes)
    good.run()
    bad = trainer(tmp_path / "bad", model=Poisoned(7, kind), max_steps=20, **changes)
    with pytest.raises(NonFiniteError, match=r"step 7: .*the weights are those after step 6") as caught:
        bad.run()
    assert caught.value.step == 7
    assert same(weights(bad.model), weights(good.model))
    newest = max((tmp_path / "bad/checkpoints").iterdir())
    assert (newest.name, verify(newest)) == ("step-00000004", [])
    assert all(t.isfinite().all() for t in load_file(newest / "model.safetensors").values())


def test_the_dump_has_what_is_needed_to_see_it_again(tmp_path):
    # Looked at only after step 10, when later steps have left gradients of their own.
    changes = {"check": None, "checkpoint_every": 0, "check_every": 100, "log_every": 10, "max_steps": 20}
    run = trainer(tmp_path, model=Poisoned(7, "gradient"), **changes)
    with pytest.raises(NonFiniteError) as caught:
        run.run()
    assert caught.value.dump == tmp_path / "dumps/step-00000007"
    report = json.loads((caught.value.dump / "report.json").read_text())
    assert [entry["step"] for entry in report["history"]] == [1, 2, 3, 4, 5, 6]
    assert len(report["amplitudes"][0]) == 2
    norms = report["gradient_norms"]
    assert [name for name, norm in norms.items() if not isinstance(norm, float)] == ["inner.layers.0.mlp.up.weight"]
    again = load_file(caught.value.dump / "batch.safetensors")
    assert torch.equal(again["1/ids"], Numbers().batch(7, 1).ids)
    assert same(load_file(caught.value.dump / "model.safetensors"), weights(run.model))
    assert report["largest_weights"] == {name: float(w.abs().max()) for name, w in weights(run.model).items()}


def test_a_batch_on_another_device_is_refused(tmp_path):
    class Elsewhere(Numbers):
        def batch(self, step, micro):
            return Batch(*(t.to("meta") for t in super().batch(step, micro)[:2]))

    with pytest.raises(ValueError, match=r"source: got int64 \(4, 8\) on meta, expected batches on cpu"):
        trainer(tmp_path, source=Elsewhere()).run()


def test_a_buffer_of_flags_does_not_hide_what_happened(tmp_path):
    model = Poisoned(1, "loss")
    model.register_buffer("seen", torch.ones(3, dtype=torch.bool))
    with pytest.raises(NonFiniteError, match="step 1") as caught:
        trainer(tmp_path, model=model, check=None).run()
    assert json.loads((caught.value.dump / "report.json").read_text())["largest_weights"]["seen"] == 1.0
