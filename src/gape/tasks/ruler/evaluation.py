"""Scores of models on samples, batch by batch: each batch is on the disk before the next begins."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gape.tasks.perplexity import weighted_interval
from gape.tasks.ruler.readers import Ids, Reader
from gape.tasks.ruler.sources import Sample, Source
from gape.tasks.ruler.tasks import clean_output, score, task
from gape.tasks.ways import DENSE, Way
from gape.utils import files, jsonl
from gape.utils.jsonl import Record, read_object
from gape.utils.run_info import manifest
from gape.utils.validation import invalid_argument, whole

SAMPLES, MANIFEST = "samples.jsonl", "manifest.json"
#: The input with the answer's prefix behind it, and the same as a turn of the model's own chat.
TEMPLATES = ("base", "chat")
#: Characters before an answer that decide how it is split into tokens.
_BEFORE = 256
#: Texts that are encoded side by side; their ids are lists meanwhile, 15 times as large as arrays.
_TOGETHER = 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How samples are read and scored.

    `template` and `max_length` are as :func:`prepare` takes them. With `generate` answers are generated and matched,
    besides the likelihood of the right ones. Short samples come in batches of `batch_tokens`.
    """

    template: str = "base"
    max_length: int | None = None
    generate: bool = True
    batch_tokens: int = 2**16
    chunk: int = 16384
    precision: str = "float32"
    way: Way = DENSE

    def __post_init__(self) -> None:
        whole("batch_tokens", self.batch_tokens)
        whole("chunk", self.chunk)
        if self.max_length is not None:
            whole("max_length", self.max_length, 2)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A sample as a model reads it: the SHA-256 of the prompt's text, and the ids of prompt and answer."""

    sample: Sample
    digest: str
    prompt: Ids
    answer: Ids


def render(reader: Reader, sample: Sample, template: str) -> str:
    """The text of a prompt, without white space at its end, which belongs to what follows; that of a chat stays."""
    if template == "chat":
        return reader.chat(sample.input) + sample.prefix.strip()
    return (sample.input + sample.prefix).rstrip()


def _answer_ids(reader: Reader, prompt: str, answer: str) -> list[int]:
    """The ids of an answer where it stands, behind a prompt and a space; none where the prompt ends with white space.

    Text before it and the answer are encoded together and apart: tokenizers that mark beginnings of words would
    otherwise take the answer for the beginning of a text. Where the two do not meet, the answer's own ids are taken.
    """
    before, placed = prompt[-_BEFORE:], answer if prompt[-1:].isspace() else f" {answer}"
    head, both = reader.encode(before), reader.encode(before + placed)
    if len(both) > len(head) and both[: len(head)] == head:
        return both[len(head) :]
    return reader.encode(placed, start=False)


def prepare(
    reader: Reader,
    samples: Sequence[Sample],
    *,
    template: str = "base",
    max_length: int | None = None,
    generate: bool = True,
) -> list[Prepared]:
    """Encode samples for a reader; unknown templates, and samples that are too long, are refused before any is read.

    `max_length` is a limit of prompt and answer together in place of the reader's; with `generate` the whole budget
    must fit, else the answer alone.
    """
    if template not in TEMPLATES:
        raise invalid_argument("template", template, f"one of {', '.join(TEMPLATES)}")
    limit = reader.limit if max_length is None else max_length
    prepared, long = [], []
    texts = [render(reader, sample, template) for sample in samples]
    encoded: list[Ids] = []
    for first in range(0, len(texts), _TOGETHER):
        group = reader.encode_all(texts[first : first + _TOGETHER], start=template != "chat")
        encoded += [np.array(ids, dtype=np.int64) for ids in group]
    for sample, text, prompt in zip(samples, texts, encoded, strict=True):
        answer = np.array(_answer_ids(reader, text, sample.answer), dtype=np.int64)
        if not len(prompt) or not len(answer):
            raise ValueError(f"tokenizer: makes no tokens of {sample.source}, sample {sample.number}")
        prepared.append(Prepared(sample=sample, digest=files.sha256(text.encode()), prompt=prompt, answer=answer))
        needed = len(prompt) + max(len(answer), sample.budget if generate else 0)
        if limit is not None and needed > limit:
            long.append((sample, needed))
    if long:
        one, needed = long[0]
        raise ValueError(
            f"{len(long)} of {len(samples)} samples are longer than the {limit:,} tokens that the model may read "
            f"(the first, {one.source} {one.number}, needs {needed:,} with its answer); --max-length sets another limit"
        )
    return prepared


def question(identity: Mapping[str, Any], sources: Iterable[Source], settings: Settings) -> Record:
    """What an evaluation is of: weights, tokenizer, data and settings. Equal ones have equal answers."""
    options = {name: value for name, value in asdict(settings).items() if name != "way"} | settings.way.settings()
    return {"model": dict(identity), "data": [source._asdict() for source in sources], "settings": options}


def key(question: Mapping[str, Any]) -> str:
    """A short name of a question."""
    return files.sha256(json.dumps(question, sort_keys=True, default=str).encode())[:12]


