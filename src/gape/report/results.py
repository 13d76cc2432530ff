"""Results that runs stored: read from runs, sweeps and reports, checked, and written again.

A run's directory holds a file for each kind of measurement (:data:`KINDS`), its settings in `run.json`, and the
trainer's `manifest.json` and `summary.json`. A report's directory holds the same of many runs, a JSONL file for each
kind and `runs.jsonl`, so it can be read in place of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gape.report.schemes import group_by, scheme_order, variant_of
from gape.train.config import MAY_CHANGE
from gape.utils import files
from gape.utils.jsonl import Record, read_lines, read_object
from gape.utils.settings import flatten
from gape.utils.stored_rows import fault
from gape.utils.validation import suggestion

RUNS = "runs.jsonl"

#: Settings of a perplexity measurement besides the context: only rows that share them are compared.
PROTOCOL = (
    "protocol", "last", "align", "corpus", "split", "only_stratum", "precision", "max_windows", "eval_seed",
)  # fmt: skip

#: Settings of recall, and of the generation that is measured beside it.
RECALL = ("corpus", "eval_seed", "precision", "device", "machine", "facts", "samples", "new_tokens")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of measurement: its file in a run's directory (JSON lines or one object) and in a report's (JSON lines).

    `key` identifies a row besides its run; every row has the keys `needed`.
    """

    file: str
    stored: str
    key: tuple[str, ...]
    needed: tuple[str, ...]


def _language(name: str, key: Iterable[str], needed: str, suffix: str = "jsonl") -> Kind:
    """A kind that the commands for language models write."""
    stored = f"{name}.jsonl"
    needs = ("run", "position", "seed", *needed.split())
    return Kind(file=f"{name}.{suffix}", stored=stored, key=tuple(key), needed=needs)


KINDS = {
    "needle": Kind(
        file="eval.jsonl", stored="results.jsonl", key=("evaluated", "factor"),
        needed=(
            "run", "variant", "position", "evaluated", "target", "seed", "train_length", "factor", "length", "needles",
            "samples", "accuracy", "hits",
        ),
    ),
    "inside": Kind(
        file="analysis.json", stored="analysis.jsonl", key=(),
        needed=("run", "variant", "position", "target", "seed", "spread"),
    ),
    "perplexity": _language("perplexity", (*PROTOCOL, "context", "stratum"), "context"),
    "routing": _language(
        "routing", ("step", "layer", "head"), "step layer head mean_mask landmark gate amplitude"
    ),
    "far_back": _language(
        "far_back", ("kind", "distance", "context", "key"), "kind distance context tokens documents nll low high"
    ),
    "recall": _language("recall", ("what", "length", *RECALL), "what length"),
    "ruler": _language("ruler", ("key", "task", "length"), "key model task length samples"),
    "forgetting": _language(
        "forgetting",
        ("kind", "what", "length", "how", "impl", "eps", "bounds", "batch", "precision", "device"),
        "kind length how eps",
    ),
    **{name: _language(name, (), "sets", "json") for name in ("entropy", "spectrum", "maps", "masks")},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Results:
    """Stored results of any number of runs, in a fixed order: rows by kind of :data:`KINDS`, and a record of each run.

    A record has the run's settings, the trainer's manifest, and how training ended.
    """

    runs: tuple[Record, ...] = ()
    measured: Mapping[str, tuple[Record, ...]] = field(default_factory=dict)

    def of(self, kind: str) -> tuple[Record, ...]:
        """The rows of a kind."""
        return self.measured.get(kind, ())

    def select(self, **values: Any) -> Results:
        """The rows that have these values."""
        measured = {
            kind: tuple(row for row in rows if all(row.get(key) == value for key, value in values.items()))
            for kind, rows in self.measured.items()
        }
        return replace(self, measured=measured)

    def only(self, **measured: Iterable[Record]) -> Results:
        """The same runs with these rows alone."""
        return replace(self, measured={kind: tuple(rows) for kind, rows in measured.items()})

    def without(self, kinds: Iterable[str]) -> Results:
        """The results without some kinds, for a report that is not about them; refuses a kind that there is not."""
        kinds = list(kinds)
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"without: got {kind!r}, expected some of {', '.join(KINDS)}{suggestion(kind, KINDS)}")
        return replace(self, measured={kind: rows for kind, rows in self.measured.items() if kind not in kinds})


