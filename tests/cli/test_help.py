"""What `--help` says: every option explained, and one name means one thing everywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest
import typer

import gape
from gape.cli import app
from gape.cli.options import numbers
from tests.cli.test_commands import gape_exits

COMMAND = typer.main.get_command(app)


def options(command: Any, path: str = "gape") -> Iterator[tuple[str, Any]]:
    """Every argument and option of every command that is shown."""
    for parameter in command.params:
        if parameter.name not in ("help", "version"):
            yield path, parameter
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from options(below, f"{path} {name}")


FOUND = list(options(COMMAND))


def test_everything_is_explained() -> None:
    assert len(FOUND) > 150
    assert [f"{path} {parameter.name}" for path, parameter in FOUND if not parameter.help] == []
    listed = COMMAND.get_help(click.Context(COMMAND, info_name="gape"))
    assert "..." not in listed.split("Commands:")[1], "a text in the list of commands is cut off"


def test_a_name_means_the_same_everywhere() -> None:
    devices = {parameter.help for _, parameter in FOUND if parameter.name == "device"}
    assert devices == {"cpu, cuda, or auto: a GPU where there is one."}
    assert {parameter.default for _, parameter in FOUND if parameter.name == "device"} == {"auto"}
    computing = [parameter for path, parameter in FOUND if parameter.name == "precision" and "table" not in path]
    assert len(computing) == 6
    assert all(parameter.opts == ["--precision", "--dtype"] for parameter in computing)
    lists = [parameter for _, parameter in FOUND if parameter.name in ("lengths", "contexts", "factors", "eps", "impl")]
    assert {p.metavar for p in lists if p.default is None or "," in str(p.default)} <= {
        "<int,...>", "<float,...>", "<name,...>"
    }  # fmt: skip


def test_numbers_with_commas() -> None:
    assert numbers("lengths", "4_096, 8192", int, "1,2") == (4096, 8192)
    assert numbers("eps", "1e-3,2", float, "1e-3") == (1e-3, 2.0)
    for text in ("4k", "", "1,,2", "1.5"):
        with pytest.raises(ValueError, match=rf"^lengths: got '{text}', expected whole numbers with commas, such as 1"):
            numbers("lengths", text, int, "1,2")
    with pytest.raises(ValueError, match=r"^eps: got 'x', expected numbers with commas, such as 1e-3"):
        numbers("eps", "x", float, "1e-3")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert gape_exits("--version") == 0
    assert capsys.readouterr().out == f"{gape.__version__}\n"


def test_a_mistyped_recipe_is_refused_before_torch_is_imported() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "gape", "niah", "train", "niah/dem"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "did you mean niah/demo?" in ended.stderr
    assert "| torch\n" not in ended.stderr
