"""What `gape analyze` does: attention entropy, spectra, maps and masks of trained runs, and losses far back.

Sets of results lie in the run's directory (`entropy.json`, …). What was analysed of the same weights with the same
settings is not analysed again. Of losses far back, `far_back_documents.jsonl` gets a line per document as it is
measured; when all are, `far_back.jsonl` gets a row per kind and distance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gape.analysis import lm
from gape.analysis.passages import Ids, Passages, Reader, long_documents, number
from gape.data import Corpus, Document
from gape.data.recall import corpus_tokenizer
from gape.experiments.experiment import Log, pick_device, wants_bfloat16
from gape.experiments.open_model import OpenModel, open_run
from gape.experiments.result_store import ResultSets, ResultStore
from gape.models.gpt import GPT
from gape.report import tables
from gape.report.tables import Table
from gape.tasks.far_back import FarBackConfig, Sums, measure, summary
from gape.train import checkpoint
from gape.utils import files
from gape.utils.jsonl import Record, read_object
from gape.utils.progress import Progress, ProgressTable
from gape.utils.validation import invalid_argument

DOCUMENTS, ROWS = "far_back_documents.jsonl", "far_back.jsonl"


#: What is stored of each kind: of several passages, or of one layer on one passage.
_ANALYSES: dict[str, Callable[..., Record]] = {"entropy": lm.entropy, "spectrum": lm.spectrum}
_PICTURES: dict[str, Callable[..., Record]] = {"maps": lm.maps, "masks": lm.masks}


def analyse(
    kind: str,
    runs: Sequence[Path],
    reader: Reader,
    *,
    lengths: Sequence[int] | None = None,
    samples: int = 1,
    layer: int | None = None,
    size: int = 64,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Analyse runs on passages of a text, to KIND.json in each; runs that have no such thing are left out.

    Args:
        kind: "entropy" of attention by layer and head, with the gates and how far attention reaches; "spectrum", norms
            of queries and keys by rotary frequency; "maps", attention of a layer's heads; "masks", the paper's mask M.
        lengths, samples: tokens of the passages, by default the training length, and how many of each length.
        layer, size: of maps and masks: which layer, the last by default, and cells along each side.
    """

    def one(run: OpenModel, log: Log) -> None:
        if without := _unfit(kind, run.model):
            log(f"{run.identity['run']}: {run.identity['position']} {without}")
            return
        # Prompts have their own lengths, and refuse any other.
        spans: Sequence[int | None] = lengths or [None if reader.prompts else run.identity["train_length"]]
        # All of them before the first is analysed: one may be longer than every document.
        for passages in [reader.passages(length, samples, seed=seed) for length in spans]:
            settings: Record = {"split": reader.split, "stratum": reader.stratum, "seed": seed}
            if kind in _PICTURES:
                own = run.model.config.n_layer - 1 if layer is None else layer
                settings |= {"layer": own, "size": size}
                work = partial(_PICTURES[kind], run.model, passages.items[0], layer=own, size=size)
            else:
                settings |= {"samples": samples}
                work = partial(_ANALYSES[kind], run.model, passages.items)
            _add(run, kind, passages, settings, work, log)

    _each(runs, reader, device, one)


def entropy_table(runs: Sequence[Path]) -> Table:
    """The stored entropies of runs, as a table."""
    return tables.entropy_table([read_object(directory / "entropy.json") for directory in runs])


