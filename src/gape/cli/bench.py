"""`gape bench`: measure speed, memory and errors on this machine; rows are appended to benchmarks/data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gape.cli.lists import numbers
from gape.cli.options import INTS, NAMES, Device

if TYPE_CHECKING:
    import torch

    from gape.bench.rows import Row
    from gape.cli.console import Voice

app = typer.Typer(help="Measure speed, memory and errors here.", no_args_is_help=True, rich_markup_mode=None)

DType = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KVHeads = Annotated[int | None, typer.Option(help="Key heads; as many as query heads by default.")]
Lengths = Annotated[str, typer.Option(metavar=INTS, help="Tokens.")]
Dim = Annotated[int, typer.Option(help="Coordinates of a head.")]
Seconds = Annotated[float, typer.Option(help="Seconds for each case, about.")]
Trust = Annotated[bool, typer.Option("--trust", help="Do not run the tests first; rows say so.")]
Out = Annotated[Path | None, typer.Option(help="CSV file to append to; benchmarks/data/NAME.csv by default.")]
Save = Annotated[bool, typer.Option("--save/--no-save", help="Whether rows are kept.")]
Impl = Annotated[str | None, typer.Option(metavar=NAMES, help="What to run; see docs/benchmarks.md.")]


@app.command()
def attention(
    lengths: Lengths = "4096,16384,65536",
    dim: Dim = 64,
    dtype: DType = "bfloat16",
    tokens: Annotated[int, typer.Option(help="Tokens in all: batch times length.")] = 65536,
    heads: Heads = 16,
    kv_heads: KVHeads = None,
    impl: Impl = None,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward together, too.")] = False,
    gates: Annotated[
        str, typer.Option(help="How gates are drawn: log-normal, contracting, landmarks, trained or trained-floor.")
    ] = "log-normal",
    eps: Annotated[float, typer.Option(help="Share of its attention a query may lose; 0 skips nothing.")] = 0.0,
    errors: Annotated[bool, typer.Option("--errors/--no-errors", help="Also measure errors against float64.")] = True,
    seconds: Seconds = 1.0,
    device: Device = "auto",
    trust: Trust = False,
    out: Out = None,
    save: Save = True,
) -> None:
    """Time attention with the gated bias, and the kernels it stands beside."""
    from gape.bench import attention as bench  # noqa: PLC0415

    settings = bench.Settings(
        lengths=numbers("lengths", lengths, int, "4096,16384"), dim=dim, heads=heads, dtype=dtype,
        kv_heads=heads if kv_heads is None else kv_heads,
        tokens=tokens, impls=bench.DEFAULT if impl is None else impl.split(","), backward=backward, gates=gates,
        eps=eps, device=device_called(device), seconds=seconds, errors=errors,
    )  # fmt: skip
    shown = ("impl", "direction", "length", "ms", "tflops", "peak_mib", "tiles", "error")
    _run("attention", bench.FIELDS, bench.measure, settings, trust, out, save, shown)


@app.command()
def decode(
    lengths: Lengths = "65536,131072",
    dim: Dim = 64,
    dtype: DType = "bfloat16",
    batch: Annotated[int, typer.Option(help="Samples at once.")] = 1,
    heads: Heads = 16,
    kv_heads: KVHeads = None,
    queries: Annotated[int, typer.Option(help="New tokens per sample.")] = 1,
    impl: Impl = None,
    seconds: Seconds = 0.5,
    device: Device = "auto",
    trust: Trust = False,
    out: Out = None,
    save: Save = True,
) -> None:
    """Time a few queries against a long cache, beside the speed of memory."""
    from gape.bench import decode as bench  # noqa: PLC0415

    settings = bench.Settings(
        lengths=numbers("lengths", lengths, int, "4096,16384"), dim=dim, heads=heads, dtype=dtype,
        kv_heads=heads if kv_heads is None else kv_heads,
        batch=batch, queries=queries, impls=bench.DEFAULT if impl is None else impl.split(","),
        device=device_called(device), seconds=seconds,
    )  # fmt: skip
    shown = ("impl", "length", "batch", "ms", "gbps", "of_copy", "of_sdpa", "peak_mib", "error")
    _run("decode", bench.FIELDS, bench.measure, settings, trust, out, save, shown)


@app.command()
def prologue(
    lengths: Lengths = "4096,16384",
    dim: Dim = 64,
    dtype: DType = "bfloat16",
    tokens: Annotated[int, typer.Option(help="Tokens in all: batch times length.")] = 16384,
    heads: Heads = 16,
    kv_heads: KVHeads = None,
    impl: Impl = None,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward together, too.")] = False,
    seconds: Seconds = 0.5,
    device: Device = "auto",
    trust: Trust = False,
    out: Out = None,
    save: Save = True,
) -> None:
    """Time what makes q and k ready for attention, alone and together with it."""
    from gape.bench import prologue as bench  # noqa: PLC0415

    settings = bench.Settings(
        lengths=numbers("lengths", lengths, int, "4096,16384"), dim=dim, heads=heads, dtype=dtype,
        kv_heads=heads if kv_heads is None else kv_heads,
        tokens=tokens, impls=bench.DEFAULT if impl is None else impl.split(","), backward=backward,
        device=device_called(device), seconds=seconds,
    )  # fmt: skip
    shown = ("impl", "direction", "length", "ms", "of_copy", "of_fused_rope", "of_compiled_rope", "peak_mib", "error")
    _run("prologue", bench.FIELDS, bench.measure, settings, trust, out, save, shown)


@app.command()
def precision(
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Outputs to 8,192 keys, gradients to 2,048.")] = False,
    keep: Annotated[bool, typer.Option("--save/--no-save", help="Keep rows, redraw docs/precision.md.")] = False,
    render: Annotated[bool, typer.Option("--render", help="Only redraw the page from the stored rows.")] = False,
    trust: Trust = False,
) -> None:
    """Measure errors of every implementation against float64; leaves with 1 if one is larger than promised."""
    # Must stand before torch: some virtual CPUs advertise bfloat16 instructions and then die on them.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    from gape.bench import precision as bench  # noqa: PLC0415
    from gape.cli.console import Board, Voice  # noqa: PLC0415

    if keep and quick:
        raise ValueError("save: keeps whole tables, leave out --quick")
    if (keep or render) and not bench.PAGE.is_file():
        raise ValueError(f"save: there is no {bench.PAGE} here, expected the root of a clone")
    if render:
        bench.render_page()
        return
    voice, where = Voice(), device_called(device)
    found = []
    with Board(voice, "row") as board:
        board.show("precision", 0)
        _vouch("precision", trust, voice)
        for row in bench.measure(where.type, quick):
            found.append(row)
            voice.say(" ".join(row.get(field, "") for field in bench.FIELDS[3:]))
            board.show("precision", len(found))
    _show("error against float64", found, bench.FIELDS[3:])
    if keep:
        bench.save(found)
        bench.render_page()
    broken = bench.verdict(found)
    typer.echo(
        "\n".join(broken)
        or "outputs, dq, dk and dv within twice plain attention's error, gate gradients under 2% where promised"
    )
    if broken:
        raise typer.Exit(1)


@app.command()
def render() -> None:
    """Redraw docs/benchmarks.md from the stored rows."""
    from gape.bench import page  # noqa: PLC0415

    if not page.PAGE.is_file():
        raise ValueError(f"there is no {page.PAGE} here, expected the root of a clone")
    page.render()
    typer.echo(page.PAGE)


@app.command()
def dispatch(
    data: Annotated[Path, typer.Option(help="Directory with attention.csv, decode.csv and precision.csv.")] = Path(
        "benchmarks/data"
    ),
    out: Annotated[Path | None, typer.Option(help="File of the table; the library's own by default.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print it, write nothing.")] = False,
) -> None:
    """Write the table of impl="auto" from measured rows."""
    from gape.bench import dispatch as bench  # noqa: PLC0415
    from gape.bench.rows import load  # noqa: PLC0415
    from gape.ops.dispatch import TABLE, written  # noqa: PLC0415
    from gape.report.rows import usable  # noqa: PLC0415

    attended = data / "attention.csv"
    if not attended.is_file():
        raise ValueError(f"data: there is no {attended}; gape bench attention --backward makes it")
    others = [data / f"{name}.csv" for name in ("decode", "precision")]
    with usable([attended]):
        rules = bench.rules(load(attended), *(load(path) if path.is_file() else [] for path in others))
    if not rules:
        raise ValueError(f"data: {attended} holds no rows; gape bench attention --backward makes them")
    if show:
        typer.echo(written(rules), nl=False)
        return
    path = out or TABLE
    path.write_text(written(rules), encoding="utf-8")
    typer.echo(f"{len(rules)} rules in {path}")


def _run(
    name: str,
    fields: Sequence[str],
    measure: Callable[[Any, Row, Callable[[str], None]], Iterator[Row]],
    settings: Any,
    trust: bool,
    out: Path | None,
    save: bool,
    shown: Sequence[str],
) -> None:
    """Ask the tests, measure, keep each row as it comes, and print a table; 1 if the tests are red or nothing ran."""
    from gape.bench import rows  # noqa: PLC0415
    from gape.cli.console import Board, Voice  # noqa: PLC0415

    voice = Voice()
    path = (out or rows.DATA / f"{name}.csv") if save else None
    if path is not None:
        rows.check_columns(path, fields)
    found = []
    with Board(voice, "row") as board:
        board.show(name, 0)
        tests = _vouch(name, trust, voice)
        for row in measure(settings, rows.stamp(settings.device, tests), voice.say):
            found.append(row)
            voice.say("  ".join(f"{key} {row[key]}" for key in shown if row.get(key)))
            if path is not None:
                rows.append(path, fields, row)
            board.show(name, len(found))
    _show(name, found, shown)
    if path is not None and found:
        voice.say(f"{len(found)} rows appended to {path}")
    if not found:
        raise typer.Exit(1)


def _vouch(name: str, trust: bool, voice: Voice) -> str:
    """What rows say about the tests; leaves with 1 if they are red."""
    from gape.bench import guard  # noqa: PLC0415

    try:
        return guard.vouch(name, trust=trust)
    except guard.RedTestsError as red:
        voice.say(f"gape: {red}")
        raise typer.Exit(1) from red


def _show(name: str, found: list[Row], shown: Sequence[str]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    title = f"{name} on {found[0]['device']}" if found else name
    table = Table(*shown, title=title)
    for row in found:
        table.add_row(*(row.get(key, "") for key in shown))
    Console(width=120).print(table)


def device_called(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one."""
    import torch  # noqa: PLC0415

    from gape.utils.validation import invalid_argument  # noqa: PLC0415

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise invalid_argument("device", name, "auto, cpu, or cuda where there is a GPU")
    return torch.device(name)
