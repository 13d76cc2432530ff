"""`gape data`: turn documents into a corpus of token shards, and verify one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gape.cli.options import INTS, numbers

if TYPE_CHECKING:
    from gape.data import pipeline

app = typer.Typer(help="Corpora of tokens.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="Directory of the corpus.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(help="Files, directories, hf:DATASET[@REVISION]#FILES, or one recipe (data/fineweb)."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, a directory with a vocabulary, or a name on the Hugging Face hub.")
    ] = None,
    heldout: Annotated[list[str] | None, typer.Option(help="Inputs that are held out; may be repeated.")] = None,
    heldout_fraction: Annotated[
        float | None, typer.Option(help="Hold out this fraction of the documents, by a hash of their ids.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of that hash, a number from 0; 0 by default.")] = None,
    strata: Annotated[
        str | None, typer.Option(metavar=INTS, help="Lengths in tokens, such as 8192,16384,32768; none by default.")
    ] = None,
    text_field: Annotated[str | None, typer.Option(help="Field or column of the text; text by default.")] = None,
    id_field: Annotated[
        str | None, typer.Option(help="Field of the id; by default id where there is one, else the line.")
    ] = None,
    title_field: Annotated[str | None, typer.Option(help="Field of the title; title by default.")] = None,
    end_of_text: Annotated[
        bool | None, typer.Option(help="Put an end of text after each document, as by default.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="uint16 or uint32; by default the smaller that fits.")] = None,
    shard_tokens: Annotated[int | None, typer.Option(help="Tokens of a shard; 16,777,216 by default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to take from each input at most.")] = None,
    max_bad: Annotated[
        float | None,
        typer.Option(help="Bad and empty records let pass: a number, or a share below 1; 0.01 by default."),
    ] = None,
) -> None:
    """Tokenise documents into shards with an index, hashes and a card. Stop it and start it again as you like."""
    # What is None was not given, and stays as the recipe or the default has it.
    options = {name: value for name, value in locals().items() if name not in ("inputs", "out")}
    from gape.data.pipeline import prepare as make  # noqa: PLC0415
    from gape.utils.progress import Progress, ProgressTable  # noqa: PLC0415

    config = settings(inputs or [], {name: value for name, value in options.items() if value is not None})
    progress = Progress()
    with ProgressTable(progress, "byte") as table:

        def show(state: pipeline.Progress) -> None:
            note = f"{state.documents:,} documents, {state.tokens:,} tokens"
            table.show(str(out), state.position, state.total or None, note)

        make(config, out, progress=show, log=progress.log)
    typer.echo((out / "card.md").read_text(encoding="utf-8"))


@app.command()
def verify(directory: Annotated[Path, typer.Argument(help="A prepared corpus.")]) -> None:
    """Read a whole corpus and compare it with the hashes in its card."""
    from gape.data import open_corpus  # noqa: PLC0415
    from gape.utils.progress import ProgressTable  # noqa: PLC0415

    corpus = open_corpus(directory)
    with ProgressTable(unit="file") as table:
        corpus.verify(lambda done, total: table.show(str(directory), done, total))
    typer.echo(f"{directory}: as it was prepared, fingerprint {corpus.fingerprint()}")


def settings(inputs: list[str], options: dict[str, Any]) -> Any:
    """The settings of a recipe, where the only input names one, and of the options, which win."""
    from gape.data import config  # noqa: PLC0415
    from gape.data.config import PrepareConfig  # noqa: PLC0415

    named = [name for name in inputs if config.is_recipe(name)]
    if named and len(inputs) > 1:
        raise ValueError(f"inputs: got the recipe {named[0]} beside others, expected it alone")
    base = config.load(named[0]) if named else {"inputs": tuple(inputs)}
    if "strata" in options:
        options["strata"] = numbers("strata", options["strata"], int, "8192,16384") if options["strata"] else ()
    if "heldout" in options:
        options["heldout"] = tuple(options["heldout"])
    return PrepareConfig(**(base | options))
