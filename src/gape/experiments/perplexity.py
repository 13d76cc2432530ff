"""Perplexity of trained models at several contexts: each measured once, with rows stored beside the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from gape.data import Corpus
from gape.experiments import experiment
from gape.experiments.experiment import Log, pick_device, wants_bfloat16
from gape.experiments.open_model import (
    HF,
    digest,
    kind_of,
    load_transformers,
    model_home,
    read_run,
    refuse_length,
    refuse_tokenizer,
    transformers_identity,
    weights_of,
)
from gape.experiments.result_store import ResultStore
from gape.experiments.run import LanguageEvaluation, LanguageRun
from gape.report.statistics import window_difference
from gape.report.tables import Table, interval
from gape.tasks import perplexity
from gape.tasks.ways import DENSE, Way
from gape.train import checkpoint
from gape.train.load import model_of
from gape.utils import files, locks
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

    @classmethod
    def of(
        cls, corpus: Corpus, evaluation: LanguageEvaluation, *, device: str, precision: str, **which: Any
    ) -> Settings:
        """Settings with a device and a precision as commands take them.

        Raises:
            ValueError: a context that no document fills, no such device or precision.
        """
        target = pick_device(device)
        low = wants_bfloat16(precision, target)
        settings = cls(corpus=corpus, evaluation=evaluation, device=target, low=low, **which)
        settings.check()
        return settings

    def check(self) -> None:
        """Refuse a context that no document fills."""
        for context in self.evaluation.contexts:
            perplexity.fits(self.corpus, self.evaluation.at(context), split=self.split, stratum=self.stratum)

    def questions(self, about: Record) -> dict[int, Record]:
        """By context, the values that tell a measurement of the weights `about` names from others."""
        common = about | {
            "corpus": self.corpus.fingerprint(), "split": self.split, "only_stratum": self.stratum,
            "precision": "bfloat16" if self.low else "float32", "device": self.device.type,
            "max_windows": self.evaluation.max_windows, "eval_seed": self.evaluation.seed,
            "skip_eps": None, "forget_eps": None,
        }  # fmt: skip
        common |= self.way.settings()
        contexts = self.evaluation.contexts
        return {context: common | self.evaluation.at(context).settings() for context in contexts}

    def missing(self, directory: Path, about: Record) -> list[int]:
        """The contexts without a row, short ones first."""
        return sorted(row["context"] for row in _store(directory).missing(self.questions(about).values()))

    def unfinished(self, directory: Path) -> bool:
        """Whether there are scores of windows whose rows may be missing."""
        return any(_scores(directory, self.evaluation.at(context)).exists() for context in self.evaluation.contexts)


def measure(
    directory: Path,
    settings: Settings,
    identity: Record,
    about: Record,
    load: Callable[[], Any],
    log: Log,
) -> list[Record]:
    """Measure a model at the contexts without rows; all rows of the contexts. Batches that are done survive a stop.

    `directory` is locked by the caller, `identity` names the model in rows, `about` identifies its weights, and `load`
    is called for it where something is missing.
    """
    model, evaluation, questions = None, settings.evaluation, settings.questions(about)
    missing = settings.missing(directory, about)
    for context in sorted(questions):
        if context in missing:
            plan = perplexity.plan(
                settings.corpus, evaluation.at(context), split=settings.split, stratum=settings.stratum,
                max_windows=evaluation.max_windows, seed=evaluation.seed,
            )  # fmt: skip
            model = model or load()
            _measure_plan(directory, model, plan, settings, identity | questions[context], log)
        # Here also where a death came between the rows and this.
        _scores(directory, evaluation.at(context)).unlink(missing_ok=True)
    store = _store(directory)
    return [row for question in questions.values() for row in store.rows(question)]


def measure_run(run: LanguageRun, directory: Path, settings: Settings, log: Log) -> list[Record]:
    """Measure a run of `gape lm train`.

    Raises:
        BusyError: another process trains or measures the run.
        ValueError: the corpus is of another tokenizer, or the run records none.
    """
    refuse_tokenizer(directory, settings.corpus.tokenizer, recorded=True)
    with locks.locked(directory, "measured"):
        chosen = checkpoint.resolve(directory, log)
        about, name = {"step": chosen.step}, settings.way.named(experiment.identity(run))
        return measure(directory, settings, name, about, lambda: model_of(chosen, device=settings.device), log)


def _measure_transformers(directory: Path, settings: Settings, log: Log) -> list[Record]:
    """Measure a model of transformers; rows and manifest lie beside a run's, or in the directory of a bare model."""
    from gape.hf import LanguageModel  # noqa: PLC0415
    from gape.hf.reading import read_config  # noqa: PLC0415

    home = str(model_home(directory))

    def load() -> LanguageModel:
        model = load_transformers(home, settings.attention)
        refuse_length(model, max(settings.evaluation.contexts))
        return LanguageModel(model.to(settings.device).eval())

    with locks.locked(directory, "measured"):
        name = settings.way.named(transformers_identity(directory, read_config(home)))
        about = {"weights": digest(directory), "attention": settings.attention}
        rows = measure(directory, settings, name, about, load, log)
        if not (directory / MANIFEST).is_file():
            data, more = {"corpus": rows[-1]["corpus"]}, {"precision": rows[-1]["precision"]}
            more |= {"transformers": version("transformers")}
            record = manifest(settings.device, seed=settings.evaluation.seed, data=data, more=more)
            files.replace(directory / MANIFEST, files.to_json(record))
    return rows


