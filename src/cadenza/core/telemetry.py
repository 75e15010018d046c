"""Metrics as JSON lines: append-only, readable while a run goes on, whole after kill -9 up to a torn last line."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cadenza.core.errors import CorruptArtifact
from cadenza.core.files import disk_errors
from cadenza.core.types import to_plain


class Telemetry:
    """Appends one object a line. Safe from several threads and, since every line is one write, several processes.

    Args:
        path: the file; made when missing. A torn last line of an earlier process is closed off first.
        sync_s: the disk is waited for at most this often, and at ``close``.
        fields: added to every line, for example ``stage``.
    """

    def __init__(self, path: Path, sync_s: float = 1.0, **fields: Any) -> None:
        self.path = path
        self._sync_s = sync_s
        self._fields = fields
        self._lock = threading.Lock()
        self._synced = time.monotonic()
        with disk_errors(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")

    def log(self, kind: str, **values: Any) -> None:
        """Writes ``{"t": seconds since 1970, "kind": kind, ...}``. NaN and infinities become null.

        Raises:
            ResourceExhausted: disk full.
        """
        record = {"t": round(time.time(), 3), "kind": kind, **self._fields, **_finite(to_plain(values))}
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with self._lock, disk_errors(self.path):
            os.write(self._file, line)
            if time.monotonic() - self._synced >= self._sync_s:
                os.fsync(self._file)
                self._synced = time.monotonic()

    def close(self) -> None:
        """Makes what was written durable and closes the file. May be called twice."""
        with self._lock:
            if self._file >= 0:
                file, self._file = self._file, -1
                try:
                    with disk_errors(self.path):
                        os.fsync(file)
                finally:
                    os.close(file)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The records of a file, or those of one kind. Torn lines (a process was killed while writing) are passed over.

    Raises:
        CorruptArtifact: a line in the middle that is whole and still not an object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _parsed(line)
            if record is None:
                if line.strip() and line.strip().startswith(b"{"):
                    continue  # torn: closed off by the next process, or the last line
                if not line.strip():
                    continue
                raise CorruptArtifact(
                    f"line {number} of {path} is not a metrics record", "restore the file"
                ) from None
            if kind is None or record.get("kind") == kind:
                yield record


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