def gather(paths: Iterable[str | Path]) -> Results:
    """Read runs, sweeps (directories with runs anywhere inside) and reports.

    Of two rows for one measurement in a file the later counts, and rows of weights that were trained further since do
    not. Of needle rows of one run and scheme in several precisions, or under several options, those with the most
    lengths count. A directory that holds both runs and a report is read from its runs.

    Raises:
        ValueError: a path without results, a file that is not what it should be, two different runs of one name, or
            runs that would be averaged as seeds of one scheme and are not.
    """
    known: dict[str, dict[tuple[Any, ...], Record]] = {}
    for path in map(Path, paths):
        sources = _sweep(path) or ({path: _report(path)} if _is_report(path) else {})
        if not any(records for source in sources.values() for kind, records in source.items() if kind != "runs"):
            raise ValueError(f"results: got {str(path)!r}, expected a run, a sweep or a report with rows of results")
        for home, source in sources.items():
            for kind, records in source.items():
                # Of two rows of one file the later counts; those of two runs have to be equal.
                for key, record in {_identity(kind, record): record for record in records}.items():
                    if known.setdefault(kind, {}).setdefault(key, record) != record:
                        raise ValueError(f"{home}: another run is called {key[0]} too; report them apart")
    runs = known.pop("runs", {})
    return _checked_results({kind: rows.values() for kind, rows in known.items()}, [runs[key] for key in sorted(runs)])


def needle_results(rows: Iterable[Record]) -> Results:
    """Results of the needle task out of its rows alone; refuses rows that are no seeds of one scheme."""
    return _checked_results({"needle": rows})


def store(results: Results, directory: Path) -> None:
    """Write results so that :func:`gather` reads them back; the same bytes for the same results.

    Each file is replaced at once, so results may be written over themselves.
    """
    directory.mkdir(parents=True, exist_ok=True)
    contents: dict[str, Iterable[Record]] = {KINDS[kind].stored: rows for kind, rows in results.measured.items()}
    for file, records in (contents | {RUNS: map(_without_path, results.runs)}).items():
        # As these two files were first written.
        separators = (", ", ": ") if file in ("results.jsonl", "analysis.jsonl") else (",", ":")
        lines = (json.dumps(record, ensure_ascii=False, separators=separators) for record in records)
        files.replace(directory / file, "".join(f"{line}\n" for line in lines).encode())


def read_rows(path: Path, needed: Iterable[str] = ()) -> list[Record]:
    """The rows of a JSONL file; refuses, by file and line, what lacks a key or holds what no row of ours holds."""
    return read_lines(path, lambda row: fault(row, needed))


def pack_hits(hits: Iterable[bool]) -> str:
    """Right and wrong answers as hexadecimal digits, four to a digit, the first sample first."""
    bits = "".join("1" if hit else "0" for hit in hits)
    return "".join(f"{int(bits[at : at + 4].ljust(4, '0'), 2):x}" for at in range(0, len(bits), 4))


def unpack_hits(packed: str, samples: int) -> list[bool]:
    """The answers that :func:`pack_hits` packed."""
    return [bit == "1" for digit in packed for bit in f"{int(digit, 16):04b}"][:samples]


def far_back_question(row: Record) -> Record:
    """The settings of a far-back measurement, except the kinds and distances of which a row is one."""
    return {key: value for key, value in (row.get("asked") or {}).items() if key not in ("kinds", "distances")}


def recall_question(row: Record) -> Record:
    """The settings of a recall measurement, except what was asked for and the length of the text."""
    return {key: row.get(key) for key in RECALL}


