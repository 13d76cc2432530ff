"""`gape analyze`: what trained language models do inside, and what they make of text far back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gape.cli.options import INTS, NAMES, Chunk, Device, Precision, Split, Stratum, numbers
from gape.utils import locks

if TYPE_CHECKING:
    from gape.analysis.passages import Passages, Reader
    from gape.analysis.runs import Trained

app = typer.Typer(
    help="Look into trained language models; what is found lies in each run's directory.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Runs = Annotated[list[Path], typer.Argument(help="Directories of trained runs.")]
Data = Annotated[Path, typer.Option(help="A prepared corpus, a text file, or JSON lines with input, prompt or text.")]
Corpus = Annotated[Path, typer.Option("--data", help="A prepared corpus.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Where DATA is a file: bytes, a directory with a vocabulary, or a name on the hub.")
]
Seed = Annotated[int, typer.Option(help="Which documents and places.")]
Lengths = Annotated[
    str | None,
    typer.Option(metavar=INTS, help="Tokens; the training length by default. Prompts are read whole."),
]
Length = Annotated[int | None, typer.Option(help="Tokens; the training length by default.")]
Samples = Annotated[int, typer.Option(help="Passages that are read, of each length.")]
Layer = Annotated[int | None, typer.Option(help="Which layer, from 0; the last by default (the paper's layer 5).")]
Size = Annotated[int, typer.Option(help="Cells along each side.")]


@app.command()
def entropy(
    runs: Runs,
    data: Data,
    lengths: Lengths = None,
    samples: Samples = 10,
    tokenizer: Tokenizer = None,
    split: Split = "heldout",
    stratum: Stratum = None,
    longest: Annotated[int | None, typer.Option(help="Leave out prompts of more tokens.")] = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Attention entropy by layer and head, the gates beside it, and how far attention reaches: entropy.json."""
    from gape.analysis import lm  # noqa: PLC0415
    from gape.report.lm_tables import entropy_table  # noqa: PLC0415

    reader = _reader(data, tokenizer, split, stratum)

    def look(run: Trained, say: Callable[[str], None]) -> None:
        asked = _lengths(reader, lengths, run)
        # All of them before the first is looked at: one may be longer than every document.
        for passages in [reader.passages(length, samples, seed=seed, longest=longest) for length in asked]:
            if passages.left_out:
                say(f"{passages.left_out} prompts are empty or longer than {longest} tokens and left out")
            settings = {**_from(reader, seed), "samples": samples, "longest": longest}
            find = partial(lm.entropy, run.model, passages.items)
            _look(run, "entropy", passages, settings, find, say)

    _over(runs, reader, device, look)
    _print(runs, "entropy", entropy_table)


