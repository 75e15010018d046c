"""Process 1 of a sandbox: builds the walls around itself, then answers the host's requests one at a time.

It is the zygote's interpreter, forked, with pytest already imported. It runs no untrusted code itself: commands
are executed, and tests run in a fork of it.
"""

from __future__ import annotations

import collections
import os
import resource
import signal
import socket
from typing import Any

from . import commands, files, frames, kernel, pytest_run, rootfs, upper

READ_LIMIT = 256 << 20  # bytes of one file that the host may ask for


class HostGone(Exception):
    """The host closed the connection: end, and with process 1 the whole namespace ends."""


class Channel:
    """The connection to the host: whole frames in, whole frames out."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        self.socket.set_inheritable(False)
        self._reader = frames.Reader()
        self._queue: collections.deque[tuple[dict[str, Any], bytes]] = collections.deque()

    def fileno(self) -> int:
        """The descriptor to wait on with ``select``."""
        return self.socket.fileno()

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next request, waiting for it. A cancel that comes too late is dropped."""
        while True:
            while self._queue:
                request, payload = self._queue.popleft()
                if request.get("op") != "cancel":
                    return request, payload
            self._fill()

    def cancelled(self, number: int) -> bool:
        """Reads what is there (call when readable); True when the host gave up on request ``number``."""
        self._fill()
        return any(q.get("op") == "cancel" and q.get("id") == number for q, _ in self._queue)

    def _fill(self) -> None:
        data = self.socket.recv(1 << 18)
        if not data:
            raise HostGone
        self._queue.extend(self._reader.feed(data))

    def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Sends one message to the host."""
        self.socket.sendall(frames.pack(message, payload))


def main(fd: int, place: dict[str, Any], warm: tuple[pytest_run.Warm, pytest_run.Warm]) -> None:
    """Runs until the host goes away or the sandbox's time is up. Never returns."""
    channel = Channel(fd)
    try:
        spec, _ = channel.receive()
        upper_fd = _enclose(spec, place)
    except HostGone:
        os._exit(0)
    except OSError as error:
        channel.send({"failed": str(error), "errno": error.errno, "at": str(error.filename)})
        os._exit(1)
    env = {
        "PATH": place["path"],
        "HOME": "/tmp",
        "USER": "agent",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "GIT_EDITOR": "true",
        "EDITOR": "true",
        "VISUAL": "true",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_PAGER": "cat",
        "PAGER": "cat",
        "DEBIAN_FRONTEND": "noninteractive",
        "PIP_NO_INPUT": "1",
        "TERM": "dumb",
    } | spec["env"]
    os.environ.clear()
    os.environ.update(env)
    runner = commands.Runner(channel, (upper_fd,), spec["limits"], env)
    channel.send({"ready": True})
    try:
        while True:
            request, payload = channel.receive()
            _answer(channel, runner, warm, upper_fd, request, payload)
    except (HostGone, BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _enclose(spec: dict[str, Any], place: dict[str, Any]) -> int:
    limits = spec["limits"]
    rootfs.map_user(place["uid"], place["gid"])
    upper_fd = rootfs.build(place, spec["layers"], limits["disk_bytes"], spec["scratch"])
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    os.umask(0o022)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # /proc/1/fd and memory are closed to the code we run
    kernel.prctl(
        kernel.PR_SET_PDEATHSIG, signal.SIGKILL
    )  # after the last change of credentials, which clears it
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, spec["ttl_s"])
    return upper_fd


def _answer(channel, runner, warm, upper_fd, request, payload) -> None:
    number, op = request["id"], request["op"]
    try:
        if op == "exec":
            reply, data = runner.execute(request, payload)
        elif op == "pytest":
            reply, data = runner.test(request, warm)
        elif op == "read":
            reply, data = {}, files.read(request["path"], READ_LIMIT)
        elif op == "write":
            files.write(request["path"], payload)
            reply, data = {}, b""
        elif op == "list":
            reply, data = {"names": files.listing(request["path"])}, b""
        elif op == "remove":
            files.remove(request["path"])
            reply, data = {}, b""
        elif op == "upper":
            reply, data = _upper(upper_fd, request)
        else:
            reply, data = {"refused": f"unknown operation {op!r}"}, b""
    except files.Refused as error:
        reply, data = {"refused": str(error)}, b""
    except (RecursionError, MemoryError) as error:  # a hostile tree: thousands of levels, or more than fits
        reply, data = {"refused": f"{op}: too deep or too large ({type(error).__name__})"}, b""
    except OSError as error:
        reply = {"errno": error.errno, "message": error.strerror, "path": str(error.filename or "")}
        data = b""
    channel.send({"id": number} | reply, data)


def _upper(upper_fd: int, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    ignored = upper.IGNORED if request["ignore_caches"] else frozenset()
    found, contents = [], []
    for entry, content in upper.entries(upper_fd, ignored):
        found.append(entry | {"size": len(content)})
        contents.append(content)
    return {"entries": found}, b"".join(contents)
