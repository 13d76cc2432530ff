"""Reports and figures from stored results: what `gape report`, `gape reproduce` and `gape ruler table` do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gape.report import catalogue, ruler, write
from gape.report.catalogue import Entry
from gape.report.results import Results, gather, store
from gape.report.series import NoData
from gape.report.tables import FORMATS
from gape.utils import files
from gape.utils.progress import Progress, ProgressTable
from gape.utils.stored_rows import usable
from gape.utils.validation import invalid_argument

#: Files of RULER's tables by format.
RULER_TABLES = {"markdown": "tables.md", "latex": "tables.tex"}


def write_report(runs: Sequence[Path], out: Path, title: str | None = None, without: Sequence[str] = ()) -> Path:
    """Gather runs and write their report, but for some kinds of measurements; the page's path.

    Raises:
        ValueError: a path without results, or a kind that there is not.
    """
    progress = Progress()
    with ProgressTable(progress, "page") as table, usable(runs):
        table.show(str(out), 0, 1)
        results = gather(list(runs)).without(without)
        heading = title or ("Needle in a haystack" if results.of("needle") else "Language models")
        return write.report(results, out, title=heading, say=progress.log)


def figure_lines(results: Path) -> list[str]:
    """A line for each figure of the paper: its name, what it is there, and where its results lie."""
    lines = []
    for entry in catalogue.FIGURES.values():
        place = "drawn from the theory" if entry.measure is None else str(results / entry.recipe)
        state = "" if entry.measure is None or _has_results(results / entry.recipe) else " (no results yet)"
        lines.append(f"{entry.name:16} {entry.paper or 'our own':30} {place}{state}")
    return lines


def figure(name: str, recipe: str | None = None) -> Entry:
    """A figure by its name, drawn from the results of its own recipe or of another.

    Raises:
        ValueError: there is none of that name.
    """
    entry = catalogue.figure(name)
    return replace(entry, recipe=recipe or entry.recipe)


def refuse_run(entry: Entry) -> None:
    """Refuse to run the recipe of a figure that needs a corpus.

    Raises:
        ValueError: it is not of the needle task.
    """
    if entry.command:
        raise ValueError(f"--run: got {entry.name}, expected a figure of the needle task; gape lm train needs data=DIR")


def draw_figure(entry: Entry, out: Path, results: Path, runs: Path | None = None) -> list[Path]:
    """Draw a figure of the paper: NAME.png, NAME.pdf and NAME.json with its numbers.

    Args:
        entry: the figure.
        out: directory of the files.
        results: directory of stored results.
        runs: directory of runs on the needle task to draw it from instead.

    Raises:
        ValueError: there are no results for it; says which commands make them.
    """
    home, gathered = results / entry.recipe, None
    if entry.measure is not None:
        gathered = _stored(entry, home) if runs is None else gather([runs])
    try:
        with usable([home]):
            return list(catalogue.write(entry, gathered, out))
    except NoData as error:
        train = f"gape {entry.command}" if entry.command else f"gape niah train {entry.recipe}"
        how = entry.commands or f"{train} and then gape report runs/{entry.recipe} --out {home}"
        raise ValueError(f"{entry.name}: {error}; {how} make them") from error


def _stored(entry: Entry, home: Path) -> Results:
    if _has_results(home):
        return gather([home])
    report = f"gape report runs/{entry.recipe} --out {home}"
    if entry.commands:
        how = f"{entry.commands} make them"
    elif entry.command:
        measure = "" if entry.command == "lm train" else f", gape {entry.command} runs/{entry.recipe}/* --data DIR"
        how = f"gape lm train {entry.recipe} data=DIR{measure} and then {report} make them"
    else:
        how = f"gape reproduce {entry.name} --run makes them, or gape niah train {entry.recipe} and then {report}"
    raise ValueError(f"{entry.name}: there are no results in {home}; {how}")


def _has_results(path: Path) -> bool:
    return (path / "runs.jsonl").is_file() or (path / "results.jsonl").is_file()


def ruler_text(
    paths: Sequence[Path],
    *,
    ablation: bool = False,
    full: str = "p-rope+gape",
    precision: str | None = None,
    form: str = "text",
    out: Path | None = None,
) -> str:
    """The paper's RULER table from stored results, as a text; rows and tables also go to `out`.

    Args:
        paths: runs, sweeps, or what `gape ruler eval` or an earlier call wrote.
        ablation: the change of NLL against the full model instead.
        full: the full model: POSITION or POSITION:VARIANT.
        precision: only rows of "float32" or "bfloat16".
        form: "text", "markdown" or "latex".
        out: a directory for rows and tables.

    Raises:
        ValueError: an unknown format or precision, or no such rows.
    """
    if form not in FORMATS:
        raise invalid_argument("format", form, f"one of {', '.join(FORMATS)}")
    if precision not in (None, "float32", "bfloat16"):
        raise invalid_argument("precision", precision, "float32 or bfloat16")
    results = gather(list(paths))
    rows = tuple(row for row in results.of("ruler") if precision in (None, row.get("precision")))
    if not rows:
        kind = "no rows of gape ruler eval" if precision is None else f"no rows of gape ruler eval in {precision}"
        raise ValueError(f"results: {', '.join(map(str, paths))} hold {kind}")
    results = results.only(ruler=rows)
    position, _, variant = full.partition(":")
    with usable(paths):
        tables = ruler.ablation_tables(results, (position, variant)) if ablation else ruler.tables(results)
    texts = {name: "\n\n".join(write_table(one) for one in tables) for name, write_table in FORMATS.items()}
    if out is not None:
        store(results, out)
        for name, file in RULER_TABLES.items():
            files.replace(out / file, f"{texts[name]}\n".encode())
    return texts[form]
