"""Perplexity of trained models at several contexts: each measured once, with rows stored beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from gape.data import Corpus
from gape.experiments.experiment import Log
from gape.experiments.open_model import (
    OpenModel,
    is_transformers,
    model_home,
    open_model,
    read_run,
    refuse_length,
    refuse_tokenizer,
    weights_of,
)
from gape.experiments.result_store import ResultStore
from gape.experiments.run import LanguageEvaluation
from gape.report.statistics import window_difference
from gape.report.tables import Table, interval
from gape.tasks import perplexity
from gape.tasks.ways import DENSE, Way
from gape.utils import files
from gape.utils.jsonl import Record
from gape.utils.progress import ProgressTable
from gape.utils.run_info import manifest
from gape.utils.validation import invalid_argument

#: Contexts that are tried where none are given.
CONTEXTS = tuple(2**n for n in range(9, 18))
ROWS, MANIFEST = "perplexity.jsonl", "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured of each model, and how.

    `low` means bfloat16 autocast; `split` and `stratum` say which documents of the corpus, None every stratum;
    `attention` is an `attn_implementation` in place of that of models of transformers.
    """

    corpus: Corpus
    evaluation: LanguageEvaluation
    device: torch.device
    low: bool
    split: str = "heldout"
    stratum: str | None = None
    way: Way = DENSE
    attention: str | None = None

    def refuse(self, context: int) -> None:
        """Refuse a context that no document fills."""
        perplexity.fits(self.corpus, self.evaluation.at(context), split=self.split, stratum=self.stratum)

    def questions(self, about: Record) -> list[Record]:
        """For each context, short ones first, what tells a measurement of the weights `about` names from others."""
        common = about | {
            "corpus": self.corpus.fingerprint(), "split": self.split, "only_stratum": self.stratum,
            "precision": "bfloat16" if self.low else "float32", "device": self.device.type,
            "max_windows": self.evaluation.max_windows, "eval_seed": self.evaluation.seed,
            "skip_eps": None, "forget_eps": None,
        }  # fmt: skip
        common |= self.way.settings()
        return [common | self.evaluation.at(context).settings() for context in sorted(set(self.evaluation.contexts))]


def store(directory: Path) -> ResultStore:
    """The rows of a model."""
    return ResultStore(directory / ROWS, key=("stratum",))


def measure(opened: OpenModel, settings: Settings, log: Log) -> list[Record]:
    """Measure a model at the contexts without rows; all rows of the contexts. Batches that are done survive a stop.

    The directory is locked by the caller.
    """
    rows, identity = store(opened.directory), opened.identity
    about = {"step": identity["step"]}
    if opened.run is None:
        about = {"weights": identity["weights"], "attention": settings.attention}
    questions = settings.questions(about)
    if missing := rows.missing(questions):
        refuse_length(opened.model, missing[-1]["context"])
    for question in missing:
        _measure_context(opened, settings, question, log)
    for question in questions:
        # Here also where a death came between the rows and this.
        _scores(opened.directory, question["context"]).unlink(missing_ok=True)
    return [row for question in questions for row in rows.rows(question)]


def measure_models(directories: Sequence[Path], settings: Settings, *, log: Log = print) -> list[list[Record]]:
    """Measure runs and saved models of transformers, once all are known to be measurable; the rows of each.

    Without contexts in the settings, those of `CONTEXTS` that a document fills. Refused are what is no language model,
    another tokenizer, contexts that no document fills, and a run that another process measures (BusyError).
    """
    if not settings.evaluation.contexts:
        settings = _with_contexts(settings, log)
    for context in settings.evaluation.contexts:
        settings.refuse(context)
    for directory in directories:
        _check(directory, settings)
    measured = []
    for directory in directories:
        with files.locked(directory, "measured"):
            opened = open_model(directory, settings.device, log, attention=settings.attention)
            rows = measure(opened, settings, log)
            measured.append(rows)
            if opened.run is None and not (directory / MANIFEST).is_file():
                more = {"precision": rows[-1]["precision"], "transformers": version("transformers")}
                data = {"corpus": rows[-1]["corpus"]}
                record = manifest(settings.device, seed=settings.evaluation.seed, data=data, more=more)
                files.replace(directory / MANIFEST, files.to_json(record))
    return measured


