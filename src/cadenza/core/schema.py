"""Opening a database at the right schema: engine settings, migration on open, refusal of a newer one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError

from cadenza.core.errors import (
    CadenzaError,
    ConfigError,
    CorruptArtifact,
    DeadlineExceeded,
    MissingArtifact,
    ResourceExhausted,
)
from cadenza.core.tables import SCHEMA_HEAD

if TYPE_CHECKING:  # alembic is loaded only when there is something to migrate
    from alembic.config import Config

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_S = 30  # how long a writer waits for another process's transaction


def make_engine(url: str | sa.URL, read_only: bool = False) -> sa.Engine:
    """An engine; for SQLite with WAL, foreign keys, and write transactions that take the lock at their start.
    ``read_only``: a SQLite file is opened as it lies there, and its journal mode left alone.

    SQLite's default transaction starts as a reader and fails at once, without waiting, when it turns into a writer
    while another process has written. An engine with ``execution_options(write=True)`` begins IMMEDIATE instead.

    Raises:
        ConfigError: not a URL, or one of a dialect or driver that is not installed.
    """
    try:
        engine = sa.create_engine(url)
    except (ArgumentError, ModuleNotFoundError) as error:  # NoSuchModuleError is an ArgumentError
        raise ConfigError(
            f"cannot use {_without_password(url)} as run database: {error}",
            "install the driver it names, or set CADENZA_DATABASE to a file or another SQLAlchemy URL",
        ) from None
    if engine.dialect.name != "sqlite":
        return engine

    @event.listens_for(engine, "connect")
    def set_pragmas(connection, _record) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000}")
        if not read_only:
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        write = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


@contextmanager
def database_errors(where: str) -> Iterator[None]:
    """Turns the driver's errors into typed ones that name the database and the mend."""
    try:
        yield
    except DatabaseError as error:
        raise translated(error, where) from error


def translated(error: DatabaseError, where: str) -> CadenzaError | DatabaseError:
    """The typed form of a driver's error, or the error itself when it is a programming mistake."""
    text = str(error.orig)
    if "disk is full" in text or "disk I/O error" in text:
        return ResourceExhausted(
            f"no space to write the run database {where}", "free disk space and run again"
        )
    if "not a database" in text or "malformed" in text:
        return CorruptArtifact(
            f"{where} is not a readable run database", "restore it, or move it away to begin anew"
        )
    if "unable to open" in text or "readonly" in text:
        return ConfigError(
            f"cannot open the run database {where}: {text}", "check the folder and its permissions"
        )
    if any(sign in text for sign in ("no such table", "no such column", "already exists", "does not exist")):
        return CorruptArtifact(
            f"{where} is not a whole run database: {text}", "restore it, or move it away to begin anew"
        )
    if isinstance(error, OperationalError) and "locked" in text:
        return DeadlineExceeded(
            f"waited {BUSY_S} s for another process writing {where}",
            "stop the process that holds it and run again",
        )
    return error


def _without_password(url: str | sa.URL) -> str:
    """For messages."""
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "CADENZA_DATABASE"


def current_revision(connection: sa.Connection) -> str | None:
    """The schema revision stored in the database, None for an empty one."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def migrate(engine: sa.Engine, where: str) -> None:
    """Brings the schema to ``SCHEMA_HEAD`` in one transaction. Two processes may open a new database at once.

    Raises:
        CorruptArtifact: the database was written by a newer Cadenza.
    """
    with engine.connect() as connection:  # a read: the usual case needs no lock and no import of alembic
        if current_revision(connection) == SCHEMA_HEAD:
            return
    from alembic import command

    config, known = _migrations()
    with engine.execution_options(write=True).begin() as connection:
        found = current_revision(connection)  # again, now that this process holds the write lock
        if found is not None and found not in known:
            raise _newer(where, found)
        if found != SCHEMA_HEAD:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def require_current(engine: sa.Engine, where: str) -> None:
    """Looks whether the schema is ``SCHEMA_HEAD``, for who only reads.

    Raises:
        MissingArtifact: nothing was ever written there.
        CorruptArtifact: the database was written by an older or a newer Cadenza.
    """
    with engine.connect() as connection:
        found = current_revision(connection)
    if found == SCHEMA_HEAD:
        return
    if found is None:
        raise MissingArtifact(
            f"the run database {where} is empty", "start a run with: cadenza train demo-quick"
        )
    if found not in _migrations()[1]:
        raise _newer(where, found)
    raise CorruptArtifact(
        f"the run database {where} has schema {found}, older than this Cadenza ({SCHEMA_HEAD})",
        "the next cadenza train in its folder, or in a copy of it that can be written, brings it up to date",
    )


def _newer(where: str, found: str) -> CorruptArtifact:
    return CorruptArtifact(
        f"the run database {where} has schema {found}, newer than this Cadenza ({SCHEMA_HEAD})",
        "upgrade Cadenza, or use another --run-dir",
    )


def _migrations() -> tuple[Config, set[str]]:
    """Alembic's configuration, and the revisions that this Cadenza knows."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config, {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}


def reading_url(location: str) -> str | sa.URL:
    """The URL that opens a run database for reading alone; of a SQLite file also where nothing can be written.

    In WAL mode even a reader makes files beside the database, unless it declares that nobody writes (``immutable``).
    That holds in a folder that cannot be written, but leaves out what a run that was killed there has not merged yet;
    with such a log the files are there already.

    Raises:
        MissingArtifact: no such file.
        ConfigError: the newest writes lie in a log that cannot be read there.
    """
    path = _file_of(location)
    if path is None:
        return location
    if not path.is_file():
        raise MissingArtifact(f"no run database at {path}", "start a run with: cadenza train demo-quick")
    query = {"uri": "true", "mode": "ro"}
    if not os.access(path.parent, os.W_OK):
        log, index = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
        if not log.is_file() or log.stat().st_size == 0:
            query["immutable"] = "1"
        elif not index.is_file():
            raise ConfigError(
                f"the newest writes of {path} lie in {log.name}, which cannot be read in a read-only folder",
                "copy the folder to where you can write, and read it there",
            )
    return sa.URL.create("sqlite", database=f"file:{quote(str(path.absolute()))}", query=query)


def _file_of(location: str) -> Path | None:
    """The file of a SQLite database, None for one on a server, in memory, or told as a SQLite URI."""
    if "://" not in location:
        return Path(location)
    try:
        url = sa.make_url(location)
    except ArgumentError:  # told by ``make_engine``
        return None
    file = url.database or ""
    here = url.get_backend_name() == "sqlite" and not file.startswith(("file:", ":")) and not url.query
    return Path(file) if here and file else None
