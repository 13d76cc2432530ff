"""What language models left behind, read back beside what the needle task left.

A run's directory holds a file for each kind of :data:`KINDS`, lines of JSON or one object. A report's directory holds
them of many runs, all as lines, and `runs.jsonl`, so that it can be read in place of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gape.report import forgetting
from gape.report import results as needle
from gape.report.lm_summary import far_back_question, schemes
from gape.report.results import (
    RUNS,
    Record,
    Results,
    experiment_of,
    read_row,
    read_rows,
    refuse_differing,
    scheme_order,
    shared_settings,
)
from gape.utils import files
from gape.utils.jsonl import read_object
from gape.utils.validation import suggestion

#: What perplexity was asked for besides the context: only rows of one question stand beside each other.
QUESTION = (
    "protocol", "last", "stride", "align", "corpus", "split", "only_stratum", "precision", "max_windows", "eval_seed",
)  # fmt: skip
#: The file in a run's directory, and what tells its rows apart besides the run.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "perplexity": ("perplexity.jsonl", (*QUESTION, "context", "stratum")),
    "positions": ("positions.jsonl", (*QUESTION, "context")),
    "routing": ("routing.jsonl", ("step", "layer", "head")),
    "far_back": ("far_back.jsonl", ("kind", "distance", "context", "key")),
    "ruler": ("ruler.jsonl", ("key", "task", "length")),
    "forgetting": ("forgetting.jsonl", forgetting.KEY),
    "entropy": ("entropy.json", ()),
    "spectrum": ("spectrum.json", ()),
    "maps": ("maps.json", ()),
    "masks": ("masks.json", ()),
}

#: What a row of a kind must have.
_WHO = ("run", "position", "seed")
NEEDED: dict[str, tuple[str, ...]] = {
    kind: _WHO + more
    for kind, more in {
        "perplexity": ("context",),
        "positions": ("context", "edges", "nll", "tokens"),
        "routing": ("step", "layer", "head", "mean_mask", "landmark", "gate", "amplitude"),
        "far_back": ("kind", "distance", "context", "tokens", "documents", "nll", "low", "high"),
        "ruler": ("key", "model", "task", "length", "samples"),
        "forgetting": ("kind", "length", "how", "eps"),
        **dict.fromkeys(("entropy", "spectrum", "maps", "masks"), ("sets",)),
    }.items()
}

_TOLD = {"settings": "run.json", "manifest": "manifest.json", "training": "summary.json"}


def gather(paths: Iterable[str | Path]) -> Results:
    """Read runs, sweeps and reports of any kind; what :func:`gape.report.results.gather` reads is among it.

    A last line that was cut short is left out. Of two rows for one measurement the later counts, and rows of weights
    that were trained further since do not. A directory that holds both runs and a report is read from its runs.

    Raises:
        ValueError: a path without results, a file that is not what it should be, two different runs of one name, or
            runs that would be averaged as seeds of one scheme and are not.
    """
    found = collect(paths)
    _refuse_mixtures(found)
    return found


def collect(paths: Iterable[str | Path]) -> Results:
    """As :func:`gather`, but language models may differ in anything: for what shows each run by itself.

    Raises:
        ValueError: as :func:`gather`, but for runs that only an average would mix.
    """
    known: dict[str, dict[tuple[Any, ...], Record]] = {}
    runs: dict[tuple[str, str], Record] = {}
    rest = []
    for path in map(Path, paths):
        sources = _sweep(path)
        if not sources and _is_report(path):
            sources = {path: _report(path)}
        if not sources or (path / needle.ROWS).is_file() or next(path.rglob("eval.jsonl"), None) is not None:
            rest.append(path)
        for home, (found, told) in sources.items():
            for record in told:
                _know(runs, (record["run"], experiment_of(record)), record, home)
            for kind, records in found.items():
                _add(known.setdefault(kind, {}), kind, records, home)
    base = needle.gather(rest) if rest else Results(rows=(), analyses=(), runs=())
    runs |= {(record["run"], experiment_of(record)): record for record in base.runs}
    return replace(
        base,
        runs=tuple(runs[name] for name in sorted(runs)),
        measured={kind: tuple(sorted(known[kind].values(), key=_order)) for kind in KINDS if kind in known},
    )


def store(results: Results, directory: Path) -> None:
    """Write results so that :func:`gather` reads them back, the same bytes for the same results."""
    directory.mkdir(parents=True, exist_ok=True)
    if results.rows or not results.measured:
        needle.store(results, directory)
    runs = tuple(map(_anywhere, results.runs))
    for name, records in ((RUNS, runs), *((f"{kind}.jsonl", rows) for kind, rows in results.measured.items())):
        lines = (json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in records)
        files.replace(directory / name, "".join(f"{line}\n" for line in lines).encode())


def _anywhere(run: Record) -> Record:
    """A run without where its corpus lay: the name of the directory says enough, and the manifest has its hash."""
    settings = run.get("settings", {})
    if not settings.get("data"):
        return run
    return run | {"settings": settings | {"data": Path(settings["data"]).name}}


def without(results: Results, kinds: Iterable[str]) -> Results:
    """Results without some kinds of :data:`KINDS`, for a report that is not about them.

    Raises:
        ValueError: there is no such kind; says which there are.
    """
    kinds = list(kinds)
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"without: got {kind!r}, expected some of {', '.join(KINDS)}{suggestion(kind, KINDS)}")
    return replace(results, measured={kind: rows for kind, rows in results.measured.items() if kind not in kinds})


def _is_report(path: Path) -> bool:
    return (path / RUNS).is_file() and any((path / f"{kind}.jsonl").is_file() for kind in KINDS)


def _report(path: Path) -> tuple[dict[str, list[Record]], list[Record]]:
    found = {}
    for kind in KINDS:
        file = path / f"{kind}.jsonl"
        if file.is_file():
            found[kind] = _rounded(kind, read_rows(file, NEEDED[kind]))
    return found, read_rows(path / RUNS, ("run",))


def _sweep(path: Path) -> dict[Path, tuple[dict[str, list[Record]], list[Record]]]:
    """Everything that runs anywhere below a path left, by their directories."""
    homes = {file.parent for name, _ in KINDS.values() for file in path.rglob(name)}
    sources = {}
    for home in sorted(home for home in homes if not _is_report(home)):
        rows = _run(home)
        if rows:
            name = next(iter(rows.values()))[0]["run"]
            parts = {key: read_object(home / f) for key, f in _TOLD.items() if (home / f).is_file()}
            sources[home] = rows, [{"run": name, **parts}]
    return sources


def _run(home: Path) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for kind, (name, _) in KINDS.items():
        file = home / name
        if file.is_file():
            needed = NEEDED[kind]
            rows = read_rows(file, needed) if file.suffix == ".jsonl" else [read_row(file, needed)]
            found[kind] = _rounded(kind, rows)
    measured = [row.get("step") or 0 for kind, rows in found.items() if kind != "routing" for row in rows]
    newest = max(measured, default=0)
    kept = {
        kind: [row for row in rows if kind == "routing" or (row.get("step") or 0) == newest]
        for kind, rows in found.items()
    }
    return {kind: rows for kind, rows in kept.items() if rows}


def _rounded(kind: str, rows: list[Record]) -> list[Record]:
    """Rows of means while a model learns, of which there are thousands, to six digits; others as they are."""
    if kind != "routing":
        return rows
    return [{key: float(f"{v:.6g}") if isinstance(v, float) else v for key, v in row.items()} for row in rows]


def _add(known: dict[tuple[Any, ...], Record], kind: str, records: Sequence[Record], path: Path) -> None:
    found = {(row["run"], *(row.get(name) for name in KINDS[kind][1])): row for row in records}
    for key, record in found.items():
        _know(known, key, record, path)


def _know(known: dict[Any, Record], key: tuple[Any, ...], record: Record, path: Path) -> None:
    if known.setdefault(key, record) != record:
        raise ValueError(f"{path}: another run is called {key[0]} too; report them apart")


def _refuse_mixtures(results: Results) -> None:
    """Refuse runs that a mean would take for seeds of one scheme, and that are not the same but for their seed.

    Runs that were asked several questions are the same where one of them is; that one is shown.
    """
    settings = {record["run"]: _trained_as(record) for record in results.runs if experiment_of(record) == "lm"}
    for kind, questions in _QUESTIONS.items():
        for records in schemes(results.measured.get(kind, ())).values():
            runs: dict[str, list[Record]] = {}
            for record in records:
                runs.setdefault(record["run"], []).extend(questions(record))
            seeds = {record["run"]: record["seed"] for record in records}
            (first, asked), *others = runs.items()
            for name, also in others:
                refuse_differing(name, first, settings.get(name, {}), settings.get(first, {}))
                if not any(question in asked for question in also):
                    refuse_differing(name, first, also[-1], asked[-1])
            refuse_same_seed(seeds)


def refuse_same_seed(seeds: Mapping[str, Any], instead: str = "report them apart") -> None:
    """Refuse two runs of one seed, by the name of the run, and say what to do instead.

    Raises:
        ValueError: names both.
    """
    known: dict[Any, str] = {}
    for name, seed in seeds.items():
        other = known.setdefault(seed, name)
        if other != name:
            raise ValueError(f"results: {name} and {other} are both seed {seed}; {instead}")


def _trained_as(run: Record) -> Record:
    """What runs of several seeds have in common: their settings, and the corpus they were trained on."""
    data = run.get("manifest", {}).get("data")
    corpus = {"data": data.get("corpus")} if isinstance(data, dict) else {}
    return shared_settings(run.get("settings", {})) | corpus


def _protocol(row: Record) -> list[Record]:
    return [{key: row.get(key) for key in QUESTION}]


#: Of the kinds that are averaged over seeds: the questions that a row or a file of findings answers.
_QUESTIONS: dict[str, Callable[[Record], list[Record]]] = {
    "perplexity": _protocol,
    "positions": _protocol,
    "far_back": lambda row: [far_back_question(row)],
    # Looks at other text or lengths are told apart where they are drawn.
    "entropy": lambda record: [{}],
}


def _order(record: Record) -> tuple[Any, ...]:
    numbers = (record.get(name) or 0 for name in ("context", "distance", "step", "layer", "head"))
    variant = str(record.get("variant") or "")
    return (scheme_order(str(record["position"])), variant, record["seed"] or 0, str(record["run"]), *numbers)