def _unfit(kind: str, model: GPT) -> str:
    """Why a model has nothing of a kind; empty where it has."""
    if kind == "spectrum" and lm.rotary(next(model.blocks()).attention.scheme) is None:
        return "does not rotate, so it has no spectrum"
    return "has no gates, so it has no mask" if kind == "masks" and next(model.gates(), None) is None else ""


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

    Refused are no corpus, no document long enough, and a tokenizer that is not the corpus's or the run's.
    """
    low = wants_bfloat16(precision, pick_device(device))
    if not data.is_dir():
        raise ValueError(f"data: got {str(data)!r}, expected a corpus that gape data prepare wrote")
    reader = Reader(data, split=split, stratum=stratum)
    assert reader.corpus is not None
    corpus, rows = reader.corpus, list[Record]()
    decode = corpus_tokenizer(corpus, tokenizer or "").decode if "names" in config.kinds else None
    others = list(corpus.documents(split, stratum))
    if "planted" in config.kinds and len(others) < 2:
        raise invalid_argument("kinds", config.kinds, "none planted, since a passage has to come from another document")
    chosen = long_documents(corpus, split, stratum, config.context, config.seed, called="context")
    texts = partial(_far_back_text, corpus, others, config)
    # What changes the numbers; the chunk does not.
    settings = {name: value for name, value in asdict(config).items() if name != "chunk"}
    settings |= {"corpus": corpus.fingerprint(), "split": split, "stratum": stratum}
    settings |= {"precision": "bfloat16" if low else "float32"}

    def analyse(run: OpenModel, log: Log) -> None:
        key = hashlib.sha256(files.to_json([settings, run.identity], indent=None)).hexdigest()[:16]
        read = partial(measure, config=config, short=int(run.identity["train_length"]), decode=decode)
        with torch.autocast(pick_device(device).type, torch.bfloat16, enabled=low):
            sums = _far_back_sums(run, key, chosen[: config.documents], texts, read, log)
        own = [run.identity | row | {"key": key, "asked": settings} for row in summary(sums)]
        ResultStore(run.directory / ROWS).replace(own, keep=lambda row: row.get("key") != key)
        rows.extend(own)

    _each(runs, reader, device, analyse)
    return tables.far_back_table(rows)


def _far_back_sums(
    run: OpenModel, key: str, documents: Sequence[Document], texts: Callable[[Document], tuple[Ids, Ids | None]],
    read: Callable[..., list[Sums]], log: Log,
) -> dict[str, list[Sums]]:  # fmt: skip
    """The sums of every document, resuming after those that are stored under a key."""
    store = ResultStore(run.directory / DOCUMENTS)
    done = {row["document"]: [Sums(*entry) for entry in row["found"]] for row in store.rows({"key": key})}
    for at, document in enumerate(documents, 1):
        if document.id not in done:
            done[document.id] = read(run.model, *texts(document))
            store.append({"key": key, "document": document.id, "found": [list(each) for each in done[document.id]]})
            log(f"{run.identity['run']}: far back, document {at} of {len(documents)}")
    return {document.id: done[document.id] for document in documents}


def _far_back_text(
    corpus: Corpus, others: Sequence[Document], config: FarBackConfig, document: Document
) -> tuple[Ids, Ids | None]:
    """A window of a document, and tokens of another one to plant in it, both chosen by the seed."""
    seed = config.seed
    start = number(seed, "window", document.id) % (document.length - config.context + 1)
    window = corpus.tokens(document, start, start + config.context).astype(np.int64)
    if "planted" not in config.kinds:
        return window, None
    first = number(seed, "other", document.id) % len(others)
    for other in (*others[first:], *others[:first]):
        if other.id != document.id and other.length >= config.passage:
            start = number(seed, "passage", document.id) % (other.length - config.passage + 1)
            return window, corpus.tokens(other, start, start + config.passage).astype(np.int64)
    raise invalid_argument("passage", config.passage, "at most the tokens of some other document")


def _each(runs: Sequence[Path], reader: Reader, device: str, analyse: Callable[[OpenModel, Log], None]) -> None:
    """Open the runs in turn and analyse each; a directory without a checkpoint is refused before the first."""
    progress, target = Progress(), pick_device(device)
    for directory in runs:
        if not checkpoint.available(directory / "checkpoints"):
            raise ValueError(f"run: got {str(directory)!r}, expected a directory that gape lm train made")
    with ProgressTable(progress, "run") as table:
        for place, directory in enumerate(runs):
            table.show("analysed", place, len(runs))
            with files.locked(directory, "measured"):
                run = open_run(directory, target, progress.log)
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
