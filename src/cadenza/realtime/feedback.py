"""What users did, as an append-only log of events in the format ``feedback/1``.

One JSON object a line. An event is written once: its id is an idempotency key, so a client that did not hear back may
send it again. A line that a crash cut in half is the last one and is passed over; anything else that cannot be read is
an error, because a lost rejection would be a reward.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from cadenza.core.config import StrictConfig
from cadenza.core.errors import CorruptArtifact
from cadenza.core.files import disk_errors

SCHEMA = "feedback/1"
Kind = Literal[
    "edit.shown", "edit.accepted", "edit.rejected", "edit.partial", "edit.modified", "edit.undone", "edit.persisted",
    "permission.allow_once", "permission.allow_always", "permission.reject_once", "permission.reject_always",
    "message.followup", "turn.interrupted", "turn.retried", "rating", "commit.linked", "pr.merged", "pr.reverted",
    "test.result", "lint.result", "session.abandoned", "tool.invalid", "question.asked",
]  # fmt: skip


class ServedPolicy(StrictConfig):
    """Who answered. ``arm``: serving or canary; ``propensity``: the chance with which this user met this arm."""

    model: str
    version: int
    digest: str = ""
    arm: str = "serving"
    propensity: float = Field(default=1.0, gt=0, le=1)


class FeedbackEvent(StrictConfig):
    """One thing a user did, or one fact about what was shown. ``trajectory_id``: the rollout it is about. ``ts`` and
    ``recv_ts``: ISO 8601, when it happened and when it arrived. ``consent``: whether it may be trained on."""

    schema_: Literal["feedback/1"] = Field(default=SCHEMA, alias="schema")
    event_id: str = Field(min_length=1)
    ts: str
    recv_ts: str
    user_hash: str
    consent: bool
    session_id: str
    turn_id: str = ""
    trajectory_id: str
    policy: ServedPolicy
    kind: Kind
    payload: dict[str, Any] = {}

    def line(self) -> str:
        return json.dumps(self.model_dump(mode="json", by_alias=True), ensure_ascii=False)


class FeedbackLog:
    """The log of one folder. Safe to append from several threads of a process; one process appends at a time."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptArtifact when what is there is no such log."""
        self.path = path
        self._lock = threading.Lock()
        self._known = {event.event_id for event in self.read()}

    def append(self, events: Iterable[FeedbackEvent]) -> int:
        """Adds those that are not there yet, on disk when this returns; how many that were.

        Raises ResourceExhausted: disk full; what was there is whole.
        """
        with self._lock:
            new = {e.event_id: e for e in events if e.event_id not in self._known}
            if new:
                with disk_errors(self.path):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    data = "".join(event.line() + "\n" for event in new.values()).encode()
                    self._write(data)
                self._known |= new.keys()
            return len(new)

    def read(self) -> list[FeedbackEvent]:
        """Every event in order of arrival, each once."""
        if not self.path.is_file():
            return []
        found: dict[str, FeedbackEvent] = {}
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):  # what comes after the last line's end was cut in half
            try:
                event = FeedbackEvent.model_validate_json(line)
            except ValidationError as error:
                reason = error.errors(include_url=False)[0]["msg"]
                raise CorruptArtifact(
                    f"line {number} of {self.path} is no event of {SCHEMA}: {reason}",
                    "restore the file, or move it away to begin a new log",
                ) from None
            found.setdefault(event.event_id, event)
        return list(found.values())

    def _write(self, data: bytes) -> None:
        with self.path.open("r+b" if self.path.exists() else "x+b") as file:
            end = file.seek(0, os.SEEK_END)
            whole = self._whole_bytes(file, end)
            file.seek(whole)
            file.truncate()
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(whole)
                raise

    @staticmethod
    def _whole_bytes(file: Any, end: int) -> int:
        """Where the last whole line ends."""
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            block = file.read(end - start)
            if b"\n" in block:
                return start + block.rindex(b"\n") + 1
            end = start
        return 0
