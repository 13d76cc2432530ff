"""What forgetting is worth to a trained model: tiles visited, time of prefill, time and bytes of decoding.

Attention alone is timed on the queries and keys that the model itself makes of a text, layer by layer:

    cudnn      plain causal attention of the same width, no bias; on a CPU whatever backend there is
    split      the gated operator through dense attention, as the model runs without skipping
    triton     the operator by the kernel that skips, with eps 0 too
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gape.models.cuda_graphs import Captured, Recorder, why_not
from gape.models.gpt import GPT
from gape.models.skipping import skipping
from gape.ops import gated_attention
from gape.ops.inputs import Problem
from gape.ops.prologue import whole_rows
from gape.utils.jsonl import Record
from gape.utils.timing import measured

if TYPE_CHECKING:
    from gape.hf import LanguageModel

#: Times work on a device: the median milliseconds of a run.
Clock = Callable[[Callable[[], Any], torch.device], float]

#: Tokens that are launched before a graph is recorded, at most.
_LAUNCHED = 16


def clock(seconds: float, least: int) -> Clock:
    """Times of about so many seconds each, and at least so many runs."""
    return lambda work, device: measured(torch.no_grad()(work), device, seconds=seconds, least=least).ms


@torch.no_grad()
def tiles(problems: Sequence[Problem], eps: float) -> list[list[float]]:
    """The fraction of the visible key tiles that the kernel visits, by layer and head."""
    from gape.ops.triton import attention  # noqa: PLC0415

    return [attention.visits(problem, eps).mean(0).tolist() for problem in problems]


def attention_ms(problems: Sequence[Problem], impl: str, eps: float, clock: Clock) -> list[float]:
    """Milliseconds of each layer's attention; `impl` is one of the operator's, or "cudnn"."""
    work = _plain if impl == "cudnn" else lambda problem: _gated(problem, impl, eps)
    return [clock(work(problem), problem.q.device) for problem in problems]


def _gated(problem: Problem, impl: str, eps: float) -> Callable[[], Tensor]:
    q, k = _as_written(problem) if impl == "triton" else (problem.q, problem.k)

    def run() -> Tensor:
        return gated_attention(
            q, k, problem.v, problem.gate, problem.landmark, problem.amplitude,
            context_length=problem.context_length, scale=problem.scale, impl=impl, eps=eps,
        )  # fmt: skip

    return run


def _as_written(problem: Problem) -> tuple[Tensor, Tensor]:
    """q and k in rows as wide as the pass that makes them ready in the model writes them for the kernel, if it can."""
    content = problem.q.size(-1)
    width = whole_rows(content, problem.q.size(1), problem.v.size(-1)) or content
    return F.pad(problem.q, (0, width - content)), F.pad(problem.k, (0, width - content))


def _plain(problem: Problem) -> Callable[[], Tensor]:
    spare = problem.v.size(-1) - problem.q.size(-1)
    q, k = (F.pad(x, (0, spare)) for x in (problem.q, problem.k))
    grouped = q.size(1) != k.size(1)

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(
                q, k, problem.v, is_causal=True, scale=problem.scale, enable_gqa=grouped
            )

    return run


def prefill_ms(model: GPT | LanguageModel, ids: Tensor, eps: float, clock: Clock) -> float:
    """Milliseconds in which the whole model reads ids (B, N) and says what follows; eps 0 is the dense model."""
    with skipping(model, eps):
        return clock(lambda: model(ids, logits_to_keep=1), ids.device)


@torch.no_grad()
def decode(
    model: GPT | LanguageModel, cache: Any, ids: Tensor, tokens: int, chunk: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Record:  # fmt: skip
    """Read a prompt into a cache, then single tokens, and time those by the clock on the wall.

    Args:
        model: in eval mode.
        cache: an empty one of the model's.
        ids: (B, N): what is read; its last `tokens` come one by one.
        tokens: at least 2.
        chunk: tokens of the prompt at once.
        progress: told tokens read and tokens in all, now and then; may raise to stop.

    Returns:
        `first_ms` of the first token; `ms` of the later ones, a median, and `mean_ms`, their mean; `tokens_per_second`
        of the batch by the median; `bytes` that the cache holds after them; `texts` of the batch that differ. Where a
        graph can be recorded it takes the second half of the tokens, or all but 16 where these are more, and these
        alone count as later ones: `record_ms`, in which it is recorded, and `launched_ms` of those before, which are
        launched kernel by kernel; `unrecorded` says why none can. Of a forgetting cache also `forget_ms`, in which it
        looks through its keys after the prompt and drops some; `every`, the tokens from there to the next look;
        `looked`, the later tokens in which it looked; `lasting_ms`, what a token takes in the long run: the mean where
        it looked, else the mean and its share of a look, of the token launched behind it and of a recording.
    """
    total, prompt = ids.size(1), ids.size(1) - tokens
    for start in range(0, prompt, chunk):
        progress(start, total)
        model(ids[:, start : min(start + chunk, prompt)], cache=cache, logits_to_keep=1)
    forgotten = _forgotten(cache, ids.device)
    times, looks = list[float](), list[int]()

    def take(step: Callable[[Tensor], Any], stop: int) -> None:
        for at in range(prompt + len(times), stop):
            progress(at, total)
            times.append(_ms(partial(step, ids[:, at : at + 1]), ids.device))
            looks.append(cache.looks if forgotten else 0)

    attention = partial(model, cache=cache, logits_to_keep=1)
    few = min(tokens // 2, _LAUNCHED)
    take(attention, prompt + few)
    if _why_not(model, cache) is None and not cache.spare:
        # The next token moves keys, and no graph could be replayed behind it.
        take(attention, min(prompt + few + 1, total - 1))
    step, recorded = _recorded(model, cache, ids[:, :1], times)
    later = 1 if step is None else len(times)
    take(step or attention, total)
    # A mean, for what comes every few tokens, such as measuring queries, does not move a median.
    ms, average = median(times[later:]), mean(times[later:])
    if forgotten:
        forgotten["looked"] = sum(after > before for before, after in pairwise(looks[later - 1 :]))
        look = forgotten["forget_ms"] + recorded.get("record_ms", 0.0) + recorded.get("launched_ms", ms) - ms
        forgotten["lasting_ms"] = average + (0.0 if forgotten["looked"] else look / forgotten["every"])
    return {
        "first_ms": times[0], "ms": ms, "mean_ms": average, "tokens_per_second": ids.size(0) * 1000 / ms,
        "bytes": cache.nbytes, "texts": len(torch.unique(ids.cpu(), dim=0)), **recorded, **forgotten,
    }  # fmt: skip


def _why_not(model: GPT | LanguageModel, cache: Any) -> str | None:
    """Why no graph of the model's next token can be recorded; None where one can."""
    if isinstance(model, GPT):
        return why_not(model, cache)
    from gape.hf import captured  # noqa: PLC0415

    return captured.why_not(model, cache)


def _recorded(
    model: GPT | LanguageModel, cache: Any, ids: Tensor, launched: list[float]
) -> tuple[Recorder | None, Record]:
    """A graph of the next token (B, 1), and what it takes to record one; why there is none where none can be."""
    reason = _why_not(model, cache) or (None if cache.spare else "the next token moves keys")
    if reason is not None:
        return None, {"unrecorded": reason}
    step: Recorder
    if isinstance(model, GPT):
        step = Captured(model, cache)
    else:
        from gape import hf  # noqa: PLC0415

        step = hf.Captured(model, cache)
    # The first one compiles.
    step.record(ids)
    return step, {"record_ms": _ms(partial(step.record, ids), ids.device), "launched_ms": median(launched)}


def _forgotten(cache: Any, device: torch.device) -> Record:
    """What it takes a cache to drop what can go, and for how long that lasts; nothing of a full one."""
    if not hasattr(cache, "forget"):
        return {}
    return {"forget_ms": _ms(cache.forget, device), "every": cache.due}


def _ms(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a call, by the clock on the wall, until the device has done it."""
    _wait(device)
    begin = time.perf_counter()
    work()
    _wait(device)
    return 1000 * (time.perf_counter() - begin)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
