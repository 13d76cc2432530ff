"""A run of a language model: trained, validated, its gates watched, its perplexity measured.

See :mod:`gape.experiments.experiment`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gape.analysis.routing import routing_variables
from gape.data import Corpus, WindowSource, open_corpus
from gape.data.recall import RecallConfig, RecallSource, corpus_tokenizer, recall_source
from gape.experiments import experiment, perplexity, recall
from gape.experiments.experiment import Log, low_precision, model_step, named_device
from gape.experiments.result_store import ResultStore
from gape.experiments.run import LanguageRun
from gape.models.gpt import GPT
from gape.tasks.recall import several
from gape.train import StopFlag, Trainer, held_out_loss
from gape.utils.jsonl import Record, read_object
from gape.utils.validation import invalid_argument

ROUTING, CONFIG = "routing.jsonl", "config.json"


def check(run: LanguageRun, directory: Path) -> None:
    """Refuse a corpus that is missing, of another vocabulary, too short, or not the one the run began with.

    Raises:
        ValueError: names the key and what was expected.
    """
    corpus = _corpus(run)
    if corpus.vocab_size != run.model.vocab_size:
        name = corpus.tokenizer.get("name")
        expected = f"{corpus.vocab_size}, the vocabulary of {run.data} (tokenizer {name})"
        raise invalid_argument("model.vocab_size", run.model.vocab_size, expected)
    _sources(run, corpus, torch.device("cpu"))
    _settings(run, torch.device("cpu")).check()
    if run.evaluation.recall_samples and run.evaluation.contexts:
        tokenizer, length = corpus_tokenizer(corpus, run.recall.tokenizer), min(run.evaluation.contexts)
        try:
            next(several(corpus, tokenizer, length, 1, run.evaluation.recall_facts, seed=run.evaluation.seed))
        except ValueError as error:
            raise ValueError(f"evaluation.contexts: got {length}, which recall texts do not fill; {error}") from error
    began = read_object(directory / CONFIG).get("extra", {}).get("corpus", {}).get("fingerprint")
    if began not in (None, corpus.fingerprint()):
        raise ValueError(f"data: {run.data} is not the corpus with which {directory} was trained; give another --out")


def train(
    run: LanguageRun, directory: Path, device: torch.device, stop: StopFlag, resume: str, console: Console | None
) -> None:
    """Train to the end, from wherever the directory stands."""
    corpus = _corpus(run)
    source, held_out, watched = _sources(run, corpus, device)
    torch.manual_seed(run.seed)
    model = GPT(run.model).to(device)
    batches = max(1, min(run.evaluation.validation_windows, held_out.windows) // held_out.batch_size)

    def validate(model: GPT, step: int) -> dict[str, float]:
        return {"loss": held_out_loss(model, held_out, batches, trainer.job), "epochs": source.epochs(step)}

    gates = RoutingLog(directory / ROUTING, experiment.identity(run))

    def observe(model: GPT, step: int) -> None:
        variables = routing_variables(model, watched.batch(1, 0).ids)
        if trainer.job.is_first:
            gates.write(step, variables)

    epochs = source.epochs(run.train.max_steps)
    facts = {"fingerprint": corpus.fingerprint(), "tokenizer": corpus.tokenizer, "epochs": epochs}
    trainer = Trainer(
        model, run.train, source, directory, validate, stop=stop, console=console,
        extra={"run": run.name, "variant": run.variant, "corpus": facts},
        observe=observe, observe_every=run.analysis.routing_every if next(model.gates(), None) else 0,
    )  # fmt: skip
    trainer.run(resume)


def missing(run: LanguageRun, directory: Path) -> bool:
    """Whether something is not measured at a context, or the scores of one that is lie about still."""
    device, step = named_device(run.device), model_step(run, directory)
    settings = _settings(run, device)
    unmeasured = settings.missing(directory, {"step": step})
    return settings.unfinished(directory) or bool(
        unmeasured or recall.missing(run, directory, settings.corpus, device, step)
    )


def measure(run: LanguageRun, directory: Path, device: torch.device, log: Log) -> None:
    """Measure perplexity, recall and generation at the missing contexts of the recipe."""
    settings = _settings(run, device)
    perplexity.measure_run(run, directory, settings, log)
    recall.measure(run, directory, settings.corpus, device, log)


class RoutingLog:
    """`routing.jsonl`: a line per step, layer and head; steps that a resumed run takes again replace those it lost.

    Args:
        path: the file.
        identity: what names the run in each line.
    """

    def __init__(self, path: Path, identity: Record) -> None:
        self._store, self._identity = ResultStore(path), identity
        self._begun = False

    def write(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Add the records of a step."""
        if not self._begun and self._store.path.is_file():
            self._store.replace((), keep=lambda row: row["step"] < step)
        self._begun = True
        self._store.append(*(self._identity | {"step": step} | dict(record) for record in records))


def _settings(run: LanguageRun, device: torch.device) -> perplexity.Settings:
    low = low_precision(run.train.precision, device)
    return perplexity.Settings(corpus=_corpus(run), evaluation=run.evaluation, device=device, low=low)


def _corpus(run: LanguageRun) -> Corpus:
    if not run.data:
        raise ValueError("data: got nothing, expected data=DIR, a corpus that gape data prepare wrote")
    return open_corpus(run.data)


def _sources(
    run: LanguageRun, corpus: Corpus, device: torch.device
) -> tuple[WindowSource | RecallSource, WindowSource, WindowSource]:
    """Windows to train on, to validate on and to watch the gates on."""
    length, stratum = run.task.length, run.task.stratum
    train = WindowSource(
        corpus, split="train", stratum=stratum, length=length, batch_size=run.batch_size, seed=run.seed, device=device,
        accumulation=run.train.accumulation,
    )  # fmt: skip
    sizes = (min(run.batch_size, run.evaluation.validation_windows), run.analysis.routing_windows)
    validation, watched = (
        WindowSource(
            corpus, split="heldout", stratum=stratum, length=length, batch_size=size, seed=run.evaluation.seed,
            device=device,
        )
        for size in sizes
    )  # fmt: skip
    return _recall_source(train, run.recall), validation, watched


def _recall_source(windows: WindowSource, config: RecallConfig) -> WindowSource | RecallSource:
    """Windows some of which are recall texts, if a run wants them.

    Raises:
        ValueError: names the key of the section.
    """
    try:
        return recall_source(windows, config)
    except ValueError as error:
        raise ValueError(f"recall.{error}") from error
