"""Options that mean the same in every command that has them, and lists of numbers as they are typed: 4096,8192."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import typer

#: How lists show in help.
INTS, FLOATS, NAMES = "<int,...>", "<float,...>", "<name,...>"


def precision_option(known: str) -> Any:
    """The option --precision, of which a command knows these beside auto."""
    return typer.Option("--precision", "--dtype", help=f"{known}, or auto: bfloat16 on a GPU.")


DType = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KVHeads = Annotated[int | None, typer.Option(help="Key heads; as many as query heads by default.")]
Dim = Annotated[int, typer.Option(help="Coordinates of a head.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Precision = Annotated[str, precision_option("float32, bfloat16 (autocast)")]
Chunk = Annotated[int, typer.Option(help="Tokens that go through the model at once; longer texts take a cache.")]
SkipEps = Annotated[float, typer.Option(help="Skip tiles of keys that have at most so much of a query's attention.")]
ForgetEps = Annotated[float, typer.Option(help="Read through a forgetting cache: attention that a query may lose.")]
Bounds = Annotated[str, typer.Option(help="Bounds on future queries that the cache evicts by: weights or queries.")]
Split = Annotated[str, typer.Option(help="Documents of the corpus: heldout or train.")]
Stratum = Annotated[str | None, typer.Option(help="Only documents of this stratum of the corpus.")]
Resume = Annotated[str, typer.Option(help="auto: go on with what is there. never: refuse to.")]


Number = TypeVar("Number", int, float)


def numbers(name: str, text: str, kind: type[Number], such_as: str) -> tuple[Number, ...]:
    """The numbers of a text with commas, in its order; spaces around them and underscores inside them do not matter.

    Raises:
        ValueError: something in it is no number of that kind; names the option, and a list that would do.
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        expected = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{name}: got {text!r}, expected {expected} with commas, such as {such_as}") from error
