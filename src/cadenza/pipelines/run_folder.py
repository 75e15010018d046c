"""The folder of a run: its identity, its lock, and where its parts lie.

``runs/NAME/`` holds ``run.json`` (identity), ``recipe.toml`` (as resolved), ``metrics.jsonl``, ``log.txt``, ``lock``,
and one folder a finished stage. ``runs/cadenza.db`` beside it holds the lifecycle of all runs of the folder.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cadenza.core.artifacts import discard
from cadenza.core.errors import ConfigError, CorruptArtifact
from cadenza.core.files import LOCK, disk_errors, is_locked, read_table, write_json

FORMAT = 1
IDENTITY = "run.json"
LOOKS = 1000  # that may come one upon another before the lock counts as taken
_MEND = "restore it, or use another --run-dir"


def database_of(folder: Path) -> Path | str:
    """The run database of a folder of runs, or what CADENZA_DATABASE names (a file or an SQLAlchemy URL)."""
    return os.environ.get("CADENZA_DATABASE") or folder / "cadenza.db"


class RunFolder:
    """Paths of one run. Nothing is created before ``lock``."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def database(self) -> Path | str:
        return database_of(self.path.parent)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def exists(self) -> bool:
        return (self.path / IDENTITY).is_file()

    def artifact(self, stage: str) -> Path:
        return self.path / stage

    def partial(self, stage: str) -> Path:
        return self.path / f"{stage}.partial"

    def identity(self) -> str:
        """The run's id; a folder that is removed and made again is another run.

        Raises:
            CorruptArtifact: ``run.json`` cannot be read or has another format.
        """
        if not self.exists:
            with disk_errors(self.path):
                write_json(self.path / IDENTITY, {"format": FORMAT, "id": uuid.uuid4().hex})
        table = read_table(self.path / IDENTITY, _MEND)
        if table.get("format") != FORMAT or not isinstance(table.get("id"), str):
            raise CorruptArtifact(f"{self.path / IDENTITY} is not of this version", _MEND)
        return table["id"]

    def restore_identity(self, run_id: str) -> None:
        """Writes a lost ``run.json`` anew from what the run database says."""
        with disk_errors(self.path):
            write_json(self.path / IDENTITY, {"format": FORMAT, "id": run_id})

    def in_use(self) -> bool:
        """Whether a process runs this folder now."""
        return is_locked(self.path / LOCK)

    def _take(self, file: IO[str]) -> bool:
        """Takes the lock. Whoever only looks (``is_locked``) holds it for an instant, shared, and stops nobody."""
        for _ in range(LOOKS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if self.in_use():
                    return False
        return False

    def clear(self, stages: list[str], copies: Iterable[str] = ()) -> None:
        """Removes the artifacts of ``stages``, finished and partial, and the ``copies`` that they put beside them."""
        for stage in stages:
            discard(self.artifact(stage))
            discard(self.partial(stage))
        for name in copies:
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for this process; the kernel lets go of it when the process ends, however it ends.

        Raises:
            ConfigError: another process runs it, or the folder holds something else than a run.
        """
        with disk_errors(self.path):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                if not self.exists and any(p.name != LOCK for p in self.path.iterdir()):
                    raise ConfigError(
                        f"{self.path} holds files that are not a run's", "choose another --run-dir"
                    )
                file = (self.path / LOCK).open("a+")
            except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
                raise ConfigError(
                    f"cannot use {self.path} as a run folder: {error.strerror}", "choose another --run-dir"
                ) from None
        with file:
            if not self._take(file):
                file.seek(0)
                raise ConfigError(
                    f"{self.path} is being run by process {file.read().strip() or '?'}",
                    "wait for it, stop it, or use another --run-dir",
                )
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield
