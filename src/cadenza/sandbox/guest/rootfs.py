"""The file system of a sandbox: what untrusted code can see, built inside its own user and mount namespace.

``/work`` is an overlay of the layers of the specification with a private upper directory; the system's
directories and the Python of the zygote are read-only binds; ``/tmp`` is empty; ``/dev`` has five nodes. Nothing
else of the host is reachable after ``pivot_root``: no home, no ``/etc`` of the host, no sockets.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import Any

from . import kernel

UID = 1000  # inside; outside it is whoever started the backend
DEVICES = ("null", "zero", "full", "random", "urandom")
MASKED_PROC = ("kcore", "keys", "kmsg", "sched_debug", "slabinfo", "sysrq-trigger", "timer_list")
PASSWD = (
    f"root:x:0:0:root:/:/bin/sh\nagent:x:{UID}:{UID}:agent:/tmp:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
)
GROUP = f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n"


def map_user(uid: int, gid: int) -> None:
    """Maps the one outside ``uid`` and ``gid`` to UID inside."""
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{UID} {uid} 1")
    _write("/proc/self/gid_map", f"{UID} {gid} 1")


def skeleton(root: str, binds: list[tuple[str, str]], links: list[tuple[str, str]]) -> None:
    """Makes, once per backend, the directory that every sandbox mounts as its root: mount points, links, ``/etc``."""
    for name in ("proc", "dev/shm", "etc", "work", "run", "tmp"):
        os.makedirs(f"{root}/{name}")
    for path, target in links:
        os.symlink(target, root + path)
    for source, path in binds:
        if os.path.isdir(source):
            os.makedirs(root + path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            _write(root + path, "")
    for name in DEVICES:
        _write(f"{root}/dev/{name}", "")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{root}/dev/{name}")
    _write(f"{root}/etc/passwd", PASSWD)
    _write(f"{root}/etc/group", GROUP)
    _write(f"{root}/etc/hosts", "127.0.0.1 localhost sandbox\n")


def build(layout: dict[str, Any], layers: list[str], disk_bytes: int, scratch: str | None) -> int:
    """Mounts everything, makes it the root, and returns a directory descriptor of the overlay's upper directory.

    Args:
        layout: see ``zygote.layout``.
        layers: read-only lower directories of ``/work`` on the host, top first.
        disk_bytes: capacity of ``/work`` and ``/tmp`` together where ``scratch`` is None.
        scratch: a host directory for the files of the sandbox, or None for a tmpfs.

    Raises:
        OSError: a mount was refused; ``filename`` says which.
    """
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    upper_base, root = layout["upper"], layout["root"]
    _mount_root(root, layout)
    if scratch is None:
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("scratch", upper_base, "tmpfs", flags, f"size={disk_bytes},mode=700")
    else:
        kernel.mount(scratch, upper_base, None, kernel.MS_BIND)
    _mount_writable(upper_base, root, layers)
    upper = os.open("upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _protect_user_namespaces()
    os.chdir(root)
    kernel.pivot_root(".", ".")  # the old root now lies on top of the new one
    kernel.unmount(".", kernel.MNT_DETACH)
    os.chdir("/")
    _loopback_up()
    socket.sethostname("sandbox")
    return upper


def _mount_root(root: str, layout: dict[str, Any]) -> None:
    kernel.mount(root, root, None, kernel.MS_BIND)
    for source, path in layout["binds"]:
        kernel.mount(source, root + path, None, kernel.MS_BIND | kernel.MS_REC)
    read_only = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
    kernel.protect_mount(root, read_only)  # all of them at once
    for name in DEVICES:
        kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", None, kernel.MS_BIND)
    # Read-only as a whole: where the host side is root, files such as /proc/sys/kernel/core_pattern would
    # otherwise be writable by plain file mode, without any capability.
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
    kernel.mount("proc", f"{root}/proc", "proc", flags)
    for name in layout["masked"]:
        kernel.mount("/dev/null", f"{root}/proc/{name}", None, kernel.MS_BIND)


def _mount_writable(upper_base: str, root: str, layers: list[str]) -> None:
    os.chdir(upper_base)
    for name in ("upper", "work", "empty", "lower", "tmp", "shm"):
        os.mkdir(name)
    for name, path in (("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.chmod(name, 0o1777)
        kernel.mount(name, root + path, None, kernel.MS_BIND)
    # Links keep the option string short (mount takes one page) and free of the separators ':' ',' '\\'.
    names = []
    for number, layer in enumerate(layers):
        names.append(f"lower/{number}")
        os.symlink(layer, names[-1])
    lower = ":".join(names) or "empty"
    kernel.mount(
        "work", f"{root}/work", "overlay", kernel.MS_NOSUID | kernel.MS_NODEV,
        f"lowerdir={lower},upperdir=upper,workdir=work,userxattr",
    )  # fmt: skip


def _protect_user_namespaces() -> None:
    """Untrusted code may not make further user namespaces: they are where most kernel bugs of this kind lie."""
    try:
        _write("/proc/sys/user/max_user_namespaces", "0")
    except OSError:
        pass  # no such file on kernels without the sysctl; the capability drop still holds


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, UP | RUNNING


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
