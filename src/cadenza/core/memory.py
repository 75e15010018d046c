"""Too little memory, as a typed failure however it was noticed."""

from __future__ import annotations

import errno
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


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