def measure_models(directories: Sequence[Path], settings: Settings, *, log: Log = print) -> list[list[Record]]:
    """Measure the perplexity of trained models, once all of them are known to be measurable.

    They are runs of `gape lm train` or `gape hf finetune`, or saved models of transformers. Without contexts in the
    settings, those of `CONTEXTS` that a document fills. Returns the rows of each, old and new.

    Raises:
        ValueError: no language model, one of another tokenizer, or no document that is long enough.
    """
    if not settings.evaluation.contexts:
        settings = _with_contexts(settings, log)
    runs = [_checked(directory, settings) for directory in directories]
    return [
        _measure_transformers(directory, settings, log) if run is None else measure_run(run, directory, settings, log)
        for directory, run in zip(directories, runs, strict=True)
    ]


def _checked(directory: Path, settings: Settings) -> LanguageRun | None:
    """The run of ours in a directory, None for a model of transformers; refuses what cannot be measured."""
    if kind_of(directory) != HF:
        if settings.attention is not None:
            raise invalid_argument("attention", settings.attention, f"none for the run of ours in {directory}")
        run = cast(LanguageRun, read_run(directory, "lm"))
        refuse_tokenizer(directory, settings.corpus.tokenizer, recorded=True)
        return run
    from gape.experiments.finetune import refuse_corpus  # noqa: PLC0415
    from gape.hf.reading import read_config  # noqa: PLC0415

    weights_of(directory)
    home = str(model_home(directory))
    refuse_corpus(home, read_config(home), settings.corpus)
    refuse_tokenizer(directory, settings.corpus.tokenizer)
    return None


def _with_contexts(settings: Settings, log: Log) -> Settings:
    """The settings with the contexts that a document fills.

    Raises:
        ValueError: there is none.
    """
    chosen = settings
    for count, context in enumerate(CONTEXTS, 1):
        tried = replace(settings, evaluation=replace(settings.evaluation, contexts=CONTEXTS[:count]))
        try:
            tried.check()
        except ValueError as error:
            if chosen is settings:
                raise
            log(f"contexts from {context:,} on are left out: {error}")
            break
        chosen = tried
    return chosen


def _measure_plan(
    directory: Path, model: Any, plan: perplexity.Plan, settings: Settings, about: Record, log: Log
) -> None:
    protocol, label = plan.protocol, f"{about['run']} at {plan.protocol.context:,}"
    if plan.left_out:
        ids = ", ".join(document.id for document in plan.left_out[:5]) + (", …" if len(plan.left_out) > 5 else "")
        short = f"{len(plan.left_out)} of {len(plan.left_out) + len(plan.documents)}"
        log(f"{about['run']}: {short} documents have fewer than {protocol.min_tokens:,} tokens and are left out: {ids}")
    autocast = torch.autocast(settings.device.type, torch.bfloat16, enabled=settings.low)
    with ProgressTable(unit="window") as table, autocast:
        scored = perplexity.score_all(
            model, settings.corpus, plan, store=_scores(directory, protocol), of=repr(sorted(about.items(), key=str)),
            chunk=settings.evaluation.chunk, forgetting=settings.way.apply(model),
            progress=lambda done, total: table.show(label, done, total),
        )  # fmt: skip
        table.remove(label)
    rows = [about | row for row in perplexity.rows(plan, scored, settings.evaluation.seed)]
    _store(directory).append(*rows)
    last = rows[-1]
    plural = "s" * (last["documents"] != 1)
    log(
        f"{label}: perplexity {last['perplexity']:.2f}, loss {last['nll']:.4f} ({last['low']:.4f} … {last['high']:.4f} "
        f"over {last['resampled']}), {last['tokens']:,} tokens of {last['documents']} document{plural}"
    )


def _scores(directory: Path, protocol: perplexity.Protocol) -> Path:
    """The file of the scores until there are rows of them."""
    return directory / f".scores-{protocol.context}.jsonl"


def _store(directory: Path) -> ResultStore:
    return ResultStore(directory / ROWS, key=("stratum",))


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
