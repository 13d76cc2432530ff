"""A run of a language model: trained, validated, its gates watched, its perplexity, recall and generation measured.

See :mod:`gape.experiments.experiment`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gape.analysis.routing import routing_variables
from gape.cache.gpt import ForgettingCache, FullCache
from gape.data import Corpus, Tokenizer, WindowSource, open_corpus
from gape.data.recall import RecallSource, corpus_tokenizer, recall_source
from gape.experiments import perplexity
from gape.experiments.experiment import Log, conditions
from gape.experiments.open_model import OpenModel, open_run
from gape.experiments.result_store import ResultStore
from gape.experiments.run import LanguageRun
from gape.models.gpt import GPT
from gape.report.results import pack_hits
from gape.report.series import GENERATE, SEVERAL
from gape.tasks import recall
from gape.train import StopFlag, Trainer, held_out_loss
from gape.utils import files
from gape.utils.jsonl import Record, read_object
from gape.utils.progress import ProgressTable
from gape.utils.run_info import device_name
from gape.utils.validation import invalid_argument

ROUTING, CONFIG, RECALL = "routing.jsonl", "config.json", "recall.jsonl"
#: What a query may lose to a forgetting cache.
EPS = 1e-2


def check(run: LanguageRun, directory: Path) -> None:
    """Refuse a corpus that is missing, of another vocabulary, too short, or not the one the run began with."""
    corpus = _corpus(run)
    if corpus.vocab_size != run.model.vocab_size:
        name = corpus.tokenizer.get("name")
        expected = f"{corpus.vocab_size}, the vocabulary of {run.data} (tokenizer {name})"
        raise invalid_argument("model.vocab_size", run.model.vocab_size, expected)
    device = torch.device("cpu")
    _sources(run, corpus, device)
    settings = _settings(run, corpus, device)
    for context in run.evaluation.contexts:
        settings.refuse(context)
    if run.evaluation.recall_samples and run.evaluation.contexts:
        tokenizer, length = corpus_tokenizer(corpus, run.recall.tokenizer), min(run.evaluation.contexts)
        try:
            next(recall.several(corpus, tokenizer, length, 1, run.evaluation.recall_facts, seed=run.evaluation.seed))
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

    gates = RoutingLog(directory / ROUTING, run.identity)

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


def missing(run: LanguageRun, directory: Path, device: torch.device, step: int) -> bool:
    """Whether something is not measured at a context."""
    corpus = _corpus(run)
    questions = _settings(run, corpus, device).questions({"step": step})
    return bool(
        perplexity.store(directory).missing(questions)
        or ResultStore(directory / RECALL).missing(_recall_questions(run, corpus, device, step))
    )


def measure(run: LanguageRun, directory: Path, device: torch.device, log: Log) -> None:
    """Measure perplexity, recall and generation at the missing contexts of the recipe."""
    corpus = _corpus(run)
    with files.locked(directory, "measured"):
        opened = open_run(directory, device, log)
        perplexity.measure(opened, _settings(run, corpus, device), log)
        _measure_recall(run, opened, corpus, device, log)


class RoutingLog:
    """`routing.jsonl`: a line per step, layer and head; steps that a resumed run takes again replace those it lost.

    `identity` names the run in each line.
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


def _settings(run: LanguageRun, corpus: Corpus, device: torch.device) -> perplexity.Settings:
    return perplexity.Settings(corpus=corpus, evaluation=run.evaluation, device=device, low=run.train.low(device.type))


def _corpus(run: LanguageRun) -> Corpus:
    if not run.data:
        raise ValueError("data: got nothing, expected data=DIR, a corpus that gape data prepare wrote")
    return open_corpus(run.data)


