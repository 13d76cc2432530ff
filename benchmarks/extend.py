"""Extend SmolLM2-135M by one method end to end, or gather what several runs gave.

    python benchmarks/extend.py --method yarn --seed 0 --minutes 8 --model MODEL --data CORPUS --needles NEEDLES
    python benchmarks/extend.py --store runs/extend/yarn-0 --store runs/extend/ours-0

A run works in HOME/METHOD-SEED and stops itself after --minutes; the same command goes on where it was. It leaves with
0 once all is measured, with 143 before. --store adds the rows of such folders to results/extend/smollm2 and writes its
summary.json anew.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import common
from gape.cli.options import INTS, Device, Precision, numbers
from gape.experiments.extend import MARK, ROWS, perform
from gape.experiments.extend_settings import LONG, SHORT, Settings
from gape.report.extend import SUMMARY, summarise
from gape.utils import files, jsonl
from gape.utils.validation import invalid_argument
from tables.markdown import ROOT

RESULTS = ROOT / "results" / "extend" / "smollm2"
#: Floors of 200 in 76 of the 90 key heads of SmolLM2-135M.
FLOORS = str(ROOT / "results" / "hf" / "smollm2-forgetting" / "floors" / "floors14.json")
#: By name in tables: the settings that tell a method from the defaults of `gape hf extend`.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "yarn": {"method": "yarn"},
    "yarn16": {"method": "yarn", "factor": 16.0},
    "nope": {"method": "nope"},
    "floors": {"method": "floors", "floors": FLOORS},
    "ours": {},
    "ours-theorem": {"plan": {"position": "rope", "least": 0.0}},
    "ours-floor32": {"plan": {"least": 32.0}},
    "ours-floor200": {"plan": {"least": 200.0}},
    "ours-nosinks": {"sinks": False},
    "ours-log": {"log_scale": True},
    "ours-short": {"steps": 800, "long_steps": 0},
    "ours-skip": {"steps": 800, "long_steps": 0, "skip_to": 65536},
    "ours-free10": {"free": 10},
    "ours-free24": {"free": 24},
    "ours-norecall": {"recall": 0.0},
}
#: Small files of a run that tell what happened.
KEPT = (MARK, ROWS, SUMMARY, "README.md", "report.html", "plan.json", "heads.json")
RUNS = "runs.jsonl"
#: What is kept of the line with which a phase began.
STARTED = ("started", "versions", "machine", "code", "data", "precision", "parameters")
PHASES, LOGS = (SHORT, LONG), ("log.jsonl", "runtime.jsonl")
#: Lengths at which everything is measured.
LENGTHS = "1024,4096,8192,16384,32768,65536,131072"


def main(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(VARIANTS)}.")] = "ours",
    model: Annotated[str, typer.Option(help="Directory of the model.")] = "smollm2",
    data: Annotated[Path, typer.Option(help="A corpus of its tokenizer.")] = Path("books"),
    needles: Annotated[Path | None, typer.Option(help="Folder of gape ruler generate.")] = None,
    seed: Annotated[int, typer.Option(help="Of the run.")] = 0,
    minutes: Annotated[float, typer.Option(help="Stop after so many; the same command goes on.")] = 8.0,
    to: Annotated[int, typer.Option(help="Tokens that the model should read.")] = 65536,
    lengths: Annotated[str, typer.Option(metavar=INTS, help="Tokens at which it is measured.")] = LENGTHS,
    checkpoint_every: Annotated[int, typer.Option(help="Updates between checkpoints.")] = 100,
    home: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/extend"),
    collect: Annotated[Path | None, typer.Option(help="Folder for METHOD-SEED.tar.gz of the small files.")] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    store: Annotated[
        list[Path] | None, typer.Option(help="Instead: keep the rows of a folder METHOD-SEED; may be repeated.")
    ] = None,
) -> None:
    """Extend by one method and seed, from wherever its folder stands."""
    if store:
        gather(store)
        return
    if method not in VARIANTS:
        raise invalid_argument("method", method, f"one of {', '.join(VARIANTS)}")
    settings = Settings(
        model=model, data=(str(data),), to=to, seed=seed,
        needles=None if needles is None else str(needles), samples=0, before=VARIANTS[method].get("method") == "plain",
        lengths=numbers("lengths", lengths, int, "1024,4096"), checkpoint_every=checkpoint_every, **VARIANTS[method],
    )  # fmt: skip
    place = home / f"{method}-{seed}"
    try:
        with common.stopping(minutes):
            typer.echo(perform(settings, place, device=device, precision=precision))
    finally:
        if collect is not None and place.is_dir():
            _collect(place, collect)


def _collect(place: Path, target: Path) -> None:
    """Pack what is small, the log of the tuning among it, into one archive."""
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target / f"{place.name}.tar.gz", "w:gz") as archive:
        for name in (*KEPT, *(f"{folder}/{log}" for folder in PHASES for log in LOGS)):
            if (place / name).is_file():
                archive.add(place / name, f"{place.name}/{name}")


def gather(folders: Sequence[Path]) -> None:
    """Add the rows and manifests of runs to results/extend/smollm2; those of the same method and seed are replaced."""
    rows = _added(RESULTS / ROWS, [row for folder in folders for row in rows_of(folder)])
    _added(RESULTS / RUNS, [manifest(folder) for folder in folders])
    files.replace(RESULTS / SUMMARY, files.to_json(summary(rows)))
    typer.echo(RESULTS / SUMMARY)


def _added(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file with others added or in their place, which are written."""
    before = jsonl.read_lines(path) if path.is_file() else []
    names = {(row["method"], row["seed"]) for row in rows}
    together = [row for row in before if (row["method"], row["seed"]) not in names] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, b"".join(files.to_json(row, indent=None) for row in together))
    return together


