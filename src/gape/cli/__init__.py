"""The command `gape`. Its parts import torch when they run, so that help comes at once."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gape.cli import analyze, data, doctor, explore, hf, lm, niah, report, ruler
from gape.utils import heartbeat, launch, signals

app = typer.Typer(
    name="gape",
    help="Gated Adaptive Positional Encoding: train, measure and analyse.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# Short texts for the list of commands, which would cut the others off.
app.command("demo", short_help="Train, measure and report in minutes.")(niah.demo)
app.command("doctor", short_help="Say what would run here, and why.")(doctor.doctor)
app.command("explore", short_help="See what gates do to a text, in the browser.")(explore.explore)
app.command("reproduce", short_help="Draw a figure of the paper.")(report.reproduce)
app.command("report", short_help="Tables, figures and a page from stored runs.")(report.report)
app.add_typer(data.app, name="data")
app.add_typer(lm.app, name="lm")
app.add_typer(hf.app, name="hf")
app.add_typer(niah.app, name="niah")
app.add_typer(ruler.app, name="ruler")
app.add_typer(analyze.app, name="analyze", short_help="Analyse trained language models.")


def _print_version(show: bool) -> None:
    if show:
        from gape import __version__  # noqa: PLC0415

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


#: Set to anything to see where an error came from.
TRACEBACK = "GAPE_TRACEBACK"


def main() -> None:
    """Run the command `gape` and leave with its exit code."""
    run(app)


def run(app: typer.Typer) -> None:
    """Run a command and leave with its exit code.

    0 all went well; 1 the work failed; 2 something that was given is wrong; 130 and 143 stopped by SIGINT and SIGTERM.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where the encoding lacks ± or → a ? stands for it; it should not be what ends hours of work.
        sys.stdout.reconfigure(errors="replace")
    if not launch.is_first():
        # What the processes of a job give is the same; one of them prints it.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        with signals.at_once(), heartbeat.heartbeat():
            app()
    except signals.Stopped as signal:
        _complain(signal)
        sys.exit(signal.code)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        code = _code(error)
        if code is None:
            raise
        _complain(error)
        sys.exit(code)


def _complain(error: BaseException) -> None:
    """Print an error in one line; of the processes of a job the first one does, or the one that says why."""
    if getattr(error, "prints", launch.is_first()):
        where = "" if launch.is_first() or getattr(error, "names_rank", False) else f"rank {launch.rank()}: "
        # A path may hold bytes that no encoding has.
        message = str(error).encode(errors="backslashreplace").decode()
        print(f"gape: {where}{' '.join(message.split())}", file=sys.stderr)


def _code(error: Exception) -> int | None:
    """The exit code of an error whose message says enough, None for one that wants its traceback."""
    if isinstance(error, signals.Interrupted):
        return error.code
    if isinstance(error, (ValueError, ImportError, *_WRONG_PATH)):
        return 2
    # The system's own words, such as a read-only file system, name the path and what is wrong with it.
    if isinstance(error, OSError):
        return 2 if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else 1
    # Imported only now: a wrong argument should not wait for torch.
    from gape.distributed import RankError  # noqa: PLC0415
    from gape.train import BusyError, CheckpointError, NonFiniteError  # noqa: PLC0415

    return 1 if isinstance(error, (BusyError, CheckpointError, NonFiniteError, RankError)) else None


#: What comes of a path that was given wrongly.
_WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
