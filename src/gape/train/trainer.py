"""The trainer: steps, and between them validation, logs, checkpoints and signals to stop."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from rich.console import Console
from torch import nn

from gape.data.windows import Batch, Source
from gape.distributed import processes
from gape.distributed.job import current_job
from gape.gates import GAPEGates
from gape.train import checkpoint
from gape.train import resume as resuming
from gape.train.config import TrainConfig
from gape.train.optimizer import build, learning_rate, named
from gape.train.run_files import NonFiniteError, RunFiles, set_newer_aside, write_dump
from gape.train.step import Updater, Window
from gape.utils import files
from gape.utils.progress import Reporter
from gape.utils.run_info import manifest
from gape.utils.signals import Interrupted, StopFlag
from gape.utils.validation import invalid_argument

Validate = Callable[[Any, int], Mapping[str, float]]
Observe = Callable[[Any, int], None]
T = TypeVar("T")
HISTORY = 100


class Trainer:
    """Trains a model in a run directory, from which an interrupted run is resumed.

    Args:
        model: called as model(ids, targets=, documents=, positions=), returns an object with `.loss`; has
            `config.to_dict()` if its config is to be stored. It stays on its device.
        config: a :class:`TrainConfig`.
        source: gives the batches, on the model's device.
        run_dir: the run's directory, made when missing.
        validate: validate(model, step) → numbers; called in eval mode without gradients, under the same autocast; what
            it draws at random leaves training alone. Its "accuracy" and "loss" decide about stopping early.
        stop: polled between steps; hand in your own to poll it in `validate` too.
        extra: stored in config.json as it is, for instance the recipe.
        console: for progress; standard error when None.
        observe: observe(model, step), called as `validate` is, at step 0 and every `observe_every` steps (0: never).
            After resuming it may be called again for a step.

    Raises:
        RankError: another process has other weights, code, settings or data.
        ValueError: for a model without anything to train, lambda_l1 with a model without landmarks, or a
            `context_parallel` that does not fit the processes or the model.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        source: Source,
        run_dir: str | PathLike[str],
        validate: Validate | None = None,
        *,
        stop: StopFlag | None = None,
        extra: Mapping[str, Any] | None = None,
        console: Console | None = None,
        observe: Observe | None = None,
        observe_every: int = 0,
    ) -> None:
        self.model: nn.Module = getattr(model, "_orig_mod", model)
        self.config, self.source, self.validate = config, source, validate
        self.run_dir = Path(run_dir)
        self.stop = StopFlag() if stop is None else stop
        self.observe, self._observe_every, self._observed = observe, observe_every, -1
        self.device = next(self.model.parameters()).device
        self.job = current_job(self.device, stop=self.stop, **config.parallel())
        # Before the model is wrapped: a sharded one has another class.
        self._identity = resuming.identity(self.model, config, source, extra)
        settings = {key: self._identity[key] for key in ("train", "model")}
        self.job.check(self.model, {"settings": settings, "data": self._identity["data"]})
        kind = self.device.type
        call = self.job.parallelize(self.model, low=config.low(kind), compiles=config.compiles(kind))
        self.optimizer = build(self.model, config)
        self.state = resuming.RunState()
        self.window = Window()
        self._updater = Updater(self.model, self.optimizer, config, self.device, self.job, call)
        self._history: deque[list[float]] = deque(maxlen=HISTORY)
        self._check_every = config.check_every or (1 if kind == "cpu" else config.log_every)
        style = config.progress if self.job.is_first else "off"
        self._reporter = Reporter(style, config.max_steps, self.run_dir.name, console)
        self._files = RunFiles(self.run_dir, self._reporter.warn, writes=self.job.is_first)
        self._saved: int | None = None
        self._first_step = 0
        self._clock = time.perf_counter()

    def run(self, resume: str | PathLike[str] = "auto") -> dict[str, Any]:
        """Train until the last step, or early after repeated perfect validation.

        Args:
            resume: "auto" resumes from the newest valid checkpoint and starts anew where there is none; "never" starts
                anew and refuses a directory with checkpoints; a path is that checkpoint of this run.

        Returns:
            What `summary.json` holds: status ("finished" or "stopped early"), step, loss, validation, tokens and the
            name of the last checkpoint.

        Raises:
            Interrupted: after SIGINT or SIGTERM; everything is saved.
            NonFiniteError: for a loss or gradient that is not finite; the weights are those of the step before.
            DiskFullError: before the start or at a checkpoint; earlier checkpoints are whole.
            LostDirectoryError: when the directory was moved or deleted meanwhile.
            CheckpointError: when there are checkpoints and none is valid.
            BusyError: when another process trains in the directory.
            ValueError: when config, model or data are not those of the checkpoint, or the directory is no run's.
        """
        if self.state.step:
            raise RuntimeError("a Trainer runs once; make another, with a new model, to resume from a checkpoint")
        self.job.from_first(lambda: resuming.refuse_foreign(self.run_dir))
        with contextlib.ExitStack() as stack:
            # First: torchrun sends SIGTERM while the processes that are left find out which one is gone.
            stack.enter_context(self.stop)
            stack.enter_context(processes.reported())
            self.job.from_first(lambda: stack.enter_context(self._files) and None)
            stack.enter_context(resuming.determinism(self.config.deterministic, self.device))
            stack.enter_context(self._reporter)
            try:
                self._open(resume)
                self._loop()
                return self._finish()
            except BaseException as error:
                self._files.note(event="stopped", step=self.state.step, why=f"{type(error).__name__}: {error}")
                raise

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.run_dir / "checkpoints"

    def _open(self, resume: str | PathLike[str]) -> None:
        chosen = resuming.shared(self.job, lambda: resuming.choose(self.checkpoints, resume, self._warn))
        keep_last = self.config.keep_last + (self.config.patience > 0)
        needed = resuming.checkpoint_bytes(self.model, self.optimizer)
        self.job.from_first(lambda: checkpoint.check_space(self.checkpoints, needed, keep_last))
        facts = resuming.facts(self.model, self.config, self.device, self.job)
        record = manifest(self.device, seed=self.config.seed, data=self._identity["data"], more=facts)
        if chosen is None:
            resuming.seed_all(self.config.seed)
            self._files.cut_log(0)
            self._files.write("manifest.json", record)
        else:
            self._restore(chosen)
        self._files.write("config.json", self._identity)
        self._files.remove(checkpoint.SUMMARY)
        self._files.note(event="started", step=self.state.step, **record)
        if self.device.type == "cuda":
            # Without the peak of earlier work in this process.
            torch.cuda.reset_peak_memory_stats(self.device)
        self.model.train()
        self._first_step, self._clock = self.state.step, time.perf_counter()

    def _restore(self, chosen: checkpoint.Checkpoint) -> None:
        resuming.refuse_changes(chosen, self._identity)
        self.state, rows = resuming.restore(chosen, self.model, self.optimizer, self.device, self.job)
        self.window.restore(rows)
        self._saved = chosen.step
        if chosen.state["device"] != self.device.type:
            self._warn(f"the run was on {chosen.state['device']} and is on {self.device.type} now: not bit for bit")
        if not self._files.cut_log(int(chosen.state["log_bytes"])):
            self._warn("log.jsonl is shorter than when the checkpoint was written; its lines from then are lost")
        self.job.from_first(lambda: set_newer_aside(self.checkpoints, chosen.step, self._warn))
        self._reporter.log(f"resumed from {chosen.path.name}")

    def _loop(self) -> None:
        every = self.config.checkpoint_every
        while True:
            if code := self.job.stop_code():
                self._save_and_stop(code)
            self._observe()
            self._validate()
            step = self.state.step
            done = step >= self.config.max_steps or self._early()
            if done or self._best_step() == step or (every and step and step % every == 0):
                self._save()
            if done:
                return
            self._step()

    def _early(self) -> bool:
        """Whether the validations so far end the run."""
        enough = 0 < self.config.stop_after_perfect <= self.state.perfect
        return enough or 0 < self.config.patience <= self.state.worse

    def _step(self) -> None:
        step, config = self.state.step + 1, self.config
        batches, tokens = self._batches(step)
        rate = learning_rate(config, step)
        self.job.seed(config.seed, step)
        self.window.add(*self._updater.step(batches, rate))
        self.state.step = step
        self.state.tokens += tokens
        if step % config.log_every == 0:
            self._write_log(rate)
        elif step % self._check_every == 0:
            self._check()
            self._reporter.update(step, f"loss {self.window.read()[-1][0]:.4f}")

    def _batches(self, step: int) -> tuple[list[Batch], int]:
        """This process's share of a step's micro-batches, and the tokens of all processes."""
        shares = [self.job.take(self.source, step, micro) for micro in range(self.config.accumulation)]
        for share in shares:
            if share.batch.ids.device != self.device:
                raise invalid_argument("source", share.batch.ids, f"batches on {self.device}, where the model is")
        return [share.batch for share in shares], sum(share.tokens for share in shares)

    def _check(self) -> None:
        """Stop with a dump if a step since the last log line was not finite; waits for the device."""
        bad = self.window.first_bad()
        if bad is None:
            return
        rows = self.window.read()
        step = self.state.step - len(rows) + 1 + bad
        loss, norm = rows[bad]
        self._remember(rows[:bad], step - 1)
        self.state.step = step - 1
        weights, amplitudes = self.job.full(checkpoint.model_tensors(self.model)[0]), self._amplitudes()
        gradients = dict(zip(named(self.optimizer), self._updater.norms.tolist(), strict=True))
        ranks, dump = self.job.bad_ranks(self._updater.own_loss), None
        if self.job.is_first:
            dump = write_dump(
                self.run_dir / "dumps", step, loss=loss, norm=norm, batches=self._batches(step)[0], model=weights,
                amplitudes=amplitudes, gradients=gradients, history=list(self._history),
            )  # fmt: skip
        where = f" (rank {', '.join(map(str, ranks))})" if ranks and self.job.size > 1 else ""
        raise NonFiniteError(step, f"the loss is {loss}{where} and the gradient's norm {norm}", dump)

    def _remember(self, rows: Sequence[Sequence[float]], last: int) -> None:
        self._history.extend([last - len(rows) + 1 + i, *row] for i, row in enumerate(rows))

    def _write_log(self, rate: float) -> None:
        self._check()
        step, rows = self.state.step, self.window.read()
        loss, norm = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        self.state.loss = loss
        record = {"loss": loss, "grad_norm": norm, "lr": rate, "tokens": self.state.tokens}
        self._files.log(event="train", step=step, **record)
        now = time.perf_counter()
        # After a resume the window begins with rows that this process did not make.
        seconds, self._clock = (now - self._clock) / min(len(rows), step - self._first_step), now
        tokens = self.state.tokens / step / max(seconds, 1e-9)
        timing: dict[str, float] = {"seconds_per_step": seconds, "tokens_per_second": tokens}
        if self.device.type == "cuda":
            timing["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        self._files.note(event="timing", step=step, **timing)
        self._reporter.update(step, f"loss {loss:.4f}  lr {rate:.1e}  {1000 * seconds:.1f} ms/step")
        self._remember(rows, step)
        self.window.restore([])

    def _observe(self) -> None:
        """Call `observe` where that is due."""
        every, step = self._observe_every, self.state.step
        if self.observe is not None and every > 0 and step % every == 0 and step != self._observed:
            self._call_apart(self.observe)
            self._observed = step

    def _validate(self) -> None:
        """Call `validate` where that is due, and record what it gives."""
        every, step = self.config.validate_every, self.state.step
        if self.validate is not None and every and step and step % every == 0 and step != self.state.validated:
            metrics, seconds = self._call_apart(self.validate)
            self._record(files.plain(dict(metrics)), seconds)

    def _call_apart(self, function: Callable[[Any, int], T]) -> tuple[T, float]:
        """Call a function of the model in eval mode, with random states restored after it; its result and seconds.

        Stop if a signal came: what it gives then may be incomplete. It is not recorded, so the resumed run repeats it.
        """
        # First, because it waits for steps that the GPU has not finished: their time is not the function's.
        self._check()
        began = time.perf_counter()
        self.model.eval()
        code: int | None = None
        try:
            random = resuming.preserved_random_states(self.device)
            with random, torch.no_grad(), self._updater.autocast(), self.job.apart(self.model):
                result = function(self.model, self.state.step)
        except Exception as error:
            if not (self.stop.requested or isinstance(error, Interrupted)):
                raise
            code = error.code if isinstance(error, Interrupted) else None
        finally:
            self.model.train()
        # Both are asked in every process.
        stopped, signalled = self.job.agree(code), self.job.stop_code()
        if stopped or signalled:
            self._save_and_stop(stopped or signalled or 143)
        seconds = time.perf_counter() - began
        self._clock += seconds
        return result, seconds

    def _record(self, metrics: dict[str, Any], seconds: float) -> None:
        state, accuracy = self.state, metrics.get("accuracy")
        state.validated, state.validation = state.step, metrics
        state.perfect = state.perfect + 1 if isinstance(accuracy, (int, float)) and accuracy >= 1.0 else 0
        if isinstance(loss := metrics.get("loss"), (int, float)):
            better = state.best is None or loss < state.best[1]
            state.best, state.worse = ((state.step, loss), 0) if better else (state.best, state.worse + 1)
        self._files.log(event="validation", step=state.step, metrics=metrics, amplitudes=self._amplitudes())
        self._files.note(event="validation", step=state.step, seconds=seconds)
        shown = "  ".join(f"{key} {v:.4f}" if isinstance(v, float) else f"{key} {v}" for key, v in metrics.items())
        self._reporter.log(f"step {state.step}: validation {shown}")

    def _amplitudes(self) -> list[list[float]]:
        """Γ of every gated layer, per head."""
        with self.job.apart(self.model):
            return [module.amplitude.tolist() for module in self.model.modules() if isinstance(module, GAPEGates)]

    def _save_and_stop(self, code: int) -> NoReturn:
        """Save and raise Interrupted, after a signal in any process."""
        self._save()
        raise Interrupted(code, f"stopped by a signal after step {self.state.step}; saved, resume goes on from there")

    def _save(self) -> None:
        if self._saved == self.state.step:
            return
        self._check()
        began = time.perf_counter()
        packed = resuming.snapshot(
            self.model,
            self.optimizer,
            self.device,
            self._identity,
            self.state,
            self.job,
            window=self.window.read(),
            log_bytes=self._files.settle_log(),
        )
        self.job.from_first(lambda: self._write_checkpoint(packed))
        self._saved = self.state.step
        self._clock += time.perf_counter() - began

    def _write_checkpoint(self, packed: Mapping[str, bytes]) -> None:
        checkpoint.save(self.checkpoints, self.state.step, packed)
        self._prune()

    def _best_step(self) -> int | None:
        return self.state.best[0] if self.state.best is not None and self.config.patience else None

    def _prune(self) -> None:
        checkpoint.prune(self.checkpoints, keep_last=self.config.keep_last, keep_step=self._best_step())

    def _finish(self) -> dict[str, Any]:
        # The process may have been killed before it deleted.
        self.job.from_first(self._prune)
        state = self.state
        summary = {
            "status": "stopped early" if self._early() else "finished",
            "step": state.step,
            "max_steps": self.config.max_steps,
            "loss": state.loss,
            "validation": state.validation,
            "best": dict(zip(("step", "loss"), state.best, strict=True)) if state.best else None,
            "tokens": state.tokens,
            "checkpoint": checkpoint.name(self._saved or 0),
        }
        self._files.write(checkpoint.SUMMARY, summary)
        self._files.note(event="ended", step=state.step, status=summary["status"])
        self._reporter.log(f"{summary['status']} at step {state.step}")
        return summary

    def _warn(self, message: str) -> None:
        if self.job.is_first:
            self._reporter.warn(f"warning: {message}")
        self._files.note(event="warning", message=message)
