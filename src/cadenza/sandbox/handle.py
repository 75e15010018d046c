"""One sandbox as the host sees it: a connection to its agent, and the files it changed."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.core.errors import DeadlineExceeded
from cadenza.core.types import Snapshot
from cadenza.sandbox import probe as probing
from cadenza.sandbox.errors import NotSupported, PathRefused, SandboxGone
from cadenza.sandbox.guest import frames
from cadenza.sandbox.layers import Hold
from cadenza.sandbox.spec import ExecResult, Failure, PytestResult, SandboxSpec
from cadenza.sandbox.workdir import remove_tree

if TYPE_CHECKING:
    from cadenza.sandbox.local import LocalBackend


class _Connection(asyncio.Protocol):
    """Whole frames from the agent go to ``deliver``; the end of the connection to ``ended``."""

    def __init__(
        self, deliver: Callable[[dict[str, Any], bytes], None], ended: Callable[[str], None]
    ) -> None:
        self._reader = frames.Reader()
        self._deliver = deliver
        self._ended = ended
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for message, payload in self._reader.feed(data):
                self._deliver(message, payload)
        except (frames.BrokenFrame, LookupError, TypeError) as error:
            self._ended(f"the agent sent a broken answer ({error})")
            assert self.transport is not None
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended("the agent ended")


class Sandbox:
    """A running sandbox. Made by ``LocalBackend.create``; ends with ``destroy``, its time to live, or its backend.

    Paths are relative to ``/work``. Every operation raises SandboxGone when the sandbox has ended, and waits no
    longer than its own timeout plus the backend's ``reply_grace_s``. Operations are answered one at a time.
    """

    def __init__(
        self, backend: LocalBackend, number: int, spec: SandboxSpec, hold: Hold, scratch: Path | None
    ) -> None:
        self.id = f"{backend.name}-{number}"
        self.spec = spec
        self._backend = backend
        self._number = number
        self._hold = hold
        self._scratch = scratch
        self._requests = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._patience: dict[int, float] = {}  # seconds each unanswered request may take
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection: _Connection | None = None
        self._gone: Exception | None = None
        self._end: str | None = None  # in the words of whoever noticed first
        self._destroying: asyncio.Task[None] | None = None
        self._burial: asyncio.Future[None] | None = None

    @property
    def alive(self) -> bool:
        """False once an operation would raise SandboxGone."""
        return self._gone is None

    async def connect(self, end: socket.socket) -> None:
        """Sends the specification to the agent at the other end and waits until it is ready. For the backend."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._deliver, self._ended), sock=end
        )
        self._connection = connection
        assert connection.transport is not None
        message = {
            "layers": [os.path.abspath(layer) for layer in self.spec.layers],
            "limits": self.spec.limits.model_dump(),
            "env": dict(self.spec.env),
            "ttl_s": self.spec.ttl_s,
            "scratch": str(self._scratch) if self._scratch else None,
        }
        connection.transport.write(frames.pack(message))
        await self._ready

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "/work",
        timeout_s: float = 10.0,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Runs a program. stdin is ``/dev/null`` unless given, editors and pagers do nothing, there is no terminal.

        Ends when the program and every holder of its output have ended, or at ``timeout_s`` with what was printed
        so far; then everything it started is dead. A program that cannot be started gives rc 126 or 127.
        """
        request = {
            "op": "exec",
            "argv": list(argv),
            "cwd": cwd,
            "timeout_s": timeout_s,
            "env": dict(env or {}),
        }
        if not argv:
            raise ValueError("argv is empty")
        reply, payload = await self._ask(request, stdin, timeout_s)
        cut = reply["out"]
        return ExecResult(
            rc=reply["rc"],
            stdout=payload[:cut],
            stderr=payload[cut:],
            truncated=reply["truncated"],
            timed_out=reply["timed_out"],
            duration_s=reply["duration_s"],
            limit=reply["limit"],
        )

    async def pytest(
        self, args: Sequence[str] = (), *, timeout_s: float = 5.0, conftest: bool = False
    ) -> PytestResult:
        """Runs tests in a fork of the warm interpreter: no plug-ins, no ini files, no conftest unless asked.

        ``args``: paths and node ids below ``/work`` (none: all). Options of pytest work too, 40 ms slower.
        """
        request = {"op": "pytest", "args": list(args), "timeout_s": timeout_s, "conftest": conftest}
        reply, payload = await self._ask(request, b"", timeout_s)
        return PytestResult(
            exit_code=reply["exit_code"],
            tests=reply["tests"],
            failures=[Failure(**failure) for failure in reply["failures"]],
            output=payload.decode(errors="replace"),
            timed_out=reply["timed_out"],
            duration_s=reply["duration_s"],
            limit=reply["limit"],
        )

    async def read(self, path: str) -> bytes:
        """A file's bytes. Raises PathRefused, FileNotFoundError and the other usual OSErrors."""
        return (await self._ask({"op": "read", "path": path}))[1]

    async def write(self, path: str, data: bytes) -> None:
        """Makes or replaces a file, and the directories it needs. Raises PathRefused or an OSError (ENOSPC, EFBIG)."""
        await self._ask({"op": "write", "path": path}, data)

    async def list(self, path: str = ".") -> builtins.list[str]:
        """Every file and link below ``path``, relative to ``/work``, sorted."""
        return (await self._ask({"op": "list", "path": path}))[0]["names"]

    async def remove(self, path: str) -> None:
        """Removes a file, a link or a whole directory."""
        await self._ask({"op": "remove", "path": path})

    async def changes(self) -> dict[str, bytes | None]:
        """What differs from the layers of the specification: new or changed files as bytes, deleted ones as None.

        In a fork this includes what its ancestors had changed: the answer is always against the first layers.
        Links, special files and ``__pycache__`` are left out. A file whose content is as before is not a change.
        """
        entries = await self._upper(ignore_caches=True)
        return self._backend.changes(entries, self.spec)

    async def snapshot(self, mode: str = "filesystem") -> Snapshot:
        """Saves the files of ``/work`` for ``fork`` and ``LocalBackend.restore``; free it with ``release``.

        Raises:
            NotSupported: ``mode`` is not ``filesystem``; this backend cannot save memory.
        """
        if mode != "filesystem":
            raise NotSupported(f"backend local has no snapshots of mode {mode!r}, only 'filesystem'")
        entries = await self._upper(ignore_caches=False)
        return await self._backend.save(self.spec, entries)

    async def fork(self, n: int) -> builtins.list[Sandbox | Exception]:
        """``n`` new sandboxes with the same files; processes are not carried over. One may fail without the others."""
        snapshot = await self.snapshot()
        try:
            return await self._backend.restore(snapshot, n)
        finally:
            self._backend.release(snapshot)

    async def destroy(self) -> None:
        """Kills every process, frees every file. Idempotent; when it returns, nothing is left."""
        if self._destroying is None:
            self._destroying = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        self.lose(SandboxGone("the sandbox was destroyed"))
        await self._backend.kill(self._number)
        if self._burial is not None:
            await self._burial

    def bury(self) -> None:
        """Frees what a dead sandbox held, however it died. For the backend."""
        self.lose(SandboxGone(self._end or "the sandbox ended"))
        self._hold.release()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            self._burial = asyncio.get_running_loop().run_in_executor(None, remove_tree, scratch)

    def lose(self, why: Exception) -> None:
        """Marks the sandbox as gone and fails everything that waits for it. For the backend."""
        if self._gone is None:
            self._gone = why
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.abort()
        for waiting in (self._ready, *self._pending.values()):
            if not waiting.done():
                waiting.set_exception(self._gone)
                waiting.exception()  # nobody may be waiting any more: that is not an error
        self._pending.clear()

    def _ended(self, why: str) -> None:
        self._end = self._end or why  # the abort after a broken answer ends the connection once more
        # Before the agent is ready, the zygote knows better why it ended (the kernel refused to make it), and says
        # so over its own socket, perhaps a moment later. Its word comes in any case, and then ``bury``.
        if self._ready.done():
            self.lose(SandboxGone(why))

    def _deliver(self, message: dict[str, Any], payload: bytes) -> None:
        if "id" in message:
            waiting = self._pending.pop(message["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result((message, payload))
        elif "ready" in message:
            self._ready.set_result(None)
        elif "failed" in message:
            self.lose(probing.refusal(message["errno"], message["at"]))

    async def _ask(
        self, request: dict[str, Any], payload: bytes = b"", timeout_s: float = 30.0
    ) -> tuple[dict[str, Any], bytes]:
        if self._gone is not None:
            raise SandboxGone(str(self._gone))
        assert self._connection is not None and self._connection.transport is not None
        transport = self._connection.transport
        number = next(self._requests)
        waiting = asyncio.get_running_loop().create_future()
        self._pending[number] = waiting
        self._patience[number] = timeout_s + self._backend.config.reply_grace_s
        transport.write(frames.pack({"id": number} | request, payload))
        try:
            # Requests are answered in order, so that those before this one add their share to the wait.
            async with asyncio.timeout(sum(self._patience.values())):
                reply, data = await waiting
        except asyncio.CancelledError:
            transport.write(frames.pack({"op": "cancel", "id": number}))
            raise
        except TimeoutError:
            transport.write(frames.pack({"op": "cancel", "id": number}))
            raise DeadlineExceeded(
                f"the agent did not answer {request['op']}", "destroy the sandbox"
            ) from None
        finally:
            self._pending.pop(number, None)
            self._patience.pop(number, None)
        if "refused" in reply:
            raise PathRefused(reply["refused"])
        if "errno" in reply:
            raise OSError(reply["errno"], reply["message"], reply["path"])
        return reply, data

    async def _upper(self, ignore_caches: bool) -> builtins.list[tuple[dict[str, Any], bytes]]:
        reply, data = await self._ask({"op": "upper", "ignore_caches": ignore_caches})
        found, at = [], 0
        for entry in reply["entries"]:
            found.append((entry, data[at : at + entry["size"]]))
            at += entry["size"]
        return found
