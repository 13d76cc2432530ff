"""Wall clock of plain `model.generate`, with gates and without, in one process.

    ungated       the model without gates, in transformers' DynamicCache
    static        the same with cache_implementation="static", which transformers compiles on a GPU
    gated-full    the model with gates, in a gape.hf.FullCache, which evicts nothing
    forgetting    the same in a gape.hf.ForgettingCache

Each case is warmed up, then timed: one new token is the prefill, many less that is the time of the tokens behind it.
Cases of one size take turns, so that a slower moment of the machine meets all of them. Prompts longer than --chunk are
also read in chunks, for prefill and memory alone. A failed case is a row too.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import transformers
import typer
from torch import Tensor

import common
import gape.hf
from common import number
from gape.cli.options import FLOATS, INTS, NAMES, Device, DType, numbers
from gape.data import open_corpus
from gape.experiments.experiment import pick_device
from gape.experiments.finetune import with_floors
from gape.experiments.open_model import load_transformers, model_home
from gape.utils.validation import invalid_argument, positive_number, whole

FIELDS = (
    *common.STAMP, "transformers", "model", "dtype", "text", "prompt", "batch", "cache", "eps", "bounds", "chunk",
    "new_tokens", "repeats", "decode_repeats", "prefill_s", "ms_per_token", "setup_s", "cache_bytes", "peak_bytes",
    "failed",
)  # fmt: skip
SHOWN = (
    "prompt", "batch", "cache", "eps", "bounds", "chunk", "prefill_s", "ms_per_token", "cache_bytes", "peak_bytes",
    "failed",
)  # fmt: skip

#: A Llama of the shape of SmolLM2-135M, by the name it has in rows; its weights are random.
SHAPE, SHAPE_NAME = "shape", "smollm2-135m-random"
CONFIG: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rope_theta": 100_000.0,
}  # fmt: skip

#: Floors of 200 in 76 of the 90 key heads of SmolLM2-135M.
FLOORS = Path("results/hf/smollm2-forgetting/floors/floors14.json")
#: Landmarks closed, so that floors act.
GATES = {"learn_landmark": False, "init_landmark_bias": -9}
CONTEXT_LENGTH = 8192

#: Texts that keys are centred on, and tokens of each.
CENTER_TEXTS = (16, 1024)
#: New tokens that warm up the model without gates, which compiles nothing.
WARM_TOKENS = 16
#: The most characters of a reason.
REASON = 200


class TimeLimitError(RuntimeError):
    """The time that the script was given is over."""


class Models(NamedTuple):
    """A model without gates and the same with gates, both in eval mode on the device."""

    name: str
    plain: Any
    gated: Any


class Case(NamedTuple):
    """What one row is about; chunk 0 reads the prompt at once, eps and bounds are those of a forgetting cache."""

    prompt: int
    batch: int
    cache: str
    chunk: int
    eps: float = 0.0
    bounds: str = ""

    def __str__(self) -> str:
        chunks = f", in chunks of {self.chunk:,}" if self.chunk else ""
        return f"{self.cache}, {self.batch} × {self.prompt:,} tokens{chunks}"

    def row(self) -> common.Row:
        """The columns that name the case."""
        sizes = {"prompt": self.prompt, "batch": self.batch, "chunk": self.chunk or "", "eps": number(self.eps or None)}
        return {name: str(value) for name, value in sizes.items()} | {"cache": self.cache, "bounds": self.bounds}


class Timing(NamedTuple):
    """One call of `generate`.

    Attributes:
        seconds: of the call.
        setup: seconds to make the cache before it.
        nbytes: bytes of the cached keys and values behind it.
    """

    seconds: float
    setup: float
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        models: "shape", or directories of models with gates.
        base: directory of the model without gates that belongs to those directories.
        floors, center: JSON file of floors for "shape"; whether keys of directories are centred on text of the corpus.
        corpus: directory of a corpus that prompts are cut from; None draws random tokens.
        prompts, batches, caches: tokens of a prompt, prompts at once, names of caches.
        eps, bounds: of the forgetting cache, each combination.
        new_tokens: tokens that the time of a token is the mean of.
        repeats, decode_repeats: calls of `generate` with one new token, and with many.
        chunk: tokens of a chunk of the prompt; 0 never reads in chunks.
        most_tokens: cases with more tokens of all prompts together are left out; 0 for none.
        time_limit: seconds after which no further call begins.
        device, dtype: of the weights.

    Raises:
        ValueError: a value out of range; names it.
    """

    CACHES: ClassVar[Sequence[str]] = ("ungated", "static", "gated-full", "forgetting")
    BOUNDS: ClassVar[Sequence[str]] = ("weights", "queries")

    device: torch.device
    models: Sequence[str]
    base: str | None
    floors: Path
    center: bool
    corpus: Path | None
    prompts: Sequence[int]
    batches: Sequence[int]
    caches: Sequence[str]
    eps: Sequence[float]
    bounds: Sequence[str]
    new_tokens: int
    repeats: int
    decode_repeats: int
    chunk: int
    most_tokens: int
    time_limit: float
    dtype: str

    def __post_init__(self) -> None:
        for name in ("prompts", "batches"):
            for value in getattr(self, name):
                whole(name, value)
        for name in ("new_tokens", "repeats", "decode_repeats"):
            whole(name, getattr(self, name))
        for name in ("chunk", "most_tokens"):
            whole(name, getattr(self, name), 0)
        positive_number("time_limit", self.time_limit)
        for name, values, known in (("cache", self.caches, self.CACHES), ("bounds", self.bounds, self.BOUNDS)):
            for value in values:
                if value not in known:
                    raise invalid_argument(name, value, f"names out of {list(known)}")
        for eps in self.eps:
            if not 0 < eps < 1:
                raise invalid_argument("eps", eps, "numbers between 0 and 1")
        if self.dtype not in common.Settings.DTYPES:
            raise invalid_argument("dtype", self.dtype, f"one of {list(common.Settings.DTYPES)}")
        if self.base is None and any(model != SHAPE for model in self.models):
            raise invalid_argument("base", None, f"the model without gates beside {self.models}")
        if self.center and (self.corpus is None or SHAPE in self.models):
            raise invalid_argument("center", True, "directories of models with gates, and a corpus")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = common.Settings.DTYPES[self.dtype]
        return dtype

    def cases(self) -> Iterator[list[Case]]:
        """The cases of a model, those of one size together; what others are compared with comes first of them."""
        for prompt, batch in product(self.prompts, self.batches):
            if self.most_tokens and prompt * batch > self.most_tokens:
                continue
            for chunk in (0, self.chunk) if 0 < self.chunk < prompt else (0,):
                cases = list[Case]()
                for cache in self.caches:
                    kinds = product(self.eps, self.bounds) if cache == "forgetting" else ((0.0, ""),)
                    cases += [Case(prompt, batch, cache, chunk, eps, bounds) for eps, bounds in kinds]
                yield cases


