"""`gape ruler`: samples of RULER's tasks, models scored on them, and the tables of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gape.cli.options import INTS, NAMES, Chunk, Device, numbers, precision_option

if TYPE_CHECKING:
    from gape.report.results import Results

app = typer.Typer(help="RULER: long-context tasks.", no_args_is_help=True, rich_markup_mode=None)

Record = dict[str, Any]
TABLES = {"markdown": "tables.md", "latex": "tables.tex"}

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
    from gape.experiments.ruler import Order, write  # noqa: PLC0415
    from gape.utils.progress import Board, Voice  # noqa: PLC0415

    questions = {name: path for name, path in (("squad", squad), ("hotpotqa", hotpotqa)) if path is not None}
    each = tuple(dict.fromkeys(numbers("lengths", lengths, int, "4096,8192")))
    order = Order(
        tokenizer=tokenizer, lengths=each, tasks=_task_names(tasks), named=tasks is not None,
        count=count, seed=seed, haystack=haystack, questions=questions, wording=wording,
    )  # fmt: skip
    voice = Voice()
    with Board(voice, "sample") as board:
        paths = list(write(order, out, show=board.show, say=voice.say))
    for path in paths:
        typer.echo(path)


@app.command("eval")
def evaluate(
    models: Annotated[list[str], typer.Argument(help="Runs of gape lm train, or models of transformers.")],
    data: Annotated[
        list[str], typer.Option(help="Samples: a file, a directory or hf:DATASET[:CONFIG]; may be repeated.")
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of a run; models of transformers have their own.")
    ] = None,
    tasks: Names = None,
    task: Annotated[str | None, typer.Option(help="The task of samples that do not say it.")] = None,
    length: Annotated[int | None, typer.Option(help="The length of samples that do not say it.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only so many samples of each task and length.")] = None,
    template: Annotated[str, typer.Option(help="base, no-prefix, chat, or a text with {input} and {prefix}.")] = "base",
    overlength: Annotated[str, typer.Option(help="Samples too long for a model: error, skip or truncate.")] = "error",
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
    skip_eps: Annotated[
        float, typer.Option(help="Leave away tiles of keys that hold at most so much of a query's attention.")
    ] = 0.0,
    forget_eps: Annotated[
        float, typer.Option(help="Read through a forgetting cache: what a query may lose to keys it dropped.")
    ] = 0.0,
    bounds: Annotated[str, typer.Option(help="What the cache forgets by: weights, queries or gates.")] = "weights",
    name: Annotated[str | None, typer.Option(help="What to call a model of transformers in tables.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of its results; runs/ruler/NAME by default.")] = None,
) -> None:
    """Score models: NLL per token of right answers, string match of generated ones. Stop and start as you like."""
    from gape.experiments.experiment import asked_precision, pick_device  # noqa: PLC0415
    from gape.experiments.ruler import Asked, measure  # noqa: PLC0415
    from gape.tasks.ruler.evaluation import Settings, Way  # noqa: PLC0415
    from gape.tasks.ruler.prompts import check_template  # noqa: PLC0415
    from gape.tasks.ruler.sources import read  # noqa: PLC0415
    from gape.utils.progress import Voice  # noqa: PLC0415

    where = pick_device(device)
    low = asked_precision(precision, where)
    settings = Settings(
        template=check_template(template), overlength=overlength, max_length=max_length, generate=generated,
        batch_tokens=batch_tokens, chunk=chunk, precision="bfloat16" if low else "float32",
        way=Way(skip_eps=skip_eps, forget_eps=forget_eps, bounds=bounds),
    )  # fmt: skip
    samples, sources = read(data, task_name=task, length=length)
    asked = Asked(
        samples=_chosen(samples, tasks, limit), sources=sources, settings=settings, tokenizer=tokenizer, device=where,
        name=name, out=out,
    )  # fmt: skip
    _print(measure(models, asked, say=Voice().say))


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
    from gape.report import ruler  # noqa: PLC0415
    from gape.report.results import gather  # noqa: PLC0415
    from gape.report.tables import FORMATS  # noqa: PLC0415
    from gape.utils.stored_rows import usable  # noqa: PLC0415
    from gape.utils.validation import invalid_argument  # noqa: PLC0415

    if form not in FORMATS:
        raise invalid_argument("format", form, f"one of {', '.join(FORMATS)}")
    if precision not in (None, "float32", "bfloat16"):
        raise invalid_argument("precision", precision, "float32 or bfloat16")
    found = gather(results)
    rows = tuple(row for row in found.of("ruler") if precision in (None, row.get("precision")))
    if not rows:
        held = "no rows of gape ruler eval" if precision is None else f"no rows of gape ruler eval in {precision}"
        raise ValueError(f"results: {', '.join(map(str, results))} hold {held}")
    found = found.only(ruler=rows)
    position, _, variant = full.partition(":")
    with usable(results):
        made = ruler.ablation_tables(found, (position, variant)) if ablation else ruler.tables(found)
    if out is not None:
        _store(found, made, out)
    typer.echo("\n\n".join(FORMATS[form](one) for one in made))


def _store(found: Results, made: Sequence[Any], out: Path) -> None:
    from gape.report.results import store  # noqa: PLC0415
    from gape.report.tables import FORMATS  # noqa: PLC0415
    from gape.utils import files  # noqa: PLC0415

    store(found, out)
    for form, name in TABLES.items():
        files.replace(out / name, ("\n\n".join(FORMATS[form](one) for one in made) + "\n").encode())


def _print(found: Sequence[Record]) -> None:
    from gape.report import ruler  # noqa: PLC0415
    from gape.report.results import Results  # noqa: PLC0415

    results = Results(measured={"ruler": tuple(found)})
    typer.echo("\n\n".join(one.text() for one in ruler.tables(results)))


def _chosen(samples: Sequence[Any], tasks: str | None, limit: int | None) -> list[Any]:
    """Samples of the tasks that were asked for, the first few of each task and length.

    Raises:
        ValueError: there is none of a task.
    """
    from gape.utils.validation import whole  # noqa: PLC0415

    wanted = _task_names(tasks)
    missing = [name for name in wanted if tasks and name not in {sample.task for sample in samples}]
    if missing:
        raise ValueError(f"tasks: the data have no samples of {', '.join(missing)}")
    seen: dict[tuple[str, int], int] = {}
    kept = []
    for sample in samples:
        place = seen[sample.task, sample.length] = seen.get((sample.task, sample.length), 0) + 1
        if sample.task in wanted and (limit is None or place <= whole("limit", limit)):
            kept.append(sample)
    return kept


def _task_names(text: str | None) -> tuple[str, ...]:
    from gape.tasks.ruler.tasks import TASKS, task  # noqa: PLC0415

    return tuple(TASKS) if text is None else tuple(dict.fromkeys(task(part.strip()).name for part in text.split(",")))
