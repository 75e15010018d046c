"""The backend's directory on the host: mount points, snapshot layers, scratch. Owned by a lock, swept when orphaned.

A lock held on ``owner.lock`` marks a living owner; the kernel lets go of it however the owner dies. Whoever starts
next removes the directories nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from cadenza.core.errors import ConfigError

_LOCK = "owner.lock"


class WorkDir:
    """A private directory that disappears with its owner, at the latest when the next backend starts."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def make(cls, parent: Path | None) -> WorkDir:
        """Sweeps what dead owners left below ``parent`` and makes a new directory there.

        Raises:
            ConfigError: the shared parent exists and is not a private directory of this user.
        """
        base = (parent or Path(tempfile.gettempdir())).resolve() / f"cadenza-sandbox-{os.geteuid()}"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"{base} is not a private directory of this user", f"remove it, or chmod 700 {base}"
            )
        with open(base / ".making", "w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)  # nobody sweeps between mkdir and the owner's lock
            sweep(base)
            path = Path(tempfile.mkdtemp(dir=base))
            lock_fd = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        for name in ("upper", "root", "layers", "scratch"):
            (path / name).mkdir()
        return cls(path, lock_fd)

    def scratch(self, number: int) -> Path:
        """A new directory for the changed files of sandbox ``number``."""
        path = self.path / "scratch" / str(number)
        path.mkdir()
        return path

    def remove(self) -> None:
        """Deletes the directory and lets go of the lock."""
        remove_tree(self.path)
        os.close(self._lock_fd)


def sweep(base: Path) -> list[Path]:
    """Removes the directories below ``base`` whose owner is dead; returns them."""
    swept = []
    for path in base.iterdir():
        if not path.is_dir() or path.is_symlink():
            continue
        try:
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = -1  # died between mkdir and the lock
        try:
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            remove_tree(path)
            swept.append(path)
        finally:
            if fd >= 0:
                os.close(fd)
    return swept


def remove_tree(path: Path) -> None:
    """``rm -rf``, also of directories that a sandbox or overlayfs made unreadable. Never follows links."""

    def permit(function: Callable[..., object], name: str, _: object) -> None:
        parent = os.path.dirname(name)
        for directory in (parent, name):
            if os.path.isdir(directory) and not os.path.islink(directory):
                os.chmod(directory, 0o700)
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name, ignore_errors=True)
        elif os.path.lexists(name):
            os.unlink(name)

    shutil.rmtree(path, onerror=permit)