def refuse_same_seed(seeds: Mapping[str, Any], instead: str = "report them apart") -> None:
    """Refuse two runs of one seed, given by name, and say what to do instead."""
    known: dict[Any, str] = {}
    for name, seed in seeds.items():
        other = known.setdefault(seed, name)
        if other != name:
            raise ValueError(f"results: {name} and {other} are both seed {seed}; {instead}")


def _checked_results(rows: Mapping[str, Iterable[Record]], runs: Iterable[Record] = ()) -> Results:
    """Results of rows in any order; refuses mixtures."""
    order = {"needle": _needle_order, "inside": _needle_order}
    measured = {kind: tuple(sorted(rows[kind], key=order.get(kind, _order))) for kind in KINDS if kind in rows}
    results = Results(runs=tuple(runs), measured=measured)
    _refuse_mixtures(results)
    return results


def _needle_order(record: Record) -> tuple[Any, ...]:
    position, evaluated = str(record["position"]), str(record.get("evaluated", record["position"]))
    return (
        str(record["variant"]), str(record["target"]), scheme_order(position), position != evaluated, evaluated,
        record["seed"], str(record["run"]), record.get("factor", 0),
    )  # fmt: skip


def _order(record: Record) -> tuple[Any, ...]:
    numbers = (record.get(name) or 0 for name in ("context", "distance", "step", "layer", "head"))
    variant = str(record.get("variant") or "")
    return (scheme_order(str(record["position"])), variant, record["seed"] or 0, str(record["run"]), *numbers)


def _identity(kind: str, record: Record) -> tuple[Any, ...]:
    """What two records of one kind may not share unless they are equal; the name of the run first."""
    if kind == "runs":
        return (record["run"], _experiment(record))
    return (record["run"], *(record.get(key) for key in KINDS[kind].key))


def _without_path(run: Record) -> Record:
    """A run without the path of its corpus: the name of the directory is enough, and the manifest has its hash."""
    settings = run.get("settings", {})
    if not settings.get("data"):
        return run
    return run | {"settings": settings | {"data": Path(settings["data"]).name}}


def _is_report(path: Path) -> bool:
    kinds = any((path / kind.stored).is_file() for kind in KINDS.values())
    return kinds and any((path / name).is_file() for name in (RUNS, KINDS["needle"].stored))


def _report(path: Path) -> dict[str, list[Record]]:
    """The rows of a report by kind, and its runs as "runs"."""
    stored = {name: (kind.stored, kind.needed) for name, kind in KINDS.items()} | {"runs": (RUNS, ("run",))}
    return {
        name: _read(name, path / file, needed) for name, (file, needed) in stored.items() if (path / file).is_file()
    }


def _sweep(path: Path) -> dict[Path, dict[str, list[Record]]]:
    """The rows and the record of each run anywhere below a path, by directory; runs without rows are left out."""
    names = {kind.file for kind in KINDS.values()}
    homes = sorted({file.parent for file in path.rglob("*.json*") if file.name in names})
    sources = {home: _run(home) for home in homes if not _is_report(home)}
    return {home: source for home, source in sources.items() if source}


def _run(home: Path) -> dict[str, list[Record]]:
    """The rows that one run left, of the weights that were trained furthest, and its record as "runs"."""
    present = {name: kind for name, kind in KINDS.items() if (home / kind.file).is_file()}
    rows = {name: _read(name, home / kind.file, kind.needed) for name, kind in present.items()}
    steps = [row.get("step") or 0 for name in rows if name != "routing" for row in rows[name]]
    source = {
        name: [row for row in rows[name] if name == "routing" or (row.get("step") or 0) == max(steps)] for name in rows
    }
    source = {name: _one_precision(own) if name == "needle" else own for name, own in source.items() if own}
    if not source:
        return {}
    parts = {"settings": "run.json", "manifest": "manifest.json", "training": "summary.json"}
    about = {key: read_object(home / file) for key, file in parts.items() if (home / file).is_file()}
    return source | {"runs": [{"run": next(iter(source.values()))[0]["run"], **about}]}


