"""`gape lm perplexity` and `gape hf perplexity`: the loss of models on long text, dense, skipping or forgetting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gape.cli.options import INTS, Bounds, Device, ForgetEps, Precision, SkipEps, Split, Stratum, numbers


def add_command(app: typer.Typer, contexts: str | None, chunk: int) -> None:
    """Add the command `perplexity`, with the contexts and the chunk that are its defaults."""

    @app.command("perplexity")
    def measure(
        models: Annotated[
            list[Path],
            typer.Argument(help="Runs, or models of transformers; the first is compared with."),
        ],
        data: Annotated[Path, typer.Option(help="A corpus of the models' tokenizer.")],
        contexts: Annotated[
            str | None,
            typer.Option(metavar=INTS, help="Tokens; else powers of two from 512 to 131072 that a document fills."),
        ] = contexts,
        last: Annotated[int, typer.Option(help="Tokens scored at the end of each window.")] = 512,
        align: Annotated[int, typer.Option(help="Score only tokens behind so many; 0 all.")] = 0,
        split: Split = "heldout",
        stratum: Stratum = None,
        max_windows: Annotated[int, typer.Option(help="Windows per context at most.")] = 8000,
        seed: Annotated[int, typer.Option(help="Which windows, where there are more than --max-windows.")] = 0,
        chunk: Annotated[
            int, typer.Option(help="Tokens that go through the model at once; longer texts take a cache.")
        ] = chunk,
        skip_eps: SkipEps = 0.0,
        forget_eps: ForgetEps = 0.0,
        bounds: Bounds = "weights",
        attention: Annotated[
            str | None, typer.Option(help="attn_implementation of models of transformers, such as gape_triton.")
        ] = None,
        device: Device = "auto",
        precision: Precision = "auto",
    ) -> None:
        """Measure models at several contexts: perplexity.jsonl in each. What is there is not measured again."""
        from gape.data import open_corpus  # noqa: PLC0415
        from gape.experiments import perplexity  # noqa: PLC0415
        from gape.experiments.experiment import pick_device, wants_bfloat16  # noqa: PLC0415
        from gape.experiments.run import LanguageEvaluation  # noqa: PLC0415
        from gape.tasks.ways import Way  # noqa: PLC0415
        from gape.utils.progress import Progress  # noqa: PLC0415

        evaluation = LanguageEvaluation(
            contexts=() if contexts is None else numbers("contexts", contexts, int, "512,1024"), last=last, align=align,
            max_windows=max_windows, seed=seed, chunk=chunk,
        )  # fmt: skip
        target = pick_device(device)
        settings = perplexity.Settings(
            corpus=open_corpus(data), evaluation=evaluation, device=target, low=wants_bfloat16(precision, target),
            split=split, stratum=stratum, way=Way(skip_eps=skip_eps, forget_eps=forget_eps, bounds=bounds),
            attention=attention,
        )  # fmt: skip
        for table in perplexity.tables(perplexity.measure_models(models, settings, log=Progress().log)):
            typer.echo(f"\n{table.text()}")
