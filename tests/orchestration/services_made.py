"""Small services for placements to run; in a module of their own so that another process can import them."""

from __future__ import annotations

import os
import threading

from cadenza.core.errors import MissingArtifact, SandboxUnavailable


class Adder:
    """Adds, fails, waits, and says where it lives."""

    def __init__(self, start: int) -> None:
        self.total = start
        self.event = threading.Event()

    def add(self, *values: int) -> int:
        self.total += sum(values)
        return self.total

    def fail(self) -> None:
        raise MissingArtifact("no such thing", "make one")

    def wait(self) -> bool:
        return self.event.wait(30)

    def wake(self) -> None:
        self.event.set()

    def where(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        self.event.set()


class Refuses:
    """Cannot be constructed."""

    def __init__(self) -> None:
        raise SandboxUnavailable("namespaces are refused", "allow them")

    def use(self) -> None: ...