@app.command()
def spectrum(
    runs: Runs,
    data: Data,
    length: Length = None,
    samples: Samples = 32,
    tokenizer: Tokenizer = None,
    split: Split = "heldout",
    stratum: Stratum = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Norms of queries and keys by rotary frequency: spectrum.json. Runs whose scheme does not rotate are left out."""
    from gape.analysis import lm  # noqa: PLC0415
    from gape.analysis.spectrum import rotary  # noqa: PLC0415

    reader = _reader(data, tokenizer, split, stratum)

    def look(run: Trained, say: Callable[[str], None]) -> None:
        if rotary(next(run.model.blocks()).attention.scheme) is None:
            say(f"{run.identity['run']}: {run.identity['position']} does not rotate, so it has no spectrum")
            return
        passages = reader.passages(_length(reader, length, run), samples, seed=seed)
        find = partial(lm.spectrum, run.model, passages.items)
        _look(run, "spectrum", passages, {**_from(reader, seed), "samples": samples}, find, say)

    _over(runs, reader, device, look)


@app.command()
def maps(
    runs: Runs,
    data: Data,
    length: Length = None,
    layer: Layer = None,
    size: Size = 64,
    tokenizer: Tokenizer = None,
    split: Split = "heldout",
    stratum: Stratum = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Attention of a layer's heads on one passage, in cells: maps.json."""
    from gape.analysis import lm  # noqa: PLC0415

    reader = _reader(data, tokenizer, split, stratum)
    _over(runs, reader, device, _picture(reader, "maps", lm.maps, length, layer, size, seed))


@app.command()
def masks(
    runs: Runs,
    data: Data,
    length: Length = None,
    layer: Layer = None,
    size: Size = 64,
    tokenizer: Tokenizer = None,
    split: Split = "heldout",
    stratum: Stratum = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """The paper's mask M of a layer's heads on one passage, in cells: masks.json. Runs without gates are left out."""
    from gape.analysis import lm  # noqa: PLC0415

    reader = _reader(data, tokenizer, split, stratum)
    draw = _picture(reader, "masks", lm.masks, length, layer, size, seed)

    def look(run: Trained, say: Callable[[str], None]) -> None:
        if next(run.model.gates(), None) is None:
            say(f"{run.identity['run']}: {run.identity['position']} has no gates, so it has no mask")
            return
        draw(run, say)

    _over(runs, reader, device, look)


@app.command()
def routing(runs: Runs) -> None:
    """The routing variables at the end of training, by layer, from the routing.jsonl that training left."""
    from gape.report.lm_results import collect  # noqa: PLC0415
    from gape.report.lm_tables import routing_table  # noqa: PLC0415
    from gape.report.rows import usable  # noqa: PLC0415

    found = collect(runs).measured.get("routing", ())
    if not found:
        raise ValueError(
            f"routing: got {', '.join(map(str, runs))}, expected runs with routing.jsonl, which gape lm train writes "
            "for schemes with gates where analysis.routing_every is not 0"
        )
    with usable(runs):
        table = routing_table(found)
    typer.echo(table.text())


@app.command("far-back")
def far_back(
    runs: Runs,
    data: Corpus,
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 65536,
    distances: Annotated[
        str, typer.Option(metavar=INTS, help="Tokens; d stands for answers d to 2d tokens back.")
    ] = "512,2048,8192,32768",
    kinds: Annotated[
        str, typer.Option(metavar=NAMES, help="What comes again: some of ngram, names and planted.")
    ] = "ngram,names,planted",
    ngram: Annotated[int, typer.Option(help="Tokens of an ngram.")] = 4,
    passage: Annotated[int, typer.Option(help="Tokens of a planted passage.")] = 64,
    documents: Annotated[int, typer.Option(help="Documents at most, one window of each.")] = 100,
    tokenizer: Annotated[
        str | None, typer.Option(help="The corpus's, for names: a directory with a vocabulary, or a name on the hub.")
    ] = None,
    split: Split = "heldout",
    stratum: Stratum = None,
    precision: Precision = "auto",
    chunk: Chunk = 16384,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Loss on tokens whose answer lies far back: far_back.jsonl. Stop it and start it again as you like."""
    from gape.analysis.far_back import measure_run  # noqa: PLC0415
    from gape.experiments.experiment import asked_precision, pick_device  # noqa: PLC0415
    from gape.report.lm_tables import far_back_table  # noqa: PLC0415
    from gape.tasks.far_back import FarBackConfig  # noqa: PLC0415

    config = FarBackConfig(
        context=context, distances=numbers("distances", distances, int, "1024,4096"), kinds=tuple(kinds.split(",")),
        ngram=ngram, passage=passage, documents=documents, chunk=chunk, seed=seed,
    )  # fmt: skip
    low = asked_precision(precision, pick_device(device))
    if not data.is_dir():
        raise ValueError(f"data: got {str(data)!r}, expected a corpus that gape data prepare wrote")
    reader = _reader(data, None, split, stratum)
    assert reader.corpus is not None
    corpus, words = reader.corpus, _words(reader.corpus.tokenizer, tokenizer)
    rows: list[dict[str, Any]] = []

    def look(run: Trained, say: Callable[[str], None]) -> None:
        rows.extend(
            measure_run(
                run, corpus, config, split=split, stratum=stratum, tokenizer=words,
                precision="bfloat16" if low else "float32", say=say,
            )
        )  # fmt: skip

    _over(runs, reader, device, look)
    for table in far_back_table(rows):
        typer.echo(f"\n{table.text()}")


def _over(
    runs: list[Path], reader: Reader, device: str, look: Callable[[Trained, Callable[[str], None]], None]
) -> None:
    """Open the runs in turn and look into each; a directory that is not there is refused before the first."""
    from gape.analysis.runs import open_run  # noqa: PLC0415
    from gape.experiments.experiment import pick_device  # noqa: PLC0415
    from gape.train import checkpoint  # noqa: PLC0415
    from gape.utils.progress import Board, Voice  # noqa: PLC0415

    voice, chosen = Voice(), pick_device(device)
    for directory in runs:
        if not checkpoint.available(directory / "checkpoints"):
            raise ValueError(f"run: got {str(directory)!r}, expected a directory that gape lm train made")
    with Board(voice, "run") as board:
        for number, directory in enumerate(runs):
            board.show("looked into", number, len(runs))
            with locks.locked(directory, "measured"):
                run = open_run(directory, chosen, voice.say)
                run.accept(reader.tokenizer)
                look(run, voice.say)


def _look(
    run: Trained,
    kind: str,
    passages: Passages,
    asked: dict[str, Any],
    find: Callable[[], dict[str, Any]],
    say: Callable[[str], None],
) -> None:
    """Keep what `find` finds, unless the same was asked of the same weights before."""
    from gape.analysis.passages import lengths_of  # noqa: PLC0415
    from gape.analysis.runs import keep, kept  # noqa: PLC0415

    asked = {"data": passages.data, "fingerprint": passages.fingerprint, "length": passages.length, **asked}
    what = f"{run.identity['run']}: {kind}{'' if passages.length is None else f' at {passages.length:,} tokens'}"
    if kept(run, kind, asked):
        say(f"{what} of {passages.data} is there already")
        return
    where = {"passages": [passage.id for passage in passages.items], "tokens": lengths_of(passages.items)}
    path = keep(run, kind, asked, where | find())
    say(f"{what} of {passages.data} → {path}")


def _picture(
    reader: Reader,
    kind: str,
    make: Callable[..., dict[str, Any]],
    length: int | None,
    layer: int | None,
    size: int,
    seed: int,
) -> Callable[[Trained, Callable[[str], None]], None]:
    """Looks at one layer on one passage."""

    def look(run: Trained, say: Callable[[str], None]) -> None:
        passages = reader.passages(_length(reader, length, run), 1, seed=seed)
        chosen = run.model.config.n_layer - 1 if layer is None else layer
        asked = {**_from(reader, seed), "layer": chosen, "size": size}
        find = partial(make, run.model, passages.items[0], layer=chosen, size=size)
        _look(run, kind, passages, asked, find, say)

    return look


def _reader(data: Path, tokenizer: str | None, split: str, stratum: str | None) -> Reader:
    from gape.analysis.passages import Reader  # noqa: PLC0415

    return Reader(data, tokenizer=tokenizer, split=split, stratum=stratum)


def _from(reader: Reader, seed: int) -> dict[str, Any]:
    return {"split": reader.split, "stratum": reader.stratum, "seed": seed}


def _lengths(reader: Reader, text: str | None, run: Trained) -> tuple[int | None, ...]:
    if text is None:
        return (_length(reader, None, run),)
    return tuple(_length(reader, number, run) for number in numbers("lengths", text, int, "1024,4096"))


def _length(reader: Reader, length: int | None, run: Trained) -> int | None:
    """The training length where none is asked for; prompts have their own, and refuse any other."""
    if length is None and not reader.prompts:
        trained_at: int = run.identity["train_length"]
        return trained_at
    return length


def _words(made_with: dict[str, Any], spec: str | None) -> Any:
    """The tokenizer that was named, or the one of bytes, which needs no files."""
    from gape.data import load_tokenizer  # noqa: PLC0415

    if spec is None and made_with["kind"] != "bytes":
        return None
    return load_tokenizer(spec or "bytes")


def _print(runs: list[Path], kind: str, make: Callable[[Any], Any]) -> None:
    from gape.utils.jsonl import read_object  # noqa: PLC0415

    typer.echo(make([read_object(directory / f"{kind}.json") for directory in runs]).text())
