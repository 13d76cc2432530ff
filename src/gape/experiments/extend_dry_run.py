"""What `gape hf extend --dry-run` says: what would be done, how long it would take here and how much memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

import gape.hf
from gape.experiments.extend_settings import SCORED_TEXTS, Phase
from gape.experiments.finetune import checkpoint_gradients
from gape.experiments.open_model import base_of, load_transformers
from gape.hf.adapters import add_lora
from gape.hf.extension import METHODS
from gape.hf.heads import sizes
from gape.utils import launch
from gape.utils.validation import invalid_argument

if TYPE_CHECKING:
    from gape.experiments.extend import Job


def describe(job: Job) -> str:
    """What would be done, how long the tuning would take here and how much memory; writes nothing.

    The time of an update is measured: one micro-batch, there and back.
    """
    settings = job.settings
    if launch.size() > 1:
        raise invalid_argument("nproc-per-node", launch.size(), "one process with --dry-run, which measures one")
    job.check()
    model = load_transformers(settings.model)
    n_parameters = sum(p.numel() for p in model.parameters())
    layers, _, n_kv_heads = sizes(model)
    lines = [
        f"model        {base_of(settings.model)}: {n_parameters:,} parameters, {job.native:,} → {settings.to:,} tokens",
        f"method       {settings.method}: {METHODS[settings.method]}",
    ]
    if settings.method == "ours":
        lines.append(
            f"heads        {job.free(model)} of {layers * n_kv_heads} key heads free, by {SCORED_TEXTS} recall texts"
        )
    if settings.method != "plain":
        lines += _tuning(model, job)
    lines.append(f"measured     perplexity and needles by length up to {settings.to:,}, generate, short answers")
    lines.append(f"written to   {job.out}: model, rows, card, page")
    return "\n".join(lines)


def _tuning(model: Any, job: Job) -> list[str]:
    """Lines on the phases of the tuning: updates, time and memory."""
    settings, total, most, parts = job.settings, 0.0, 0, []
    own = sum(p.nbytes for p in model.parameters())
    # Matrices of LoRA are small beside the weights.
    moments = 0 if settings.lora else 2 * own
    if settings.lora:
        add_lora(model, settings.lora)
    if settings.gradient_checkpointing:
        checkpoint_gradients(model)
    wrapped = gape.hf.LanguageModel(model.to(job.device).train())
    for phase in settings.phases(job.native):
        config = job.train_config(phase)
        seconds, peak = _trial(wrapped, phase, job.device, low=job.low)
        # Weights and gradients are in a GPU's peak already; the two averages are not.
        most = max(most, moments + (own + moments // 2 if peak is None else peak))
        total += seconds * config.accumulation * phase.steps
        tokens = config.accumulation * phase.batch_size * phase.length
        parts.append(f"{phase.steps} updates of {tokens:,} tokens in windows of {phase.length:,}")
    return [
        f"tuning       {', then '.join(parts)}; {settings.recall:.0%} recall texts, "
        f"{settings.keep:.0%} answers of the original",
        f"time         {total / 60:,.1f} min on {job.device}",
        f"memory       {most / 2**30:,.1f} GiB in tuning",
    ]


def _trial(model: Any, phase: Phase, device: torch.device, *, low: bool) -> tuple[float, int | None]:
    """Seconds of a micro-batch there and back, and bytes at its peak; None on a CPU."""
    ids = torch.zeros(phase.batch_size, phase.length, dtype=torch.int64, device=device)
    on_gpu, seconds = device.type == "cuda", 0.0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    # The first call compiles kernels.
    for _ in range(2 if on_gpu else 1):
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            model(ids, targets=ids).loss.backward()
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return seconds, torch.cuda.max_memory_allocated(device) if on_gpu else None