def manifest(folder: Path) -> dict[str, Any]:
    """Settings of a run, its free heads, and where, by which code and on what data each phase of its tuning began."""
    method, _, seed = folder.name.rpartition("-")
    logs = {phase: folder / phase / "runtime.jsonl" for phase in PHASES}
    started = {
        phase: [
            {key: row.get(key) for key in STARTED} for row in jsonl.read_lines(log) if row.get("event") == "started"
        ]
        for phase, log in logs.items()
        if log.is_file()
    }
    free = jsonl.read_object(folder / "plan.json").get("free", [])
    settings = jsonl.read_object(folder / MARK)
    return {"method": method, "seed": int(seed), "settings": settings, "free": free, "started": started}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run: of the tuned model, or of the model as it is for the method "plain".

    Raises:
        ValueError: it is no folder of a run.
    """
    method, _, seed = folder.name.rpartition("-")
    settings, known = jsonl.read_object(folder / MARK), jsonl.read_object(folder / SUMMARY)
    if method not in VARIANTS or not seed.isdigit() or not settings:
        raise invalid_argument("folders", str(folder), "METHOD-SEED, as benchmarks/extend.py makes it")
    stage = "before" if settings["method"] == "plain" else "after"
    minutes = known.get(stage, {}).get("minutes")
    return [
        {"method": method, "seed": int(seed), "steps": settings["steps"], "minutes": minutes, **row}
        for row in jsonl.read_lines(folder / ROWS)
        if row["stage"] == stage
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each method needles by length and task, perplexity and cache_share by length, seeds and minutes."""
    methods = [name for name in VARIANTS if any(row["method"] == name for row in rows)]
    result = {}
    for name in methods:
        own = [row for row in rows if row["method"] == name]
        minutes = {row["seed"]: row["minutes"] for row in own}
        result[name] = summarise(own, sorted(minutes), list(minutes.values()))
    return result


if __name__ == "__main__":
    common.script(main)
