"""What `gape hf extend` measures of a model before and after: perplexity, needles, `generate`, its short answers.

Each function measures one thing and returns a row. Rows are told apart by `stage`, `kind` and what is in their keys.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gape.hf
from gape.data import Corpus
from gape.experiments.result_store import ResultStore
from gape.hf.gates import has_gates
from gape.models.skipping import cannot_skip, skip
from gape.tasks import perplexity, recall
from gape.tasks.ruler import evaluation
from gape.tasks.ruler.readers import TransformersReader
from gape.tasks.ruler.sources import Sample
from gape.utils.jsonl import Record
from gape.utils.progress import ProgressTable

#: Stages of a model, as rows name them.
BEFORE, AFTER = "before", "after"
#: Kinds of rows.
PERPLEXITY, NEEDLE, GENERATE, ANSWERS = "perplexity", "needle", "generate", "answers"
#: Of the shipped prompts so many are measured on; the others may be tuned on.
MEASURED_PROMPTS = 100
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
        answer_tokens: of the original's answers to short prompts; 0 leaves these out.
        prompts: short prompts at most.
    """

    contexts: tuple[int, ...]
    last: int = 512
    windows: int = 16
    needles: tuple[Sample, ...] = ()
    generate: tuple[int, ...] = ()
    new_tokens: int = 64
    answer_tokens: int = 32
    prompts: int = MEASURED_PROMPTS


#: A row that may be missing: what names it, and what measures the rest.
Task = tuple[Record, Callable[[], Record]]


def measure(
    store: ResultStore,
    stage: str,
    measures: Measures,
    corpus: Corpus,
    open_reader: Callable[[], TransformersReader],
    original: Callable[[], TransformersReader] | None = None,
) -> None:
    """Measure what has no row yet; each row is on the disk before the next is begun.

    Args:
        store: of the rows.
        stage: of the model.
        measures: what.
        corpus: whose held-out documents are read.
        open_reader: opens the model, once and only if something is missing.
        original: opens the model that short answers are compared with; None compares nothing.

    Raises:
        ValueError: a figure that is not finite; rows before it are stored.
    """
    names = list(_names(measures, stage, compares=original is not None))
    left = store.missing(names)
    if not left:
        return
    reader = open_reader()
    skipping = _skip(reader)
    with ProgressTable(unit="measurement") as table:
        for number, name in enumerate(left, len(names) - len(left)):
            table.show(f"{stage}: {name['kind']}", number, len(names))
            row = name | _measured(name, reader, measures, corpus, original) | skipping
            _refuse_not_finite(row)
            store.append(row)
            _free(reader.device)


def _refuse_not_finite(row: Record) -> None:
    """Refuse a row that tables and curves could not show."""
    for key, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            where = f"{row['kind']} {row['stage']}" + (f" at {row['length']:,} tokens" if "length" in row else "")
            raise ValueError(f"{key}: got {value} ({where}), expected a finite number of the model")


def _skip(reader: TransformersReader) -> Record:
    """Let kernels skip what gates prove negligible, where there are kernels; what rows say of it."""
    if reader.device.type != "cuda" or not has_gates(reader.model) or cannot_skip(reader.model) is not None:
        return {}
    skip(reader.model, EPS)
    return {"skip_eps": EPS}


def _names(measures: Measures, stage: str, *, compares: bool) -> Iterator[Record]:
    """What names each row."""
    for context in measures.contexts:
        yield {"stage": stage, "kind": PERPLEXITY, "length": context}
    for length, task in sorted({(sample.length, sample.task) for sample in measures.needles}):
        yield {"stage": stage, "kind": NEEDLE, "task": task, "length": length}
    for length in measures.generate:
        yield {"stage": stage, "kind": GENERATE, "length": length}
    if compares and measures.answer_tokens:
        yield {"stage": stage, "kind": ANSWERS}


def _measured(
    name: Record,
    reader: TransformersReader,
    measures: Measures,
    corpus: Corpus,
    original: Callable[[], TransformersReader] | None,
) -> Record:
    kinds: Mapping[str, Callable[[], Record]] = {
        PERPLEXITY: lambda: perplexity_row(reader, corpus, measures, int(name["length"])),
        NEEDLE: lambda: needle_row(
            reader, [s for s in measures.needles if (s.task, s.length) == (name["task"], name["length"])]
        ),
        GENERATE: lambda: generate_row(reader, corpus, int(name["length"]), measures.new_tokens),
        ANSWERS: lambda: answers_row(reader, _opened(original), measures),
    }
    return kinds[name["kind"]]()


def _opened(opener: Callable[[], TransformersReader] | None) -> TransformersReader:
    assert opener is not None
    return opener()


