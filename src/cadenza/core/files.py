"""Files that are either there and whole, or not there: atomic writes, and a full disk as a typed failure."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cadenza.core.errors import ConfigError, CorruptArtifact, MissingArtifact, ResourceExhausted

LOCK = "lock"  # of the process that runs a folder
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNUSABLE = {
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an exception, or one that caused it, says that no more can be written.

    Libraries in other languages (safetensors, Arrow) lose the error number and keep the text.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if "No space left on device" in str(error) or "File too large" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full(path: Path | str) -> ResourceExhausted:
    """The error that tells a user which file did not fit."""
    return ResourceExhausted(
        f"no space left to write {path}", "free disk space and run the same command again"
    )


def unusable_path(error: BaseException | None) -> ConfigError | None:
    """The error for a user when a path cannot be used as it lies there: a folder where a file belongs or the other way
    round, no permission, a read-only disk. None for any other error, and for one that names no path."""
    if isinstance(error, OSError) and error.errno in _UNUSABLE and error.filename:
        path = error.filename2 or error.filename  # of a rename the target: a user knows no temporary file
        return ConfigError(
            f"cannot use {os.fsdecode(path)}: {error.strerror}",
            "move away what lies there or set its permissions, and run the same command again",
        )
    return None


@contextmanager
def disk_errors(path: Path | str) -> Iterator[None]:
    """Turns a full disk into ResourceExhausted; other errors pass."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path) from error
        raise


def write_bytes(path: Path, data: bytes, durable: bool = True) -> None:
    """Writes a whole file or nothing, by a temporary file in the same folder and a rename.

    Args:
        durable: also wait until the disk has it (about 1 to 10 ms).

    Raises:
        ResourceExhausted: disk full; the old file, if any, is untouched.
    """
    with disk_errors(path):
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        if durable:
            sync_folder(path.parent)


def refuse_folder(path: Path) -> None:
    """Raises ConfigError when a folder lies where a file is to be written."""
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder where a file belongs", "move it away and run the same command again"
        )


def copy_file(source: Path, target: Path) -> None:
    """``write_bytes`` of what ``source`` holds; makes the folder of ``target``.

    Raises:
        ConfigError: ``target`` is a folder, into which the copy would go unseen.
        ResourceExhausted: disk full.
    """
    refuse_folder(target)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, source.read_bytes())


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    """``write_bytes`` of readable JSON with a final newline."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(), durable)


def read_json(path: Path) -> Any:
    """The JSON in a file. Raises CorruptArtifact when it is none; FileNotFoundError passes."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptArtifact(
            f"{path} is not JSON: {error}", "restore the file, or remove it and run again"
        ) from None


def read_table(path: Path, mend: str) -> dict[str, Any]:
    """The JSON object in a file. Raises CorruptArtifact with ``mend`` when it is none; FileNotFoundError passes."""
    try:
        table = read_json(path)
    except CorruptArtifact as error:
        raise error.with_mend(mend) from None
    if not isinstance(table, dict):
        raise CorruptArtifact(f"{path} holds no JSON object", mend)
    return table


def require_writable(path: Path, mend: str) -> None:
    """Makes the folder of ``path`` and tries a file in it, so that long work does not end in a result nobody can keep.

    Raises:
        ConfigError: it cannot be written there. ResourceExhausted: disk full.
    """
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent) as file:
                file.write(b"\0")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", mend) from None


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_folder(path: Path, what: str, mend: str) -> Path:
    """``path``, when it is a folder. Raises MissingArtifact naming ``what`` otherwise."""
    path = path.expanduser()
    if not path.is_dir():
        raise MissingArtifact(f"no {what} at {path}", mend)
    return path


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file at ``path`` now; False where there is none."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such folder, or no run was begun in it
        return False
    return False
