"""Write the table of `impl="auto"` that comes with the library from the measured rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import common
from gape.experiments.dispatch_rules import rules
from gape.ops.dispatch import TABLE, to_toml


def main(
    data: Annotated[Path, typer.Option(help="Directory of attention.csv, decode.csv, precision.csv.")] = common.DATA,
    out: Annotated[Path | None, typer.Option(help="File of the table; the library's own by default.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print it, write nothing.")] = False,
) -> None:
    """Write the table of impl="auto" from measured rows."""
    paths = [data / f"{name}.csv" for name in ("attention", "decode", "precision")]
    if not paths[0].is_file():
        raise ValueError(f"data: there is no {paths[0]}; python benchmarks/attention.py --backward writes it")
    table = rules(*(common.load(path) if path.is_file() else [] for path in paths))
    text = to_toml(table, "`benchmarks/dispatch.py`")
    if show:
        typer.echo(text, nl=False)
        return
    path = out or TABLE
    path.write_text(text, encoding="utf-8")
    typer.echo(f"{len(table)} rules in {path}")


if __name__ == "__main__":
    common.script(main)