def open_models(name: str, settings: Settings) -> Models:
    """A model with gates and the one without that it is compared with.

    Raises:
        ValueError: a directory without a model, or floors of another shape.
    """
    if name == SHAPE:
        return random_models(settings)
    plain = load_transformers(str(model_home(Path(settings.base or ""))), dtype=settings.torch_dtype)
    gated = load_transformers(str(model_home(Path(name))), dtype=settings.torch_dtype)
    label = Path(name).resolve().parent.name if Path(name).name == "model" else Path(name).resolve().name
    plain, gated = plain.to(settings.device).eval(), gated.to(settings.device).eval()
    if settings.center:
        if not gape.hf.center_keys(gated, prompt_ids(settings, gated.config.vocab_size, *CENTER_TEXTS)):
            raise invalid_argument("center", True, f"a model with coordinates that do not turn; {name} has none")
        label += "-centered"
    return Models(label, plain, gated)


def random_models(settings: Settings) -> Models:
    """A model of `CONFIG` with random weights, the same on every machine, and a copy of it with gates."""
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(settings.torch_dtype).eval()
    gated = copy.deepcopy(plain)
    gates = with_floors(GATES, settings.floors)
    gape.hf.inject(gated, context_length=CONTEXT_LENGTH, start="paper", gates=gates)
    return Models(SHAPE_NAME, plain.to(settings.device), gated.to(settings.device))


def prompt_ids(settings: Settings, vocab_size: int, batch: int, prompt: int) -> Tensor:
    """Token ids (batch, prompt) on the device: consecutive text of the corpus, or random.

    Raises:
        ValueError: the corpus is too short, or of more ids than the model has.
    """
    if settings.corpus is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocab_size, (batch, prompt), generator=generator).to(settings.device)
    corpus = open_corpus(settings.corpus)
    if corpus.vocab_size > vocab_size:
        raise invalid_argument("corpus", f"{corpus.vocab_size} ids", f"at most the model's {vocab_size}")
    parts, total = list[Tensor](), 0
    for document in chain.from_iterable(corpus.documents(split) for split in corpus.splits):
        parts.append(torch.tensor(corpus.tokens(document).astype("int64")))
        total += len(parts[-1])
        if total >= batch * prompt:
            return torch.cat(parts)[: batch * prompt].view(batch, prompt).to(settings.device)
    raise invalid_argument("corpus", f"{total:,} tokens", f"at least {batch * prompt:,}")


