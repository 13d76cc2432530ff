"""`gape lm forgetting`, `gape hf forgetting`, `gape niah forgetting`: what models gain and lose by forgetting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gape.cli.options import FLOATS, INTS, NAMES, Chunk, Device, numbers, precision_option

Runs = Annotated[
    list[Path],
    typer.Argument(help="Runs of gape lm or gape hf finetune, or directories of models with gates."),
]
NeedleRuns = Annotated[list[Path], typer.Argument(help="Runs of gape niah train.")]
Data = Annotated[Path | None, typer.Option(help="A corpus of the models' tokenizer.")]
Measures = Annotated[
    str | None,
    typer.Option("--measure", metavar=NAMES, help="Some of tiles, cache and perplexity; all by default."),
]
NeedleMeasures = Annotated[
    str | None,
    typer.Option("--measure", metavar=NAMES, help="Some of tiles, cache and needle; tiles,needle by default."),
]
Eps = Annotated[str, typer.Option(metavar=FLOATS, help="Share of its attention a query may lose.")]
Bounds = Annotated[
    str, typer.Option(metavar=NAMES, help="Bounds on future queries that caches evict by: weights, queries or both.")
]
Seed = Annotated[int, typer.Option(help="Which text.")]
Precision = Annotated[str, precision_option("float32, bfloat16 (autocast), bfloat16-weights (as models are served)")]


def language(
    runs: Runs,
    data: Data = None,
    measures: Measures = None,
    lengths: Annotated[str, typer.Option(metavar=INTS, help="Tokens.")] = "65536,131072",
    eps: Eps = "1e-3,1e-4",
    bounds: Bounds = "weights,queries",
    max_windows: Annotated[int, typer.Option(help="perplexity: windows per length at most.")] = 60,
    last: Annotated[int, typer.Option(help="perplexity: tokens scored at the end of each window.")] = 512,
    chunk: Chunk = 16384,
    seed: Seed = 0,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Measure models dense, skipping and forgetting: forgetting.jsonl in each. What is there is not measured again."""
    from gape.experiments.forgetting_bench import Settings  # noqa: PLC0415
    from gape.experiments.open_model import kind_of  # noqa: PLC0415

    settings = Settings(
        lengths=numbers("lengths", lengths, int, "65536,131072"), eps=numbers("eps", eps, float, "1e-3,1e-4"),
        bounds=tuple(bounds.split(",")), max_windows=max_windows, last=last, chunk=chunk,
        seed=seed,
    )  # fmt: skip
    for directory in runs:
        if kind_of(directory) == "niah":
            raise ValueError(
                f"run: got {str(directory)!r}, expected a language model; for needles: gape niah forgetting"
            )
    _measure(runs, settings, measures, device, precision, data)


def needles(
    runs: NeedleRuns,
    measures: NeedleMeasures = None,
    factors: Annotated[str, typer.Option(metavar=INTS, help="Multiples of the training length.")] = "1,2,4",
    eps: Eps = "1e-3,1e-4",
    bounds: Bounds = "weights,queries",
    samples: Annotated[int, typer.Option(help="needle: sequences per length.")] = 1000,
    chunk: Chunk = 16384,
    seed: Seed = 0,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Measure runs dense, skipping and forgetting: forgetting.jsonl in each. What is there is not measured again."""
    from gape.experiments.forgetting_bench import Settings  # noqa: PLC0415
    from gape.experiments.open_model import read_run  # noqa: PLC0415

    settings = Settings(
        factors=numbers("factors", factors, int, "1,2,4"), eps=numbers("eps", eps, float, "1e-3,1e-4"),
        bounds=tuple(bounds.split(",")), samples=samples, chunk=chunk, seed=seed,
    )  # fmt: skip
    for directory in runs:
        read_run(directory, "niah")
    _measure(runs, settings, measures, device, precision)


def _measure(
    runs: list[Path], settings: object, measures: str | None, device: str, precision: str, data: Path | None = None
) -> None:
    from gape.experiments.forgetting import measure_runs  # noqa: PLC0415
    from gape.report.forgetting import tables  # noqa: PLC0415

    names = None if measures is None else tuple(measures.split(","))
    rows = measure_runs(runs, settings, data=data, measures=names, device=device, precision=precision)  # type: ignore[arg-type]
    for table in tables(rows):
        typer.echo(f"\n{table.text()}")
