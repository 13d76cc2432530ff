"""`gape explore`: what gates do to a text, in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gape.cli.options import Device
from gape.utils import files, heartbeat

if TYPE_CHECKING:
    from gape.explore.exploration import Exploration
    from gape.explore.view import View


def explore(
    model: Annotated[
        Path | None,
        typer.Argument(help="A run, or a model of transformers with gates; a small needle model by default."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A file with the text to read.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The text to read.")] = None,
    needle: Annotated[int | None, typer.Option(help="Read so many tokens with a needle among them.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text at most.")] = 16384,
    tokenizer: Annotated[
        str | None, typer.Option(help="Of a run of gape lm train: a directory with a vocabulary, or a name on the hub.")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Write the page to this file, which opens offline.")] = None,
    heads: Annotated[
        str | None,
        typer.Option(metavar="<layer.head,...>", help="With --export: heads whose maps are in full."),
    ] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    seed: Annotated[int, typer.Option(help="Which text of --needle.")] = 0,
    device: Device = "auto",
) -> None:
    """Show a text as a model's gates see it, on a page that stays on this machine."""
    if export is not None and not export.resolve().parent.is_dir():
        raise ValueError(f"export: got {str(export)!r}, expected a file in a directory that exists")
    if heads is not None and export is None:
        raise ValueError(
            f"heads: got {heads!r} without --export, expected both; a page on a server has every head in full"
        )
    if not 0 <= port < 2**16:
        raise ValueError(f"port: got {port}, expected a number from 0 to 65535")
    own = (model, text, prompt, needle)
    exploration = None
    if all(value is None for value in own):
        view = _shipped_view()
    else:
        from gape.experiments.exploring import explored  # noqa: PLC0415

        exploration = explored(
            model, text=text, prompt=prompt, needle=needle, tokens=tokens, tokenizer=tokenizer, seed=seed, device=device
        )
        view = exploration.view
    if export is None:
        _serve(view, exploration, port, browser)
    else:
        _export(view, exploration, export, heads)


def _shipped_view() -> View:
    """The view of the needle model, as the package has it; needs no torch."""
    from importlib.resources import as_file  # noqa: PLC0415
    from importlib.resources import files as resources  # noqa: PLC0415

    from gape.explore.view import View  # noqa: PLC0415

    with as_file(resources("gape.explore").joinpath("needle", "view.gz")) as path:
        return View.load(path)


def _export(view: View, exploration: Exploration | None, out: Path, heads: str | None) -> None:
    from gape.explore.export import page  # noqa: PLC0415
    from gape.explore.view import default_heads, parsed_heads  # noqa: PLC0415

    sizes = view.header["model"]
    chosen = default_heads(view.header) if heads is None else parsed_heads(heads, sizes["layers"], sizes["n_heads"])
    data = page(view, exploration, chosen).encode()
    files.replace(out, data)
    typer.echo(f"{out}: {files.size(len(data))}")


def _serve(view: View, exploration: Exploration | None, port: int, browser: bool) -> None:
    from gape.explore.server import Explorer, serve  # noqa: PLC0415

    def opened(url: str) -> None:
        typer.echo(f"{url}\nCtrl-C ends it.")
        heartbeat.set_state("serving the page")
        if browser:
            webbrowser.open(url)

    serve(Explorer(view, exploration, port), opened)
