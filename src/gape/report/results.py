"""What runs left behind, read back: evaluation rows, looks inside, and where both came from.

A run's directory holds `eval.jsonl` (a row per length), `analysis.json`, `run.json` and the trainer's `manifest.json`
and `summary.json`. A report's directory holds the same of many runs as `results.jsonl`, `analysis.jsonl` and
`runs.jsonl`, so it can be read in place of them. What language models leave is read by :mod:`gape.report.lm_results`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gape.train.config import MAY_CHANGE
from gape.utils import files
from gape.utils.jsonl import read_lines, read_object
from gape.utils.stored_rows import fault

Record = dict[str, Any]

ROWS, ANALYSES, RUNS = "results.jsonl", "analysis.jsonl", "runs.jsonl"

#: What a row of an evaluation must have.
ROW_KEYS = (
    "run", "variant", "position", "evaluated", "target", "seed", "train_length", "factor", "length", "needles",
    "samples", "accuracy", "hits",
)  # fmt: skip

#: What a look inside must have.
LOOK_KEYS = ("run", "variant", "position", "target", "seed", "spread")

#: What rows of one length have in common, whatever their seed.
_ALIKE = ("length", "needles", "precision", "options")


@dataclass(frozen=True, kw_only=True)
class Results:
    """Stored results of any number of runs, in a fixed order.

    Attributes:
        rows: one per run, scheme evaluated and length; keys :data:`ROW_KEYS`.
        analyses: one per run that was looked into: its row keys up to train_length, and what
            :func:`gape.analysis.niah.inspect_model` found.
        runs: one per run: its settings, the trainer's manifest, and how training ended.
        measured: rows of language models by kind; see :mod:`gape.report.lm_results`.
    """

    rows: tuple[Record, ...]
    analyses: tuple[Record, ...]
    runs: tuple[Record, ...]
    measured: Mapping[str, tuple[Record, ...]] = field(default_factory=dict)

    def select(self, **wanted: Any) -> Results:
        """The rows and analyses whose keys have the wanted values (or one of them, for a tuple)."""

        def fits(record: Mapping[str, Any]) -> bool:
            return all(
                record.get(key) in value if isinstance(value, tuple) else record.get(key) == value
                for key, value in wanted.items()
            )

        measured = {kind: tuple(filter(fits, records)) for kind, records in self.measured.items()}
        rows, analyses = tuple(filter(fits, self.rows)), tuple(filter(fits, self.analyses))
        return Results(rows=rows, analyses=analyses, runs=self.runs, measured=measured)

    def values(self, key: str) -> list[Any]:
        """The distinct values of a row's key, in the order of the rows."""
        return list(dict.fromkeys(row[key] for row in self.rows))


def gather(paths: Iterable[str | Path]) -> Results:
    """Read runs, sweeps (directories with runs anywhere inside) and reports.

    A last line that was cut short is left out; of two rows for one measurement in a file the later counts, and rows of
    weights that were trained further since do not. Of rows of one run and scheme in several precisions, or under
    several options, those with the most lengths count, of equally many the later. A directory that holds both runs and
    a report is read from its runs.

    Raises:
        ValueError: a path without results, a file that is not what it should be, two different runs of one name, or
            runs that would be averaged as seeds of one scheme and are not.
    """
    rows: dict[tuple[Any, ...], Record] = {}
    analyses: dict[tuple[Any, ...], Record] = {}
    runs: dict[tuple[Any, ...], Record] = {}
    for path in map(Path, paths):
        sources = _sweep(path)
        if not sources and (path / ROWS).is_file():
            sources = {path: _report(path)}
        if not any(found.rows for found in sources.values()):
            raise ValueError(f"results: got {str(path)!r}, expected a run, a sweep or a report with evaluation rows")
        for home, found in sources.items():
            _add(rows, {(row["run"], row["evaluated"], row["factor"]): row for row in found.rows}, home)
            _add(analyses, {(record["run"],): record for record in found.analyses}, home)
            _add(runs, {(record["run"], experiment_of(record)): record for record in found.runs}, home)
    return arranged(rows.values(), analyses.values(), runs.values())


def arranged(rows: Iterable[Record], analyses: Iterable[Record] = (), runs: Iterable[Record] = ()) -> Results:
    """Results in their fixed order.

    Raises:
        ValueError: rows of runs that would be averaged as seeds of one scheme and are not.
    """
    found = Results(
        rows=tuple(sorted(rows, key=_order)),
        analyses=tuple(sorted(analyses, key=_order)),
        runs=tuple(sorted(runs, key=lambda record: str(record["run"]))),
    )
    _refuse_mixtures(found.rows, found.runs)
    return found