def _sources(
    run: LanguageRun, corpus: Corpus, device: torch.device
) -> tuple[WindowSource | RecallSource, WindowSource, WindowSource]:
    """Windows to train on, some of which may be recall texts, to validate on and to watch the gates on."""
    length, stratum = run.task.length, run.task.stratum
    windows = WindowSource(
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
    try:
        return recall_source(windows, run.recall), validation, watched
    except ValueError as error:
        raise ValueError(f"recall.{error}") from error


def _recall_questions(run: LanguageRun, corpus: Corpus, device: torch.device, step: int) -> list[Record]:
    """The values that tell each measurement of recall and generation of some weights from others."""
    evaluation = run.evaluation
    common = {"step": step, "corpus": corpus.fingerprint(), "eval_seed": evaluation.seed, **conditions(run, device)}
    samples = {"samples": evaluation.recall_samples}
    kinds: list[Record] = []
    if evaluation.recall_samples:
        kinds += [{"what": distance, "facts": 1} | samples for distance in recall.DISTANCES]
        kinds.append({"what": SEVERAL, "facts": evaluation.recall_facts} | samples)
    if evaluation.new_tokens:
        kinds.append({"what": GENERATE, "new_tokens": evaluation.new_tokens})
    return [common | {"length": length} | kind for length in sorted(set(evaluation.contexts)) for kind in kinds]


def _measure_recall(run: LanguageRun, opened: OpenModel, corpus: Corpus, device: torch.device, log: Log) -> None:
    """Measure what has no row yet; each row is on the disk before the next is begun."""
    store = ResultStore(opened.directory / RECALL)
    left = store.missing(_recall_questions(run, corpus, device, opened.identity["step"]))
    tokenizer = functools.cache(lambda: corpus_tokenizer(corpus, run.recall.tokenizer))
    with ProgressTable(unit="measurement") as table:
        for number, about in enumerate(left):
            name = f"{run.name}: {about['what']} at {about['length']:,}"
            table.show(name, number, len(left))
            with torch.autocast(device.type, torch.bfloat16, enabled=run.train.low(device.type)):
                if about["what"] == GENERATE:
                    row = _generate(opened.model, corpus, about)
                else:
                    row = _answer(opened.model, corpus, tokenizer(), about)
            store.append(opened.identity | about | row)
            figure = f"{row['match']:.3f}" if "match" in row else f"{row['tokens_per_second']:.1f} tokens/s"
            log(f"{name}: {figure}")


def _answer(model: GPT, corpus: Corpus, tokenizer: Tokenizer, about: Record) -> Record:
    """How many of the facts asked for are answered: `match`, their loss, and which answers were right."""
    length, samples, seed, what = (about[key] for key in ("length", "samples", "eval_seed", "what"))
    if what == SEVERAL:
        texts = list(recall.several(corpus, tokenizer, length, samples, about["facts"], seed=seed))
    else:
        drawn = recall.samples(corpus, tokenizer, length, samples, seed=seed, distances=(what,))
        texts = [(each.ids, [range(len(each.ids) - each.answer, len(each.ids))]) for each in drawn]
    scores = [score for ids, answers in texts for score in recall.score_answers(model, ids, answers)]
    hits = [score.right for score in scores]
    nll = sum(score.nll for score in scores) / len(scores)
    return {"match": sum(hits) / len(hits), "nll": nll, "answers": len(hits), "hits": pack_hits(hits)}


def _generate(model: GPT, corpus: Corpus, about: Record) -> Record:
    """Tokens per second behind a text, and bytes of the cache: one that forgets where floors allow it."""
    length, new = about["length"], about["new_tokens"]
    document = next(each for each in corpus.documents("heldout") if each.length >= length)
    device = next(model.parameters()).device
    ids = torch.from_numpy(corpus.tokens(document, 0, length).astype("int64"))[None].to(device)
    seconds, name, nbytes = {}, "", 0
    # The first call compiles kernels.
    for tokens in (new + 1, 1, new + 1):
        name, cache = _cache(model)
        begin = time.perf_counter()
        model.generate(ids, tokens, temperature=0.0, cache=cache)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[tokens], nbytes = time.perf_counter() - begin, cache.nbytes
    rate = new / max(seconds[new + 1] - seconds[1], 1e-9)
    row = {"prefill_s": seconds[1], "tokens_per_second": rate, "cache": name, "cache_bytes": nbytes}
    return row | {"machine": device_name(device)}


def _cache(model: GPT) -> tuple[str, Any]:
    """The cache that serves a model best, and its name in rows."""
    if any(floor > 0 for _, gates in model.gates() for floor in gates.gate_floor):
        return "forgetting", ForgettingCache(model, eps=EPS, bounds="queries", partial=True)
    own_bias = any(block.attention.has_own_bias for block in model.blocks())
    return "full", model.new_cache() if own_bias else FullCache(model)
