"""`gape analyze`: attention, gates and masks of trained language models, and their loss on text far back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gape.cli.options import INTS, NAMES, Chunk, Device, Precision, Split, Stratum, numbers

if TYPE_CHECKING:
    from gape.analysis.passages import Reader

app = typer.Typer(
    help="Analyse trained language models; results are stored in each run's directory.",
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
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Attention entropy by layer and head, the gates beside it, and how far attention reaches: entropy.json."""
    from gape.experiments import analyses  # noqa: PLC0415

    chosen = None if lengths is None else numbers("lengths", lengths, int, "1024,4096")
    reader = _reader(data, tokenizer, split, stratum)
    analyses.analyse("entropy", runs, reader, lengths=chosen, samples=samples, seed=seed, device=device)
    typer.echo(analyses.entropy_table(runs).text())


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
    from gape.experiments import analyses  # noqa: PLC0415

    reader, chosen = _reader(data, tokenizer, split, stratum), None if length is None else [length]
    analyses.analyse("spectrum", runs, reader, lengths=chosen, samples=samples, seed=seed, device=device)


def _picture(name: str, text: str) -> None:
    """Add a command that draws one layer on one passage."""

    @app.command(name, help=text)
    def picture(
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
        from gape.experiments import analyses  # noqa: PLC0415

        reader, chosen = _reader(data, tokenizer, split, stratum), None if length is None else [length]
        analyses.analyse(name, runs, reader, lengths=chosen, layer=layer, size=size, seed=seed, device=device)


_picture("maps", "Attention of a layer's heads on one passage, in cells: maps.json.")
_picture(
    "masks",
    "The paper's mask M of a layer's heads on one passage, in cells: masks.json. Runs without gates are left out.",
)


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
    from gape.experiments import analyses  # noqa: PLC0415
    from gape.tasks.far_back import FarBackConfig  # noqa: PLC0415

    config = FarBackConfig(
        context=context, distances=numbers("distances", distances, int, "1024,4096"), kinds=tuple(kinds.split(",")),
        ngram=ngram, passage=passage, documents=documents, chunk=chunk, seed=seed,
    )  # fmt: skip
    tables = analyses.far_back(
        runs, data, config, tokenizer=tokenizer, split=split, stratum=stratum, precision=precision, device=device
    )
    for table in tables:
        typer.echo(f"\n{table.text()}")


def _reader(data: Path, tokenizer: str | None, split: str, stratum: str | None) -> Reader:
    from gape.analysis.passages import Reader  # noqa: PLC0415

    return Reader(data, tokenizer=tokenizer, split=split, stratum=stratum)
