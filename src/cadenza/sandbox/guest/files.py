"""Reading and writing below ``/work`` for the host, which trusts no path in it.

Every open goes through ``openat2(RESOLVE_BENEATH)``: a symbolic link that leads out of ``/work`` is refused, also
when it is swapped in between two calls, and a dangling link is never written through.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from . import kernel

WORK = "/work"


class Refused(Exception):
    """The path leads out of /work, or is no regular file."""


def relative(path: str) -> str:
    """``path`` without a leading ``/work``; refuses other absolute paths and any ``..`` that climbs out."""
    if "\0" in path:
        raise Refused("a path cannot contain a NUL byte")
    whole = os.path.normpath(os.path.join(WORK, path))
    if whole != WORK and not whole.startswith(WORK + "/"):
        raise Refused(f"{path!r} is outside {WORK}")
    return os.path.relpath(whole, WORK)


def _open(root: int, path: str, flags: int) -> int:
    try:
        return kernel.open_beneath(root, path, flags)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ELOOP):
            raise
        # An absolute link may still point below /work; resolve once and insist on the result.
        real = os.path.realpath(os.path.join(WORK, path))
        if error.errno == errno.EXDEV and real.startswith(WORK + "/"):
            return kernel.open_beneath(root, os.path.relpath(real, WORK), flags)
        raise Refused(f"{path!r} is a symbolic link that leads out of {WORK}") from error


def _regular(fd: int, path: str) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise Refused(f"{path!r} is not a regular file")


def read(path: str, limit: int) -> bytes:
    """The file's bytes. Raises OSError EFBIG above ``limit``, Refused, or the usual OSErrors."""
    name = relative(path)
    with _Root() as root:
        fd = _open(root, name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with open(fd, "rb", buffering=0) as file:
            _regular(fd, name)
            if os.fstat(fd).st_size > limit:
                raise OSError(errno.EFBIG, f"larger than {limit} bytes", name)
            return file.readall()


def write(path: str, data: bytes) -> None:
    """Replaces or makes the file, making directories as needed; an existing file keeps its mode."""
    name = relative(path)
    if name == ".":
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    with _Root() as root:
        try:
            fd = _open(root, name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except FileNotFoundError:
            fd = _make(root, name)
        with open(fd, "wb", buffering=0) as file:
            _regular(fd, name)
            os.ftruncate(fd, 0)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]


def _make(root: int, name: str) -> int:
    directory, _, leaf = name.rpartition("/")
    parent = _make_directories(root, directory)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(leaf, flags, 0o644, dir_fd=parent)
    except FileExistsError as error:  # the name exists and yet could not be opened: a dangling link
        raise Refused(f"{name!r} is a dangling symbolic link") from error
    finally:
        os.close(parent)


def _make_directories(root: int, path: str) -> int:
    current = os.dup(root)
    done = ""
    for part in filter(None, path.split("/")):
        done = f"{done}/{part}" if done else part
        try:
            os.mkdir(part, 0o755, dir_fd=current)
        except FileExistsError:
            pass
        finally:
            os.close(current)
        try:
            current = _open(root, done, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError as error:  # exists for mkdir, not for open
            raise Refused(f"{done!r} is a dangling symbolic link") from error
    return current


def remove(path: str) -> None:
    """Removes a file, a link (itself, not its target) or a directory with everything in it."""
    name = relative(path)
    if name == ".":
        raise Refused(f"{WORK} itself cannot be removed")
    directory, _, leaf = name.rpartition("/")
    with _Root() as root:
        parent = _open(root, directory or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            _remove_at(parent, leaf)
        finally:
            os.close(parent)


def _remove_at(parent: int, leaf: str) -> None:
    if not stat.S_ISDIR(os.lstat(leaf, dir_fd=parent).st_mode):
        os.unlink(leaf, dir_fd=parent)
        return
    fd = os.open(leaf, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        for name in os.listdir(fd):
            _remove_at(fd, name)
    finally:
        os.close(fd)
    os.rmdir(leaf, dir_fd=parent)


def listing(path: str) -> list[str]:
    """Every file and link below ``path``, relative to /work, sorted; links are not followed."""
    name = relative(path)
    with _Root() as root:
        fd = _open(root, name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                return [name]
            prefix = "" if name == "." else name + "/"
            return sorted(_walk(fd, prefix))
        finally:
            os.close(fd)


def _walk(fd: int, prefix: str) -> Iterator[str]:
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if not is_directory:
            yield prefix + name
            continue
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            yield from _walk(below, prefix + name + "/")
        finally:
            os.close(below)


class _Root:
    """A descriptor of /work for one operation."""

    def __enter__(self) -> int:
        self._fd = os.open(WORK, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