def store(results: Results, directory: Path) -> None:
    """Write results so that :func:`gather` reads them back, the same bytes for the same results.

    Each file is replaced at once: results that are written over themselves are not lost on the way.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, records in ((ROWS, results.rows), (ANALYSES, results.analyses), (RUNS, results.runs)):
        text = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
        files.replace(directory / name, text.encode())


def read_rows(path: Path, needed: Iterable[str] = ()) -> list[Record]:
    """The rows of a JSONL file, all with the keys that are needed; a last line that was cut short is left out.

    Raises:
        ValueError: any other line is not a JSON object, or holds what no row of ours holds; names file and line.
    """
    return read_lines(path, lambda row: fault(row, needed))


def read_row(path: Path, needed: Iterable[str] = ()) -> Record:
    """The row that a JSON file holds, with the keys that are needed.

    Raises:
        ValueError: it is no JSON object, or holds what no row of ours holds; names the file.
    """
    row = read_object(path)
    if wrong := fault(row, needed):
        raise ValueError(f"{path}: {wrong}")
    return row


def pack_hits(hits: Iterable[bool]) -> str:
    """Right and wrong answers as hexadecimal digits, four to a digit, the first sample first."""
    bits = "".join("1" if hit else "0" for hit in hits)
    return "".join(f"{int(bits[at : at + 4].ljust(4, '0'), 2):x}" for at in range(0, len(bits), 4))


def unpack_hits(packed: str, samples: int) -> list[bool]:
    """What :func:`pack_hits` packed."""
    return [bit == "1" for digit in packed for bit in f"{int(digit, 16):04b}"][:samples]


def _add(known: dict[tuple[Any, ...], Record], found: dict[tuple[Any, ...], Record], path: Path) -> None:
    for key, record in found.items():
        if known.setdefault(key, record) != record:
            raise ValueError(f"{path}: another run is called {key[0]} too; report them apart")


def _report(path: Path) -> Results:
    def lines(name: str, needed: Iterable[str]) -> tuple[Record, ...]:
        return tuple(read_rows(path / name, needed)) if (path / name).is_file() else ()

    return Results(rows=lines(ROWS, ROW_KEYS), analyses=lines(ANALYSES, LOOK_KEYS), runs=lines(RUNS, ("run",)))


def _sweep(path: Path) -> dict[Path, Results]:
    """The runs anywhere under a directory by their own; those without a row are left out."""
    homes = [file.parent for file in sorted(path.rglob("eval.jsonl"))]
    return {home: found for home in homes if (found := _run(home)).rows}


def _run(home: Path) -> Results:
    """What one run left: the rows and the look of the weights that were measured last."""
    rows = read_rows(home / "eval.jsonl", ROW_KEYS)
    if not rows:
        return Results(rows=(), analyses=(), runs=())
    step = rows[-1].get("step")
    look = home / "analysis.json"
    parts = {"settings": "run.json", "manifest": "manifest.json", "training": "summary.json"}
    told = {key: read_object(home / name) for key, name in parts.items() if (home / name).is_file()}
    return Results(
        rows=_measured_alike([row for row in rows if row.get("step") == step]),
        analyses=(read_row(look, LOOK_KEYS),) if look.is_file() and read_object(look).get("step") == step else (),
        runs=({"run": rows[0]["run"], **told},),
    )


def _measured_alike(rows: Iterable[Record]) -> tuple[Record, ...]:
    """Of each scheme that a run was measured with, the rows of one precision and one set of options."""
    groups: dict[str, dict[str, list[Record]]] = {}
    for row in rows:
        ways = groups.setdefault(row["evaluated"], {})
        way = repr((row.get("precision"), row.get("options")))
        # To the end: of equally long ones the way of the latest row is taken.
        ways[way] = [*ways.pop(way, []), row]
    longest = (
        max(reversed(ways.values()), key=lambda found: len({row["factor"] for row in found}))
        for ways in groups.values()
    )
    return tuple(row for found in longest for row in found)


def _refuse_mixtures(rows: Iterable[Record], runs: Iterable[Record]) -> None:
    """Refuse rows that a table would take for seeds of one scheme, and that are not the same but for their seed."""
    own = (record for record in runs if experiment_of(record) == "niah")
    settings = {record["run"]: shared_settings(record.get("settings", {})) for record in own}
    known: dict[tuple[Any, ...], Record] = {}
    for row in rows:
        scheme = (row["variant"], row["position"], row["evaluated"], row["target"])
        other = known.setdefault((*scheme, row["factor"], row["seed"]), row)
        if other is not row:
            raise ValueError(f"results: {row['run']} and {other['run']} are both seed {row['seed']}; report them apart")
        other = known.setdefault((*scheme, row["factor"]), row)
        one, two = ({key: r[key] for key in _ALIKE if key in r} | settings.get(r["run"], {}) for r in (row, other))
        refuse_differing(row["run"], other["run"], one, two)


def refuse_differing(name: str, other: str, one: Record, two: Record) -> None:
    """Refuse two runs that would be averaged and differ in what both tell.

    Raises:
        ValueError: names the runs and the keys.
    """
    differing = sorted(key for key in one.keys() & two.keys() if one[key] != two[key])
    if differing:
        raise ValueError(f"results: {name} and {other} differ in {', '.join(differing)}; report them apart")


def experiment_of(run: Mapping[str, Any]) -> str:
    """The kind of experiment that a record of a run is of; the needle task's do not say it."""
    kind: str = run.get("settings", {}).get("kind", "niah")
    return kind


def shared_settings(settings: Mapping[str, Any]) -> Record:
    """What runs that are averaged over seeds have in common, flat: what is trained, not how it is measured or shown."""
    told = {key: settings[key] for key in ("batch_size", "task", "model", "train") if key in settings}
    own = {f"train.{key}" for key in ("seed", *MAY_CHANGE)}
    return {key: value for key, value in flat(told).items() if key not in own}


def flat(value: Any, prefix: str = "") -> Record:
    """Nested records as one, with dotted keys."""
    if not isinstance(value, dict):
        return {prefix: value}
    made: Record = {}
    for key, inner in value.items():
        made |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return made


#: Bases in the order of tables and legends; others follow by name.
BASES = ("nope", "rope", "p-rope", "yarn", "alibi", "fox")


def scheme_order(position: str) -> tuple[int, str, bool]:
    """Sorts schemes: by base, the gated one after it."""
    base = position.removesuffix("+gape")
    return (BASES.index(base) if base in BASES else len(BASES), base, base != position)


def _order(record: Mapping[str, Any]) -> tuple[Any, ...]:
    position, evaluated = str(record["position"]), str(record.get("evaluated", record["position"]))
    return (
        str(record["variant"]), str(record["target"]), scheme_order(position), position != evaluated, evaluated,
        record["seed"], str(record["run"]), record.get("factor", 0),
    )  # fmt: skip