def _check(directory: Path, settings: Settings) -> None:
    """Refuse what cannot be measured."""
    refuse_tokenizer(directory, settings.corpus.tokenizer, recorded=not is_transformers(directory))
    if is_transformers(directory):
        from gape.experiments.finetune import refuse_corpus  # noqa: PLC0415
        from gape.hf.reading import read_config  # noqa: PLC0415

        weights_of(directory)
        home = str(model_home(directory))
        refuse_corpus(home, read_config(home), settings.corpus)
    else:
        read_run(directory, "lm")
        if settings.attention is not None:
            raise invalid_argument("attention", settings.attention, f"none for the run of ours in {directory}")


def _with_contexts(settings: Settings, log: Log) -> Settings:
    """The settings with the contexts that a document fills."""
    contexts: list[int] = []
    for context in CONTEXTS:
        try:
            settings.refuse(context)
        except ValueError as error:
            if not contexts:
                raise
            log(f"contexts from {context:,} on are left out: {error}")
            break
        contexts.append(context)
    return replace(settings, evaluation=replace(settings.evaluation, contexts=tuple(contexts)))


def _measure_context(opened: OpenModel, settings: Settings, question: Record, log: Log) -> None:
    """Measure what a question asks at its context; its rows are on the disk at once."""
    evaluation, context = settings.evaluation, question["context"]
    plan = perplexity.plan(
        settings.corpus, evaluation.at(context), split=settings.split, stratum=settings.stratum,
        max_windows=evaluation.max_windows, seed=evaluation.seed,
    )  # fmt: skip
    about = settings.way.named(opened.identity) | question
    label = f"{about['run']} at {context:,}"
    if plan.left_out:
        ids = ", ".join(document.id for document in plan.left_out[:5]) + (", …" if len(plan.left_out) > 5 else "")
        short = f"{len(plan.left_out)} of {len(plan.left_out) + len(plan.documents)} documents"
        log(f"{about['run']}: {short} have fewer than {plan.protocol.min_tokens:,} tokens and are left out: {ids}")
    autocast = torch.autocast(settings.device.type, torch.bfloat16, enabled=settings.low)
    with ProgressTable(unit="window") as table, autocast:
        scored = perplexity.score_all(
            opened.model, settings.corpus, plan, store=_scores(opened.directory, context),
            of=repr(sorted(about.items(), key=str)), chunk=evaluation.chunk,
            forgetting=settings.way.apply(opened.model),
            progress=lambda done, total: table.show(label, done, total),
        )  # fmt: skip
        table.remove(label)
    rows = [about | row for row in perplexity.rows(plan, scored, evaluation.seed)]
    store(opened.directory).append(*rows)
    last = rows[-1]
    plural = "s" * (last["documents"] != 1)
    log(
        f"{label}: perplexity {last['perplexity']:.2f}, loss {last['nll']:.4f} ({last['low']:.4f} … {last['high']:.4f} "
        f"over {last['resampled']}), {last['tokens']:,} tokens of {last['documents']} document{plural}"
    )


def _scores(directory: Path, context: int) -> Path:
    """The file of the scores until there are rows of them."""
    return directory / f".scores-{context}.jsonl"


def tables(runs: Sequence[Sequence[Record]]) -> list[Table]:
    """Perplexity by run and context, and differences from the first run on the same windows; both for each stratum.

    Args:
        runs: rows of each run as :func:`measure_models` returns them.
    """
    shown = []
    for stratum in dict.fromkeys(row["stratum"] for rows in runs for row in rows):
        at = [{row["context"]: row for row in rows if row["stratum"] == stratum} for rows in runs]
        documents = "all documents" if stratum is None else f"stratum {stratum}"
        first = next(iter(at[0].values()))
        title, header = f"Perplexity by context, {first['protocol']}, {documents}", ("Run", *map("{:,}".format, at[0]))
        cells = [
            (next(iter(rows.values()))["run"], *(f"{row['perplexity']:.2f}" for row in rows.values())) for rows in at
        ]
        shown.append(Table(title=title, header=header, rows=tuple(cells)))
        cells = []
        for row in (row for rows in at[1:] for row in rows.values()):
            d = window_difference(row, at[0][row["context"]])
            cells.append((row["run"], f"{d.at:,}", f"{d.difference:+.4f}", interval(d.low, d.high), d.direction))
        if cells:
            title = f"Nats per token beside {first['run']} on the same windows, {documents}"
            header = ("Run", "context", "difference", "95% interval", "verdict")
            shown.append(Table(title=title, header=header, rows=tuple(cells)))
    return shown