def generate(model: Any, case: Case, ids: Tensor, new: int) -> Timing:
    """Call `generate` for exactly so many new tokens of each prompt, in a cache of its own."""
    # What the call before left behind is not part of this one.
    gc.collect()
    begin = time.perf_counter()
    options: dict[str, Any] = {}
    if case.cache == "static":
        options["cache_implementation"] = "static"
    elif case.cache == "gated-full":
        options["past_key_values"] = gape.hf.FullCache(model)
    elif case.cache == "forgetting":
        options["past_key_values"] = gape.hf.ForgettingCache(model, eps=case.eps, bounds=case.bounds, partial=True)
    if case.chunk:
        options["prefill_chunk_size"] = case.chunk
    _wait(ids)
    start = time.perf_counter()
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        pad_token_id=0, return_dict_in_generate=True, **options,
    )  # fmt: skip
    _wait(ids)
    seconds = time.perf_counter() - start
    if answer.sequences.size(1) != ids.size(1) + new:
        raise RuntimeError(f"generate gave {answer.sequences.size(1) - ids.size(1)} new tokens, expected {new}")
    return Timing(seconds, start - begin, cache_bytes(answer.past_key_values))


def _wait(ids: Tensor) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a cache of transformers or of ours."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
    return sum(x.nbytes for x in tensors)


class Turns:
    """Cases of one size that are measured in turns.

    Attributes:
        rows: the figures of each case so far, or why it failed.
    """

    def __init__(self, models: Models, cases: Sequence[Case], settings: Settings, deadline: float) -> None:
        self.models, self.settings, self.deadline = models, settings, deadline
        self.rows: dict[Case, common.Row] = {case: {} for case in cases}
        self._short: dict[Case, list[Timing]] = {case: [] for case in cases}
        size = cases[0]
        self._ids = prompt_ids(settings, models.plain.config.vocab_size, size.batch, size.prompt)

    def model(self, case: Case) -> Any:
        """The model that a case is about."""
        return self.models.plain if case.cache in ("ungated", "static") else self.models.gated

    def measure(self, log: Callable[[str], None]) -> None:
        """Warm up and measure memory, one case after another; then time prompts in turns, then single tokens.

        Raises:
            TimeLimitError: the time is over.
        """
        for case in self.rows:
            log(f"{self.models.name}: {case}")
            self._attempt(case, self._warm_up)
            _free(self.settings.device)
        for _ in range(self.settings.repeats):
            for case in self.rows:
                self._attempt(case, self._prefill)
        for case in self.rows:
            self._attempt(case, self._figures)
            _clear(self.model(case), case, self.settings.device)

    def _attempt(self, case: Case, measure: Callable[[Case], None]) -> None:
        if "failed" in self.rows[case]:
            return
        try:
            measure(case)
        except TimeLimitError:
            raise
        except Exception as error:
            # Out of memory, a compiler that fails, a class that is not there: the next case may run.
            reason = (str(error).strip() or "no message").splitlines()[0]
            self.rows[case] = {"failed": f"{type(error).__name__}: {reason}"[:REASON]}

    def _run(self, case: Case, new: int) -> Timing:
        if time.monotonic() > self.deadline:
            raise TimeLimitError
        return generate(self.model(case), case, self._ids, new)

    def _warm_up(self, case: Case) -> None:
        device, many = self.settings.device, self.settings.new_tokens + 1
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        # A static cache is compiled for its length; our kernels are compiled as the cache grows.
        self._run(case, 1 if case.chunk else min(many, WARM_TOKENS) if case.cache == "ungated" else many)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.rows[case]["cache_bytes"] = str(self._run(case, 1).nbytes)
        if device.type == "cuda":
            self.rows[case]["peak_bytes"] = str(torch.cuda.max_memory_allocated(device) - before)

    def _prefill(self, case: Case) -> None:
        self._short[case].append(self._run(case, 1))

    def _figures(self, case: Case) -> None:
        prefill = median(timing.seconds for timing in self._short[case])
        self.rows[case] |= {
            "prefill_s": number(prefill), "setup_s": number(median(timing.setup for timing in self._short[case]), 3),
        }  # fmt: skip
        if not case.chunk:
            many = self.settings.new_tokens + 1
            long = [self._run(case, many).seconds for _ in range(self.settings.decode_repeats)]
            self.rows[case]["ms_per_token"] = number((median(long) - prefill) / self.settings.new_tokens * 1000)


