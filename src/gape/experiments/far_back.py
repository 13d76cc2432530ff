"""Far-back loss of a trained run on a corpus: every document once, whatever interrupts it.

`far_back_documents.jsonl` gets a line per document as it is measured. When all are, `far_back.jsonl` gets a row per
kind and distance in the place of earlier ones of the same question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from gape.analysis.passages import Ids, long_documents, number
from gape.experiments.experiment import Log
from gape.experiments.open_model import OpenModel
from gape.experiments.result_store import ResultStore
from gape.models.gpt import GPT
from gape.tasks.far_back import FarBackConfig, Sums, measure, summary
from gape.utils import files
from gape.utils.jsonl import Record
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.data import Corpus, Document, Tokenizer

DOCUMENTS, ROWS = "far_back_documents.jsonl", "far_back.jsonl"


def measure_run(
    run: OpenModel,
    corpus: Corpus,
    config: FarBackConfig,
    *,
    split: str = "heldout",
    stratum: str | None = None,
    tokenizer: Tokenizer | None = None,
    low: bool = False,
    log: Log = print,
) -> list[Record]:
    """Measure what is missing and write the rows, which are returned as `far_back.jsonl` has them.

    `tokenizer` is the corpus's own, for names; `low` measures in bfloat16 autocast.

    Raises:
        ValueError: names without the corpus's tokenizer, no document long enough, or a tokenizer that is not the run's.
    """
    run.accept(corpus.tokenizer)
    decode = _decoder(config, corpus, tokenizer)
    chosen = long_documents(corpus, split, stratum, config.context, config.seed, called="context")
    chosen = chosen[: config.documents]
    others = list(corpus.documents(split, stratum))
    if "planted" in config.kinds and len(others) < 2:
        raise invalid_argument("kinds", config.kinds, "none planted, since a passage has to come from another document")
    model = cast(GPT, run.model)
    device = next(model.parameters()).device
    # What changes the numbers; the chunk does not.
    settings = {key: value for key, value in asdict(config).items() if key != "chunk"}
    settings |= {"corpus": corpus.fingerprint(), "split": split, "stratum": stratum}
    settings |= {"precision": "bfloat16" if low else "float32"}
    key = hashlib.sha256(files.to_json([settings, run.identity], indent=None)).hexdigest()[:16]
    store = ResultStore(run.directory / DOCUMENTS)
    done = {row["document"]: [Sums(*entry) for entry in row["found"]] for row in store.rows({"key": key})}
    for at, document in enumerate(chosen, 1):
        if document.id in done:
            continue
        ids = _window(corpus, document, config.context, config.seed)
        passage = _passage(corpus, document, others, config) if "planted" in config.kinds else None
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            losses = measure(model, ids, passage, config, short=int(run.identity["train_length"]), decode=decode)
        store.append({"key": key, "document": document.id, "found": [list(loss) for loss in losses]})
        done[document.id] = losses
        log(f"{run.identity['run']}: far back, document {at} of {len(chosen)}")
    return _write(run, key, settings, {document.id: done[document.id] for document in chosen})


def _write(run: OpenModel, key: str, settings: Record, documents: dict[str, list[Sums]]) -> list[Record]:
    rows = [run.identity | row | {"key": key, "asked": settings} for row in summary(documents)]
    ResultStore(run.directory / ROWS).replace(rows, keep=lambda row: row.get("key") != key)
    return rows


def _decoder(config: FarBackConfig, corpus: Corpus, tokenizer: Tokenizer | None) -> Callable[[list[int]], str] | None:
    if "names" not in config.kinds:
        return None
    if tokenizer is None:
        name = corpus.tokenizer["name"]
        raise ValueError(f"tokenizer: got nothing, expected {name}, which the corpus was made with, to find names")
    if tokenizer.identity()["sha256"] != corpus.tokenizer["sha256"]:
        expected = f"{corpus.tokenizer['name']}, which the corpus was made with"
        raise invalid_argument("tokenizer", tokenizer.identity()["name"], expected)
    return tokenizer.decode


def _window(corpus: Corpus, document: Document, length: int, seed: int) -> Ids:
    start = number(seed, "window", document.id) % (document.length - length + 1)
    return corpus.tokens(document, start, start + length).astype(np.int64)


def _passage(corpus: Corpus, document: Document, others: list[Any], config: FarBackConfig) -> Ids:
    """Tokens of another document, chosen by the seed and the one they are planted in."""
    first = number(config.seed, "other", document.id) % len(others)
    for step in range(len(others)):
        other = others[(first + step) % len(others)]
        if other.id != document.id and other.length >= config.passage:
            start = number(config.seed, "passage", document.id) % (other.length - config.passage + 1)
            return corpus.tokens(other, start, start + config.passage).astype(np.int64)
    raise invalid_argument("passage", config.passage, "at most the tokens of some other document")
