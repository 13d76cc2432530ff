"""Options that mean the same in every command that has them."""

from __future__ import annotations

from typing import Annotated, Any

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
Split = Annotated[str, typer.Option(help="Documents of the corpus: heldout or train.")]
Stratum = Annotated[str | None, typer.Option(help="Only documents of this stratum of the corpus.")]
Resume = Annotated[str, typer.Option(help="auto: go on with what is there. never: refuse to.")]