def batches(items: Sequence[Prepared], batch_tokens: int) -> list[list[int]]:
    """Numbers of samples that are read together: of one task, length and budget, long ones first."""
    groups: dict[tuple[str, int, int], list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault((item.sample.task, item.sample.length, item.sample.budget), []).append(number)
    chosen: list[list[int]] = []
    for numbers in groups.values():
        ordered = sorted(numbers, key=lambda n: (-len(items[n].prompt), n))
        while ordered:
            longest = len(items[ordered[0]].prompt) + items[ordered[0]].sample.budget
            size = max(1, batch_tokens // longest)
            chosen.append(ordered[:size])
            ordered = ordered[size:]
    return chosen


def evaluate(
    reader: Reader,
    items: Sequence[Prepared],
    settings: Settings,
    directory: Path,
    *,
    question: Record,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Record]:
    """Score all samples, resuming after those that the directory has; a row for each sample, in their order.

    `directory` gets manifest.json and samples.jsonl; one of another question is refused, and a loss that is not finite.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _claim(directory, reader, items, question)
    path = directory / SAMPLES
    done = _read_samples(path, items)
    progress(len(done), len(items))
    for batch in batches(items, settings.batch_tokens):
        # A batch is read whole even if a part of it is done: another composition could change the last digits.
        if not all(number in done for number in batch):
            rows = _score_batch(reader, items, batch, settings.generate)
            new = {row["sample"]: row for row in rows if row["sample"] not in done}
            jsonl.append(path, *new.values())
            done |= new
        progress(len(done), len(items))
    return [done[number] for number in range(len(items))]


def _claim(directory: Path, reader: Reader, items: Sequence[Prepared], question: Record) -> None:
    """Write the manifest, or make sure that the one there is of the same question."""
    path = directory / MANIFEST
    about = {
        "question": files.plain(question),
        "prompts_sha256": files.sha256("".join(i.digest for i in items).encode()),
    }
    before = read_object(path)
    if before and {name: before.get(name) for name in about} != about:
        raise invalid_argument("out", str(directory), "a directory of the same evaluation, or an empty one")
    if not before:
        files.replace(path, files.to_json(manifest(reader.device, seed=0, more=about | {"samples": len(items)})))


def _read_samples(path: Path, items: Sequence[Prepared]) -> dict[int, Record]:
    """The samples of a file, without an incomplete last line."""
    if not path.is_file():
        return {}
    rows = jsonl.read_lines(path, lambda row: None if isinstance(row.get("sample"), int) else "is no scored sample")
    digests = {number: item.digest for number, item in enumerate(items)}
    return {row["sample"]: row for row in rows if row.get("prompt_sha256") == digests.get(row["sample"], "")}


def _score_batch(reader: Reader, items: Sequence[Prepared], batch: Sequence[int], generate: bool) -> list[Record]:
    chosen = [items[number] for number in batch]
    rows = []
    losses = reader.losses([item.prompt for item in chosen], [item.answer for item in chosen])
    for number, item, loss in zip(batch, chosen, losses, strict=True):
        sample, nll = item.sample, float(loss.mean())
        if not math.isfinite(nll):
            raise ValueError(f"loss: got {nll} for {sample.source} sample {sample.number}, expected a number")
        row: Record = {
            "sample": number, "source": sample.source, "number": sample.number, "task": sample.task,
            "length": sample.length, "prompt_sha256": item.digest, "prompt_tokens": len(item.prompt),
            "answer": sample.answer, "answer_tokens": len(item.answer), "references": list(sample.outputs), "nll": nll,
        }  # fmt: skip
        rows.append(row)
    if generate:
        outputs = reader.complete([item.prompt for item in chosen], chosen[0].sample.budget)
        for row, ids in zip(rows, outputs, strict=True):
            row["output"] = reader.decode(ids)
            row["parsed"] = clean_output(row["output"])
            row["score"] = score(row["output"], row["references"], task(row["task"]).match)
    return rows


def summarise(rows: Sequence[Record], seed: int = 0) -> list[Record]:
    """A record for each task and length: mean, deviation and interval of the loss per token, and of the match.

    Loss and match of every sample are in it, in the samples' order, so that models are compared on the same samples;
    `plan` is equal where these are, in as many tokens.
    """
    groups: dict[tuple[str, int], list[Record]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["length"]), []).append(row)
    records = []
    for (name, length), own in groups.items():
        # What must be equal for losses to be comparable. The 0 is of tokens once cut out of long prompts: hashes of
        # stored rows have it.
        signatures = [f"{row['prompt_sha256']} 0 {row['answer_tokens']} {row['answer']}" for row in own]
        record: Record = {
            "task": name, "length": length, "data": sorted({row["source"] for row in own}), "samples": len(own),
            "plan": files.sha256("\n".join(signatures).encode())[:16],
            "answer_tokens": sum(row["answer_tokens"] for row in own) / len(own),
        }  # fmt: skip
        record |= _statistics([row["nll"] for row in own], "nll", seed)
        if "score" in own[0]:
            record |= _statistics([row["score"] for row in own], "match", seed)
        records.append(record)
    return records


def _statistics(values: Sequence[float], name: str, seed: int) -> Record:
    each = np.array(values, dtype=np.float64)
    interval = weighted_interval(each, np.ones_like(each), np.arange(len(each)), seed)
    return {
        name: float(each.mean()), f"{name}_std": float(each.std(ddof=1)) if len(each) > 1 else 0.0,
        f"{name}_low": interval.low, f"{name}_high": interval.high,
        f"sample_{name}": [round(value, 5) for value in each.tolist()],
    }  # fmt: skip
