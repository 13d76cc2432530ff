"""A checkpoint is whole or it is refused, whatever happened to its files."""

import errno
import json
import os
import pickle
import shutil

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from gape.train import CheckpointError, DiskFullError, checkpoint, load_model, verify
from gape.utils import files
from gape.utils.files import locked
from tests.train.toy import gpt, outcome, trainer

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_byte_is_seen(run, name):
    path = run / "checkpoints/step-00000012" / name
    whole = path.read_bytes()
    places = [0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 2, len(whole) - 1]
    damaged = [whole[:n] for n in (0, 1, len(whole) // 2, len(whole) - 1)] + [whole + b" "]
    damaged += [whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for at in places for bit in (1, 128)]
    for content in damaged:
        path.write_bytes(content)
        # A changed digest in the seal reads as a change of the file it stands for.
        assert any(name in problem or name == "manifest.json" for problem in verify(path.parent)), content[:20]
    path.unlink()
    assert name in verify(path.parent)[0]
    path.write_bytes(whole)
    assert verify(path.parent) == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("resealed", [False, True])
def test_a_pickle_in_any_place_is_refused_unopened(run, tmp_path, name, resealed):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    shutil.rmtree(run / "checkpoints/step-00000009")
    place = run / "checkpoints/step-00000012"
    (place / name).write_bytes(pickle.dumps(Evil()))
    if resealed and name != FILES[3]:
        reseal(place)
    for use in (lambda: load_model(place), lambda: load_model(run), lambda: trainer(run).run()):
        with pytest.raises(CheckpointError, match=name):
            use()
    assert not (tmp_path / "owned").exists()


def test_a_seal_names_no_file_outside(run):
    place = run / "checkpoints/step-00000012"
    seal = json.loads((place / "manifest.json").read_bytes())
    seal["files"]["../../log.jsonl"] = seal["files"].pop("state.json")
    (place / "manifest.json").write_bytes(files.to_json(seal))
    assert "manifest.json cannot be read" in verify(place)[0]


def reseal(place):
    """Make the seal fit the files."""
    seal = json.loads((place / "manifest.json").read_bytes())
    for file, entry in seal["files"].items():
        data = (place / file).read_bytes()
        entry.update(size=len(data), sha256=files.sha256(data))
    (place / "manifest.json").write_bytes(files.to_json(seal))


def test_random_states_that_are_none_are_refused(run):
    place = run / "checkpoints/step-00000012"
    state = json.loads((place / "state.json").read_bytes())
    state["random"]["python"][1] = [1, 2]
    (place / "state.json").write_bytes(files.to_json(state))
    reseal(place)
    with pytest.raises(CheckpointError, match=r"step-00000012.*random"):
        trainer(run).run()


def test_a_checkpoint_under_the_name_of_another_step_is_refused(run):
    (run / "checkpoints/step-00000012").rename(run / "checkpoints/step-00000016")
    assert "step-00000012" in verify(run / "checkpoints/step-00000016")[0]
    trainer(run).run()
    assert [path.name for path in checkpoint.available(run / "checkpoints")] == ["step-00000012", "step-00000009"]
    assert (run / "checkpoints/step-00000016.aside").is_dir()


class FullDisk:
    """The write function on a disk that is full after so many bytes' worth of files."""

    def __init__(self, monkeypatch, after, half=False, code=errno.ENOSPC):
        self.after, self.half, self.code, self.really = after, half, code, files.write
        monkeypatch.setattr(files, "write", self)

    def __call__(self, path, data):
        if self.after == 0:
            if self.half:
                path.write_bytes(data[: len(data) // 2])
            raise OSError(self.code, os.strerror(self.code))
        self.after -= 1
        self.really(path, data)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("after", range(4))
def test_a_full_disk_keeps_what_was_there(run, monkeypatch, after, half):
    before = outcome(run)
    more = trainer(run, max_steps=13, decay_steps=12)
    monkeypatch.setattr(files, "replace", lambda path, data: None)
    FullDisk(monkeypatch, after, half)
    with pytest.raises(DiskFullError, match=r"no room for checkpoint step-00000013 .* KiB needed, .* free"):
        more.run()
    assert outcome(run) == before
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]
    assert all(verify(path) == [] for path in (run / "checkpoints").iterdir())


def test_a_full_disk_keeps_the_file_that_was_to_be_replaced(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    files.replace(path, b"old")
    FullDisk(monkeypatch, 0, half=True)
    with pytest.raises(DiskFullError, match=r"no room for config\.json .* 5 B needed"):
        files.replace(path, b"newer")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("config.json", b"old")]


def test_another_disk_error_is_told_as_it_is(run, monkeypatch):
    monkeypatch.setattr(files, "replace", lambda path, data: None)
    FullDisk(monkeypatch, 2, code=errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        trainer(run, max_steps=13, decay_steps=12).run()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free", lambda path: 1000)
    one = trainer(tmp_path)
    with pytest.raises(DiskFullError, match=r"2 checkpoints and one in the making .* 1000 B free") as caught:
        one.run()
    assert (one.state.step, caught.value.free) == (0, 1000)
    monkeypatch.undo()
    one.run()
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoints/step-00000012").iterdir())
    assert 3 * size <= caught.value.needed <= 3 * size + 3 * 2**16


def test_old_ones_go_only_when_the_new_one_can_be_read(run, monkeypatch):
    really = files.write

    def lying(path, data):
        really(path, data[:-1] + b"?" if path.name == "optimizer.safetensors" else data)

    monkeypatch.setattr(files, "write", lying)
    with pytest.raises(CheckpointError, match="cannot be read back; older checkpoints are kept"):
        trainer(run, max_steps=13, decay_steps=12, keep_last=1).run()
    assert verify(run / "checkpoints/step-00000012") == verify(run / "checkpoints/step-00000009") == []


def test_weights_that_are_not_finite_are_never_saved(run):
    poisoned = trainer(run, max_steps=13, decay_steps=12)

    def poison(*_):
        with torch.no_grad():
            poisoned.model.norm.weight[0] = float("inf")

    hook = register_optimizer_step_post_hook(poison)
    try:
        with pytest.raises(CheckpointError, match=r"norm\.weight is not finite; nothing was saved"):
            poisoned.run()
    finally:
        hook.remove()
    assert not (run / "checkpoints/step-00000013").exists()


def test_files_that_a_killed_process_left_are_removed(run):
    """Temporary files, an old checkpoint that was to be deleted, and one that was half deleted."""
    (run / ".tmp-config.json-123").write_text("{")
    for name in ("step-00000006", ".tmp-discarded-step-00000003-9", ".tmp-step-00000015-123"):
        shutil.copytree(run / "checkpoints/step-00000009", run / "checkpoints" / name)
    seal = run / "checkpoints/step-00000006/manifest.json"
    seal.write_bytes(seal.read_bytes().replace(b'"step": 9', b'"step": 6'))
    trainer(run).run()
    assert not [*run.glob(".tmp*")]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]


@pytest.mark.parametrize("name", [".lock", "log.jsonl", "runtime.jsonl"])
def test_a_link_in_a_run_is_not_followed(run, tmp_path, name):
    (tmp_path / "victim").write_text("precious")
    (run / name).unlink()
    (run / name).symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match=name):
        trainer(run, max_steps=13, decay_steps=12).run()
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_link_under_the_name_of_a_file_in_the_making_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f".tmp-config.json-{os.getpid()}").symlink_to(tmp_path / "victim")
    files.replace(tmp_path / "config.json", b"new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "config.json").read_bytes() == b"new"


def test_a_lock_removes_nothing_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / ".tmp-notes").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(victim)
    with locked(run, "measured"):
        assert (victim / ".tmp-notes").exists()


def test_a_directory_of_somebody_elses_files_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".tmp-notes").write_text("precious")
    with pytest.raises(ValueError, match="run_dir"):
        trainer(tmp_path).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-notes", "config.json"]


