"""What runs left behind, read back: evaluation rows, looks inside, and where both came from.

A run's directory holds `eval.jsonl` (a row per length), `analysis.json`, `run.json` and the trainer's `manifest.json`
and `summary.json`. A report's directory holds the same of many runs as `results.jsonl`, `analysis.jsonl` and
`runs.jsonl`, so it can be read in place of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]

ROWS, ANALYSES, RUNS = "results.jsonl", "analysis.jsonl", "runs.jsonl"

#: What a row of an evaluation must have.
ROW_KEYS = (
    "run", "variant", "position", "evaluated", "target", "seed", "train_length", "factor", "length", "needles",
    "samples", "accuracy", "hits",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Results:
    """Stored results of any number of runs, in a fixed order.

    Attributes:
        rows: one per run, scheme evaluated and length; keys :data:`ROW_KEYS`.
        analyses: one per run that was looked into: its row keys up to train_length, and what
            :func:`gape.analysis.niah.look_inside` found.
        runs: one per run: its settings, the trainer's manifest, and how training ended.
    """

    rows: tuple[Record, ...]
    analyses: tuple[Record, ...]
    runs: tuple[Record, ...]

    def select(self, **wanted: Any) -> Results:
        """The rows and analyses whose keys have the wanted values (or one of them, for a tuple)."""

        def fits(record: Mapping[str, Any]) -> bool:
            return all(
                record.get(key) in value if isinstance(value, tuple) else record.get(key) == value
                for key, value in wanted.items()
            )

        return Results(rows=tuple(filter(fits, self.rows)), analyses=tuple(filter(fits, self.analyses)), runs=self.runs)

    def values(self, key: str) -> list[Any]:
        """The distinct values of a row's key, in the order of the rows."""
        return list(dict.fromkeys(row[key] for row in self.rows))


def gather(paths: Iterable[str | Path]) -> Results:
    """Read runs, sweeps (directories with runs anywhere inside) and reports.

    A last line that was cut short is left out; of two rows for one measurement in a file the later counts.

    Raises:
        ValueError: a path without results, a file that is not what it should be, or two different runs of one name.
    """
    rows: dict[tuple[Any, ...], Record] = {}
    analyses: dict[tuple[Any, ...], Record] = {}
    runs: dict[tuple[Any, ...], Record] = {}
    for path in map(Path, paths):
        found = _report(path) if (path / ROWS).is_file() else _sweep(path)
        if not found.rows:
            raise ValueError(f"results: got {str(path)!r}, expected a run, a sweep or a report with evaluation rows")
        _add(rows, {(row["run"], row["evaluated"], row["factor"]): row for row in found.rows}, path)
        _add(analyses, {(record["run"],): record for record in found.analyses}, path)
        _add(runs, {(record["run"],): record for record in found.runs}, path)
    return Results(
        rows=tuple(sorted(rows.values(), key=_order)),
        analyses=tuple(sorted(analyses.values(), key=_order)),
        runs=tuple(sorted(runs.values(), key=lambda record: str(record["run"]))),
    )


def store(results: Results, directory: Path) -> None:
    """Write results so that :func:`gather` reads them back, the same bytes for the same results."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, records in ((ROWS, results.rows), (ANALYSES, results.analyses), (RUNS, results.runs)):
        text = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
        (directory / name).write_text(text, encoding="utf-8")


def read_lines(path: Path) -> list[Record]:
    """The objects of a JSONL file; a last line that was cut short is left out.

    Raises:
        ValueError: any other line is not a JSON object.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}: line {number} is not a JSON object")
        records.append(record)
    return records


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
    def lines(name: str) -> tuple[Record, ...]:
        return tuple(read_lines(path / name)) if (path / name).is_file() else ()

    rows = lines(ROWS)
    for row in rows:
        _check(row, path / ROWS)
    return Results(rows=rows, analyses=lines(ANALYSES), runs=lines(RUNS))


def _sweep(path: Path) -> Results:
    rows: list[Record] = []
    analyses: list[Record] = []
    runs: list[Record] = []
    for file in sorted(path.rglob("eval.jsonl")):
        home = file.parent
        found = read_lines(file)
        for row in found:
            _check(row, file)
        if not found:
            continue
        rows += found
        if (home / "analysis.json").is_file():
            analyses.append(_object(home / "analysis.json"))
        parts = {"settings": "run.json", "manifest": "manifest.json", "training": "summary.json"}
        told = {key: _object(home / name) for key, name in parts.items() if (home / name).is_file()}
        runs.append({"run": found[0]["run"], **told})
    return Results(rows=tuple(rows), analyses=tuple(analyses), runs=tuple(runs))


def _object(path: Path) -> Record:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def _check(row: Mapping[str, Any], path: Path) -> None:
    missing = [key for key in ROW_KEYS if key not in row]
    if missing:
        raise ValueError(f"{path}: a row lacks {', '.join(missing)}")


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