def measure(settings: Settings, stamp: common.Row, log: Callable[[str], None]) -> Iterator[common.Row]:
    """Rows as sizes are done; a case that fails is a row with the reason."""
    transformers.logging.set_verbosity_error()
    deadline = time.monotonic() + settings.time_limit
    text = "random" if settings.corpus is None else settings.corpus.resolve().name
    about = {"transformers": transformers.__version__, "dtype": settings.dtype, "text": text}
    about |= {name: str(getattr(settings, name)) for name in ("new_tokens", "repeats", "decode_repeats")}
    for name in settings.models:
        models = open_models(name, settings)
        for cases in settings.cases():
            turns = Turns(models, cases, settings, deadline)
            try:
                turns.measure(log)
            except TimeLimitError:
                log(f"the time limit of {settings.time_limit:g} s is over")
                return
            for case, row in turns.rows.items():
                yield {**stamp, **about, "model": models.name, **case.row(), **row}


def _clear(model: Any, case: Case, device: torch.device) -> None:
    """Free what a case leaves in the model, the compiler and the allocator."""
    # Where transformers keeps a static cache, or its length, for the next call.
    for name in ("_cache", "_previous_max_cache_length"):
        vars(model).pop(name, None)
    if device.type == "cuda" and case.cache == "static":
        # Each shape is compiled anew, and there may be more of them than a function is compiled for.
        torch.compiler.reset()
    _free(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(
    model: Annotated[str, typer.Option(metavar=NAMES, help="shape, or directories of models with gates.")] = SHAPE,
    base: Annotated[str | None, typer.Option(help="Directory of the model without gates beside a directory.")] = None,
    floors: Annotated[Path, typer.Option(help="JSON file with gate_floor by layer, for shape.")] = FLOORS,
    center: Annotated[bool, typer.Option("--center", help="Center the keys of directories with gates first.")] = False,
    corpus: Annotated[Path | None, typer.Option(help="Corpus that prompts are cut from; else random tokens.")] = None,
    prompts: Annotated[str, typer.Option(metavar=INTS, help="Tokens of a prompt.")] = "8192,65536,131072",
    batches: Annotated[str, typer.Option(metavar=INTS, help="Prompts at once.")] = "1,8",
    cache: Annotated[str | None, typer.Option(metavar=NAMES, help="Caches; all by default.")] = None,
    eps: Annotated[str, typer.Option(metavar=FLOATS, help="Of the forgetting cache.")] = "1e-2",
    bounds: Annotated[str, typer.Option(metavar=NAMES, help="Of the forgetting cache: weights, queries.")] = "weights",
    new_tokens: Annotated[int, typer.Option(help="Tokens that the time of a token is the mean of.")] = 256,
    repeats: Annotated[int, typer.Option(help="Timed calls with one new token.")] = 3,
    decode_repeats: Annotated[int | None, typer.Option(help="Timed calls with many; as --repeats by default.")] = None,
    chunk: Annotated[int, typer.Option(help="Also read prompts in chunks of so many tokens; 0: never.")] = 8192,
    most_tokens: Annotated[int, typer.Option(help="Leave out cases of more tokens, prompt × batch; 0: none.")] = 0,
    time_limit: Annotated[float, typer.Option(help="Seconds after which no further call begins.")] = 3600.0,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    trust: common.Trust = False,
    out: common.Out = None,
    save: common.Save = True,
) -> None:
    """Time `generate` with gates and without, by length of the prompt, batch and cache."""
    settings = Settings(
        device=pick_device(device), models=model.split(","), base=base, floors=floors, center=center,
        corpus=corpus,
        prompts=numbers("prompts", prompts, int, "8192,65536"), batches=numbers("batches", batches, int, "1,8"),
        caches=Settings.CACHES if cache is None else cache.split(","), eps=numbers("eps", eps, float, "1e-2,1e-3"),
        bounds=bounds.split(","), new_tokens=new_tokens, repeats=repeats,
        decode_repeats=repeats if decode_repeats is None else decode_repeats, chunk=chunk,
        most_tokens=most_tokens, time_limit=time_limit, dtype=dtype,
    )  # fmt: skip
    common.benchmark("generate", FIELDS, measure, settings, SHOWN, trust=trust, out=out, save=save)


if __name__ == "__main__":
    common.script(main)
