"""Too little memory, or too few open files allowed, as a typed failure however it was noticed."""

from __future__ import annotations

import errno
import os
import resource
from typing import TYPE_CHECKING

from cadenza.core.errors import ResourceExhausted

if TYPE_CHECKING:
    from collections.abc import Iterator

# torch raises a plain RuntimeError with the first on Linux and with the second elsewhere.
_TEXTS = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that caused it, says that memory could not be had."""
    return any(
        isinstance(one, MemoryError)
        or (isinstance(one, OSError) and one.errno == errno.ENOMEM)
        or any(text in str(one) for text in _TEXTS)
        for one in _chain(error)
    )


def out_of_memory(what: str) -> ResourceExhausted:
    """The error for ``what`` (a stage, a service, a command) that could not get memory."""
    return ResourceExhausted(
        f"{what} ran out of memory",
        "close other programs, or lower what it holds at once: tokens_per_microbatch of a training, "
        "services.engine.slots and services.environment.sandboxes of the others",
    )


def is_too_many_files(error: BaseException | None) -> bool:
    """Whether an exception, or one that caused it, says that no more files may be opened."""
    return any(
        (isinstance(one, OSError) and one.errno in (errno.EMFILE, errno.ENFILE))
        or os.strerror(errno.EMFILE) in str(one)
        for one in _chain(error)
    )


def too_many_files() -> ResourceExhausted:
    """The error for a process that may open no more files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceExhausted(
        f"no more files may be opened (the limit of this shell is {soft})",
        "raise it with ulimit -n 4096 and run the same command again",
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
