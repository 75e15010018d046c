"""Frames between host and agent: two lengths, a JSON object, a binary payload.

Layout: ``!II`` (JSON bytes, payload bytes), then the JSON (UTF-8), then the payload. Both sides use this file.
"""

from __future__ import annotations

import json
import struct
from typing import Any

HEADER = struct.Struct("!II")
MAX_JSON = 64 << 20  # bytes; a longer header can only come from a broken peer


class BrokenFrame(Exception):
    """The peer sent something that is not a frame."""


def pack(message: dict[str, Any], payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(text), len(payload)) + text + payload


class Reader:
    """Collects bytes as they arrive and yields whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Adds ``data``; returns the frames that are now complete.

        Raises:
            BrokenFrame: the header or the JSON cannot be read; the connection is of no further use.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= HEADER.size:
            text_size, payload_size = HEADER.unpack_from(self._buffer)
            if text_size > MAX_JSON:
                raise BrokenFrame(f"a header of {text_size} bytes")
            end = HEADER.size + text_size + payload_size
            if len(self._buffer) < end:
                break
            start = HEADER.size + text_size
            try:
                message = json.loads(self._buffer[HEADER.size : start])
            except ValueError as error:
                raise BrokenFrame(str(error)) from error
            if not isinstance(message, dict):
                raise BrokenFrame("the header is not an object")
            frames.append((message, bytes(self._buffer[start:end])))
            del self._buffer[:end]
        return frames
