"""What `gape hf heads` does: find the heads that retrieve, on samples of RULER, and write floors that spare them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gape.experiments.experiment import pick_device
from gape.experiments.open_model import base_of, refuse_missing
from gape.experiments.open_reader import transformers_reader
from gape.hf import heads
from gape.hf.reading import read_config
from gape.tasks.ruler import prompts, sources
from gape.tasks.ruler.readers import TransformersReader
from gape.tasks.ruler.sources import Sample
from gape.utils import files
from gape.utils.progress import Progress, ProgressTable
from gape.utils.validation import invalid_argument, positive_number, whole

#: The key of the floors in a file, as gates know them.
FLOORS = "gate_floor"
#: Heads that are printed.
_SHOWN = 10
#: No limit: samples that are too long are left out.
_ANY = 2**62
_ABSENT, _LONG = "their answer does not stand in the text", "they are longer than the model can read"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How heads are chosen; see the options of `gape hf heads`."""

    model: str
    data: str
    free: int
    floor: float
    samples: int

    def __post_init__(self) -> None:
        whole("free", self.free, 0)
        positive_number("floor", self.floor)
        whole("samples", self.samples)

    def to_record(self) -> dict[str, Any]:
        """What a file of floors says of these settings; names, wherever they are."""
        data = Path(self.data).resolve().name if Path(self.data).exists() else self.data
        return {"free": self.free, "floor": float(self.floor), "model": base_of(self.model), "data": data}


@dataclass(frozen=True, kw_only=True)
class LocatedSample:
    """A sample as ids (N,), with the numbers of the tokens that its answer repeats and of those of the answer."""

    sample: Sample
    ids: Tensor
    source: list[int]
    answer: range


def write(settings: Settings, out: Path, device: str) -> None:
    """Score the heads of a model, print the best and write floors.

    Raises:
        ValueError: no such model or data, a model with gates, too few heads, no sample that shows where its answer
            stands, or a file in the place of `out`.
    """
    progress, target = Progress(), pick_device(device)
    if out.exists():
        raise invalid_argument("out", str(out), "a name that is free")
    refuse_missing(settings.model)
    if str(read_config(settings.model).model_type).startswith("gape_"):
        raise invalid_argument("model", settings.model, "one without gates; gape hf remove takes them out")
    samples, _ = sources.read([settings.data])
    reader = transformers_reader(settings.model, device=target)
    layers, n_heads, n_kv_heads = heads.sizes(reader.model)
    groups = n_heads // n_kv_heads
    # Refuses more free heads than there are, before anything is scored.
    heads.floors(torch.zeros(layers, n_kv_heads), settings.free, settings.floor, groups)
    located = locate(reader, samples, settings.samples, progress)
    score = _scores(reader, located, progress)
    record = {
        FLOORS: heads.floors(score, settings.free, settings.floor, groups),
        "score": [[round(value, 6) for value in row] for row in score.tolist()],
        **settings.to_record(), "samples": len(located),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    files.replace(out, files.to_json(record, indent=None))
    _show(score, settings.free)


def locate(reader: TransformersReader, samples: Sequence[Sample], most: int, progress: Progress) -> list[LocatedSample]:
    """The first samples that show where their answer stands, as many from each file and length.

    Raises:
        ValueError: there is none, or the tokenizer does not give the characters of a token.
    """
    if not getattr(reader.tokenizer, "is_fast", False):
        raise invalid_argument(
            "tokenizer", type(reader.tokenizer).__name__, "a fast one, which gives the characters of a token"
        )
    located: list[LocatedSample] = []
    left = Counter[str]()
    for sample in _evenly(samples):
        if len(located) == most:
            break
        one = _locate_sample(reader, sample)
        if isinstance(one, str):
            left[one] += 1
        else:
            located.append(one)
    reasons = "; ".join(f"{count} left out: {why}" for why, count in left.items())
    if not located:
        raise ValueError(
            f"data: none of its samples can be used, expected one whose answer stands in its text; {reasons}"
        )
    if reasons:
        progress.log(reasons)
    return located


def _evenly(samples: Sequence[Sample]) -> Iterator[Sample]:
    """The first of each file and length, then the second of each, and so on."""
    groups: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.source, sample.length), []).append(sample)
    for row in zip_longest(*groups.values()):
        yield from (sample for sample in row if sample is not None)


def _locate_sample(reader: TransformersReader, sample: Sample) -> LocatedSample | str:
    """A sample with the places of its answer, or why it cannot be used."""
    spans = [_places(sample.input, output) for output in sample.outputs]
    if not all(spans):
        return _ABSENT
    (item,) = prompts.prepare(reader, [sample], max_length=_ANY, generate=False)
    if reader.limit is not None and len(item.prompt) + len(item.answer) > reader.limit:
        return _LONG
    text = prompts.render(reader, sample, "base")
    offsets = reader.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    # What the tokenizer puts before every text is not among them.
    before = len(item.prompt) - len(offsets)
    source = [
        before + number
        for number, (start, stop) in enumerate(offsets)
        if any(start < last and stop > first for places in spans for first, last in places)
    ]
    ids = torch.cat([torch.from_numpy(item.prompt), torch.from_numpy(item.answer)])
    return LocatedSample(sample=sample, ids=ids, source=source, answer=range(len(item.prompt), len(ids)))


def _places(text: str, answer: str) -> list[tuple[int, int]]:
    """Where an answer stands in a text: first character and end of each place."""
    places, start = [], text.find(answer)
    while start >= 0:
        places.append((start, start + len(answer)))
        start = text.find(answer, start + len(answer))
    return places


def _scores(reader: TransformersReader, located: Sequence[LocatedSample], progress: Progress) -> Tensor:
    """The mean over samples, (L, Hk)."""
    own = reader.model.config._attn_implementation
    # The model's own does not return its weights.
    reader.model.set_attn_implementation("eager")
    scores = []
    with ProgressTable(progress, "sample") as table:
        for number, one in enumerate(located, 1):
            table.show("scores of heads", number - 1, len(located))
            ids = one.ids[None].to(reader.device)
            scores.append(heads.scores(reader.model, ids, one.source, one.answer))
            progress.log(
                f"{number} of {len(located)}: {one.sample.source} {one.sample.number}, {len(one.ids):,} tokens"
            )
    reader.model.set_attn_implementation(own)
    return torch.stack(scores).mean(0)


def _show(score: Tensor, free: int) -> None:
    print("layer  key head   score")
    for layer, head in heads.best(score, _SHOWN):
        print(f"{layer:5}  {head:8}  {float(score[layer, head]):6.4f}")
    count = score.numel()
    print(f"{free} of {count} key heads are free and keep {100 * free / count:.1f} % of the keys of all heads")


def with_floors(gates: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Options of gates with the floors of a file of `gape hf heads`.

    Raises:
        ValueError: floors are given already, or there is no such file.
    """
    if FLOORS in gates:
        raise invalid_argument("floors", str(path), f"none beside --gate {FLOORS}=…")
    try:
        rows = files.from_json(path.read_bytes()).get(FLOORS)
    except (OSError, ValueError) as error:
        raise ValueError(f"floors: {path} cannot be read, expected a file of gape hf heads: {error}") from error
    if not isinstance(rows, list):
        raise invalid_argument("floors", rows, f"a list of {FLOORS} in {path}, as gape hf heads writes it")
    return {**gates, FLOORS: rows}
