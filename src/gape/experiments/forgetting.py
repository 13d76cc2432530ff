"""What forgetting does to a trained model: tiles, time of prefill, decoding, perplexity and needles.

:mod:`gape.experiments.forgetting_bench` keeps the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache as kept_once
from functools import partial
from typing import Any, cast

import numpy as np

from gape.experiments import forgetting_timing as timing
from gape.experiments.experiment import Record
from gape.experiments.forgetting_bench import Bench, Forgetful, Way, setting
from gape.experiments.run import NeedleRun
from gape.models.gpt import GPT
from gape.models.skipping import IMPL
from gape.ops.inputs import Problem
from gape.report.results import pack_hits
from gape.tasks import niah, perplexity, perplexity_rows
from gape.utils.progress import Board, Voice
from gape.utils.validation import invalid_argument

#: What is measured of a run of each kind unless asked otherwise.
DEFAULT = {"lm": ("tiles", "prefill", "decode", "perplexity"), "niah": ("tiles", "needle")}
WHAT = {"lm": "a language model", "niah": "a run of the needle task"}
#: Measures of one kind of run only.
ONLY = {"perplexity": "lm", "needle": "niah"}


def check(bench: Bench, measures: Sequence[str] | None) -> tuple[str, ...]:
    """The measures of a model, if they can be made.

    Raises:
        ValueError: the model has no gates, or none that can be measured at these lengths, a measure is unknown or not
            one for its kind, or no text is as long as asked.
    """
    chosen = tuple(measures or DEFAULT[bench.kind])
    for name in chosen:
        if name not in MEASURES:
            raise invalid_argument("measure", name, f"some of {', '.join(MEASURES)}")
        if ONLY.get(name, bench.kind) != bench.kind:
            raise invalid_argument("measure", name, f"others for {WHAT[bench.kind]}")
    bench.subject.check(max(bench.lengths) + ("decode" in chosen) * bench.asked.tokens)
    for length in bench.lengths:
        bench.text(length, 1)
        if "decode" in chosen:
            bench.text(length + bench.asked.tokens, 1)
    return chosen


def tiles(bench: Bench) -> None:
    """Tiles visited, by layer and head."""
    for length in bench.lengths if bench.skips else ():
        layers = kept_once(partial(bench.layers, length))
        for eps in bench.asked.eps:
            about = {"kind": "tiles", "length": length, "how": "skipping", "impl": IMPL, "eps": eps}

            def make(eps: float = eps, layers: Callable[[], list[Problem]] = layers) -> Record:
                found = timing.tiles(layers(), eps)
                mean = float(np.mean([np.mean(layer) for layer in found]))
                return {"tiles": [[round(x, 5) for x in layer] for layer in found], "mean": mean}

            bench.once(about, make, lambda row: f"{row['mean']:.3f} of the tiles")


def prefill(bench: Bench) -> None:
    """Time of attention alone and of the whole model, dense and skipping."""
    for length in bench.lengths:
        _attention(bench, length)
        _whole_model(bench, length)


def _attention(bench: Bench, length: int) -> None:
    clock = _clock(bench)
    layers = kept_once(partial(bench.layers, length))
    ways = [("cudnn", 0.0), ("split", 0.0)]
    if bench.skips:
        ways += [(IMPL, eps) for eps in (0.0, *bench.asked.eps)]
    for name, eps in ways:
        about = {"kind": "prefill", "what": "attention", "length": length, "how": "skipping" if eps else "dense"}

        def make(name: str = name, eps: float = eps) -> Record:
            each = timing.attention_ms(layers(), name, eps, clock)
            return {"ms": sum(each), "layers": [round(ms, 4) for ms in each]}

        bench.once(about | {"impl": name, "eps": eps}, make, lambda row: f"{row['ms']:.3f} ms")


def _whole_model(bench: Bench, length: int) -> None:
    clock = _clock(bench)
    for eps in (0.0, *(bench.asked.eps if bench.skips else ())):
        about = {"kind": "prefill", "what": "model", "length": length, "how": "skipping" if eps else "dense"}

        def make(eps: float = eps) -> Record:
            return {"ms": timing.prefill_ms(bench.model, bench.text(length, 1), eps, clock)}

        about |= {"impl": IMPL if eps else bench.subject.impl, "eps": eps}
        bench.once(about, make, lambda row: f"{row['ms']:.3f} ms")


def _clock(bench: Bench) -> timing.Clock:
    return timing.clock(bench.asked.seconds, least=5 if bench.device.type == "cuda" else 1)


def decode(bench: Bench) -> None:
    """Tokens per second and bytes with the full cache and with forgetting ones.

    Each cache reads the prompt anew: what it has dropped by then, the later chunks did not see.
    """
    tokens, chunk = bench.asked.tokens, bench.asked.chunk
    for length in bench.lengths:
        for told, new_cache in bench.caches(length + tokens):
            for batch in bench.asked.batches:
                about = {"kind": "decode", "length": length, "batch": batch, "tokens": tokens, "chunk": chunk, **told}
                make = partial(_decoded, bench, new_cache, about)
                bench.once(about, make, _speed)


def _decoded(bench: Bench, new_cache: Callable[[], Any], about: Record) -> Record:
    tokens, batch = about["tokens"], about["batch"]
    ids, cache = bench.text(about["length"] + tokens, batch), new_cache()
    label = f"{bench.trained.identity['run']}: {setting(about)}"
    with Board(Voice(), "token") as board:
        found = timing.decode(
            bench.model, cache, ids, tokens, max(1, about["chunk"] // batch),
            lambda done, total: board.show(label, done, total),
        )  # fmt: skip
        board.drop(label)
    return found | ({"kept": cache.kept, "beyond": cache.beyond} if about["how"] == "forgetting" else {})


def _speed(row: Record) -> str:
    about = "" if row.get("looked") else "about "
    looks = f", {about}{row['lasting_ms']:.2f} with looks" if "lasting_ms" in row else ""
    return f"{row['tokens_per_second']:.1f} tokens/s ({row['ms']:.2f} ms{looks}), {row['bytes'] / 2**20:.2f} MiB"


def perplexities(bench: Bench) -> None:
    """Perplexity dense, skipping, and read through forgetting caches."""
    assert bench.reader is not None
    assert bench.reader.corpus is not None
    asked = bench.asked
    for length in bench.lengths:
        protocol = perplexity.Protocol(context=length, last=min(asked.last, length))
        plan = perplexity.plan(bench.reader.corpus, protocol, max_windows=asked.max_windows, seed=asked.seed)
        for way in bench.ways(length):
            about = {"kind": "perplexity", "length": length, "max_windows": asked.max_windows}
            about |= protocol.settings() | way.told
            make = partial(_scored, bench, plan, about, way)
            bench.once(about, make, lambda row: f"perplexity {row['perplexity']:.3f}, loss {row['nll']:.5f}")


def _scored(bench: Bench, plan: perplexity.Plan, about: Record, way: Way) -> Record:
    assert bench.reader is not None
    assert bench.reader.corpus is not None
    store = bench.trained.directory / f".forgetting-{about['how']}-{about['length']}.jsonl"
    label = f"{bench.trained.identity['run']}: {setting(about)}"
    with Board(Voice(), "window") as board, way.context():
        scored = perplexity_rows.score_all(
            cast(GPT, way.reader), bench.reader.corpus, plan, store=store,
            of=repr(sorted((bench.shared | about).items(), key=str)), chunk=about["chunk"],
            progress=lambda done, total: board.show(label, done, total),
        )  # fmt: skip
        board.drop(label)
    rows = perplexity_rows.rows(plan, scored, bench.asked.seed)
    store.unlink()
    return next((row for row in rows if row["stratum"] is None), rows[-1])


def needles(bench: Bench) -> None:
    """Accuracy on the needle task dense, skipping, and read through forgetting caches."""
    run, samples = cast(NeedleRun, bench.run), bench.asked.samples
    for factor, length in zip(bench.asked.factors, bench.lengths, strict=True):
        config = run.task.at(length)
        for way in bench.ways(length):
            about = {"kind": "needle", "length": length, "factor": factor, "samples": samples, **way.told}
            bench.once(about, partial(_answered, bench, config, way), lambda row: f"accuracy {row['accuracy']:.3f}")


def _answered(bench: Bench, config: niah.NIAHConfig, way: Way) -> Record:
    with way.context():
        right = niah.hits(way.reader, config, samples=bench.asked.samples, seed=bench.asked.seed, device=bench.device)
    held = way.reader.held if isinstance(way.reader, Forgetful) else []
    share = {"held": sum(held) / len(held)} if held else {}
    return {"accuracy": float(right.double().mean()), "hits": pack_hits(right.tolist())} | share


#: Everything that can be measured, by name.
MEASURES: dict[str, Callable[[Bench], None]] = {
    "tiles": tiles,
    "prefill": prefill,
    "decode": decode,
    "perplexity": perplexities,
    "needle": needles,
}
