"""What a sandbox changed, read from the overlay's upper directory: one entry per changed name.

The content is untrusted: links are never followed, and only regular files, links and directories are reported.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any

OPAQUE = "user.overlay.opaque"
IGNORED = frozenset({"__pycache__"})


def entries(
    upper_fd: int, ignored: frozenset[str] = IGNORED, limit: int = 256 << 20
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields ``({path, kind, mode, opaque?}, content)``, parents before children.

    ``kind`` is ``file``, ``link`` (content is the target), ``dir`` or ``gone`` (a whiteout). ``opaque``: a directory
    that hides the one below it.

    Raises:
        OSError: EFBIG when the files are larger than ``limit`` bytes together (sparse ones count in full).
    """
    fd = os.dup(upper_fd)
    try:
        total = 0
        for entry, content in _below(fd, "", ignored, limit):
            total += len(content)
            if total > limit:
                raise OSError(errno.EFBIG, f"more than {limit} bytes were changed", entry["path"])
            yield entry, content
    finally:
        os.close(fd)


def _below(
    fd: int, prefix: str, ignored: frozenset[str], limit: int
) -> Iterator[tuple[dict[str, Any], bytes]]:
    for name in sorted(os.listdir(fd)):
        if name in ignored:
            continue
        path = prefix + name
        status = os.lstat(name, dir_fd=fd)
        kind = stat.S_IFMT(status.st_mode)
        entry: dict[str, Any] = {"path": path, "mode": stat.S_IMODE(status.st_mode)}
        if kind == stat.S_IFREG:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with (
                _opened(name, flags, fd, entry["mode"]) as content,
                open(content, "rb", 0, closefd=False) as file,
            ):
                yield entry | {"kind": "file"}, file.read(limit + 1)
        elif kind == stat.S_IFLNK:
            yield entry | {"kind": "link"}, os.fsencode(os.readlink(name, dir_fd=fd))
        elif kind == stat.S_IFCHR and status.st_rdev == 0:
            yield entry | {"kind": "gone"}, b""
        elif kind == stat.S_IFDIR:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            with _opened(name, flags, fd, entry["mode"]) as below:
                yield entry | {"kind": "dir", "opaque": _opaque(below)}, b""
                yield from _below(below, path + "/", ignored, limit)


@contextlib.contextmanager
def _opened(name: str, flags: int, parent: int, mode: int) -> Iterator[int]:
    """Opens also what the sandbox made unreadable to hide it: the owner, which we are, may change the mode and back."""
    changed = False
    try:
        fd = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        os.chmod(name, mode | 0o700, dir_fd=parent)
        changed = True
        fd = os.open(name, flags, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)
        if changed:
            os.chmod(name, mode, dir_fd=parent)


def _opaque(fd: int) -> bool:
    try:
        return os.getxattr(fd, OPAQUE) == b"y"
    except OSError:
        return False
