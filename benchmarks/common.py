"""What the benchmark scripts share: options, checked sizes, tests that must pass first, and rows in CSV files."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self

import torch
import typer
from rich.console import Console
from rich.table import Table

import gape.cli
from gape.cli.options import INTS, NAMES, numbers
from gape.experiments.experiment import pick_device
from gape.utils import run_info
from gape.utils.progress import Progress
from gape.utils.timing import measure_time
from gape.utils.validation import invalid_argument, positive_number, whole

Row = dict[str, str]

#: Where rows are kept in a clone.
DATA = Path("benchmarks/data")

#: What every row begins with.
STAMP = ("device", "torch", "triton", "commit", "tests")

#: The tests of what a benchmark measures, by its name; quick ones.
TESTS = {
    "attention": ("tests/ops/test_agreement.py", "tests/ops/test_triton.py", "tests/ops/test_skipping.py"),
    "decode": ("tests/ops/test_decode.py",),
    "precision": ("tests/ops/test_agreement.py", "tests/ops/test_precision.py"),
    "generate": ("tests/hf/test_cache.py", "tests/hf/test_paged.py"),
    "explore": ("tests/explore/test_exploration.py",),
    "evict": ("tests/hf/test_cache.py", "tests/hf/test_presses.py", "tests/cache/test_eviction.py"),
}

Lengths = Annotated[str, typer.Option(metavar=INTS, help="Tokens.")]
Tokens = Annotated[int, typer.Option(help="Tokens in all: batch times length.")]
Impl = Annotated[str | None, typer.Option(metavar=NAMES, help="What to run; see docs/guide/benchmarks.md.")]
Backward = Annotated[bool, typer.Option("--backward", help="Forward and backward together, too.")]
Seconds = Annotated[float, typer.Option(help="Seconds for each case, about.")]
Trust = Annotated[bool, typer.Option("--trust", help="Do not run the tests first; rows say so.")]
Out = Annotated[Path | None, typer.Option(help="CSV file to append to; benchmarks/data/NAME.csv by default.")]
Save = Annotated[bool, typer.Option("--save/--no-save", help="Whether rows are kept.")]


def script(main: Callable[..., None]) -> None:
    """Run a function as a command, with the exit codes of `gape`."""
    # Read at the first product: some virtual CPUs advertise bfloat16 instructions and then die on them.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    gape.cli.run(app)


@contextmanager
def stopping(minutes: float) -> Iterator[None]:
    """Stop the process as SIGTERM does once so many minutes are over."""
    alarm = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


class UnavailableError(RuntimeError):
    """A candidate cannot run here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        device: where.
        impls: names of candidates.
        lengths: numbers of tokens.
        dim: head dim.
        heads, kv_heads: query heads and key heads.
        dtype: of q, k and v, by name.
        seconds: about how long each candidate is timed.

    Raises:
        ValueError: a value that cannot be; names it.
    """

    DTYPES: ClassVar = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    #: Names that `impls` may have, and those that run by default.
    KNOWN: ClassVar[Sequence[str]] = ()
    DEFAULT: ClassVar[Sequence[str]] = ()

    device: torch.device
    impls: Sequence[str]
    lengths: Sequence[int]
    dim: int
    heads: int
    kv_heads: int
    dtype: str
    seconds: float

    @classmethod
    def from_options(
        cls, *, lengths: str, impl: str | None, device: str, heads: int, kv_heads: int | None, **others: Any
    ) -> Self:
        """Settings from options as they are typed."""
        return cls(
            lengths=numbers("lengths", lengths, int, "4096,16384"), device=pick_device(device), heads=heads,
            impls=cls.DEFAULT if impl is None else impl.split(","), kv_heads=heads if kv_heads is None else kv_heads,
            **others,
        )  # fmt: skip

    def __post_init__(self) -> None:
        for length in self.lengths:
            whole("lengths", length)
        for name in ("dim", "heads", "kv_heads"):
            whole(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise invalid_argument("kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        if self.dtype not in self.DTYPES:
            raise invalid_argument("dtype", self.dtype, f"one of {list(self.DTYPES)}")
        for impl in self.impls:
            if impl not in self.KNOWN:
                raise invalid_argument("impl", impl, f"names out of {list(self.KNOWN)}")
        positive_number("seconds", self.seconds)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = self.DTYPES[self.dtype]
        return dtype


class OnDevice(Protocol):
    """Settings of any benchmark."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""


