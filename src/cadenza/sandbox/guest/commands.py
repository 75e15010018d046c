"""Running untrusted code: start it, collect bounded output, and at the deadline leave nothing of it alive."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

from . import kernel, pytest_run
from .bounded import HeadTail

if TYPE_CHECKING:
    from .agent import Channel

CHUNK = 1 << 16
REPORT_LIMIT = 64 << 20  # bytes of one test run's report
WATCH_S = 0.1  # how often a running command's processes and memory are looked at
DYING_S = 10.0  # that killed processes are waited for
PAGE = resource.getpagesize()


class Runner:
    """Starts one command or test run at a time and watches it until it has ended or must be ended."""

    def __init__(
        self, channel: Channel, private: tuple[int, ...], limits: dict[str, Any], env: dict[str, str]
    ):
        self._channel = channel
        self._private = private  # descriptors that no test process may inherit
        self._limits = limits
        self._env = env
        self._elders: frozenset[int] = (
            frozenset()
        )  # processes left behind by earlier commands, which may live on
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._wake_write = wake_write

    def execute(self, request: dict[str, Any], stdin: bytes) -> tuple[dict[str, Any], bytes]:
        """Runs ``argv``. The reply's payload is stdout followed by stderr."""
        started = time.monotonic()
        out, err = HeadTail(self._limits["output_bytes"]), HeadTail(self._limits["output_bytes"])
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        try:
            process = self._spawn(request, stdin, out_write, err_write)
        except OSError as error:
            for fd in (out_read, err_read):
                os.close(fd)
            rc = 127 if isinstance(error, FileNotFoundError) else 126
            text = f"{error.filename or request['argv'][0]}: {error.strerror}\n".encode()
            return _reply(rc, b"", text, time.monotonic() - started)
        finally:
            os.close(out_write)
            os.close(err_write)
        watch = _Watch(process.pid, {out_read: out, err_read: err}, started + request["timeout_s"])
        self._follow(watch, request["id"])
        process.returncode = watch.rc  # it was reaped by us
        reply, payload = _reply(watch.rc, out.value(), err.value(), time.monotonic() - started)
        reply |= {
            "truncated": out.truncated or err.truncated,
            "timed_out": watch.timed_out,
            "limit": watch.limit,
        }
        return reply, payload

    def _spawn(self, request: dict[str, Any], stdin: bytes, out: int, err: int) -> subprocess.Popen:
        source = os.memfd_create("stdin") if stdin else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if stdin:
                view = memoryview(stdin)
                while view:
                    view = view[os.write(source, view) :]
                os.lseek(source, 0, os.SEEK_SET)
            process = subprocess.Popen(
                request["argv"],
                stdin=source,
                stdout=out,
                stderr=err,
                cwd=request["cwd"],
                env=self._env | request["env"],
                start_new_session=True,
                close_fds=False,  # everything of ours is close-on-exec
            )
        finally:
            os.close(source)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (self._limits["cpu_s"],) * 2)
        return process

    def test(
        self, request: dict[str, Any], warm: tuple[pytest_run.Warm, pytest_run.Warm]
    ) -> tuple[dict[str, Any], bytes]:
        """Forks the warm interpreter and runs pytest in the fork. The payload is what the tests printed."""
        started = time.monotonic()
        output = HeadTail(self._limits["output_bytes"])
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        report = os.memfd_create("report")  # a file, so that no result wakes us before the run has ended
        pid = os.fork()
        if pid == 0:
            try:
                self._become_test_process(out_write, (out_read,))
                pytest_run.run(warm, request["args"], request["conftest"], report)
            finally:
                os._exit(70)  # run() never returns
        os.close(out_write)
        watch = _Watch(pid, {out_read: output}, started + request["timeout_s"], leave_none=True)
        self._follow(watch, request["id"])
        reply = pytest_run.summarize(os.pread(report, REPORT_LIMIT, 0), watch.rc)
        os.close(report)
        reply |= {
            "timed_out": watch.timed_out,
            "limit": watch.limit,
            "duration_s": time.monotonic() - started,
        }
        return reply, output.value()

    def _become_test_process(self, out: int, unused: tuple[int, ...]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        self._channel.socket.close()
        for fd in (self._wake, self._wake_write, *self._private, *unused):
            os.close(fd)
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(out)
        resource.setrlimit(resource.RLIMIT_CPU, (self._limits["cpu_s"],) * 2)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else its own /proc/self would be closed to it

    def _follow(self, watch: _Watch, number: int) -> None:
        """Waits until the process has ended and its pipes are at their end, or kills everything it started."""
        poll = select.poll()
        for fd in (*watch.sinks, self._wake, self._channel.fileno()):
            poll.register(fd, select.POLLIN)
        look_at = time.monotonic() + WATCH_S
        while watch.sinks or watch.rc is None:
            now = time.monotonic()
            if now >= watch.deadline:
                watch.timed_out = True
                break
            if now >= look_at:
                watch.limit = self._over_limit()
                if watch.limit:
                    break
                look_at = now + WATCH_S
            for fd, _ in poll.poll(max(0.0, min(watch.deadline, look_at) - now) * 1000 + 1):
                if fd == self._wake:
                    os.read(fd, 4096)
                    self._reap(watch)
                elif fd == self._channel.fileno():
                    if self._channel.cancelled(number):
                        watch.deadline = 0.0
                elif not watch.drain(fd):
                    poll.unregister(fd)
                    watch.close(fd)
            if watch.rc is not None and watch.leave_none and not watch.killed:
                self._kill_young(watch)  # a test run leaves nothing behind, so its pipes end now
        if watch.timed_out or watch.limit:
            self._kill_young(watch)
        watch.finish()
        self._elders = self._alive() if self._reap(watch) else frozenset()

    def _reap(self, watch: _Watch) -> bool:
        """Collects the dead: the command, and orphans left to process 1. True while any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == watch.pid:
                watch.rc = os.waitstatus_to_exitcode(status)

    def _alive(self) -> frozenset[int]:
        return frozenset(int(name) for name in os.listdir("/proc") if name.isdigit()) - {1}

    def _kill_young(self, watch: _Watch) -> None:
        """Kills every process that was not there before the command: its group, and whatever left the group."""
        watch.killed = True
        if not self._reap(watch) and watch.rc is not None:
            return
        for _ in range(5 if self._elders else 0):
            young = self._alive() - self._elders
            for pid in young:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not young or not self._wait_gone(watch, young):
                break
        else:
            # None is to be spared, or they are born faster than they are named: one call reaches all at once, and none
            # can be born meanwhile. Hundreds take their time to die where others want the processor.
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            self._wait_gone(watch, self._alive(), DYING_S)
        if watch.rc is None:
            self._wait_gone(watch, frozenset({watch.pid}))

    def _wait_gone(self, watch: _Watch, pids: frozenset[int], most_s: float = 1.0) -> bool:
        """Waits for killed processes to go. True when new ones have appeared meanwhile."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        deadline = time.monotonic() + most_s
        while self._reap(watch) and time.monotonic() < deadline:
            alive = self._alive() - self._elders
            if not alive & pids and (watch.rc is not None or watch.pid not in pids):
                return bool(alive)
            if poll.poll(20):
                os.read(self._wake, 4096)
        return bool(self._alive() - self._elders)

    def _over_limit(self) -> str | None:
        """The name of the limit that all processes together exceed, or None."""
        pids = self._alive()
        if len(pids) > self._limits["processes"]:
            return "processes"
        total = 0
        for pid in pids:
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{pid}/statm", "rb") as file:
                    fields = file.read().split()
                total += (int(fields[1]) - int(fields[2])) * PAGE  # resident, not shared
        return "memory" if total > self._limits["memory_bytes"] else None


class _Watch:
    """One running command: its process, its pipes and their sinks, and how it ended."""

    def __init__(
        self, pid: int, sinks: dict[int, HeadTail], deadline: float, leave_none: bool = False
    ) -> None:
        self.pid = pid
        self.sinks = sinks
        self.deadline = deadline
        self.leave_none = leave_none
        self.rc: int | None = None
        self.timed_out = False
        self.killed = False
        self.limit: str | None = None

    def drain(self, fd: int) -> bool:
        """Reads once. False at the end of the pipe."""
        data = os.read(fd, CHUNK)
        self.sinks[fd].feed(data)
        return bool(data)

    def close(self, fd: int) -> None:
        del self.sinks[fd]
        os.close(fd)

    def finish(self) -> None:
        """Takes what the pipes still hold, without waiting for anybody, and closes them."""
        for fd in list(self.sinks):
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(1024):  # a survivor that writes for ever cannot hold us here
                    if not self.drain(fd):
                        break
            self.close(fd)


def _reply(rc: int | None, out: bytes, err: bytes, duration: float) -> tuple[dict[str, Any], bytes]:
    reply = {"rc": -signal.SIGKILL if rc is None else rc, "out": len(out), "duration_s": duration}
    return reply | {"truncated": False, "timed_out": False, "limit": None}, out + err
