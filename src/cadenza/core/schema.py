"""Opening a database at the right schema: engine settings, migration on open, refusal of a newer one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError

from cadenza.core.errors import (
    CadenzaError,
    ConfigError,
    CorruptArtifact,
    DeadlineExceeded,
    ResourceExhausted,
)
from cadenza.core.tables import SCHEMA_HEAD

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_S = 30  # how long a writer waits for another process's transaction


def make_engine(url: str) -> sa.Engine:
    """An engine; for SQLite with WAL, foreign keys, and write transactions that take the lock at their start.

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


def _without_password(url: str) -> str:
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
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    with engine.execution_options(write=True).begin() as connection:
        found = current_revision(connection)  # again, now that this process holds the write lock
        if found is not None and found not in known:
            raise CorruptArtifact(
                f"the run database {where} has schema {found}, newer than this Cadenza ({SCHEMA_HEAD})",
                "upgrade Cadenza, or use another --run-dir",
            )
        if found != SCHEMA_HEAD:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
