"""The command `gape`. Its parts import torch when they run, so that help comes at once."""

from __future__ import annotations

import os
import sys

import typer

from gape.cli import demo, niah, report, reproduce

app = typer.Typer(
    name="gape",
    help="Gated Adaptive Positional Encoding: train, measure and look inside.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.command("reproduce")(reproduce.reproduce)
app.command("report")(report.report)
app.add_typer(niah.app, name="niah")

#: Set to anything to see where an error came from.
TRACEBACK = "GAPE_TRACEBACK"


def main() -> None:
    """Run the command and leave with its exit code.

    0 all went well; 1 the work failed; 2 something that was given is wrong; 130 and 143 stopped by SIGINT and SIGTERM.
    """
    try:
        app()
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        code = _code(error)
        if code is None:
            raise
        print(f"gape: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(code)


def _code(error: Exception) -> int | None:
    """The exit code of an error whose message says enough, None for one that wants its traceback."""
    # Imported only now: an error in reading the arguments should not wait for torch.
    from gape.train.errors import CheckpointError, DiskFullError, NonFiniteError  # noqa: PLC0415
    from gape.train.signals import Interrupted  # noqa: PLC0415

    if isinstance(error, Interrupted):
        return error.code
    if isinstance(error, (CheckpointError, DiskFullError, NonFiniteError)):
        return 1
    if isinstance(error, (ValueError, FileNotFoundError, NotADirectoryError, PermissionError, ImportError)):
        return 2
    return None
