"""Migrations: an old database is brought up to date, a newer one is refused, and the code agrees with the tables."""

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from cadenza.core.errors import ConfigError, CorruptArtifact, MissingArtifact
from cadenza.core.rundb import RunDatabase
from cadenza.core.schema import MIGRATIONS, make_engine, migrate
from cadenza.core.tables import SCHEMA_HEAD, metadata


def scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return ScriptDirectory.from_config(config)


def test_the_fast_path_knows_the_newest_migration():
    assert scripts().get_heads() == [SCHEMA_HEAD]


def test_migrations_make_exactly_the_tables_that_the_code_uses(tmp_path):
    engine = make_engine(f"sqlite:///{tmp_path / 'a.db'}")
    migrate(engine, "a.db")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_every_older_schema_is_brought_up_to_date_with_its_rows(tmp_path):
    from alembic import command

    for script in scripts().walk_revisions():
        path = tmp_path / f"{script.revision}.db"
        engine = make_engine(f"sqlite:///{path}")
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        with engine.execution_options(write=True).begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, script.revision)
            connection.execute(
                sa.text(
                    "INSERT INTO events (run, kind, data, created) VALUES ('r', 'old', '{\"n\": 1}', 0.0)"
                )
            )
        engine.dispose()
        with RunDatabase.open(path) as database:
            assert [event["data"] for event in database.events("r")] == [{"n": 1}]


def test_a_database_of_a_newer_cadenza_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "cadenza.db"
    RunDatabase.open(path).close()
    engine = make_engine(f"sqlite:///{path}")
    with engine.execution_options(write=True).begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(CorruptArtifact, match="has schema 9999, newer than this Cadenza") as failure:
        RunDatabase.open(path)
    assert "\n" not in str(failure.value)
    with pytest.raises(CorruptArtifact, match="has schema 9999, newer than this Cadenza"):
        RunDatabase.observe(path)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    engine.dispose()


def test_an_observer_migrates_or_makes_a_database(tmp_path, monkeypatch):
    path = tmp_path / "cadenza.db"
    RunDatabase.open(path).close()
    before = path.read_bytes()
    with monkeypatch.context() as later:  # as the next Cadenza with a migration will find it
        later.setattr("cadenza.core.schema.SCHEMA_HEAD", "9999")
        message = (
            f"has schema {SCHEMA_HEAD}, older than this Cadenza .9999.; the next cadenza train in its folder"
        )
        with pytest.raises(CorruptArtifact, match=message) as failure:
            RunDatabase.observe(path)
    assert "\n" not in str(failure.value) and path.read_bytes() == before
    (tmp_path / "empty.db").touch()
    with pytest.raises(MissingArtifact, match="is empty; start a run"):
        RunDatabase.observe(tmp_path / "empty.db")
    assert (tmp_path / "empty.db").stat().st_size == 0
    for location in (tmp_path / "none.db", f"sqlite:///{tmp_path}/none.db"):
        with pytest.raises(MissingArtifact, match="no run database at .*none.db; start a run"):
            RunDatabase.observe(location)
    assert not (tmp_path / "none.db").exists()


def test_a_current_database_opens_without_loading_alembic(tmp_path, command_environment):
    import subprocess
    import sys

    path = tmp_path / "cadenza.db"
    RunDatabase.open(path).close()
    code = (
        "import sys; from cadenza.core.rundb import RunDatabase; "
        f"RunDatabase.open({str(path)!r}).close(); sys.exit('alembic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=command_environment, check=False).returncode == 0


def test_a_database_without_one_of_its_tables_is_reported_as_a_defect(tmp_path):
    path = tmp_path / "cadenza.db"
    with RunDatabase.open(path):
        pass
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE stages"))
    engine.dispose()
    with RunDatabase.open(path) as database:
        with pytest.raises(
            CorruptArtifact, match="is not a whole run database: no such table: stages; restore it"
        ):
            database.stages("r")
        with pytest.raises(CorruptArtifact, match="no such table: stages"):
            database.stop_stage("r", "s", "failed", "x")


@pytest.mark.parametrize("url", ["postgresql+nodriver://me:secret@host/db", "nodialect://host/db", "x://"])
def test_a_url_without_its_driver_is_a_defect_or_tells_the_password(url):
    with pytest.raises(ConfigError, match="as run database: .*; install the driver it names") as failure:
        RunDatabase.open(url)
    assert "secret" not in str(failure.value)
