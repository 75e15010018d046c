"""What a sandbox changed, read from the overlay's upper directory: one entry per changed name.

The content is untrusted: links are never followed, and only regular files, links and directories are reported.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any

OPAQUE = "user.overlay.opaque"
IGNORED = frozenset({"__pycache__"})


def entries(upper_fd: int, ignored: frozenset[str] = IGNORED) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields ``({path, kind, mode, opaque?}, content)``, parents before children.

    ``kind`` is ``file``, ``link`` (content is the target), ``dir`` or ``gone`` (a whiteout). ``opaque``: a directory
    that hides the one below it.
    """
    fd = os.dup(upper_fd)
    try:
        yield from _below(fd, "", ignored)
    finally:
        os.close(fd)


def _below(fd: int, prefix: str, ignored: frozenset[str]) -> Iterator[tuple[dict[str, Any], bytes]]:
    for name in sorted(os.listdir(fd)):
        if name in ignored:
            continue
        path = prefix + name
        status = os.lstat(name, dir_fd=fd)
        kind = stat.S_IFMT(status.st_mode)
        entry: dict[str, Any] = {"path": path, "mode": stat.S_IMODE(status.st_mode)}
        if kind == stat.S_IFREG:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(name, flags, dir_fd=fd), "rb", buffering=0) as file:
                yield entry | {"kind": "file"}, file.readall()
        elif kind == stat.S_IFLNK:
            yield entry | {"kind": "link"}, os.fsencode(os.readlink(name, dir_fd=fd))
        elif kind == stat.S_IFCHR and status.st_rdev == 0:
            yield entry | {"kind": "gone"}, b""
        elif kind == stat.S_IFDIR:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(name, flags, dir_fd=fd)
            try:
                yield entry | {"kind": "dir", "opaque": _opaque(below)}, b""
                yield from _below(below, path + "/", ignored)
            finally:
                os.close(below)


def _opaque(fd: int) -> bool:
    try:
        return os.getxattr(fd, OPAQUE) == b"y"
    except OSError:
        return False
