"""The Linux system calls that Python's standard library does not offer, through ctypes. x86-64 and aarch64."""

from __future__ import annotations

import ctypes
import os
import platform

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None)  # does not release the interpreter lock: needed around clone

_MACHINE = platform.machine()
_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155},
    "aarch64": {"clone": 220, "pivot_root": 41},
}.get(_MACHINE)
_OPENAT2, _MOUNT_SETATTR = 437, 442  # the same on every architecture since 5.x

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
SIGCHLD = 17

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_RECURSIVE, AT_FDCWD = 0x8000, -100

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_SET_NAME = 15

RESOLVE_NO_MAGICLINKS, RESOLVE_BENEATH = 0x02, 0x08


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def supported() -> str | None:
    """Why this machine's architecture cannot be used, or None."""
    return None if _NUMBERS else f"architecture {_MACHINE} is not supported (x86_64 and aarch64 are)"


def clone(flags: int) -> int:
    """``fork`` that also makes the namespaces in ``flags``. Returns 0 in the child, its pid in the parent.

    The raw system call is used because ``unshare(CLONE_NEWPID)`` followed by ``fork`` needs one more process per
    sandbox. The interpreter's own fork handlers are run as ``os.fork`` runs them. Single-threaded callers only.
    """
    assert _NUMBERS is not None
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = _held.syscall(_NUMBERS["clone"], ctypes.c_ulong(flags | SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        api.PyOS_AfterFork_Child()
        return 0
    number = _errno()  # read before any other call can overwrite it
    api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, os.strerror(number), "clone")
    return pid


def _errno() -> int:
    location = _held.__errno_location
    location.restype = ctypes.POINTER(ctypes.c_int)
    return location()[0]


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2). Raises OSError naming the target."""
    _check(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            os.fsencode(data) if data else None,
        ),
        f"mount {kind or 'bind'} on {target}",
    )


def unmount(target: str, flags: int) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    assert _NUMBERS is not None
    _check(_libc.syscall(_NUMBERS["pivot_root"], os.fsencode(new), os.fsencode(old)), "pivot_root")


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd")]


def protect_mount(target: str, attributes: int) -> None:
    """mount_setattr(2) on ``target`` and every mount below it (Linux 5.12)."""
    attr = _MountAttr(attributes, 0, 0, 0)
    _check(
        _libc.syscall(
            _MOUNT_SETATTR,
            AT_FDCWD,
            os.fsencode(target),
            AT_RECURSIVE,
            ctypes.byref(attr),
            ctypes.c_size_t(ctypes.sizeof(attr)),
        ),
        f"mount_setattr {target}",
    )


class _OpenHow(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


def open_beneath(directory_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """openat2(2) with RESOLVE_BENEATH: no component, symbolic link included, may leave the directory (Linux 5.6)."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    return _check(
        _libc.syscall(
            _OPENAT2,
            directory_fd,
            os.fsencode(path),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        ),
        path,
    )


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    _check(
        _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)),
        f"prctl {option}",
    )


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapData(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def drop_capabilities() -> None:
    """Empties the bounding, effective, permitted and inheritable sets for good."""
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:  # until the last that this kernel knows
        capability += 1
    header = _CapHeader(0x20080522, 0)
    _check(_libc.capset(ctypes.byref(header), (_CapData * 2)()), "capset")
