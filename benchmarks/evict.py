"""Needles through a cache that forgets and through presses of kvpress that hold as many bytes.

    python benchmarks/evict.py RUN                            # RUN is a folder of gape hf extend
    python benchmarks/evict.py RUN --base OTHER --minutes 8   # presses on a model without gates too

The order is that of kvpress' own pipeline. The context is read at once, before the question is known; what is
dropped is dropped then, and the bytes are counted; the question is read through what is left, and then the answer.
With --with-question the question is part of what is read first.

    full          every key, in a cache of transformers
    forgetting    gape.hf.ForgettingCache under an eps, or under a budget: a share of the bytes of a full cache
    snapkv, …     a press of kvpress that keeps as many keys as fit into the bytes of `forgetting` in the same cell

Bytes are those of keys, values, landmarks and positions, pages in use for `forgetting`, means over texts. Their share
is of all keys and values of a model without gates. Where `forgetting` holds no less than the full cache, presses have
no rows. The command goes on where it was: a case that has a row, failed or not, is not measured again. It leaves with
0 once all is measured, with 143 before.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from torch import Tensor

import common
import gape.hf
from common import number
from gape.cache.eviction import BOUNDS
from gape.cli.options import FLOATS, INTS, NAMES, Bounds, Device, Precision, numbers
from gape.experiments.experiment import pick_device, wants_bfloat16
from gape.experiments.extend import NEEDLES, TASKS
from gape.experiments.extend_measures import full_bytes
from gape.experiments.open_model import model_home, transformers_reader
from gape.experiments.ruler import choose
from gape.hf.gates import has_gates
from gape.tasks.ruler import sources
from gape.tasks.ruler.evaluation import Prepared, prepare
from gape.tasks.ruler.readers import TransformersReader
from gape.utils import run_info
from gape.utils.progress import ProgressTable
from gape.utils.validation import invalid_argument, whole

FULL, FORGETTING = "full", "forgetting"
#: Presses by their names in rows, with their classes in kvpress; all are made with their defaults.
PRESSES = {
    "snapkv": "SnapKVPress", "streaming": "StreamingLLMPress", "expected": "ExpectedAttentionPress",
    "knorm": "KnormPress", "tova": "TOVAPress",
}  # fmt: skip
CACHES = (FULL, FORGETTING, *PRESSES)
#: What a row is about; a row with the same is not measured again.
KEY = (
    "device", "dtype", "model", "base", "weights", "read_first", "prompt", "task", "texts", "cache", "setting",
    "bounds",
)  # fmt: skip
FIELDS = (
    *common.STAMP, "transformers", "kvpress", *KEY[1:], "exact", "nll", "bytes", "share", "failed",
)  # fmt: skip
SHOWN = ("prompt", "task", "base", "cache", "setting", "exact", "nll", "share", "failed")
#: Tokens by which the bytes of a key are measured.
FEW = 16
#: The most characters of a reason.
REASON = 200


class Case(NamedTuple):
    """A cell: `base` says whether the model without gates reads, `setting` that of the forgetting cache or ""."""

    prompt: int
    task: str
    base: bool
    cache: str
    setting: str

    def __str__(self) -> str:
        where = f"{self.task} at {self.prompt:,}: {self.cache}" + " on the base" * self.base
        return f"{where}, bytes of {self.setting}" if self.cache in PRESSES else f"{where} {self.setting}".rstrip()


class Outcome(NamedTuple):
    """Of one text: whether each token of the answer was the likeliest, its loss in nats per token, bytes, share."""

    exact: bool
    nll: float
    nbytes: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        model, base: directories of a model with gates and, if any, of the one without that presses also run on.
        needles: a folder of gape ruler generate.
        prompts, tasks, texts: lengths and tasks of needles, and texts of each.
        eps, shares: settings of the forgetting cache; shares are of the bytes of a full one.
        caches: names out of `CACHES`; `forgetting` has to have rows for presses to have some.
        bounds: of the forgetting cache.
        with_question: whether the question is read before anything is dropped.
        low: whether weights are bfloat16.
        out: file of the rows; None keeps none.

    Raises:
        ValueError: a value out of range; names it.
    """

    device: torch.device
    model: Path
    base: Path | None
    needles: Path
    prompts: Sequence[int]
    tasks: Sequence[str]
    texts: int
    eps: Sequence[float]
    shares: Sequence[float]
    caches: Sequence[str]
    bounds: str
    with_question: bool
    low: bool
    out: Path | None

    def __post_init__(self) -> None:
        whole("texts", self.texts)
        for prompt in self.prompts:
            whole("prompts", prompt)
        for name in ("eps", "shares"):
            for value in getattr(self, name):
                if not 0 < value < 1:
                    raise invalid_argument(name, value, "numbers between 0 and 1")
        for name, values, known in (("cache", self.caches, CACHES), ("bounds", [self.bounds], BOUNDS)):
            for value in values:
                if value not in known:
                    raise invalid_argument(name, value, f"names out of {list(known)}")

    @property
    def presses(self) -> list[str]:
        """The names of presses."""
        return [name for name in self.caches if name in PRESSES]

    def cases(self) -> Iterator[Case]:
        """Every case; what others are compared with comes first."""
        steps = [f"eps {value:g}" for value in self.eps] + [f"share {value:g}" for value in self.shares]
        bases = [False, True] if self.base is not None else [False]
        for prompt, task in product(self.prompts, self.tasks):
            if FULL in self.caches:
                yield from (Case(prompt, task, base, FULL, "") for base in bases)
            for setting in steps:
                if FORGETTING in self.caches:
                    yield Case(prompt, task, False, FORGETTING, setting)
                yield from (Case(prompt, task, *each, setting) for each in product(bases, self.presses))


