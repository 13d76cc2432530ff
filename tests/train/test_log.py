"""Logs, manifest and display: useful with nothing installed, and never the end of a run."""

import io
import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gape.train import DiskFullError, verify
from gape.utils import jsonl
from gape.utils import run_info as manifests
from gape.utils.run_info import code_hash
from tests.train.toy import Numbers, gpt, lines, settings, trainer


@pytest.mark.parametrize("style", ["bar", "plain", "off"])
def test_a_broken_display_does_not_stop_training(tmp_path, style):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    console = Console(file=Broken(), force_terminal=style == "bar")
    assert trainer(tmp_path, progress=style, console=console, max_steps=5).run()["step"] == 5


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    console = io.StringIO()
    trainer(tmp_path / "seen", progress="auto", console=Console(file=console), max_steps=4).run()
    assert "seen: step 1/4  loss " in console.getvalue()
    assert "seen: step 4: validation accuracy 0.5000" in console.getvalue()
    assert "\x1b" not in console.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_the_log_says_so(tmp_path):
    class Filling(Numbers):
        def batch(self, step, micro):
            if step == 5:
                logs = {tmp_path / "log.jsonl", tmp_path / "runtime.jsonl"}
                with Path("/dev/full").open("ab", buffering=0) as full:
                    for handle in Path("/proc/self/fd").iterdir():
                        if handle.resolve() in logs:
                            os.dup2(full.fileno(), int(handle.name))
            return super().batch(step, micro)

    with pytest.raises(DiskFullError, match=r"no room for a log line .* B needed"):
        trainer(tmp_path, source=Filling()).run()
    assert [verify(path) for path in (tmp_path / "checkpoints").iterdir()] == [[]]


def test_rows_of_one_measurement_come_with_one_write(tmp_path, monkeypatch):
    """Killed between two writes, a measurement of several rows would look answered and be incomplete."""
    written = []

    class Watched(io.BytesIO):
        def write(self, data):
            written.append(bytes(data))
            return len(data)

        def fileno(self):
            return 2

    (tmp_path / "rows.jsonl").touch()
    monkeypatch.setattr(jsonl.os, "fsync", lambda _: None)
    monkeypatch.setattr(jsonl.files, "open_append", lambda path: Watched())
    jsonl.append(tmp_path / "rows.jsonl", {"row": 1}, {"row": 2})
    assert written == [b'{"row": 1}\n{"row": 2}\n']


def test_numbers_that_json_has_not_become_words(tmp_path):
    trainer(tmp_path, check=lambda model, step: {"accuracy": float("nan")}, max_steps=4).run()
    validations = [r["metrics"] for r in lines(tmp_path / "log.jsonl") if r["event"] == "validation"]
    assert validations == [{"accuracy": "nan"}]


def test_config_and_manifest_say_how_to_do_it_again(trained):
    config = json.loads((trained / "config.json").read_text())
    assert config["train"] == settings().to_dict()
    assert config["model"] == {"class": "GPT", "config": gpt().config.to_dict()}
    record = json.loads((trained / "manifest.json").read_text())
    assert record["versions"]["torch"] in (torch.__version__, torch.__version__.split("+")[0])
    assert record["data"] == Numbers().fingerprint()
    assert record["code"]["sha256"] == code_hash()
    assert (record["precision"], record["compiled"], record["seed"]) == ("float32", False, 0)


def test_lines_of_others_are_never_cut(tmp_path, monkeypatch):
    """Only a last line that was cut short goes; a whole one may be another process's, written a moment ago."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": ')
    jsonl.append(path, {"c": 3}, {"d": 4})
    assert [*lines(path)] == [{"a": 1}, {"c": 3}, {"d": 4}]
    monkeypatch.setattr(jsonl.JSONLines, "cut", lambda self, length: pytest.fail("cut"))
    jsonl.append(path, {"e": 5})
    jsonl.append(tmp_path / "new.jsonl", {"f": 6})
    assert [*lines(path)][-1:] == [{"e": 5}]


def test_the_manifest_stays_that_of_the_first_start(run):
    before = (run / "manifest.json").read_bytes()
    trainer(run, max_steps=13, decay_steps=12).run()
    assert (run / "manifest.json").read_bytes() == before
    assert [r["step"] for r in lines(run / "runtime.jsonl") if r["event"] == "started"] == [0, 12]


def test_a_run_can_ask_for_deterministic_algorithms(tmp_path):
    steps = []

    def check(model, step):
        steps.append(torch.are_deterministic_algorithms_enabled())
        return {}

    trainer(tmp_path, deterministic=True, check=check, max_steps=4).run()
    assert steps == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    assert json.loads((tmp_path / "manifest.json").read_text())["deterministic"] is True


def test_versions_and_machine_are_there_without_a_checkout(monkeypatch):
    monkeypatch.setattr("gape.utils.run_info._git", lambda *arguments: None)
    record = manifests.manifest(torch.device("cpu"), seed=1)
    assert record["code"]["commit"] is None
    assert len(record["code"]["sha256"]) == 64


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = io.StringIO()
    trainer(tmp_path / "seen", progress="auto", console=Console(file=console, force_terminal=True), max_steps=1).run()
    assert "seen: step 1/1  loss " in console.getvalue()


def test_times_are_those_of_the_steps_this_process_took(tmp_path, monkeypatch):
    """Left after 4 steps of a window of 5: the fifth step has taken what it took, not a fifth of it."""
    trainer(tmp_path, max_steps=4, decay_steps=12, validate_every=0).run()
    ticks = iter(range(1000))
    monkeypatch.setattr("gape.train.trainer.time.perf_counter", lambda: next(ticks))
    trainer(tmp_path, max_steps=5, decay_steps=12, validate_every=0).run()
    timing = [r for r in lines(tmp_path / "runtime.jsonl") if r["event"] == "timing"]
    assert [(r["step"], r["seconds_per_step"]) for r in timing] == [(5, 1.0)]


def test_files_copied_without_their_history_are_of_the_commit_that_is_said(monkeypatch):
    monkeypatch.setenv("GAPE_COMMIT", "abc")
    monkeypatch.setattr(manifests, "_git", lambda *_: "tracked")
    assert manifests.commit() == "tracked+changes"
    monkeypatch.setattr(manifests, "_git", lambda *_: None)
    assert manifests.commit() == "abc"
    monkeypatch.delenv("GAPE_COMMIT")
    assert manifests.commit() is None
