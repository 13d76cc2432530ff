"""`gape report`: tables, figures and one page out of stored runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, sweeps, or earlier reports.")],
    out: Annotated[Path, typer.Option(help="Directory of the report.")] = Path("report"),
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    without: Annotated[
        str | None, typer.Option(help="Kinds of measurements to leave out, such as ruler,forgetting.")
    ] = None,
) -> None:
    """Write results, tables, figures and a self-contained page from what runs left behind; nothing is run."""
    left_out = () if without is None else without.split(",")
    typer.echo(f"Report: {write_report(runs, out, title, left_out)}")


def write_report(runs: list[Path], out: Path, title: str | None = None, without: Sequence[str] = ()) -> Path:
    """Gather runs and write their report, but for some kinds of measurements; the page's path.

    Raises:
        ValueError: a path without results, or a kind that there is not.
    """
    from gape.report import write  # noqa: PLC0415
    from gape.report.results import gather  # noqa: PLC0415
    from gape.utils.progress import Board, Voice  # noqa: PLC0415
    from gape.utils.stored_rows import usable  # noqa: PLC0415

    voice = Voice()
    with Board(voice, "page") as board, usable(runs):
        board.show(str(out), 0, 1)
        results = gather(runs).without(without)
        heading = title or ("Needle in a haystack" if results.of("needle") else "Language models")
        return write.report(results, out, title=heading, say=voice.say)
