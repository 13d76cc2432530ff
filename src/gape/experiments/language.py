"""A run of a language model: trained, validated, its gates watched, its perplexity measured.

See :mod:`gape.experiments.experiment`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from gape.analysis.routing import routing_variables
from gape.data import Corpus, WindowSource, open_corpus
from gape.experiments import experiment
from gape.experiments.experiment import Log, low_precision, model_step, named_device, pick_device, wants_bfloat16
from gape.experiments.open_model import read_run
from gape.experiments.result_store import ResultStore
from gape.experiments.run import LanguageEvaluation, LanguageRun
from gape.models.gpt import GPT
from gape.tasks import perplexity, perplexity_rows
from gape.train import StopFlag, Trainer, checkpoint, held_out_loss
from gape.train.load import model_of
from gape.utils import jsonl, locks
from gape.utils.jsonl import Record
from gape.utils.progress import ProgressTable
from gape.utils.validation import invalid_argument

#: Contexts that are tried where none are asked for.
CONTEXTS = tuple(2**n for n in range(9, 18))
ROWS, POSITIONS, ROUTING, CONFIG = "perplexity.jsonl", "positions.jsonl", "routing.jsonl", "config.json"


def check(run: LanguageRun, directory: Path) -> None:
    """Refuse a corpus that is missing, of another vocabulary, too short, or not the one the run began with.

    Raises:
        ValueError: names the key and what was expected.
    """
    corpus = _corpus(run)
    if corpus.vocab_size != run.model.vocab_size:
        name = corpus.tokenizer.get("name")
        wanted = f"{corpus.vocab_size}, the vocabulary of {run.data} (tokenizer {name})"
        raise invalid_argument("model.vocab_size", run.model.vocab_size, wanted)
    _sources(run, corpus, torch.device("cpu"))
    for context in run.evaluation.contexts:
        perplexity.fits(corpus, run.evaluation.at(context))
    began = recorded_corpus(directory).get("fingerprint")
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
    """Whether a context is not measured, or the scores of one that is lie about still."""
    device = named_device(run.device)
    low = low_precision(run.train.precision, device)
    if any(_scores(directory, run.evaluation.at(context)).exists() for context in run.evaluation.contexts):
        return True
    values = _conditions(run, _corpus(run), model_step(run, directory), device, low)
    return bool(_missing(run, directory, values))


def measure(run: LanguageRun, directory: Path, device: torch.device, stop: StopFlag, log: Log) -> None:
    """Measure perplexity at the missing contexts of the recipe."""
    low = low_precision(run.train.precision, device)
    measure_perplexity(run, directory, _corpus(run), device=device, low=low, stop=stop, log=log)


def measure_perplexity(
    run: LanguageRun,
    directory: Path,
    corpus: Corpus,
    *,
    device: torch.device,
    low: bool,
    stop: StopFlag,
    log: Log,
    split: str = "heldout",
    stratum: str | None = None,
) -> list[Record]:
    """Measure a trained run at the contexts of its evaluation that have no rows yet.

    Rows go to `perplexity.jsonl` and `positions.jsonl` in its directory; batches that are done survive a stop.

    Returns:
        All rows that answer the question, old and new, in the order of the contexts.

    Raises:
        Interrupted: a signal came.
        BusyError: another process trains or measures the run.
        ValueError: the corpus is of another tokenizer, or no document is long enough.
    """
    refuse_tokenizer(directory, corpus)
    contexts = {context: run.evaluation.at(context) for context in run.evaluation.contexts}
    for protocol in contexts.values():
        perplexity.fits(corpus, protocol, split=split, stratum=stratum)
    with locks.locked(directory, "measured"):
        chosen = checkpoint.resolve(directory, log)
        values = _conditions(run, corpus, chosen.step, device, low, split, stratum)
        left = _missing(run, directory, values)
        for context in contexts.keys() - left:
            _scores(directory, contexts[context]).unlink(missing_ok=True)
        plans = [
            perplexity.plan(
                corpus, contexts[context], split=split, stratum=stratum, max_windows=run.evaluation.max_windows,
                seed=run.evaluation.seed,
            )
            for context in left
        ]  # fmt: skip
        if plans:
            model: GPT = model_of(chosen, device=device)
            for plan in plans:
                _measure_plan(run, directory, model, corpus, plan, values, low, stop, log)
    store = _store(directory, ROWS)
    return [row for protocol in contexts.values() for row in store.rows(values | protocol.settings())]


def measure_runs(
    directories: Sequence[Path],
    corpus: Corpus,
    evaluation: LanguageEvaluation,
    *,
    split: str = "heldout",
    stratum: str | None = None,
    device: str = "auto",
    precision: str = "auto",
    log: Log = print,
) -> list[list[Record]]:
    """Measure the perplexity of trained runs, once all of them are known to be measurable.

    Args:
        directories: of the runs.
        corpus: of the runs' tokenizer.
        evaluation: what to measure; without contexts, those of `CONTEXTS` that a document fills.
        split, stratum: which documents.
        device, precision: as the options of `gape lm perplexity`.
        log: called with a line for each measurement.

    Returns:
        For each run its rows, old and new.

    Raises:
        ValueError: no run of a language model, one of another tokenizer, or no document that is long enough.
    """
    if not evaluation.contexts:
        evaluation = _with_contexts(evaluation, corpus, split, stratum, log)
    target = pick_device(device)
    low = wants_bfloat16(precision, target)
    runs = []
    for directory in directories:
        run = cast(LanguageRun, read_run(directory, "lm"))
        refuse_tokenizer(directory, corpus)
        runs.append(replace(run, evaluation=evaluation))
    return [
        measure_perplexity(
            run, directory, corpus, device=target, low=low, stop=StopFlag(), log=log, split=split, stratum=stratum
        )
        for directory, run in zip(directories, runs, strict=True)
    ]


def _with_contexts(
    evaluation: LanguageEvaluation, corpus: Corpus, split: str, stratum: str | None, log: Log
) -> LanguageEvaluation:
    """The evaluation at the contexts that a document fills.

    Raises:
        ValueError: there is none.
    """
    contexts: list[int] = []
    for context in CONTEXTS:
        try:
            perplexity.fits(corpus, evaluation.at(context), split=split, stratum=stratum)
        except ValueError as error:
            if not contexts:
                raise
            log(f"contexts above {contexts[-1]:,} are left out: {error}")
            break
        contexts.append(context)
    return replace(evaluation, contexts=tuple(contexts))


def _measure_plan(
    run: LanguageRun,
    directory: Path,
    model: GPT,
    corpus: Corpus,
    plan: perplexity.Plan,
    values: Record,
    low: bool,
    stop: StopFlag,
    log: Log,
) -> None:
    device, protocol = next(model.parameters()).device, plan.protocol
    scores = _scores(directory, protocol)
    if plan.left_out:
        names = ", ".join(document.id for document in plan.left_out[:5]) + (", …" if len(plan.left_out) > 5 else "")
        short = f"{len(plan.left_out)} of {len(plan.left_out) + len(plan.documents)}"
        log(f"{run.name}: {short} documents have fewer than {protocol.needed:,} tokens and are left out: {names}")
    label = f"{run.name} at {protocol.context:,}"
    with ProgressTable(unit="window") as table, torch.autocast(device.type, torch.bfloat16, enabled=low):
        scored = perplexity_rows.score_all(
            model, corpus, plan, store=scores, of=repr(sorted(values.items(), key=str)), chunk=run.evaluation.chunk,
            check=stop.check, progress=lambda done, total: table.show(label, done, total),
        )  # fmt: skip
        table.remove(label)
    about = experiment.identity(run) | values | protocol.settings()
    rows = [about | row for row in perplexity_rows.rows(plan, scored, run.evaluation.seed)]
    _store(directory, ROWS).append(*rows)
    # Last: its row says that the others are there.
    _store(directory, POSITIONS).append(about | perplexity_rows.position_row(plan, scored))
    scores.unlink()
    last = rows[-1]
    plural = "s" * (last["documents"] != 1)
    log(
        f"{label}: perplexity {last['perplexity']:.2f}, loss {last['nll']:.4f} ({last['low']:.4f} … {last['high']:.4f} "
        f"over {last['resampled']}), {last['tokens']:,} tokens of {last['documents']} document{plural}"
    )


def _scores(directory: Path, protocol: perplexity.Protocol) -> Path:
    """The file of the scores until there are rows of them."""
    return directory / f".scores-{protocol.name}-{protocol.context}.jsonl"


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


def refuse_tokenizer(directory: Path, corpus: Corpus) -> None:
    """Refuse a corpus whose ids mean something else than those a run was trained on.

    Raises:
        ValueError: another tokenizer, or none recorded.
    """
    known = recorded_corpus(directory).get("tokenizer")
    if known is None:
        raise ValueError(
            f"run: {directory} does not say with which tokenizer it was trained, expected a run of gape lm"
        )
    if known.get("sha256") != corpus.tokenizer.get("sha256"):
        wanted = f"a corpus of the tokenizer that {directory} was trained with, {known.get('name')}"
        raise ValueError(f"data: {corpus.directory} is of tokenizer {corpus.tokenizer.get('name')}, expected {wanted}")


def recorded_corpus(directory: Path) -> Record:
    """What a run's config.json says of its corpus: fingerprint, tokenizer, epochs; empty before training began."""
    return dict(jsonl.read_object(directory / CONFIG).get("extra", {}).get("corpus", {}))


