"""Whatever stops a preparation, starting it again gives the bytes that an undisturbed one gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gape.data import pipeline
from gape.train import BusyError, Interrupted, StopFlag
from gape.utils import files
from tests.data.books import contents, make, texts, write_lines
from tests.data.child import SETTINGS

SMALL = {"shard_tokens": 900, "heldout_fraction": 0.2, "max_bad": 0.5}


def rows(n: int) -> list:
    """Documents, and among them lines that are bad and empty, the last ones too."""
    lines: list = []
    for row in texts(n):
        lines += [row, "{bad"] if len(lines) % 5 == 0 else [row]
    return [*lines, {"text": ""}, "{"]


class Died(BaseException):
    """A process's end, as far as what it leaves behind goes."""


def test_a_death_at_any_write_is_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = write_lines(tmp_path / "a.jsonl", rows(60))
    make(tmp_path / "whole", lines, **SMALL)
    whole, write = contents(tmp_path / "whole"), files.write
    deaths = 0
    for fatal in range(100):
        count = 0

        def dying(path: Path, data: bytes, fatal: int = fatal) -> None:
            nonlocal count
            count += 1
            if count > fatal:
                # Half of the file is there, and none of the cleaning up is done.
                write(path.with_name(f"{path.name}-torn"), data[: len(data) // 2])
                raise Died
            write(path, data)

        home = tmp_path / f"death-{fatal}"
        monkeypatch.setattr(files, "write", dying)
        try:
            make(home, lines, **SMALL)
        except Died:
            deaths += 1
        monkeypatch.setattr(files, "write", write)
        if count <= fatal:
            break
        make(home, lines, **SMALL)
        assert contents(home) == whole, f"death at write {fatal}"
    # A shard and its record each, and the settings and cards.
    assert deaths > 10


#: Holds a file's lock until its input ends.
HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.lockf(f, 2); print(flush=True); sys.stdin.read()"


def test_a_directory_that_another_process_fills_is_left_to_it(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", rows(60))
    make(tmp_path / "whole", lines, **SMALL)
    stop = StopFlag()
    config = pipeline.PrepareConfig(inputs=(str(lines),), tokenizer="bytes", **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "REQUEST", 2500)
        with pytest.raises(Interrupted):
            pipeline.prepare(config, tmp_path / "c", workers=0, stop=stop, progress=lambda _: stop.request())
    (tmp_path / "c" / ".tmp-tokens-00009.bin-1").write_bytes(b"theirs")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "c" / "parts" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        before = contents(tmp_path / "c")
        with pytest.raises(BusyError, match="is being prepared by another process"):
            make(tmp_path / "c", lines, **SMALL)
        assert contents(tmp_path / "c") == before
        other.communicate()
    make(tmp_path / "c", lines, **SMALL)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


def test_a_damaged_shard_is_made_again(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", rows(60))
    make(tmp_path / "whole", lines, **SMALL)
    stop = StopFlag()

    def show(progress: pipeline.Progress) -> None:
        stop.request()

    config = pipeline.PrepareConfig(inputs=(str(lines),), tokenizer="bytes", **SMALL)
    # A few records to a request, so that the stop finds shards sealed and documents left.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "REQUEST", 2500)
        with pytest.raises(Interrupted):
            pipeline.prepare(config, tmp_path / "c", workers=0, stop=stop, progress=show)
    shards = sorted((tmp_path / "c").glob("tokens-*.bin"))
    assert shards
    shards[0].write_bytes(b"damage")
    make(tmp_path / "c", lines, **SMALL)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


def test_processes_give_what_one_gives(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", rows(300))
    make(tmp_path / "one", lines, **SMALL)
    make(tmp_path / "two", lines, workers=2, **SMALL)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def started(lines: Path, home: Path, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.data.child", str(lines), str(home), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def big(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    lines = write_lines(tmp_path / "a.jsonl", rows(6000))
    make(tmp_path / "whole", lines, **{k: v for k, v in SETTINGS.items() if k != "tokenizer"})
    return lines, contents(tmp_path / "whole")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_it_and_the_same_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int, code: int
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", rows(60))
    make(tmp_path / "whole", lines, **SMALL)
    config = pipeline.PrepareConfig(inputs=(str(lines),), tokenizer="bytes", **SMALL)
    monkeypatch.setattr(pipeline, "REQUEST", 2500)
    with pytest.raises(Interrupted) as stopped:
        pipeline.prepare(config, tmp_path / "c", workers=1, progress=lambda _: os.kill(os.getpid(), signum))
    assert stopped.value.code == code
    assert not (tmp_path / "c" / "card.json").exists()
    make(tmp_path / "c", lines, **SMALL)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_kill_9_at_many_moments(tmp_path: Path) -> None:
    lines, whole = big(tmp_path)
    home, kills = tmp_path / "c", 0
    while True:
        child = started(lines, home, 2)
        assert child.stdout is not None
        # Each life gets a request further, and ends somewhere in the next one.
        said = [child.stdout.readline(), child.stdout.readline()]
        time.sleep(0.004 * kills)
        workers = workers_of(child.pid)
        child.kill()
        child.communicate()
        if not said[1]:
            break
        kills += 1
        until = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < until, "a worker outlived who started it"
            time.sleep(0.05)
    assert kills > 3
    assert contents(home) == whole


def workers_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []
