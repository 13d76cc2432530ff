"""What `gape hf extend` measures of a model before and after: perplexity, needles, `generate`, its short answers.

Rows are told apart by `stage`, `kind` and what is in their keys. Below are the texts of a corpus that are measured on.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gape.hf
from gape.data import Corpus, Tokenizer
from gape.experiments import own_answers
from gape.experiments.result_store import ResultStore
from gape.hf.gates import has_gates
from gape.models.skipping import cannot_skip, skip
from gape.tasks import perplexity, recall
from gape.tasks.ruler.evaluation import prepare
from gape.tasks.ruler.readers import TransformersReader
from gape.tasks.ruler.sources import Sample
from gape.utils.jsonl import Record
from gape.utils.progress import ProgressTable
from gape.utils.validation import invalid_argument

#: Stages of a model, as rows name them.
BEFORE, AFTER = "before", "after"
#: Tokens of the original's answers to short prompts.
ANSWER_TOKENS = 32
#: Tokens of the shortest context that is measured.
SHORTEST_CONTEXT = 1024
#: What a query of a model with gates may lose to skipped tiles and to a forgetting cache.
EPS = 1e-2
#: Any length: learned limits are for those who keep to them.
_ANY = 2**31


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What is measured.

    Attributes:
        contexts: lengths of perplexity, rising; the same last tokens of the same documents at each.
        last: tokens scored at the end of each window.
        windows: of each context at most.
        needles: samples of RULER.
        generate: lengths of prompts at which `generate` is timed.
        new_tokens: that are generated there.
        prompts: short prompts at most whose answers are compared; 0 leaves these out.
    """

    contexts: tuple[int, ...]
    last: int
    windows: int
    needles: tuple[Sample, ...]
    generate: tuple[int, ...]
    new_tokens: int
    prompts: int


def measure(
    store: ResultStore,
    stage: str,
    measures: Measures,
    corpus: Corpus,
    open_reader: Callable[[], TransformersReader],
    original: Callable[[], TransformersReader] | None = None,
) -> None:
    """Measure what has no row yet; each row is on the disk before the next is begun.

    `open_reader` opens the model, once and only if something is missing; `original` the one that short answers are
    compared with, None compares nothing. Held-out documents of the corpus are read.

    Raises:
        ValueError: a figure that is not finite; rows before it are stored.
    """
    tasks = [({"stage": stage} | name, task) for name, task in _tasks(measures, corpus, original)]
    missing = store.missing([name for name, _ in tasks])
    if not missing:
        return
    reader = open_reader()
    skipping = _skip(reader)
    with ProgressTable(unit="measurement") as table:
        for number, (name, task) in enumerate(tasks):
            if name not in missing:
                continue
            table.show(f"{stage}: {name['kind']}", number, len(tasks))
            row = name | task(reader) | skipping
            for key, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    # Tables and curves could not show it.
                    where = f"{row['kind']} {stage}" + (f" at {row['length']:,} tokens" if "length" in row else "")
                    raise ValueError(f"{key}: got {value} ({where}), expected a finite number of the model")
            store.append(row)
            _free(reader.device)


def _skip(reader: TransformersReader) -> Record:
    """Let kernels skip what gates prove negligible, where there are kernels; what rows say of it."""
    if reader.device.type != "cuda" or not has_gates(reader.model) or cannot_skip(reader.model) is not None:
        return {}
    skip(reader.model, EPS)
    return {"skip_eps": EPS}


def _tasks(
    measures: Measures, corpus: Corpus, original: Callable[[], TransformersReader] | None
) -> Iterator[tuple[Record, Callable[[TransformersReader], Record]]]:
    """What names each row, and what measures the rest of it."""
    for context in measures.contexts:
        yield {"kind": "perplexity", "length": context}, partial(_perplexity, corpus, measures, context)
    for length, task in sorted({(sample.length, sample.task) for sample in measures.needles}):
        samples = [sample for sample in measures.needles if (sample.task, sample.length) == (task, length)]
        yield {"kind": "needle", "task": task, "length": length}, partial(_needles, samples)
    for length in measures.generate:
        yield {"kind": "generate", "length": length}, partial(_generate, corpus, length, measures.new_tokens)
    if original is not None and measures.prompts:
        yield {"kind": "answers"}, partial(_answers, original, measures.prompts)


def _perplexity(corpus: Corpus, measures: Measures, context: int, reader: TransformersReader) -> Record:
    """Perplexity of the last tokens of windows of one length; the same tokens at every context."""
    protocol = perplexity.Protocol(context=context, last=min(measures.last, context), align=max(measures.contexts))
    plan = perplexity.plan(corpus, protocol, max_windows=measures.windows)
    model: Any = gape.hf.LanguageModel(reader.model)
    batches = list(perplexity.scores(model, corpus, plan, chunk=max(measures.contexts)))
    sums = [value for batch in batches for value in batch]
    tokens = int(plan.windows[:, 3].sum())
    nll = sum(sums) / tokens
    return {
        "nll": nll, "perplexity": math.exp(min(nll, 700.0)), "windows": len(sums), "tokens": tokens,
        "documents": len({int(number) for number in plan.windows[:, 0]}), "window_nll": [round(x, 3) for x in sums],
    }  # fmt: skip


def _needles(samples: Sequence[Sample], reader: TransformersReader) -> Record:
    """The share of answers whose every token is the likeliest one behind its prompt, and their loss."""
    model = gape.hf.LanguageModel(reader.model)
    items = prepare(reader, samples, max_length=_ANY, generate=False)
    scores = [
        recall.score(model, torch.from_numpy(np.concatenate([item.prompt, item.answer])), len(item.answer))
        for item in items
    ]
    matches = [int(score.right) for score in scores]
    return {
        "samples": len(scores), "match": sum(matches) / len(matches),
        "nll": sum(score.nll for score in scores) / len(scores), "matches": matches,
    }  # fmt: skip


def _generate(corpus: Corpus, length: int, new_tokens: int, reader: TransformersReader) -> Record:
    """Seconds of the prefill, tokens per second and bytes of the cache of plain `generate`, one prompt of text.

    A model with gates has a forgetting cache. `cache_share` is its bytes beside those of all keys and values.
    """
    ids = _prompt(corpus, length).to(reader.device)
    # The first call compiles kernels.
    _timed(reader, ids, new_tokens)
    prefill, cache = _timed(reader, ids, 1)
    whole, _ = _timed(reader, ids, new_tokens + 1)
    full = full_bytes(reader.model, length)
    return {
        "prefill_s": prefill, "tokens_per_second": new_tokens / max(whole - prefill, 1e-9), "cache_bytes": cache,
        "full_bytes": full, "cache_share": cache / full, "new_tokens": new_tokens,
        "eps": EPS if has_gates(reader.model) else None,
    }  # fmt: skip


def _timed(reader: TransformersReader, ids: Tensor, new: int) -> tuple[float, int]:
    """Seconds of `generate` for so many tokens, and bytes of its cache."""
    options: dict[str, Any] = {}
    if has_gates(reader.model):
        options["past_key_values"] = gape.hf.ForgettingCache(reader.model, eps=EPS, bounds="queries", partial=True)
    _free(reader.device)
    begin = time.perf_counter()
    answer = reader.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        pad_token_id=0, return_dict_in_generate=True, **options,
    )  # fmt: skip
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    cache = answer.past_key_values
    layers = getattr(cache, "layers", ())
    tensors = [x for layer in layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    nbytes = int(cache.nbytes) if hasattr(cache, "nbytes") else sum(x.nbytes for x in tensors if x is not None)
    return time.perf_counter() - begin, nbytes


def full_bytes(model: Any, length: int) -> int:
    """Bytes of all keys and values of so many tokens."""
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = next(model.parameters()).element_size()
    return int(2 * config.num_hidden_layers * kv_heads * width * element * length)


def _answers(open_original: Callable[[], TransformersReader], prompts: int, reader: TransformersReader) -> Record:
    """How far a model's answers to short prompts are from the original's.

    The original answers greedily. `kl` is Σ p·log(p/q) in nats, p the original's distribution and q the model's, the
    mean over the tokens of these answers; `same` is the share of tokens on whose likeliest one both agree.
    """
    original, chosen = open_original(), own_answers.short_prompts()[:prompts]
    divergences, agreements = list[Tensor](), list[Tensor]()
    for ids, count in own_answers.answer(original, chosen, ANSWER_TOKENS):
        if not count:
            continue
        first, second = (_distribution(each, ids, count) for each in (original, reader))
        divergences.append((first.exp() * (first - second)).sum(-1))
        agreements.append((first.argmax(-1) == second.argmax(-1)).float())
    kl, same = torch.cat(divergences), torch.cat(agreements)
    return {"kl": float(kl.mean()), "same": float(same.mean()), "prompts": len(chosen), "tokens": len(kl)}


@torch.no_grad()
def _distribution(reader: TransformersReader, ids: Tensor, count: int) -> Tensor:
    """Log-probabilities of the last tokens of a text, float32 (count, V) on the CPU."""
    model = gape.hf.LanguageModel(reader.model)
    logits = model.logits(model.hidden(ids[None, :-1].to(reader.device))[:, -count:])
    return logits[0].float().log_softmax(-1).cpu()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)


def _prompt(corpus: Corpus, length: int) -> Tensor:
    """So many tokens of text, int64 (1, length), from held-out documents if there are some, begun anew at the end."""
    parts, total = list[Any](), 0
    for document in corpus.documents(corpus.splits[-1]):
        parts.append(np.asarray(corpus.tokens(document), dtype=np.int64))
        total += len(parts[-1])
        if total >= length:
            break
    return torch.from_numpy(np.resize(np.concatenate(parts), length))[None]


def refuse_short(corpus: Corpus, longest: int, window: int) -> None:
    """Refuse a corpus whose documents do not fill the longest window to train on, or one to measure on."""
    for split, needed in (("train", longest + 1), ("heldout", min(window, SHORTEST_CONTEXT) + 1)):
        lengths = [document.length for document in corpus.documents(split)] if split in corpus.splits else []
        if max(lengths, default=0) < needed:
            got = f"{len(lengths)} {split} documents of at most {max(lengths, default=0):,} tokens"
            less = ", or a smaller long_length" if needed > window + 1 else ""
            raise invalid_argument("data", got, f"more text: one of at least {needed:,} tokens{less}")


def passage(corpus: Corpus, length: int) -> Tensor:
    """The beginning of the longest training document, int64 (1, N), N at most `length`."""
    longest = max(corpus.documents("train"), key=lambda document: document.length)
    return torch.from_numpy(corpus.tokens(longest, 0, min(length, longest.length)).astype("int64"))[None]


def passages(corpus: Corpus, count: int, length: int) -> Tensor:
    """Passages of training documents that have so many tokens, int64 (count, length); documents take turns."""
    documents = [document for document in corpus.documents("train") if document.length >= length]
    rows = []
    for number in range(count):
        document = documents[number % len(documents)]
        begin = number * length % (document.length - length + 1)
        rows.append(torch.from_numpy(corpus.tokens(document, begin, begin + length).astype("int64")))
    return torch.stack(rows)


def prose(corpus: Corpus, tokenizer: Tokenizer, characters: int) -> str:
    """Held-out text, at most so many characters."""
    parts, count = list[str](), 0
    for document in corpus.documents("heldout"):
        ids = [token for token in corpus.tokens(document).tolist() if token != corpus.end_of_text]
        parts.append(tokenizer.decode(ids))
        count += len(parts[-1])
        if count > characters:
            break
    return "\n".join(parts)[:characters]