@contextmanager
def isolate(impl: str, length: int, log: Callable[[str], None]) -> Iterator[None]:
    """Let a candidate fail without ending the benchmark; `log` is called with the reason."""
    try:
        yield
    except UnavailableError as why:
        log(f"{impl} at {length:,}: skipped, {why}")
    except Exception as error:
        # Compilers and kernels of other projects fail in ways of their own, and none should end the benchmark.
        message = (str(error).strip() or "no message").splitlines()[0]
        log(f"{impl} at {length:,}: failed, {type(error).__name__}: {message}")


def benchmark(
    name: str,
    fields: Sequence[str],
    measure: Callable[[Any, Row, Callable[[str], None]], Iterator[Row]],
    settings: OnDevice,
    shown: Sequence[str],
    *,
    trust: bool,
    out: Path | None,
    save: bool,
) -> None:
    """Run the tests, measure, keep each row as it comes, and print a table; 1 if the tests fail or nothing ran."""
    path = (out or DATA / f"{name}.csv") if save else None
    if path is not None:
        check_columns(path, fields)
    log, rows = Progress().log, list[Row]()
    stamp = run_info.stamp(settings.device) | {"tests": run_tests(name, trust=trust)}
    for row in measure(settings, stamp, log):
        rows.append(row)
        log("  ".join(f"{key} {row[key]}" for key in shown if row.get(key)))
        if path is not None:
            append(path, fields, row)
    if not rows:
        raise typer.Exit(1)
    show(name, rows, shown)
    if path is not None:
        log(f"{len(rows)} rows appended to {path}")


def run_tests(name: str, *, trust: bool) -> str:
    """What rows say about the tests of a benchmark: "passed", or "trusted" where they were not run.

    Raises:
        ValueError: the tests are not here.
        Exit: with 1 where they fail.
    """
    if trust:
        return "trusted"
    missing = [path for path in TESTS[name] if not Path(path).is_file()]
    if missing:
        raise ValueError(f"trust: there is no {missing[0]} to run; start this in a clone, or pass --trust")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *TESTS[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "100"})
    if done.returncode:
        # Without pytest, stdout is empty and stderr says so.
        lines = (done.stdout or done.stderr).splitlines()[-15:]
        lines.insert(0, f"nothing was measured: tests of {name} fail (--trust goes on regardless)")
        typer.echo("\n".join(lines), err=True)
        raise typer.Exit(1)
    return "passed"


def show(name: str, rows: list[Row], shown: Sequence[str]) -> None:
    """Print a table."""
    table = Table(*shown, title=f"{name} on {rows[0]['device']}")
    for row in rows:
        table.add_row(*(row.get(key, "") for key in shown))
    Console(width=120).print(table)


def load(path: Path) -> list[Row]:
    """The rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check_columns(path: Path, fields: Sequence[str]) -> None:
    """Refuse a file whose columns are not `fields`; a missing file is fine.

    Raises:
        ValueError: its first line says other columns.
    """
    if path.exists() and path.stat().st_size:
        with path.open(newline="", encoding="utf-8") as file:
            columns = next(csv.reader(file))
        if columns != list(fields):
            raise ValueError(f"out: {path} has the columns {columns}, expected {list(fields)}; choose another file")


def append(path: Path, fields: Sequence[str], row: Row) -> None:
    """Add a row to a file, which gets its header where it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists() or not path.stat().st_size
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, restval="", lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def copy_gbps(device: torch.device) -> float:
    """GB per second, read and written together, of a plain copy of a large buffer."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure_time(lambda: target.copy_(source), device, seconds=0.3).ms / 1e6


def number(value: float | None, digits: int = 4) -> str:
    """A figure for a row, empty where there is none."""
    return "" if value is None else f"{value:.{digits}g}"
