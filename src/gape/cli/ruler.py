"""`gape ruler`: samples of RULER's tasks, models scored on them, and the tables of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gape.cli.options import INTS, NAMES, Bounds, Chunk, Device, ForgetEps, SkipEps, numbers, precision_option

app = typer.Typer(help="RULER: long-context tasks.", no_args_is_help=True, rich_markup_mode=None)

Names = Annotated[str | None, typer.Option(metavar=NAMES, help="RULER's names of tasks; all by default.")]


@app.command()
def generate(
    tokenizer: Annotated[
        str, typer.Option(help="Counts the tokens: bytes, a directory, a file, or a name on the hub.")
    ],
    lengths: Annotated[
        str, typer.Option(metavar=INTS, help="Tokens of prompt and answer together, from 256 up.")
    ] = "4096,8192",
    tasks: Names = None,
    count: Annotated[int, typer.Option(help="Samples of each task and length.")] = 500,
    seed: Annotated[int, typer.Option(help="Which samples.")] = 0,
    haystack: Annotated[
        Path | None, typer.Option(help="File of text to hide needles in; else repeated sentences.")
    ] = None,
    squad: Annotated[Path | None, typer.Option(help="For qa_1: questions in SQuAD's format.")] = None,
    hotpotqa: Annotated[Path | None, typer.Option(help="For qa_2: questions in HotpotQA's format.")] = None,
    wording: Annotated[
        str, typer.Option(help="Of the prompts: own, or lm-eval for RULER's from that package.")
    ] = "own",
    out: Annotated[Path, typer.Option(help="Directory that gets TASK_LENGTH.jsonl and manifest.json.")] = Path("ruler"),
) -> None:
    """Make samples of exact length for a tokenizer, the same bytes for the same seed. Needs no network."""
    from gape.experiments.ruler import write  # noqa: PLC0415
    from gape.utils.progress import Progress, ProgressTable  # noqa: PLC0415

    questions = {name: path for name, path in (("squad", squad), ("hotpotqa", hotpotqa)) if path is not None}
    progress = Progress()
    with ProgressTable(progress, "sample") as table:
        written = write(
            out, tokenizer=tokenizer, lengths=tuple(dict.fromkeys(numbers("lengths", lengths, int, "4096,8192"))),
            tasks=None if tasks is None else tasks.split(","), count=count, seed=seed,
            haystack=haystack, questions=questions, wording=wording, show=table.show, log=progress.log,
        )  # fmt: skip
        paths = list(written)
    for path in paths:
        typer.echo(path)


@app.command("eval")
def evaluate(
    models: Annotated[list[str], typer.Argument(help="Runs of gape lm train, or models of transformers.")],
    data: Annotated[list[str], typer.Option(help="Samples: a file or a directory; may be repeated.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of a run; models of transformers have their own.")
    ] = None,
    tasks: Names = None,
    limit: Annotated[int | None, typer.Option(help="Only so many samples of each task and length.")] = None,
    template: Annotated[str, typer.Option(help="base, or chat: a turn of the model's own chat.")] = "base",
    max_length: Annotated[
        int | None, typer.Option(help="Tokens that a model may read; what its config says by default.")
    ] = None,
    generated: Annotated[
        bool, typer.Option("--generate/--no-generate", help="Also generate answers; else only score the right ones.")
    ] = True,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch of short samples.")] = 65536,
    chunk: Chunk = 16384,
    device: Device = "auto",
    precision: Annotated[
        str, precision_option("float32, bfloat16 (autocast; models of transformers are read in it)")
    ] = "auto",
    skip_eps: SkipEps = 0.0,
    forget_eps: ForgetEps = 0.0,
    bounds: Bounds = "weights",
    name: Annotated[str | None, typer.Option(help="What to call a model of transformers in tables.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of its results; runs/ruler/NAME by default.")] = None,
) -> None:
    """Score models: NLL per token of right answers, string match of generated ones. Stop and start as you like."""
    from gape.experiments.experiment import pick_device, wants_bfloat16  # noqa: PLC0415
    from gape.experiments.ruler import choose, measure  # noqa: PLC0415
    from gape.report.results import Results  # noqa: PLC0415
    from gape.report.ruler import tables  # noqa: PLC0415
    from gape.tasks.ruler.evaluation import Settings  # noqa: PLC0415
    from gape.tasks.ruler.sources import read  # noqa: PLC0415
    from gape.tasks.ways import Way  # noqa: PLC0415
    from gape.utils.progress import Progress  # noqa: PLC0415

    target = pick_device(device)
    settings = Settings(
        template=template, max_length=max_length, generate=generated,
        batch_tokens=batch_tokens, chunk=chunk,
        precision="bfloat16" if wants_bfloat16(precision, target) else "float32",
        way=Way(skip_eps=skip_eps, forget_eps=forget_eps, bounds=bounds),
    )  # fmt: skip
    samples, sources = read(data)
    samples = choose(samples, None if tasks is None else tasks.split(","), limit)
    rows = measure(
        models, samples, sources, settings, device=target, tokenizer=tokenizer, name=name, out=out, log=Progress().log
    )
    typer.echo("\n\n".join(table.text() for table in tables(Results(measured={"ruler": tuple(rows)}))))


@app.command()
def table(
    results: Annotated[list[Path], typer.Argument(help="Directories of runs, sweeps, or what eval or table wrote.")],
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Print the change of NLL against the full model.")
    ] = False,
    full: Annotated[
        str, typer.Option(help="With --ablation, the full model: POSITION or POSITION:VARIANT.")
    ] = "p-rope+gape",
    precision: Annotated[str | None, typer.Option(help="Only rows measured in float32, or in bfloat16.")] = None,
    form: Annotated[str, typer.Option("--format", help="text, markdown or latex.")] = "text",
    out: Annotated[
        Path | None, typer.Option(help="Directory for the rows and tables, which table reads again.")
    ] = None,
) -> None:
    """Print the paper's table from stored results: best bold, second underlined, differences on the same samples."""
    from gape.experiments.reporting import ruler_text  # noqa: PLC0415

    typer.echo(ruler_text(results, ablation=ablation, full=full, precision=precision, form=form, out=out))
