"""`gape forget`: what a trained model gains by forgetting, and what it loses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gape.cli.options import FLOATS, INTS, NAMES, Chunk, Device, numbers, precision_option
from gape.utils import locks

if TYPE_CHECKING:
    import torch

    from gape.analysis.passages import Reader
    from gape.experiments.experiment import Say
    from gape.experiments.forgetting_bench import Asked, Bench
    from gape.experiments.forgetting_models import Precision

app = typer.Typer(help="Forgetting, measured on trained models.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Forgetting, measured on trained models."""


@app.command()
def measure(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Runs of gape lm, gape niah or gape hf finetune, or directories of models with gates."),
    ],
    data: Annotated[Path | None, typer.Option(help="A corpus of the runs' tokenizer, for language models.")] = None,
    measures: Annotated[
        str | None,
        typer.Option(
            "--measure",
            metavar=NAMES,
            help="Some of tiles, prefill, decode, perplexity and needle; by default all but needle for language "
            "models, tiles and needle for runs of the needle task.",
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(metavar=INTS, help="Language models: tokens.")] = "65536,131072",
    factors: Annotated[
        str, typer.Option(metavar=INTS, help="Needle task: multiples of the training length.")
    ] = "1,2,4",
    eps: Annotated[str, typer.Option(metavar=FLOATS, help="Share of its attention a query may lose.")] = "1e-3,1e-4",
    bounds: Annotated[
        str, typer.Option(metavar=NAMES, help="What caches forget by: some of weights, queries and gates.")
    ] = "weights,queries",
    batches: Annotated[str, typer.Option(metavar=INTS, help="decode: samples at once.")] = "1,8",
    tokens: Annotated[int, typer.Option(help="decode: tokens after the prompt.")] = 64,
    max_windows: Annotated[int, typer.Option(help="perplexity: windows per length at most.")] = 60,
    last: Annotated[int, typer.Option(help="perplexity: tokens scored at the end of each window.")] = 512,
    samples: Annotated[int, typer.Option(help="needle: sequences per length.")] = 1000,
    chunk: Chunk = 16384,
    seconds: Annotated[float, typer.Option(help="prefill: seconds for each time, about.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Which text.")] = 0,
    device: Device = "auto",
    precision: Annotated[
        str, precision_option("float32, bfloat16 (autocast), bfloat16-weights (as models are served)")
    ] = "auto",
) -> None:
    """Measure models dense, skipping and forgetting: forgetting.jsonl in each. What is there is not measured again."""
    from gape.experiments.forgetting_bench import Asked  # noqa: PLC0415
    from gape.report.forgetting import tables  # noqa: PLC0415

    asked = Asked(
        lengths=numbers("lengths", lengths, int, "65536,131072"), factors=numbers("factors", factors, int, "1,2,4"),
        eps=numbers("eps", eps, float, "1e-3,1e-4"), bounds=tuple(bounds.split(",")),
        batches=numbers("batches", batches, int, "1,8"),
        tokens=tokens, max_windows=max_windows, last=last, samples=samples, chunk=chunk, seconds=seconds, seed=seed,
    )  # fmt: skip
    chosen = None if measures is None else tuple(measures.split(","))
    rows = _measured(runs, data, asked, chosen, device, precision)
    for table in tables(rows):
        typer.echo(f"\n{table.text()}")


def _measured(
    runs: list[Path], data: Path | None, asked: Asked, measures: tuple[str, ...] | None, device: str, precision: str
) -> list[dict[str, Any]]:
    """Measure what is missing of every run, once all of them are known to be measurable; all their rows."""
    import torch  # noqa: PLC0415

    from gape.experiments.experiment import pick_device  # noqa: PLC0415
    from gape.experiments.forgetting import MEASURES, check  # noqa: PLC0415
    from gape.experiments.forgetting_models import Precision, corpus  # noqa: PLC0415
    from gape.utils.progress import Board, Voice  # noqa: PLC0415

    voice, where, rows = Voice(), pick_device(device), []
    how, reader = Precision.asked(precision, where), corpus(runs, data)
    for directory in runs:
        check(_bench(directory, reader, asked, torch.device("cpu"), how, lambda _: None), measures)
    for directory in runs:
        with locks.locked(directory, "measured"), Board(voice, "measure") as board:
            bench = _bench(directory, reader, asked, where, how, voice.say)
            names = check(bench, measures)
            for number, name in enumerate(names):
                board.show(str(directory), number, len(names))
                MEASURES[name](bench)
            # Directories of one name are different runs.
            rows += [row | {"run": str(directory)} for row in bench.rows()]
    return rows


def _bench(
    directory: Path,
    reader: Reader | None,
    asked: Asked,
    device: torch.device,
    precision: Precision,
    say: Say,
) -> Bench:
    from gape.experiments.forgetting_bench import Bench  # noqa: PLC0415
    from gape.experiments.forgetting_models import opened  # noqa: PLC0415

    trained, subject, run = opened(directory, device, precision.weights, say)
    made = Bench(
        trained=trained, subject=subject, run=run, asked=asked, reader=reader, precision=precision, say=say
    )  # fmt: skip
    if made.kind != "lm":
        return replace(made, reader=None)
    assert reader is not None
    trained.accept(reader.tokenizer)
    return made
