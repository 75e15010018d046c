"""How a command fails: a user's mistake in one line, a defect of ours with its trace in a file."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cadenza.core.errors import CadenzaError, Interrupted, ResourceExhausted
from cadenza.core.extras import missing_extra
from cadenza.core.files import disk_full, is_disk_full, unusable_path
from cadenza.core.memory import is_out_of_memory, is_too_many_files, out_of_memory, too_many_files

DEFECT = 70  # EX_SOFTWARE of sysexits.h
_trace_folder: Path | None = None


def keep_traces_in(folder: Path) -> None:
    """From now on the trace of an unexpected error goes into this folder (a run's), if it exists by then."""
    global _trace_folder
    _trace_folder = folder


@contextmanager
def interruptible(what: str, mend: str) -> Iterator[None]:
    """Ctrl-C in the block becomes the one line of any other failure; typer would leave without a word."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted while {what}", mend) from error


def report(error: Exception) -> int:
    """Prints one line on stderr and returns the exit code."""
    cause = getattr(error, "cause", None)
    while isinstance(cause, Exception):  # Ray hands over an actor's error wrapped in its own
        error, cause = cause, getattr(cause, "cause", None)
    if not isinstance(error, CadenzaError) and is_disk_full(error):
        error = disk_full(getattr(error, "filename", None) or "a file")
    if not isinstance(error, ResourceExhausted) and is_out_of_memory(error):
        error = out_of_memory("this command")
    if not isinstance(error, ResourceExhausted) and is_too_many_files(error):
        error = too_many_files()
    error = missing_extra(error, "this command") or unusable_path(error) or error
    if isinstance(error, CadenzaError):
        print(f"error: {_one_line(error.cause)}; {_one_line(error.mend)}", file=sys.stderr)
        return error.exit_code
    trace = "".join(traceback.format_exception(error))
    summary = _one_line(f"{type(error).__name__}: {error}")
    try:
        path = _write_trace(trace)
    except OSError:  # no disk to write it to: the terminal is all there is
        print(trace, file=sys.stderr)
        print(f"error: unexpected {summary}; please report it with the trace above", file=sys.stderr)
    else:
        print(f"error: unexpected {summary}; please report it with the trace in {path}", file=sys.stderr)
    return DEFECT


def _write_trace(trace: str) -> Path:
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = _trace_folder if _trace_folder is not None and _trace_folder.is_dir() else None
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"{name}-", suffix=".txt", dir=folder, delete=False, encoding="utf-8"
    ) as file:
        file.write(trace)
    return Path(file.name)


def _one_line(text: str) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= 400 else line[:397] + "..."