def _read(kind: str, file: Path, needed: Iterable[str]) -> list[Record]:
    """The rows of a file; those of routing, of which there are thousands, to six digits."""
    if file.suffix == ".json":
        row = read_object(file)
        if wrong := fault(row, needed):
            raise ValueError(f"{file}: {wrong}")
        return [row]
    rows = read_rows(file, needed)
    if kind != "routing":
        return rows
    return [{key: float(f"{v:.6g}") if isinstance(v, float) else v for key, v in row.items()} for row in rows]


def _one_precision(rows: Iterable[Record]) -> list[Record]:
    """Of each scheme that a run was measured with, the rows of one precision and one set of options."""
    chosen: list[Record] = []
    for own in group_by(rows, lambda row: row["evaluated"]).values():
        # Backwards: of equally many lengths the precision and options of the latest row count.
        ways = group_by(reversed(own), lambda row: repr((row.get("precision"), row.get("options"))))
        longest = max(ways.values(), key=lambda some: len({row["factor"] for row in some}))
        chosen += reversed(longest)
    return chosen


def _scheme(row: Record) -> Hashable:
    return row["position"], variant_of(row)


#: Kinds that are averaged over seeds: what the rows of one mean share, and what else has to be the same in them.
_AVERAGED: dict[str, tuple[Callable[[Record], Hashable], Callable[[Record], Record]]] = {
    "needle": (
        lambda row: tuple(row[key] for key in ("variant", "position", "evaluated", "target", "factor")),
        lambda row: {key: row[key] for key in ("length", "needles", "precision", "options") if key in row},
    ),
    "perplexity": (_scheme, lambda row: {key: row.get(key) for key in PROTOCOL}),
    "far_back": (_scheme, far_back_question),
    "recall": (lambda row: (_scheme(row), row["what"], row["length"]), recall_question),
    # Figures choose among other texts and lengths themselves.
    "entropy": (_scheme, lambda row: {}),
}


def _refuse_mixtures(results: Results) -> None:
    """Refuse runs that a mean would take for seeds of one scheme, and that differ in more than their seed.

    Runs that were measured in several ways are alike where one of these is the same; that one is shown.
    """
    settings = {(_experiment(run), run["run"]): _training_settings(run) for run in results.runs}
    for kind, (scheme, question) in _AVERAGED.items():
        experiment = "niah" if kind == "needle" else "lm"
        for rows in group_by(results.of(kind), scheme).values():
            (first, own), *others = group_by(rows, lambda row: row["run"]).items()
            questions = [question(row) for row in own]
            for name, more in others:
                pairs = [(settings.get((experiment, name), {}), settings.get((experiment, first), {}))]
                also = [question(row) for row in more]
                if not any(each in questions for each in also):
                    pairs.append((also[-1], questions[-1]))
                for one, two in pairs:
                    if differing := sorted(key for key in one.keys() & two.keys() if one[key] != two[key]):
                        raise ValueError(
                            f"results: {name} and {first} differ in {', '.join(differing)}; report them apart"
                        )
            refuse_same_seed({row["run"]: row["seed"] for row in rows})


def _experiment(run: Record) -> str:
    """The kind of experiment of a run's record; those of the needle task do not name it."""
    return str(run.get("settings", {}).get("kind", "niah"))


def _training_settings(run: Record) -> Record:
    """What runs of several seeds have in common, flat: the settings of training, and the corpus."""
    settings, data = run.get("settings", {}), run.get("manifest", {}).get("data")
    shared = flatten({key: settings[key] for key in ("batch_size", "task", "model", "train") if key in settings})
    own = {f"train.{key}" for key in ("seed", *MAY_CHANGE)}
    corpus = {"data": data.get("corpus")} if isinstance(data, dict) else {}
    return {key: value for key, value in shared.items() if key not in own} | corpus