def _conditions(
    run: LanguageRun,
    corpus: Corpus,
    step: int | None,
    device: torch.device,
    low: bool,
    split: str = "heldout",
    stratum: str | None = None,
) -> Record:
    """The values, besides the protocol's, that tell rows of one measurement from those of others."""
    return {
        "step": step, "corpus": corpus.fingerprint(), "split": split, "only_stratum": stratum,
        "precision": "bfloat16" if low else "float32", "device": device.type,
        "max_windows": run.evaluation.max_windows, "eval_seed": run.evaluation.seed,
    }  # fmt: skip


def _missing(run: LanguageRun, directory: Path, values: Record) -> list[int]:
    """The contexts without rows, short ones first."""
    wanted = {context: values | run.evaluation.at(context).settings() for context in run.evaluation.contexts}
    missing = [row for name in (ROWS, POSITIONS) for row in _store(directory, name).missing(wanted.values())]
    return sorted(context for context, row in wanted.items() if row in missing)


def _store(directory: Path, name: str) -> ResultStore:
    return ResultStore(directory / name, key=("stratum",))


def _corpus(run: LanguageRun) -> Corpus:
    if not run.data:
        raise ValueError("data: got nothing, expected data=DIR, a corpus that gape data prepare wrote")
    return open_corpus(run.data)


def _sources(run: LanguageRun, corpus: Corpus, device: torch.device) -> tuple[WindowSource, WindowSource, WindowSource]:
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
    return train, validation, watched
