"""What forgetting does to trained models: tiles visited, bytes and keys cached, perplexity and needles.

:func:`measure_runs` measures; :mod:`gape.experiments.forgetting_bench` stores the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache as call_once
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gape.analysis.passages import Reader
from gape.experiments.experiment import Log, pick_device, wants_bfloat16
from gape.experiments.forgetting_bench import SERVED, Bench, Settings, Way, setting
from gape.experiments.open_model import kind_of, open_model
from gape.experiments.run import NeedleRun
from gape.models.skipping import IMPL
from gape.ops.inputs import Problem
from gape.report.results import pack_hits
from gape.tasks import niah, perplexity, perplexity_rows
from gape.utils import locks
from gape.utils.jsonl import Record
from gape.utils.progress import Progress, ProgressTable
from gape.utils.validation import invalid_argument

#: What is measured of a run of each kind by default.
DEFAULT = {"lm": ("tiles", "cache", "perplexity"), "niah": ("tiles", "needle")}
WHAT = {"lm": "a language model", "niah": "a run of the needle task"}
#: Measures of one kind of run only.
ONLY = {"perplexity": "lm", "needle": "niah"}


def chosen_measures(bench: Bench, measures: Sequence[str] | None) -> tuple[str, ...]:
    """The measures of a model, those of its kind by default.

    Raises:
        ValueError: a measure is unknown or not one for its kind.
    """
    chosen = tuple(measures or DEFAULT[bench.kind])
    for name in chosen:
        if name not in MEASURES:
            raise invalid_argument("measure", name, f"some of {', '.join(MEASURES)}")
        if ONLY.get(name, bench.kind) != bench.kind:
            raise invalid_argument("measure", name, f"others for {WHAT[bench.kind]}")
    return chosen


def tiles(bench: Bench) -> None:
    """Tiles visited, by layer and head."""
    for length in bench.lengths if bench.skips else ():
        layers = call_once(partial(bench.layers, length))
        for eps in bench.settings.eps:
            about = {"kind": "tiles", "length": length, "how": "skipping", "impl": IMPL, "eps": eps}
            bench.once(about, partial(_visit_tiles, layers, eps), lambda row: f"{row['mean']:.3f} of the tiles")


@torch.no_grad()
def _visit_tiles(layers: Callable[[], list[Problem]], eps: float) -> Record:
    from gape.ops.triton import attention  # noqa: PLC0415

    fractions = [attention.visits(problem, eps).mean(0).tolist() for problem in layers()]
    mean = float(np.mean([np.mean(layer) for layer in fractions]))
    return {"tiles": [[round(x, 5) for x in layer] for layer in fractions], "mean": mean}


def caches(bench: Bench) -> None:
    """Bytes and keys of the full cache and of forgetting ones behind a text, and what eviction can have cost."""
    for length in bench.lengths:
        for name, new_cache in bench.caches():
            about = {"kind": "cache", "length": length, "chunk": bench.settings.chunk, **name}
            bench.once(about, partial(_cache_size, bench, new_cache, about), _bytes)


@torch.no_grad()
def _cache_size(bench: Bench, new_cache: Callable[[], Any], about: Record) -> Record:
    cache = new_cache()
    for part in torch.split(bench.text(about["length"]), about["chunk"], dim=1):
        bench.model(part, cache=cache, logits_to_keep=1)
    if about["how"] == "forgetting":
        cache.evict()
    return {"bytes": cache.nbytes, "num_keys": cache.num_keys, "realised_eps": cache.realised_eps}


def _bytes(row: Record) -> str:
    keys = [count for layer in row["num_keys"] for count in layer]
    return f"{row['bytes'] / 2**20:.2f} MiB, {min(keys):,} to {max(keys):,} keys of a head"


def perplexities(bench: Bench) -> None:
    """Perplexity dense, skipping, and read through forgetting caches."""
    settings = bench.settings
    for length in bench.lengths:
        protocol = perplexity.Protocol(context=length, last=min(settings.last, length))
        plan = perplexity.plan(bench.corpus, protocol, max_windows=settings.max_windows, seed=settings.seed)
        for way in bench.ways(length):
            about = {"kind": "perplexity", "length": length, "max_windows": settings.max_windows}
            about |= protocol.settings() | way.name
            make = partial(_score_windows, bench, plan, about, way)
            bench.once(about, make, lambda row: f"perplexity {row['perplexity']:.3f}, loss {row['nll']:.5f}")


def _score_windows(bench: Bench, plan: perplexity.Plan, about: Record, way: Way) -> Record:
    scores = bench.opened.directory / f".forgetting-{about['how']}-{about['length']}.jsonl"
    label, make = f"{bench.opened.identity['run']}: {setting(about)}", way.new_cache
    with ProgressTable(unit="window") as table, way.context():
        scored = perplexity_rows.score_all(
            bench.model, bench.corpus, plan, store=scores, of=repr(sorted((bench.shared | about).items(), key=str)),
            chunk=about["chunk"], new_cache=None if make is None else lambda capacity: make(),
            progress=lambda done, total: table.show(label, done, total),
        )  # fmt: skip
        table.remove(label)
    rows = perplexity_rows.rows(plan, scored, bench.settings.seed)
    scores.unlink()
    return next((row for row in rows if row["stratum"] is None), rows[-1])


def needles(bench: Bench) -> None:
    """Accuracy on the needle task dense, skipping, and read through forgetting caches."""
    run, samples = cast(NeedleRun, bench.opened.run), bench.settings.samples
    for factor, length in zip(bench.settings.factors, bench.lengths, strict=True):
        config = run.task.at(length)
        for way in bench.ways(length):
            about = {"kind": "needle", "length": length, "factor": factor, "samples": samples, **way.name}
            make = partial(_answer_needles, bench, config, way)
            bench.once(about, make, lambda row: f"accuracy {row['accuracy']:.3f}")


def _answer_needles(bench: Bench, config: niah.NIAHConfig, way: Way) -> Record:
    shares: list[float] = []
    reader = bench.model
    if way.new_cache is not None:
        reader = partial(read_through, bench.model, way.new_cache, way.name["chunk"], shares)
    with way.context():
        right = niah.hits(
            reader, config, samples=bench.settings.samples, seed=bench.settings.seed, device=bench.device
        )  # fmt: skip
    share = {"key_share": sum(shares) / len(shares)} if shares else {}
    return {"accuracy": float(right.double().mean()), "hits": pack_hits(right.tolist())} | share


def read_through(
    model: Any, new_cache: Callable[[], Any], chunk: int, shares: list[float], ids: Tensor, *, logits_to_keep: int = 0
) -> Any:
    """What a model says of ids (B, N) that it reads chunk by chunk through a cache.

    `shares` gets, for each sample, the share of the keys that were cached when the last chunk had come.
    """
    cache = new_cache()
    *before, last = torch.split(ids, chunk, dim=1)
    for part in before:
        model(part, cache=cache, logits_to_keep=1)
    answer = model(last, cache=cache, logits_to_keep=logits_to_keep)
    counts = [keys for layer in cache.num_keys for keys in layer]
    shares += [sum(counts) / len(counts) / ids.size(1)] * ids.size(0)
    return answer


#: Everything that can be measured, by name.
MEASURES: dict[str, Callable[[Bench], None]] = {
    "tiles": tiles, "cache": caches, "perplexity": perplexities, "needle": needles,
}  # fmt: skip


def measure_runs(
    directories: Sequence[Path],
    settings: Settings,
    *,
    data: Path | None = None,
    measures: Sequence[str] | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> list[Record]:
    """Measure what is missing of every model, once all of them are known to be measurable.

    Args:
        directories: runs of ours or of `gape hf finetune`, or saved models with gates.
        settings: what is to be measured.
        data: a corpus, for language models.
        measures: names of `MEASURES`; those of `DEFAULT` by default.
        device, precision: as the options of `gape lm forgetting`.

    Returns:
        All rows of the models' weights, by directory.

    Raises:
        ValueError: a directory without a model, no corpus for a language model, or what :meth:`Bench.refuse` refuses.
    """
    progress, target, rows = Progress(), pick_device(device), list[Record]()
    if precision != SERVED:
        precision = "bfloat16" if wants_bfloat16(precision, target, SERVED) else "float32"
    reader = _corpus(directories, data)
    for directory in directories:
        bench = _bench(directory, reader, settings, torch.device("cpu"), precision, lambda _: None)
        chosen_measures(bench, measures)
        bench.refuse()
    for directory in directories:
        with locks.locked(directory, "measured"), ProgressTable(progress, "measure") as table:
            bench = _bench(directory, reader, settings, target, precision, progress.log)
            names = chosen_measures(bench, measures)
            for number, name in enumerate(names):
                table.show(str(directory), number, len(names))
                MEASURES[name](bench)
            # Directories of one name are different runs.
            rows += [row | {"run": str(directory)} for row in bench.rows()]
    return rows


def _corpus(directories: Sequence[Path], data: Path | None) -> Reader | None:
    """The corpus that language models among the runs read; None where there is none."""
    for directory in directories:
        if kind_of(directory) != "niah" and data is None:
            raise ValueError(f"data: got nothing, expected --data CORPUS for the language model in {directory}")
    if data is not None and not data.is_dir():
        raise ValueError(f"data: got {str(data)!r}, expected a corpus that gape data prepare wrote")
    return None if data is None else Reader(data)


def _bench(
    directory: Path, reader: Reader | None, settings: Settings, device: torch.device, precision: str, log: Log
) -> Bench:
    opened = open_model(directory, device, torch.bfloat16 if precision == SERVED else torch.float32, log)
    bench = Bench(opened=opened, settings=settings, reader=reader, precision=precision, log=log)
    if bench.kind != "lm":
        return replace(bench, reader=None)
    assert reader is not None
    opened.accept(reader.tokenizer)
    return bench
