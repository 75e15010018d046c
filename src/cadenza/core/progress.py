"""What a person sees while a run goes on: bars on a terminal, plain lines elsewhere, nothing under ``--json``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress


class Bar:
    """Progress of one piece of work. ``advance`` and ``set`` are cheap enough to call every step."""

    def advance(self, steps: float = 1, **shown: Any) -> None:
        """Moves on by ``steps`` and shows ``shown`` (for example ``loss=2.31``) beside the bar."""

    def set(self, completed: float, **shown: Any) -> None:
        """Puts the bar at ``completed``, for work that resumes in the middle."""


class Progress:
    """Quiet: shows nothing. The base of the two that do, and what ``--json`` and tests use."""

    def line(self, text: str) -> None:
        """One line that stays."""

    def results(self) -> Console | None:
        """Where a stage may print what it found: stdout, or None where that belongs to one JSON object."""
        return None

    @contextmanager
    def bar(self, title: str, total: float | None = None) -> Iterator[Bar]:
        """A bar for the length of the block. ``total`` None: unknown."""
        yield Bar()


class TerminalProgress(Progress):
    """Rich bars on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: RichProgress | None = None

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def results(self) -> Console | None:
        return Console()

    @contextmanager
    def bar(self, title: str, total: float | None = None) -> Iterator[Bar]:
        outer = self._bars
        bars = outer or RichProgress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}"),
            console=self._console,
        )
        task = bars.add_task(title, total=total, shown="")
        if outer is not None:  # a bar inside a bar shares the live display; rich allows one at a time
            yield _RichBar(bars, task)
            return
        self._bars = bars
        try:
            with bars:
                yield _RichBar(bars, task)
        finally:
            self._bars = None


class _RichBar(Bar):
    def __init__(self, bars: RichProgress, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, steps: float = 1, **shown: Any) -> None:
        self._bars.advance(self._task, steps)
        self._show(shown)

    def set(self, completed: float, **shown: Any) -> None:
        self._bars.update(self._task, completed=completed)
        self._show(shown)

    def _show(self, values: dict[str, Any]) -> None:
        if values:
            self._bars.update(self._task, shown=_text(values))


class LineProgress(Progress):
    """One plain line at most every ``interval_s`` for logs and pipes, with the share done and the time left."""

    def __init__(self, stream: TextIO, interval_s: float = 10.0) -> None:
        self._stream = stream
        self._interval_s = interval_s

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def results(self) -> Console | None:
        return Console()

    @contextmanager
    def bar(self, title: str, total: float | None = None) -> Iterator[Bar]:
        yield _LineBar(self, title, total, self._interval_s)


class _LineBar(Bar):
    def __init__(self, owner: LineProgress, title: str, total: float | None, interval_s: float) -> None:
        self._owner, self._title, self._total, self._interval_s = owner, title, total, interval_s
        self._done, self._first = 0.0, 0.0  # the first: where an earlier process left it, see ``set``
        self._begins = True
        self._begun = self._printed = time.monotonic()

    def advance(self, steps: float = 1, **shown: Any) -> None:
        self._done, self._begins = self._done + steps, False
        self._print(shown)

    def set(self, completed: float, **shown: Any) -> None:
        if self._begins:
            self._first = completed
        self._done, self._begins = completed, False
        self._print(shown)

    def _print(self, shown: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._printed < self._interval_s:
            return
        self._printed = now
        of = f"/{self._total:g}" if self._total else ""
        left = ""
        if self._total and self._done > self._first:
            seconds = (now - self._begun) * (self._total - self._done) / (self._done - self._first)
            left = f", {clock(max(seconds, 0))} left"
        more = f"  {_text(shown)}" if shown else ""
        self._owner.line(
            f"{self._title}: {round(self._done, 1):g}{of}, {clock(now - self._begun)}{left}{more}"
        )


def clock(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _text(values: dict[str, Any]) -> str:
    return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())


def make_progress(quiet: bool = False, stream: TextIO | None = None) -> Progress:
    """The right one for where the text goes: stderr by default, so that stdout stays free for results."""
    if quiet:
        return Progress()
    target: TextIO = sys.stderr if stream is None else stream
    console = Console(file=target)
    return TerminalProgress(console) if console.is_terminal else LineProgress(target)
