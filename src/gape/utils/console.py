"""Talking to whoever started the command: results on standard output, progress on standard error."""

from __future__ import annotations

import time
from types import TracebackType
from typing import ClassVar

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gape.utils import heartbeat
from gape.utils.progress import SteadyConsole

#: Lines in a log file should be readable next morning.
SECONDS_BETWEEN_LINES = 10.0


class Voice:
    """Lines of progress on standard error; `console` is where they go."""

    def __init__(self) -> None:
        self.console = SteadyConsole(stderr=True)

    def say(self, message: str) -> None:
        """A line about how it goes."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)


class Board:
    """Where several runs are at once: a bar each on a terminal, a line each now and then elsewhere.

    A board inside another one adds its bars to that one's. Nothing is to be written to standard output meanwhile.

    Args:
        voice: whose console it is shown on.
        unit: what is counted.
    """

    #: The innermost one that is shown.
    _open: ClassVar[Board | None] = None

    def __init__(self, voice: Voice, unit: str = "step") -> None:
        self._voice, self._unit = voice, unit
        self._outer = Board._open
        self._bars: Progress | None = None if self._outer is None else self._outer._bars
        if self._outer is None and voice.console.is_terminal and not voice.console.is_dumb_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                console=voice.console, transient=True, refresh_per_second=2,
            )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> Board:
        Board._open = self
        if self._bars is not None and self._outer is None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        Board._open = self._outer
        for name in list(self._tasks):
            self.drop(name)
        if self._bars is not None and self._outer is None:
            self._bars.stop()

    def show(self, name: str, step: int, total: int | None = None) -> None:
        """A run has done `step` of `total`, None where that is not known."""
        state = f"{name}: {self._unit} {step}" + ("" if total is None else f"/{total}")
        heartbeat.note(state)
        if self._bars is not None:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(escape(name), total=total)
            self._bars.update(self._tasks[name], completed=step)
            return
        when, before = self._told.setdefault(name, (time.monotonic(), 0))
        if step != before and time.monotonic() - when >= SECONDS_BETWEEN_LINES:
            self._told[name] = (time.monotonic(), step)
            self._voice.say(state)

    def drop(self, name: str) -> None:
        """A run is over."""
        if self._bars is not None and name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
