"""Output of unknown length in constant memory: the head and the tail stay, the middle is counted."""

from __future__ import annotations


class HeadTail:
    """Keeps the first and the last ``limit // 2`` bytes of what is fed to it."""

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self._seen = 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes."""
        self._seen += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 4 * self._half:  # trimmed rarely, so that the cost stays linear
                del self._tail[: -self._half]

    @property
    def truncated(self) -> bool:
        """Whether anything was left out."""
        return self._seen > 2 * self._half

    def value(self) -> bytes:
        """All of it, or head, a line ``... N bytes elided ...``, tail."""
        if not self.truncated:
            return bytes(self._head + self._tail)
        elided = self._seen - 2 * self._half
        return bytes(self._head) + b"\n... %d bytes elided ...\n" % elided + bytes(self._tail[-self._half :])
