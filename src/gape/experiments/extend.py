"""What `gape hf extend` does: make a model read, and find, at many times its context, and show that it does.

A directory holds everything: `extend.json` (settings), `corpus/`, `needles/`, `heads.json`, `plan.json`, `kept.json`,
`start/` (the model before tuning), `tuning/` and `tuning-long/` (runs), `model/` (the result), `rows.jsonl`,
`summary.json`, `report.html`, `README.md`. Each part is written once and at once, so that a command which was killed
goes on to the same model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from gape.data import Corpus, RecallSource, WindowSource, load_tokenizer
from gape.distributed import processes
from gape.distributed.context import layers_to_slice
from gape.experiments import extend_measures as measures
from gape.experiments import finetune, own_answers, ruler
from gape.experiments.experiment import pick_device, wants_bfloat16
from gape.experiments.extend_measures import AFTER, BEFORE, SHORTEST_CONTEXT, Measures
from gape.experiments.extend_settings import LONG, SCORED_TEXTS, SHORT, Phase, Settings
from gape.experiments.open_model import MODEL, SETTINGS, base_of, load_transformers, transformers_reader
from gape.experiments.result_store import ResultStore
from gape.hf import extension
from gape.hf.centering import center_keys
from gape.hf.floors import FloorPlan
from gape.hf.gates import has_gates
from gape.hf.heads import head_scores, sizes
from gape.hf.sinks import SinkLandmarks, sink_landmarks
from gape.models.skipping import cannot_skip
from gape.report import extend as report
from gape.tasks import recall
from gape.tasks.ruler import sources
from gape.tasks.ruler.generator import SHORTEST
from gape.tasks.ruler.readers import TransformersReader
from gape.train import TrainConfig
from gape.utils import files, launch
from gape.utils.jsonl import read_object
from gape.utils.progress import Progress
from gape.utils.validation import invalid_argument, suggestion, whole

MARK, ROWS, PLAN, HEADS, KEPT, START = (
    "extend.json", "rows.jsonl", "plan.json", "heads.json", "kept.json", "start",
)  # fmt: skip
NEEDLES, HAYSTACK = "needles", "haystack.txt"
#: Tasks of RULER that are measured.
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1")
#: Tokens that are scored at the end of each context.
LAST = 512
#: Tokens on which logits are measured.
LOGIT_TOKENS = 8192
#: Texts that sinks and means of keys are measured on, and tokens of each.
SINK_TEXTS, SINK_TOKENS = 16, 1024
#: Characters of the haystack of prose.
_HAYSTACK_CHARACTERS = 2_000_000


def extend(
    model: str,
    data: str | Sequence[str],
    *,
    to: int,
    out: str | Path,
    device: str = "auto",
    precision: str = "auto",
    **options: Any,
) -> Path:
    """Make a model of `transformers` read, and find, at many times its context; what `gape hf extend` does.

    Args:
        model: a directory, or a name on the hub; without gates.
        data: a corpus of `gape data prepare`, or files and folders of text.
        to: tokens that it should read.
        out: directory of everything; the model goes to model/ in it. The same call goes on where it was stopped.
        device, precision: as the options of the command.
        **options: others of the command, such as steps=300 or lora=16.

    Returns:
        The directory of the model.

    Raises:
        Interrupted: a signal came; the same call goes on.
        ValueError: a model, data or a length that do not fit; nothing is left behind.
    """
    texts = (data,) if isinstance(data, str) else tuple(data)
    known = [f.name for f in dataclasses.fields(Settings)]
    for name in options:
        if name not in known:
            raise ValueError(f"{name}: unknown option{suggestion(name, known)}")
    settings = Settings(model=model, data=texts, to=to, **options)
    return perform(settings, Path(out), device=device, precision=precision)


def perform(settings: Settings, out: Path, *, device: str = "auto", precision: str = "auto") -> Path:
    """The directory of the extended model; for the method "plain", `out`. Arguments and errors as :func:`extend`."""
    job = Job(settings, out, pick_device(device), precision)
    job.check()
    joined = processes.connect()
    with _claimed(settings, out):
        _ = job.corpus
    with files.locked(out, "extended") if launch.is_first() else nullcontext():
        job.run()
    if joined:
        processes.leave()
    return out if settings.method == "plain" else out / MODEL


@contextmanager
def _claimed(settings: Settings, out: Path) -> Iterator[None]:
    """Claim a directory; what is refused inside leaves nothing of this call behind."""
    existed, claimed = processes.from_first(lambda: _claim(settings, out))
    try:
        yield
    except ValueError:
        if not claimed and launch.is_first():
            (out / MARK).unlink()
            if not existed and not any(out.iterdir()):
                out.rmdir()
        raise


def _claim(settings: Settings, out: Path) -> tuple[bool, bool]:
    """Write the settings into a directory; whether it was there, and whether they were."""
    if files.foreign(out, MARK):
        raise invalid_argument("out", str(out), "a new or empty directory, or one of this command")
    before, now = read_object(out / MARK), settings.stored()
    if before and before != now:
        keys = [key for key in now if before.get(key) != now[key]]
        lines = "; ".join(f"{key} was {before.get(key)!r} and is now {now[key]!r}" for key in keys)
        raise ValueError(f"out: {out} was made with other settings: {lines}")
    existed = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    files.replace(out / MARK, files.to_json(now))
    return existed, bool(before)


class Job:
    """One extension in the directory `out`: its parts, each made if it is missing."""

    def __init__(self, settings: Settings, out: Path, device: torch.device, precision: str) -> None:
        self.settings, self.out, self.device, self.precision = settings, out, device, precision
        self.low, self.progress = wants_bfloat16(precision, device), Progress()
        self.native, self.skips = 0, False

    def check(self) -> None:
        """Refuse a model, a target, floors or paths that cannot be, before anything is written."""
        settings = self.settings
        finetune.refuse_data(settings.data)
        if settings.needles is not None:
            sources.read([settings.needles])
        model = load_transformers(settings.model)
        self.native = extension.native_context(model)
        extension.refuse_target(self.native, settings.to)
        layers, _, n_kv_heads = sizes(model)
        most = layers * n_kv_heads
        if settings.free is not None and whole("free", settings.free, 0) > most:
            raise invalid_argument("free", settings.free, f"at most {most}, the key heads of the model")
        self._refuse_method(model)
        self.skips = self.device.type == "cuda" and has_gates(model) and cannot_skip(model) is None
        for phase in settings.phases(self.native):
            ways = self.train_config(phase).context_parallel
            if ways > 1:
                layers_to_slice(model)
                if settings.skip_to and phase.folder == SHORT:
                    fewer = f"0 where {launch.size()} processes share {phase.batch_size} windows"
                    raise invalid_argument("skip_to", settings.skip_to, fewer)
            if phase.length % ways:
                fits = f"a number that divides {phase.length}, the tokens of a window that they share"
                raise invalid_argument("nproc-per-node", launch.size(), fits)

    def _refuse_method(self, model: Any) -> None:
        """Refuse options of the method by what would be put into a model, which is changed."""
        settings, plan = self.settings, None
        if settings.method == "ours":
            # Bad options show on any text and any scores.
            layers, _, n_kv_heads = sizes(model)
            ids, scores = torch.arange(min(16, self.native))[None], torch.zeros(layers, n_kv_heads)
            plan = extension.floor_plan(model.eval(), scores, self.free(model), ids, **settings.plan)
        self._put_in(model, plan)

    def _put_in(self, model: Any, plan: FloorPlan | None, landmarks: SinkLandmarks | None = None) -> None:
        settings = self.settings
        floors = None if settings.floors is None else finetune.with_floors({}, Path(settings.floors))["gate_floor"]
        extension.put_in(
            model, settings.method, to=settings.to, plan=plan, landmarks=landmarks, floors=floors,
            factor=settings.factor, log_scale=settings.log_scale,
        )  # fmt: skip

    def train_config(self, phase: Phase) -> TrainConfig:
        """The settings of a phase of the tuning; processes share the tokens of a window where windows are too few."""
        count = launch.size()
        ways = 1 if count <= phase.batch_size else count // math.gcd(count, phase.batch_size)
        return self.settings.train_config(phase, self.precision, skips=self.skips, context_parallel=ways)

    def free(self, model: Any) -> int:
        """How many key heads have no floor."""
        return extension.default_free(model) if self.settings.free is None else self.settings.free

    @cached_property
    def corpus(self) -> Corpus:
        """The corpus, refused if it has too little text to be trained and measured on, or is another tokenizer's."""
        settings, window = self.settings, self.settings.window(self.native)
        phases = settings.phases(self.native)
        tuned = () if settings.method == "plain" else phases
        with finetune.removing_refused(self.out):
            corpus = finetune.corpus_of(
                settings.model, settings.data, self.out, settings.heldout_fraction, self.progress
            )
            measures.refuse_short(corpus, max((phase.length for phase in tuned), default=window), window)
            finetune.refuse_corpus(settings.model, load_transformers(settings.model).config, corpus)
            text = WindowSource(corpus, length=window, batch_size=phases[0].batch_size)
            if tuned:
                # What the tuning would refuse.
                RecallSource(text, load_tokenizer(settings.model), settings.recall_config())
        return corpus

    def run(self) -> None:
        """Everything that is missing, in order; of several processes all tune, and the first does the rest."""
        if processes.from_first(self._prepare):
            for phase in self.settings.phases(self.native):
                self._tune(phase)
        processes.from_first(self._finish)

    def _prepare(self) -> bool:
        """Measure the model as it is and make what the tuning begins with; whether there is anything to tune."""
        if self.settings.before:
            measures.measure(self._store, BEFORE, self._measures, self.corpus, self._original)
        if self.settings.method == "plain" or (self.out / MODEL / "config.json").is_file():
            return False
        self._start()
        self._keep()
        return True

    def _finish(self) -> None:
        """Put the tuned model in its place, measure it and write the report."""
        settings, store = self.settings, self._store
        if settings.method != "plain":
            self._clear()
            tuned = partial(self._reader, str(self.out / MODEL))
            measures.measure(store, AFTER, self._measures, self.corpus, tuned, self._original)
        minutes = report.tuning_minutes([self.out / phase.folder for phase in settings.phases(self.native)])
        report.write(self.out, settings.stored() | {"native": self.native}, store.rows(), minutes)

    @cached_property
    def _store(self) -> ResultStore:
        return ResultStore(self.out / ROWS)

    def _original(self) -> TransformersReader:
        return self._reader(self.settings.model)

    @cached_property
    def _measures(self) -> Measures:
        """What is measured: lengths up to the target that held-out documents fill, and needles."""
        settings = self.settings
        doubling, length = [settings.to], min(SHORTEST_CONTEXT, settings.window(self.native))
        while length < settings.to:
            doubling.append(length)
            length *= 2
        lengths = tuple(sorted(settings.lengths or doubling))
        longest = max(document.length for document in self.corpus.documents("heldout")) - 1
        last = min(LAST, lengths[0])
        # Windows end at multiples of the tokens that are scored.
        contexts = tuple(length for length in lengths if -(-length // last) * last <= longest)
        if len(contexts) < len(lengths):
            self.progress.log(f"perplexity beyond {longest:,} tokens is left out: no held-out document is longer")
        return Measures(
            contexts=contexts, windows=settings.windows, needles=self._needles(lengths), last=last,
            generate=tuple(length for length in lengths if length in (self.native, settings.to, lengths[-1])),
            new_tokens=settings.new_tokens, prompts=settings.prompts,
        )  # fmt: skip

    def _needles(self, lengths: Sequence[int]) -> tuple[sources.Sample, ...]:
        """Samples of RULER: those that were given, or made of held-out text; lengths that take none are left out."""
        settings = self.settings
        if settings.needles is not None:
            return tuple(sample for sample in sources.read([settings.needles])[0] if sample.length in lengths)
        if not settings.samples:
            return ()
        haystack, folder = self.out / HAYSTACK, self.out / NEEDLES
        if not haystack.is_file():
            text = measures.prose(self.corpus, load_tokenizer(settings.model), _HAYSTACK_CHARACTERS)
            files.replace(haystack, text.encode())
        for length in (length for length in lengths if length >= max(SHORTEST, self.native // 2)):
            try:
                written = ruler.write(
                    folder, tasks=TASKS, lengths=(length,), tokenizer=settings.model, count=settings.samples,
                    haystack=haystack, log=self.progress.log,
                )  # fmt: skip
                list(written)
            except ValueError as error:
                self.progress.log(f"needles at {length:,} are left out: {error}")
        return tuple(sources.read([str(folder)])[0]) if folder.is_dir() else ()

    def _start(self) -> None:
        """Write the model before tuning, with all that was put into it."""
        start, settings = self.out / START, self.settings
        if (start / "config.json").is_file() or (self.out / MODEL / "config.json").is_file():
            return
        model = load_transformers(settings.model).to(self.device).eval()
        plan = self._plan(model) if settings.method == "ours" else None
        landmarks = self._landmarks(model) if settings.method == "ours" and settings.sinks else None
        torch.manual_seed(settings.seed)
        self._put_in(model.cpu(), plan, landmarks)
        if settings.method == "ours":
            center_keys(model.to(self.device), self._passages())
            model.cpu()
        model.config.gape_from = base_of(settings.model)
        finetune.save(model, settings.model, start)

    def _plan(self, model: Any) -> FloorPlan:
        """The plan of floors, stored."""
        path = self.out / PLAN
        if path.is_file():
            return FloorPlan.from_dict(files.from_json(path.read_bytes()))
        plan = self.planned(model, self._scores(model))
        self.progress.log(str(plan))
        files.replace(path, files.to_json(plan.to_dict()))
        return plan

    def planned(self, model: Any, scores: torch.Tensor) -> FloorPlan:
        """Floors for a model by the scores of its heads (L, Hk)."""
        ids = measures.passage(self.corpus, min(LOGIT_TOKENS, self.native)).to(self.device)
        return extension.floor_plan(model, scores, self.free(model), ids, **self.settings.plan)

    def _landmarks(self, model: Any) -> SinkLandmarks:
        """Landmark gates that keep sinks in view."""
        landmarks = sink_landmarks(model, self._passages())
        self.progress.log(f"sinks: kept in view by {landmarks.heads} of {landmarks.bias.numel()} key heads")
        return landmarks

    def _passages(self) -> torch.Tensor:
        """Beginnings of passages of training text (B, N), on the device."""
        length = min(SINK_TOKENS, self.settings.window(self.native))
        return measures.passages(self.corpus, SINK_TEXTS, length).to(self.device)

    def _scores(self, model: Any) -> torch.Tensor:
        """The retrieval score of every key head, on recall texts of training documents, stored."""
        path = self.out / HEADS
        if path.is_file():
            return torch.tensor(files.from_json(path.read_bytes())["score"])
        length = min(self.settings.window(self.native), self.native)
        texts = recall.samples(
            self.corpus, load_tokenizer(self.settings.model), length, SCORED_TEXTS // 3, split="train"
        )
        self.progress.log(f"heads: scored on {SCORED_TEXTS} recall texts of {length:,} tokens")
        score = head_scores(model, [(text.ids, text.source, text.answer) for text in texts])
        record = {"score": [[round(value, 6) for value in row] for row in score.tolist()], "texts": SCORED_TEXTS}
        files.replace(path, files.to_json(record))
        return torch.tensor(record["score"])

    def _keep(self) -> None:
        """Store the original's own answers to prompts, to mix into the tuning."""
        settings, path = self.settings, self.out / KEPT
        if not settings.keep or path.is_file():
            return
        self.progress.log("answers of the original to prompts of its own, to keep it what it was")
        reader = self._original()
        if self.device.type == "cuda":
            own_answers.capture_steps(reader, self.native)
        rows = own_answers.prompts_with_answers(reader, seed=settings.seed, tokens=settings.update_tokens)
        files.replace(path, json.dumps(rows).encode())

    def _clear(self) -> None:
        """Put the tuned model in its place, and remove what tuning needed."""
        phases = self.settings.phases(self.native)
        if not (self.out / MODEL / "config.json").is_file():
            (self.out / phases[-1].folder / MODEL).rename(self.out / MODEL)
        # What a resumed command would need is not needed any more, and is several times as large as the model.
        for phase in phases:
            for left in ("checkpoints", MODEL):
                shutil.rmtree(self.out / phase.folder / left, ignore_errors=True)
        shutil.rmtree(self.out / START, ignore_errors=True)

    def _tune(self, phase: Phase) -> None:
        """Tune the model in a phase, if that is not done yet."""
        settings, run = self.settings, self.out / phase.folder
        if (run / SETTINGS).is_file():
            return
        source = self.out / (START if phase.folder == SHORT else f"{SHORT}/{MODEL}")
        kept: list[list[int]] = json.loads((self.out / KEPT).read_bytes()) if settings.keep else []
        finetune.finetune(
            str(source), [str(self.corpus.directory)], run, self.train_config(phase),
            length=phase.length, batch_size=phase.batch_size, learn="all", device=str(self.device), resume="auto",
            heldout_fraction=settings.heldout_fraction, gradient_checkpointing=settings.gradient_checkpointing,
            variant=settings.method, recall=settings.recall_config(long=phase.folder == LONG),
            kept=kept, kept_share=settings.keep, lora=settings.lora,
        )  # fmt: skip

    def _reader(self, name: str) -> TransformersReader:
        return transformers_reader(name, device=self.device, low=self.low)
