"""What `gape hf perplexity` does: models of transformers measured at several contexts, rows stored beside them.

A run of `gape hf finetune` has its model in `model/` and its rows beside its manifest; a bare directory of a model gets
both itself. Rows are those of `gape lm perplexity`, and name the model that a run began with as their `base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import gape.hf
from gape.data import Corpus
from gape.experiments import perplexity
from gape.experiments.experiment import Log
from gape.experiments.finetune import refuse_corpus
from gape.experiments.open_model import (
    digest,
    load_transformers,
    model_home,
    refuse_length,
    refuse_tokenizer,
    transformers_identity,
    weights_of,
)
from gape.experiments.perplexity import Settings
from gape.hf.reading import read_config
from gape.utils import files, locks
from gape.utils.jsonl import Record
from gape.utils.run_info import manifest

MANIFEST = "manifest.json"


def measure_models(
    directories: Sequence[Path], settings: Settings, attention: str | None = None, *, log: Log = print
) -> list[list[Record]]:
    """Measure models at the contexts that have no row yet.

    Args:
        directories: runs of `gape hf finetune`, or saved models.
        settings: what to measure.
        attention: an `attn_implementation` in place of the model's own.
        log: called with a line for each context.

    Returns:
        For each model its rows, old and new.

    Raises:
        ValueError: a directory without a model, one of another tokenizer, or a context beyond learned positions.
    """
    for directory in directories:
        _refuse(directory, settings.corpus)
    return [_measure(directory, settings, attention, log) for directory in directories]


def _measure(directory: Path, settings: Settings, attention: str | None, log: Log) -> list[Record]:
    home = str(model_home(directory))

    def load() -> gape.hf.LanguageModel:
        model = load_transformers(home, attention)
        refuse_length(model, max(settings.evaluation.contexts))
        return gape.hf.LanguageModel(model.to(settings.device).eval())

    with locks.locked(directory, "measured"):
        identity = transformers_identity(directory, read_config(home))
        about = {"weights": digest(directory), "attention": attention}
        rows = perplexity.measure(directory, settings, identity, about, load, log)
        if not (directory / MANIFEST).is_file():
            data, more = {"corpus": rows[-1]["corpus"]}, {"precision": rows[-1]["precision"]}
            more |= {"transformers": version("transformers")}
            record = manifest(settings.device, seed=settings.evaluation.seed, data=data, more=more)
            files.replace(directory / MANIFEST, files.to_json(record))
    return rows


def _refuse(directory: Path, corpus: Corpus) -> None:
    """Refuse what is no model, and one of another vocabulary or tokenizer than the corpus."""
    weights_of(directory)
    home = str(model_home(directory))
    refuse_corpus(home, read_config(home), corpus)
    refuse_tokenizer(directory, corpus.tokenizer)
