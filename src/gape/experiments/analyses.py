"""What `gape analyze` does: attention entropy, spectra, maps and masks of trained runs, and losses far back.

Sets of results lie in the run's directory (`entropy.json`, …). What was analysed of the same weights with the same
settings is not analysed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from gape.analysis import lm
from gape.analysis.passages import Passages, Reader
from gape.data import load_tokenizer
from gape.experiments.experiment import Log, pick_device, wants_bfloat16
from gape.experiments.far_back import measure_run
from gape.experiments.open_model import OpenModel, open_run
from gape.experiments.result_store import ResultSets
from gape.models.gpt import GPT
from gape.report import tables
from gape.report.tables import Table
from gape.tasks.far_back import FarBackConfig
from gape.train import checkpoint
from gape.utils import locks
from gape.utils.jsonl import Record, read_object
from gape.utils.progress import Progress, ProgressTable


def entropy(
    runs: Sequence[Path],
    reader: Reader,
    *,
    lengths: Sequence[int] | None = None,
    samples: int = 10,
    seed: int = 0,
    device: str = "auto",
) -> Table:
    """Attention entropy by layer and head, the gates beside it, and how far attention reaches: `entropy.json`.

    `samples` passages of each of some lengths are read, the training length by default.
    """

    def analyse(run: OpenModel, log: Log) -> None:
        spans = [_length(reader, length, run) for length in ((None,) if lengths is None else lengths)]
        # All of them before the first is analysed: one may be longer than every document.
        for passages in [reader.passages(length, samples, seed=seed) for length in spans]:
            settings = {**_source(reader, seed), "samples": samples}
            _add(run, "entropy", passages, settings, partial(lm.entropy, _gpt(run), passages.items), log)

    _each(runs, reader, device, analyse)
    return tables.entropy_table([read_object(directory / "entropy.json") for directory in runs])


def spectrum(
    runs: Sequence[Path], reader: Reader, *, length: int | None = None, samples: int = 32, seed: int = 0,
    device: str = "auto",
) -> None:  # fmt: skip
    """Norms of queries and keys by rotary frequency: `spectrum.json`. Schemes that do not rotate are left out."""

    def analyse(run: OpenModel, log: Log) -> None:
        model = _gpt(run)
        if lm.rotary(next(model.blocks()).attention.scheme) is None:
            log(f"{run.identity['run']}: {run.identity['position']} does not rotate, so it has no spectrum")
            return
        passages = reader.passages(_length(reader, length, run), samples, seed=seed)
        settings = {**_source(reader, seed), "samples": samples}
        _add(run, "spectrum", passages, settings, partial(lm.spectrum, model, passages.items), log)

    _each(runs, reader, device, analyse)


def pictures(
    kind: str, runs: Sequence[Path], reader: Reader, *, length: int | None = None, layer: int | None = None,
    size: int = 64, seed: int = 0, device: str = "auto",
) -> None:  # fmt: skip
    """One layer's heads on one passage, in `size` × `size` cells; the last layer by default.

    `kind` is "maps", attention, to `maps.json`; or "masks", the paper's mask M of runs with gates, to `masks.json`.
    """

    def analyse(run: OpenModel, log: Log) -> None:
        model = _gpt(run)
        if kind == "masks" and next(model.gates(), None) is None:
            log(f"{run.identity['run']}: {run.identity['position']} has no gates, so it has no mask")
            return
        passages = reader.passages(_length(reader, length, run), 1, seed=seed)
        number = model.config.n_layer - 1 if layer is None else layer
        settings = {**_source(reader, seed), "layer": number, "size": size}
        draw = partial(_PICTURES[kind], model, passages.items[0], layer=number, size=size)
        _add(run, kind, passages, settings, draw, log)

    _each(runs, reader, device, analyse)


_PICTURES: dict[str, Callable[..., Record]] = {"maps": lm.maps, "masks": lm.masks}


def far_back(
    runs: Sequence[Path],
    data: Path,
    config: FarBackConfig,
    *,
    tokenizer: str | None = None,
    split: str = "heldout",
    stratum: str | None = None,
    precision: str = "auto",
    device: str = "auto",
) -> list[Table]:
    """Loss on tokens whose answer lies far back in the documents of a corpus: `far_back.jsonl`.

    Raises:
        ValueError: no corpus, no document long enough, or a tokenizer that is not the corpus's or the run's.
    """
    low = wants_bfloat16(precision, pick_device(device))
    if not data.is_dir():
        raise ValueError(f"data: got {str(data)!r}, expected a corpus that gape data prepare wrote")
    reader = Reader(data, split=split, stratum=stratum)
    assert reader.corpus is not None
    corpus, rows = reader.corpus, list[Record]()
    # The tokenizer of bytes needs no files.
    spec = tokenizer or ("bytes" if corpus.tokenizer["kind"] == "bytes" else None)
    own = None if spec is None else load_tokenizer(spec)

    def analyse(run: OpenModel, log: Log) -> None:
        rows.extend(measure_run(run, corpus, config, split=split, stratum=stratum, tokenizer=own, low=low, log=log))

    _each(runs, reader, device, analyse)
    return tables.far_back_table(rows)


def _each(runs: Sequence[Path], reader: Reader, device: str, analyse: Callable[[OpenModel, Log], None]) -> None:
    """Open the runs in turn and analyse each; a directory without a checkpoint is refused before the first."""
    progress, target = Progress(), pick_device(device)
    for directory in runs:
        if not checkpoint.available(directory / "checkpoints"):
            raise ValueError(f"run: got {str(directory)!r}, expected a directory that gape lm train made")
    with ProgressTable(progress, "run") as table:
        for number, directory in enumerate(runs):
            table.show("analysed", number, len(runs))
            with locks.locked(directory, "measured"):
                run = open_run(directory, target, log=progress.log)
                run.accept(reader.tokenizer)
                analyse(run, progress.log)


def _add(
    run: OpenModel, kind: str, passages: Passages, settings: Record, analyse: Callable[[], Record], log: Log
) -> None:
    """Store what `analyse` returns, unless it was stored for the same weights and settings."""
    settings = {"data": passages.data, "fingerprint": passages.fingerprint, "length": passages.length, **settings}
    name = f"{run.identity['run']}: {kind}{'' if passages.length is None else f' at {passages.length:,} tokens'}"
    sets = ResultSets(run.directory / f"{kind}.json", run.identity)
    if settings in sets:
        log(f"{name} of {passages.data} is there already")
        return
    texts = {
        "passages": [passage.id for passage in passages.items],
        "tokens": [len(passage.ids) for passage in passages.items],
    }
    sets.add(settings, texts | analyse())
    log(f"{name} of {passages.data} → {sets.path}")


def _source(reader: Reader, seed: int) -> Record:
    return {"split": reader.split, "stratum": reader.stratum, "seed": seed}


def _length(reader: Reader, length: int | None, run: OpenModel) -> int | None:
    """The training length where none is given; prompts have their own, and refuse any other."""
    if length is None and not reader.prompts:
        train_length: int = run.identity["train_length"]
        return train_length
    return length


def _gpt(run: OpenModel) -> GPT:
    return cast(GPT, run.model)
