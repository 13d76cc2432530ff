"""Progress on standard error: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from gape.utils import heartbeat, launch

#: Where there is no terminal: seconds between two lines about a training run, and about a row of a table.
TRAINING_LINE_SECONDS, TABLE_LINE_SECONDS = 2.0, 10.0


class Reporter:
    """Shows how far one training run of `total` steps is; `style` is "bar", "plain", "off" or "auto"."""

    def __init__(self, style: str, total: int, label: str, console: Console | None = None) -> None:
        self.console = console or SteadyConsole(stderr=True)
        # A dumb terminal cannot move its cursor: rich would show nothing at all there.
        moves = self.console.is_terminal and not self.console.is_dumb_terminal
        self.style = ("bar" if moves else "plain") if style == "auto" else style
        self.total, self.label = total, label
        self._bar: Bars | None = None
        self._last = -TRAINING_LINE_SECONDS

    def __enter__(self) -> Reporter:
        if self.style == "bar":
            with _harmless():
                note, left = TextColumn("{task.fields[note]}"), TimeRemainingColumn()
                self._bar = Bars(*_columns(), note, left, console=self.console, transient=True)
                self._bar.add_task(escape(self.label), total=self.total, note="")
                self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            with _harmless():
                self._bar.stop()

    def log(self, message: str) -> None:
        """A line, unless nothing is to be shown."""
        if self.style != "off":
            self.warn(message)

    def warn(self, message: str) -> None:
        """A line that matters whatever the style."""
        with _harmless():
            self.console.print(f"{self.label}: {message}", markup=False, highlight=False, soft_wrap=True)

    def update(self, step: int, note: str) -> None:
        """Show the step that the run is at."""
        with _harmless():
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=step, note=escape(note))
            elif self.style == "plain" and (time.monotonic() - self._last >= TRAINING_LINE_SECONDS):
                self._last = time.monotonic()
                self.log(f"step {step}/{self.total}  {note}")


def _columns() -> tuple[ProgressColumn, ...]:
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()


class SteadyConsole(Console):
    """A console that falls silent when nobody reads it, and shows nothing but in the first process of a job."""

    def __init__(self, **options: Any) -> None:
        super().__init__(quiet=not launch.is_first(), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; the next heartbeat counts from here."""
        heartbeat.reset()
        super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Show nothing from here on."""
        self.quiet = True


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """A closed pipe or an odd terminal costs the display, not the run."""
    # SystemExit is what rich makes of a broken pipe; what follows one has no type to name.
    with contextlib.suppress(Exception, SystemExit):
        yield


class Progress:
    """Writes lines about a command's progress to standard error; `console` is where they go."""

    def __init__(self) -> None:
        self.console = SteadyConsole(stderr=True)

    def log(self, message: str) -> None:
        """Write a line."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)


class ProgressTable:
    """Shows how far several pieces of work are: a bar each on a terminal, a line each now and then elsewhere.

    A table inside another one adds its bars to that one's. Nothing is to be written to standard output meanwhile.
    """

    #: The innermost one that is shown.
    _open: ClassVar[ProgressTable | None] = None

    def __init__(self, progress: Progress | None = None, unit: str = "step") -> None:
        self._progress, self._unit = progress or Progress(), unit
        self._outer = ProgressTable._open
        self._bars: Bars | None = None if self._outer is None else self._outer._bars
        console = self._progress.console
        if self._outer is None and console.is_terminal and not console.is_dumb_terminal:
            self._bars = Bars(*_columns(), TimeElapsedColumn(), console=console, transient=True, refresh_per_second=2)
        self._tasks: dict[str, TaskID] = {}
        # By name: when the last line was written, and of which step.
        self._lines: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> ProgressTable:
        ProgressTable._open = self
        if self._bars is not None and self._outer is None:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        ProgressTable._open = self._outer
        for name in list(self._tasks):
            self.remove(name)
        if self._bars is not None and self._outer is None:
            self._bars.stop()

    def show(self, name: str, step: int, total: int | None = None, note: str = "") -> None:
        """Show that `step` of `total` is done, None where the total is not known; `note` says more."""
        state = f"{name}: {self._unit} {step}" + ("" if total is None else f"/{total}") + (note and f", {note}")
        heartbeat.set_state(state)
        if self._bars is not None:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(escape(name), total=total)
            description = escape(f"{name}: {note}" if note else name)
            self._bars.update(self._tasks[name], completed=step, description=description)
            return
        last, before = self._lines.setdefault(name, (time.monotonic(), 0))
        if step != before and time.monotonic() - last >= TABLE_LINE_SECONDS:
            self._lines[name] = (time.monotonic(), step)
            self._progress.log(state)

    def remove(self, name: str) -> None:
        """Take away the bar of work that is over."""
        if self._bars is not None and name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