def perplexity_row(reader: TransformersReader, corpus: Corpus, measures: Measures, context: int) -> Record:
    """Perplexity of the last tokens of windows of one length; the same tokens at every context."""
    protocol = perplexity.Protocol(context=context, last=min(measures.last, context), align=max(measures.contexts))
    plan = perplexity.plan(corpus, protocol, max_windows=measures.windows)
    model = gape.hf.LanguageModel(reader.model)
    batches = list(perplexity.scores(model, corpus, plan, chunk=max(measures.contexts)))  # type: ignore[arg-type]
    sums = [value for batch in batches for value in batch]
    tokens = int(plan.windows[:, 3].sum())
    nll = sum(sums) / tokens
    return {
        "nll": nll, "perplexity": math.exp(min(nll, 700.0)), "windows": len(sums), "tokens": tokens,
        "documents": len({int(number) for number in plan.windows[:, 0]}), "window_nll": [round(x, 3) for x in sums],
    }  # fmt: skip


def needle_row(reader: TransformersReader, samples: Sequence[Sample]) -> Record:
    """The share of answers whose every token is the likeliest one behind its prompt, and their loss."""
    model = gape.hf.LanguageModel(reader.model)
    items = evaluation.prepare(reader, samples, max_length=_ANY, generate=False)
    scores = [
        recall.score(model, torch.from_numpy(np.concatenate([item.prompt, item.answer])), len(item.answer))
        for item in items
    ]
    matches = [int(score.right) for score in scores]
    return {
        "samples": len(scores), "match": sum(matches) / len(matches),
        "nll": sum(score.nll for score in scores) / len(scores), "matches": matches,
    }  # fmt: skip


def generate_row(reader: TransformersReader, corpus: Corpus, length: int, new_tokens: int) -> Record:
    """Seconds of the prefill, tokens per second and bytes of the cache of plain `generate`, one prompt of text.

    A model with gates has a forgetting cache. `cache_share` is its bytes beside those of all keys and values.
    """
    ids = _prompt(corpus, length).to(reader.device)
    # The first call compiles kernels.
    _timed(reader, ids, new_tokens)
    prefill, cache = _timed(reader, ids, 1)
    whole, _ = _timed(reader, ids, new_tokens + 1)
    full = _full_bytes(reader.model, length)
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
    held = [x for layer in layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    nbytes = int(cache.nbytes) if hasattr(cache, "nbytes") else sum(x.nbytes for x in held if x is not None)
    return time.perf_counter() - begin, nbytes


def _full_bytes(model: Any, length: int) -> int:
    """Bytes of all keys and values of so many tokens."""
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = next(model.parameters()).element_size()
    return int(2 * config.num_hidden_layers * kv_heads * width * element * length)


def _prompt(corpus: Corpus, length: int) -> Tensor:
    """So many tokens of text, int64 (1, length), from held-out documents if there are some, begun anew at the end."""
    split = corpus.splits[-1]
    parts, total = list[Any](), 0
    for document in corpus.documents(split):
        parts.append(np.asarray(corpus.tokens(document), dtype=np.int64))
        total += len(parts[-1])
        if total >= length:
            break
    return torch.from_numpy(np.resize(np.concatenate(parts), length))[None]


def short_prompts() -> list[str]:
    """The prompts that ship: the first :data:`MEASURED_PROMPTS` to measure on, the others to tune on."""
    text = (resources.files("gape.tasks") / "short_prompts.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def answers_row(reader: TransformersReader, original: TransformersReader, measures: Measures) -> Record:
    """How far a model's answers to short prompts are from the original's.

    The original answers greedily. `kl` is Σ p·log(p/q) in nats, p the original's distribution and q the model's, the
    mean over the tokens of these answers; `same` is the share of tokens on whose likeliest one both agree.
    """
    chosen = short_prompts()[: measures.prompts]
    divergences, agreements = list[Tensor](), list[Tensor]()
    answers = answer(original, chosen, measures.answer_tokens)
    for ids, count in answers:
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


def answer(
    reader: TransformersReader, texts: Sequence[str], most: int, *, seed: int | None = None, batch: int = 128
) -> list[tuple[Tensor, int]]:
    """A model's answers to prompts, in its chat template where it has one.

    Args:
        reader: the model.
        texts: prompts.
        most: tokens of an answer.
        seed: draws answers with this seed; None takes the likeliest token each time.
        batch: prompts at once.

    Returns:
        For each prompt ids (N,) on the CPU, prompt and answer, and how many of the last ones are the answer.
    """
    has_chat = bool(getattr(reader.tokenizer, "chat_template", None))
    encode = partial(reader.encode, start=not has_chat)
    rows = [encode(reader.chat(text) if has_chat else text) for text in texts]
    end = reader.model.generation_config.eos_token_id
    ends = {end} if isinstance(end, int) else set(end or ())
    answers = []
    for first in range(0, len(rows), batch):
        own = rows[first : first + batch]
        longest = max(map(len, own))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in own], device=reader.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in own], device=reader.device)
        options: dict[str, Any] = {"do_sample": False}
        if seed is not None:
            torch.manual_seed(seed + first)
            options = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0}
        out = reader.model.generate(
            ids, attention_mask=mask, max_new_tokens=most, pad_token_id=next(iter(ends), 0), **options
        )
        for row, new in zip(own, out[:, longest:].tolist(), strict=True):
            stop = next((place + 1 for place, token in enumerate(new) if token in ends), len(new))
            answers.append((torch.tensor(row + new[:stop]), stop))
    return answers


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
