"""What a language model recalls at each context of its recipe, and what answering costs: rows in `recall.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gape.cache.gpt import ForgettingCache, FullCache
from gape.data import Corpus, Tokenizer
from gape.data.recall import corpus_tokenizer
from gape.experiments import experiment
from gape.experiments.experiment import Log, conditions, low_precision
from gape.experiments.result_store import ResultStore
from gape.experiments.run import LanguageRun
from gape.models.gpt import GPT
from gape.report.recall import GENERATE, SEVERAL
from gape.report.results import pack_hits
from gape.tasks import recall
from gape.train import checkpoint
from gape.train.load import model_of
from gape.utils import locks
from gape.utils.jsonl import Record
from gape.utils.progress import ProgressTable
from gape.utils.run_info import device_name

ROWS = "recall.jsonl"
#: What a query may lose to a forgetting cache.
EPS = 1e-2


def questions(run: LanguageRun, corpus: Corpus, device: torch.device, step: int | None) -> list[Record]:
    """The values that tell each measurement of some weights from others."""
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


def missing(run: LanguageRun, directory: Path, corpus: Corpus, device: torch.device, step: int | None) -> list[Record]:
    """Those of the measurements that have no row."""
    return ResultStore(directory / ROWS).missing(questions(run, corpus, device, step))


def measure(run: LanguageRun, directory: Path, corpus: Corpus, device: torch.device, log: Log) -> None:
    """Measure what has no row yet; each row is on the disk before the next is begun.

    Raises:
        BusyError: another process trains or measures the run.
        ValueError: a context too short for a fact and its question, or another tokenizer than the corpus's.
    """
    with locks.locked(directory, "measured"):
        chosen = checkpoint.resolve(directory, log)
        left = missing(run, directory, corpus, device, chosen.step)
        if not left:
            return
        asks = any(about["what"] != GENERATE for about in left)
        tokenizer = corpus_tokenizer(corpus, run.recall.tokenizer) if asks else None
        model: GPT = model_of(chosen, device=device)
        autocast = partial(
            torch.autocast, device.type, torch.bfloat16, enabled=low_precision(run.train.precision, device)
        )
        with ProgressTable(unit="measurement") as table:
            for number, about in enumerate(left):
                table.show(f"{run.name}: {about['what']} at {about['length']:,}", number, len(left))
                with autocast():
                    row = (
                        _generate(model, corpus, about)
                        if tokenizer is None or about["what"] == GENERATE
                        else _answer(model, corpus, tokenizer, about)
                    )
                ResultStore(directory / ROWS).append(experiment.identity(run) | about | row)
                figure = f"{row['match']:.3f}" if "match" in row else f"{row['tokens_per_second']:.1f} tokens/s"
                log(f"{run.name}: {about['what']} at {about['length']:,}: {figure}")


def _answer(model: GPT, corpus: Corpus, tokenizer: Tokenizer, about: Record) -> Record:
    """How many of the facts asked for are answered: `match`, their loss, and which answers were right."""
    texts: Iterable[tuple[torch.Tensor, list[range]]]
    length, samples, seed, what = (about[key] for key in ("length", "samples", "eval_seed", "what"))
    if what == SEVERAL:
        texts = recall.several(corpus, tokenizer, length, samples, about["facts"], seed=seed)
    else:
        drawn = recall.samples(corpus, tokenizer, length, samples, seed=seed, distances=(what,))
        texts = ((each.ids, [range(len(each.ids) - each.answer, len(each.ids))]) for each in drawn)
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
