"""The process every sandbox is forked from. Started clean (empty environment), so that it holds no secrets.

It imports pytest once, prepares a session, freezes its heap, and then only waits: for requests of the host on
its control socket (``create`` with a descriptor, ``kill``), for dead children, and for the death of the host.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from . import agent, kernel, pytest_run, rootfs

NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)
RESERVED = ("/work", "/tmp", "/proc", "/dev", "/run")  # paths a sandbox uses itself
RELOCATED = "/opt/python"  # where a virtual environment below a reserved path is seen
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


class Unusable(Exception):
    """The zygote cannot serve; the text goes to the user."""


def layout(run_dir: str) -> dict[str, Any]:
    """What each sandbox's root consists of, worked out once. Rewrites module paths if Python must be relocated."""
    binds: list[tuple[str, str]] = []
    links: list[tuple[str, str]] = []
    for path in SYSTEM:
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        elif os.path.isdir(path):
            binds.append((path, path))
    binds += [(path, path) for path in SYSTEM_FILES if os.path.exists(path)]
    base = os.path.realpath(sys.base_prefix)
    if _below(base, RESERVED):
        raise Unusable(f"Python's own directory {base} lies below {RESERVED}, which a sandbox needs itself")
    prefix = sys.prefix
    seen = prefix
    if prefix != sys.base_prefix and _below(prefix, RESERVED):
        seen = RELOCATED
        _relocate(prefix, seen)
    for source, target in {base: base, sys.base_prefix: sys.base_prefix, prefix: seen}.items():
        if not _below(source, ("/usr",)):
            binds.append((source, target))
    path = [f"{seen}/bin", f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    rootfs.skeleton(f"{run_dir}/root", binds, links)
    # Only where the host side is root does the mode of these files let anybody in.
    masked = [name for name in rootfs.MASKED_PROC if os.geteuid() == 0 and os.path.exists(f"/proc/{name}")]
    return {
        "upper": f"{run_dir}/upper",
        "root": f"{run_dir}/root",
        "binds": binds,
        "uid": os.geteuid(),
        "gid": os.getegid(),
        "masked": masked,
        "path": ":".join(dict.fromkeys(path)),
    }


def _below(path: str, parents: tuple[str, ...]) -> bool:
    return any(path == parent or path.startswith(parent + "/") for parent in parents)


def _relocate(old: str, new: str) -> None:
    """Modules are already imported; later imports of their submodules, and source look-ups, must find the new place."""

    def moved(path: Any) -> Any:
        return new + path[len(old) :] if isinstance(path, str) and _below(path, (old,)) else path

    sys.path[:] = [moved(path) for path in sys.path]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        for holder in (module, getattr(module, "__spec__", None)):
            for name in ("__path__", "submodule_search_locations"):
                value = getattr(holder, name, None)
                if isinstance(value, list):
                    value[:] = [moved(path) for path in value]
    sys.prefix = sys.exec_prefix = new
    sys.executable = moved(sys.executable)


def main(control_fd: int, host_pid_fd: int, run_dir: str) -> None:
    """Serves until the host closes the control socket or dies. Never returns."""
    control = socket.socket(fileno=control_fd)
    try:
        problem = kernel.supported()
        if problem:
            raise Unusable(problem)
        warm = pytest_run.warm_up()
        place = layout(run_dir)
    except (Unusable, RuntimeError, OSError) as error:
        control.send(json.dumps({"unusable": str(error)}).encode())
        os._exit(1)
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()  # children never copy these pages for the collector's sake
    gc.disable()
    try:
        _serve(control, host_pid_fd, place, warm)
    finally:
        os._exit(1)


def _serve(
    control: socket.socket,
    host_pid_fd: int,
    place: dict[str, Any],
    warm: tuple[pytest_run.Warm, pytest_run.Warm],
) -> None:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    for fd in (control.fileno(), host_pid_fd, wake_read):
        poll.register(fd, select.POLLIN)
    control.send(b'{"ready": true}')
    children: dict[int, int] = {}  # pid -> sandbox number
    inherited = (control.fileno(), host_pid_fd, wake_read, wake_write)
    while True:
        for fd, _ in poll.poll():
            if fd == host_pid_fd:
                return
            if fd == wake_read:
                os.read(wake_read, 4096)
                _reap(control, children)
            elif fd == control.fileno():
                data, fds, _, _ = socket.recv_fds(control, 4096, 1)
                if not data:
                    return
                request = json.loads(data)
                if "create" in request:
                    _create(control, request["create"], fds[0], children, inherited, place, warm)
                else:
                    _kill(request["kill"], children)


def _create(control, number, fd, children, inherited, place, warm) -> None:
    try:
        pid = kernel.clone(NAMESPACES)
    except OSError as error:
        control.send(json.dumps({"refused": number, "errno": error.errno}).encode())
        os.close(fd)
        return
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in inherited:
                os.close(other)
            agent.main(fd, place, warm)
        finally:
            os._exit(1)
    os.close(fd)
    children[pid] = number


def _kill(number: int, children: dict[int, int]) -> None:
    for pid, other in children.items():
        if other == number:
            os.kill(pid, signal.SIGKILL)  # not yet reaped, so the pid cannot have been reused


def _reap(control: socket.socket, children: dict[int, int]) -> None:
    while children:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        number = children.pop(pid, None)
        if number is not None:
            control.send(json.dumps({"dead": number}).encode())
