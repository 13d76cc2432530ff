"""Signals and silence: a command ends soon after a signal, and a log shows that it is at work."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from gape.train import StopFlag
from gape.utils import heartbeat, signals
from gape.utils.progress import Progress, ProgressTable
from tests.cli.test_commands import gape_exits

#: Work in one call of C, during which no line of Python runs.
CHILD = """
import hashlib, sys, types
from gape.cli import main
from gape.utils import signals
signals.GRACE = 0.1
def work(*given):
    print("began", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)
# In the place of the module, which would load torch.
sys.modules["gape.experiments.reporting"] = types.SimpleNamespace(write_report=work)
sys.argv = ["gape", "report", "somewhere"]
main()
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_long_call_does_not_keep_a_command_from_its_end(signum: signal.Signals, code: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "began\n"
        child.send_signal(signum)
        _, errors = child.communicate(timeout=9)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == code
    assert errors == f"gape: stopped by {signum.name}\n"


FORK = """
import multiprocessing, time
from gape.utils import signals
signals.GRACE = 0.1
with signals.at_once():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    child.start()
    time.sleep(0.2)
    child.terminate()
    child.join()
    time.sleep(0.5)
"""


def test_a_signal_to_a_forked_child_does_not_end_its_parent() -> None:
    assert subprocess.run([sys.executable, "-c", FORK], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_not_taken_for_an_error(
    signum: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*given: object) -> None:
        try:
            os.kill(os.getpid(), signum)
        except Exception:
            pytest.fail("what guards against errors swallows the signal")

    monkeypatch.setattr("gape.data.open_corpus", work)
    before = signal.getsignal(signum)
    assert gape_exits("data", "verify", "somewhere") == code
    assert capsys.readouterr().err == f"gape: stopped by {signum.name}\n"
    assert signal.getsignal(signum) == before


def test_training_ends_in_good_order_and_measurements_at_once() -> None:
    with signals.at_once():
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested
        with StopFlag() as stop, pytest.raises(signals.Stopped), stop.at_once():
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_silent_command_says_where_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.02)

    def work(directory: object) -> None:
        with ProgressTable(unit="file") as table:
            table.show("books", 3, 7)
            time.sleep(0.2)
        raise ValueError("enough")

    monkeypatch.setattr("gape.data.open_corpus", work)
    assert gape_exits("data", "verify", "somewhere") == 2
    assert "books: file 3/7, " in capsys.readouterr().err


def test_a_nested_progress_table_adds_its_bars_to_the_outer_one() -> None:
    progress = Progress()
    progress.console = Console(file=io.StringIO(), force_terminal=True, width=80)  # type: ignore[assignment]
    with ProgressTable(progress, "run") as outer:
        outer.show("all", 0, 2)
        with ProgressTable(unit="window") as inner:
            inner.show("one", 1, 3)
            time.sleep(0.6)
    assert "1/3" in progress.console.file.getvalue()