def test_a_directory_that_is_gone_is_told_as_such(run):
    """Not as a path that was given wrongly, which FileNotFoundError stands for."""
    lost = trainer(run, max_steps=16, decay_steps=12, check=lambda model, step: shutil.rmtree(run) or {})
    with pytest.raises(OSError, match="the log") as caught:
        lost.run()
    assert not isinstance(caught.value, FileNotFoundError)


def test_tied_tensors_are_stored_once_and_come_back_tied():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    tensors, aliases = checkpoint.model_tensors(model)
    assert (sorted(tensors), aliases) == (["a.bias", "a.weight", "b.bias"], {"b.weight": "a.weight"})
    other = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    other["b"].weight = other["a"].weight
    checkpoint.load_model_tensors(other, tensors, aliases)
    assert torch.equal(other["b"].weight, model["a"].weight)


def test_another_model_is_refused_by_name(run):
    content = checkpoint.load(run / "checkpoints/step-00000012")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up\.weight is missing"):
        checkpoint.load_model_tensors(gpt(n_layer=2), content.model, content.state["aliases"])
    with pytest.raises(CheckpointError, match=r"embedding\.weight has shape \(11, 16\), the model's has \(11, 32\)"):
        checkpoint.load_model_tensors(gpt(n_embd=32), content.model, content.state["aliases"])


def test_a_name_that_is_taken_is_not_taken_again(tmp_path):
    for number, name in enumerate(("step-00000005", "step-00000005.aside1")):
        (tmp_path / name / str(number)).mkdir(parents=True)
    assert checkpoint.set_aside(tmp_path / "step-00000005").name == "step-00000005.aside"
    (tmp_path / "step-00000005/2").mkdir(parents=True)
    assert checkpoint.set_aside(tmp_path / "step-00000005").name == "step-00000005.aside2"
    assert (tmp_path / "step-00000005.aside1/1").is_dir()


def test_many_old_ones_do_not_stand_for_the_room_of_a_new_one(tmp_path, monkeypatch):
    for step in range(4):
        (tmp_path / checkpoint.name(step)).mkdir()
        (tmp_path / checkpoint.name(step) / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(files, "free", lambda path: 999)
    with pytest.raises(DiskFullError, match="1000 B needed"):
        checkpoint.check_space(tmp_path, 1000, keep_last=1)


def test_a_dtype_goes_with_the_weights(tmp_path):
    trainer(tmp_path, model=gpt().double(), check=None, max_steps=1).run()
    assert {parameter.dtype for parameter in load_model(tmp_path).parameters()} == {torch.float64}
    with pytest.raises(CheckpointError, match=r"embedding\.weight is torch\.float64, the model's is torch\.float32"):
        trainer(tmp_path, check=None, max_steps=1).run()