class Job:
    """The models, the texts, and the rows so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, settings.device
        out = settings.out
        if out is not None:
            common.check_columns(out, FIELDS)
        self.rows = common.load(out) if out is not None and out.is_file() else []
        samples = [one for one in sources.read([str(settings.needles)])[0] if one.length in settings.prompts]
        self.samples = choose(samples, settings.tasks, settings.texts)
        for prompt, task in product(settings.prompts, settings.tasks):
            count = sum((one.length, one.task) == (prompt, task) for one in self.samples)
            if count < settings.texts:
                expected = f"at least {settings.texts} texts of {task} at {prompt:,} tokens"
                raise invalid_argument("needles", f"{settings.needles}, {count} of them", expected)

    @cached_property
    def readers(self) -> dict[bool, TransformersReader]:
        """The models, by whether they are the one without gates.

        Raises:
            ValueError: a model without gates, or a base with gates.
        """
        places = {False: self.settings.model, True: self.settings.base}
        readers = {
            base: transformers_reader(str(model_home(place)), device=self.device, low=self.settings.low)
            for base, place in places.items()
            if place is not None
        }
        for base, reader in readers.items():
            if has_gates(reader.model) == base:
                expected = "a model without gates" if base else "a model with gates, as gape hf extend makes it"
                raise invalid_argument("base" if base else "model", str(places[base]), expected)
        return readers

    @cached_property
    def weights(self) -> dict[bool, str]:
        """The beginning of a hash of the weights of each; a ValueError where their tokenizers differ."""
        known = {base: reader.identity() for base, reader in self.readers.items()}
        if len({str(each["tokenizer"]["sha256"]) for each in known.values()}) > 1:
            raise invalid_argument("base", str(self.settings.base), "a model of the same tokenizer")
        return {base: str(each["weights"])[:12] for base, each in known.items()}

    @cached_property
    def items(self) -> list[Prepared]:
        """The texts as the models read them."""
        longest = 2 * max(self.settings.prompts)
        return prepare(self.readers[False], self.samples, max_length=longest, generate=False)

    @cached_property
    def about(self) -> common.Row:
        """What all rows say of the models and the way they read."""
        settings, gated = self.settings, self.readers[False]
        return {
            "device": run_info.device_name(self.device), "dtype": str(gated.model.dtype).removeprefix("torch."),
            "model": label(settings.model), "read_first": "prompt" if settings.with_question else "context",
            "texts": str(settings.texts), "transformers": transformers.__version__,
            "kvpress": version("kvpress") if settings.presses else "",
        }  # fmt: skip

    @cached_property
    def key_bytes(self) -> dict[bool, int]:
        """Bytes that a token takes in a cache of transformers, all layers together, of each model."""
        ids = torch.from_numpy(self.items[0].prompt[:FEW]).to(self.device)
        return {base: token_bytes(reader.model, ids) for base, reader in self.readers.items()}

    def row(self, case: Case) -> common.Row:
        """The columns that name a case."""
        settings = self.settings
        # The bytes that a press on the base may hold are those of the model with gates.
        weights = [self.weights[False], *([self.weights[True]] if case.base else [])]
        return self.about | {
            "base": label(settings.base) if case.base and settings.base is not None else "",
            "weights": "/".join(weights), "prompt": str(case.prompt), "task": case.task, "cache": case.cache,
            "setting": case.setting, "bounds": settings.bounds if case.setting else "",
        }  # fmt: skip

    def stored(self, case: Case) -> common.Row | None:
        """The row of a case, if there is one."""
        wanted = self.row(case)
        return next((row for row in self.rows if all(row[key] == wanted[key] for key in KEY)), None)

    def due(self) -> Iterator[Case]:
        """The cases without a row, as rows come; presses only where the forgetting cache holds less than the full."""
        for case in self.settings.cases():
            if self.stored(case) is None and (case.cache not in PRESSES or self.budget(case) is not None):
                yield case

    def budget(self, case: Case) -> int | None:
        """The bytes that a press may hold; None where those of the forgetting cache are not known, or are all."""
        row = self.stored(case._replace(base=False, cache=FORGETTING))
        return None if row is None or row["failed"] or float(row["share"]) >= 1 else int(row["bytes"])

    def figures(self, case: Case, show: Callable[[int], None]) -> common.Row:
        """What is measured of a case; `show` is called with the texts that are done."""
        reader = self.readers[case.base]
        read = partial(outcome, gape.hf.LanguageModel(reader.model), device=self.device)
        outcomes = list[Outcome]()
        for item in self.items:
            if (item.sample.length, item.sample.task) != (case.prompt, case.task):
                continue
            tokens = len(item.prompt) if self.settings.with_question else context_tokens(reader, item)
            full = full_bytes(reader.model, tokens)
            show(len(outcomes))
            outcomes.append(read(item, tokens, *self._cache(case, reader.model, item, tokens, full), full=full))
        exact, nll, nbytes, share = (sum(each) / len(outcomes) for each in zip(*outcomes, strict=True))
        if not math.isfinite(nll):
            raise ValueError(f"nll: got {nll}, expected a finite number of the model")
        return {"exact": number(exact), "nll": number(nll), "bytes": str(int(nbytes)), "share": number(share)}

    def _cache(self, case: Case, model: Any, item: Prepared, tokens: int, full: int) -> tuple[Any, Any]:
        """An empty cache for a case, and the context in which the first tokens are read."""
        if case.cache == FORGETTING:
            kind, _, value = case.setting.partition(" ")
            limit: dict[str, Any] = {"eps": float(value)} if kind == "eps" else {"max_bytes": int(float(value) * full)}
            return gape.hf.ForgettingCache(model, bounds=self.settings.bounds, partial=True, **limit), nullcontext()
        cache = gape.hf.LanguageModel(model).new_cache()
        if case.cache == FULL:
            return cache, nullcontext()
        budget = self.budget(case)
        assert budget is not None
        keys = min(tokens, max(1, budget // self.key_bytes[case.base]))
        return cache, press(case.cache, keys, tokens)(model)


def label(place: Path) -> str:
    """What rows call a model: the folder of its run, or its own."""
    home = model_home(place).resolve()
    return home.parent.name if home.name == "model" else home.name


def context_tokens(reader: TransformersReader, item: Prepared) -> int:
    """How many tokens of a prompt stand before its question, which is the last paragraph of our wording.

    Raises:
        ValueError: another wording.
    """
    context = reader.encode(item.sample.input.rpartition("\n\n")[0])
    pairs = zip(context, item.prompt.tolist(), strict=False)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(context), len(item.prompt)))
    if same < len(item.prompt) // 2 or same == len(item.prompt):
        raise invalid_argument("needles", item.sample.source, "samples in our wording, which end with a question")
    return same


def press(name: str, keys: int, tokens: int) -> Any:
    """A press of kvpress that keeps so many of the keys of each head.

    Raises:
        ImportError: kvpress is missing; says how to install it.
    """
    import kvpress  # noqa: PLC0415

    from gape.hf.presses import GatedPress  # noqa: PLC0415

    # It rounds down; half a key keeps the number from falling by one.
    ratio = 0.0 if keys >= tokens else 1 - (keys + 0.5) / tokens
    return GatedPress(getattr(kvpress, PRESSES[name])(compression_ratio=ratio))


@torch.no_grad()
def token_bytes(model: Any, ids: Tensor) -> int:
    """Bytes that each of some tokens (N,) takes in a cache of transformers."""
    reader = gape.hf.LanguageModel(model)
    cache = reader.new_cache()
    reader.hidden(ids[None], cache=cache)
    return cache.nbytes // len(ids)


@torch.no_grad()
def outcome(
    model: Any, item: Prepared, tokens: int, cache: Any, context: Any, *, device: torch.device, full: int
) -> Outcome:
    """Read so many tokens of a prompt in a context, then the rest of it and the answer through the cache."""
    ids = torch.from_numpy(item.prompt).to(device)
    targets = torch.from_numpy(item.answer).to(device)
    with context:
        x = model.hidden(ids[None, :tokens], cache=cache)[:, -1:]
    if isinstance(cache, gape.hf.ForgettingCache):
        cache.evict()
    nbytes = int(cache.nbytes)
    rest = torch.cat([ids[tokens:], targets[:-1]])
    if len(rest):
        positions = torch.arange(tokens, tokens + len(rest), device=device)
        x = torch.cat([x, model.hidden(rest[None], positions, cache=cache)], dim=1)
    x = x[:, -len(targets) :]
    exact = bool((model.logits(x).argmax(-1)[0] == targets).all())
    nll = float(model.token_losses(x, targets[None]).double().mean())
    return Outcome(exact, nll, nbytes, nbytes / full)


def measure(job: Job, stamp: common.Row, log: Callable[[str], None]) -> Iterator[common.Row]:
    """Rows as they come; a case that fails is a row with the reason."""
    transformers.logging.set_verbosity_error()
    with ProgressTable(unit="text") as table:
        for case in job.due():
            row = stamp | job.row(case)
            try:
                row |= job.figures(case, partial(table.show, str(case), total=job.settings.texts))
            except Exception as error:
                # Out of memory, a press that refuses a model: the next case may run.
                reason = (str(error).strip() or "no message").splitlines()[0]
                row |= {"failed": f"{type(error).__name__}: {reason}"[:REASON]}
            table.remove(str(case))
            job.rows.append({name: row.get(name, "") for name in FIELDS})
            yield row
            gc.collect()
            if job.device.type == "cuda":
                torch.cuda.empty_cache()


def main(
    run: Annotated[Path, typer.Argument(help="A folder of gape hf extend, or a model with gates.")],
    base: Annotated[Path | None, typer.Option(help="The same of a model without gates, for presses alone.")] = None,
    needles: Annotated[Path | None, typer.Option(help="Folder of gape ruler generate; RUN/needles by default.")] = None,
    prompts: Annotated[str, typer.Option(metavar=INTS, help="Tokens of a prompt.")] = "4096,8192,16384,32768",
    tasks: Annotated[str, typer.Option(metavar=NAMES, help="Tasks of RULER.")] = ",".join(TASKS),
    texts: Annotated[int, typer.Option(help="Texts of a task and length.")] = 8,
    eps: Annotated[str, typer.Option(metavar=FLOATS, help="Of the forgetting cache.")] = "1e-3,1e-2,1e-1,0.3",
    shares: Annotated[
        str, typer.Option(metavar=FLOATS, help="Its budgets: shares of the bytes of a full cache.")
    ] = "0.5,0.25,0.125",
    cache: Annotated[str | None, typer.Option(metavar=NAMES, help=f"{', '.join(CACHES)}; all by default.")] = None,
    bounds: Bounds = "queries",
    with_question: Annotated[
        bool, typer.Option("--with-question", help="Read the question before anything is dropped.")
    ] = False,
    minutes: Annotated[float, typer.Option(help="Stop after so many; the same command goes on.")] = 60.0,
    device: Device = "auto",
    precision: Precision = "auto",
    trust: common.Trust = False,
    out: common.Out = None,
    save: common.Save = True,
) -> None:
    """Measure needles through caches of equal bytes."""
    chosen = pick_device(device)
    settings = Settings(
        device=chosen, model=run, base=base, needles=needles or run / NEEDLES,
        prompts=numbers("prompts", prompts, int, "4096,8192"), tasks=tasks.split(","), texts=texts,
        eps=numbers("eps", eps, float, "1e-2,1e-3") if eps else [],
        shares=numbers("shares", shares, float, "0.5,0.25") if shares else [],
        caches=CACHES if cache is None else cache.split(","), bounds=bounds, with_question=with_question,
        low=wants_bfloat16(precision, chosen), out=(out or common.DATA / "evict.csv") if save else None,
    )  # fmt: skip
    if settings.presses:
        # Missing, it should be so before an hour of work, and with the line that installs it.
        import gape.hf.presses  # noqa: F401, PLC0415
    with common.stopping(minutes):
        job = Job(settings)
        if next(job.due(), None) is None:
            typer.echo(f"all is measured: {settings.out}")
            return
        common.benchmark("evict", FIELDS, measure, job, SHOWN, trust=trust, out=out, save=save)


if __name__ == "__main__":
    common.script(main)
