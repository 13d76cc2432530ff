"""Whatever stops a preparation, starting it again gives the bytes that an undisturbed one gives."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gape.data import pipeline
from gape.train import BusyError
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


def stop_early(lines: Path, home: Path) -> None:
    """Prepare a corpus that ends behind a few records, with shards sealed and documents left."""

    def die(progress: pipeline.Progress) -> None:
        raise Died

    config = pipeline.PrepareConfig(inputs=(str(lines),), tokenizer="bytes", **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "BATCH", 2500)
        with pytest.raises(Died):
            pipeline.prepare(config, home, progress=die)


def test_a_directory_that_another_process_fills_is_left_to_it(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", rows(60))
    make(tmp_path / "whole", lines, **SMALL)
    stop_early(lines, tmp_path / "c")
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
    stop_early(lines, tmp_path / "c")
    shards = sorted((tmp_path / "c").glob("tokens-*.bin"))
    assert shards
    shards[0].write_bytes(b"damage")
    make(tmp_path / "c", lines, **SMALL)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


def started(lines: Path, home: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.data.child", str(lines), str(home)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def big(tmp_path: Path, count: int) -> tuple[Path, dict[str, bytes]]:
    lines = write_lines(tmp_path / "a.jsonl", rows(count))
    make(tmp_path / "whole", lines, **{k: v for k, v in SETTINGS.items() if k != "tokenizer"})
    return lines, contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_stops_it_and_the_same_call_goes_on(tmp_path: Path, signum: int, code: int) -> None:
    lines, whole = big(tmp_path, 3000)
    child = started(lines, tmp_path / "c")
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signum)
    child.communicate()
    assert child.returncode == code
    assert not (tmp_path / "c" / "card.json").exists()
    make(tmp_path / "c", lines, **{k: v for k, v in SETTINGS.items() if k != "tokenizer"})
    assert contents(tmp_path / "c") == whole


@pytest.mark.slow
def test_kill_9_at_many_moments(tmp_path: Path) -> None:
    lines, whole = big(tmp_path, 6000)
    home, kills = tmp_path / "c", 0
    while True:
        child = started(lines, home)
        assert child.stdout is not None
        # Each life gets a batch further, and ends somewhere in the next one.
        said = [child.stdout.readline(), child.stdout.readline()]
        time.sleep(0.004 * kills)
        child.kill()
        child.communicate()
        if not said[1]:
            break
        kills += 1
    assert kills > 3
    assert contents(home) == whole
