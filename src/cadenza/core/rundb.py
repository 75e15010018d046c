"""The run database: what ran, how far it came, which prompts were trained on, which policy is served.

One database serves a folder of runs (``runs/cadenza.db``, SQLite in WAL mode) or a cluster (a PostgreSQL URL). All
writes go through one grouped writer; every writing method waits for its commit unless ``wait=False`` gives a future
(in asyncio: ``await asyncio.wrap_future(...)``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from cadenza.core import tables
from cadenza.core.errors import CadenzaError, DeadlineExceeded, MissingArtifact
from cadenza.core.grouped_writes import GroupedWriter
from cadenza.core.schema import BUSY_S, database_errors, make_engine, migrate, reading_url, require_current
from cadenza.core.types import Policy

WRITE_DEADLINE_S = 2 * BUSY_S


class LedgerViolation(CadenzaError):
    """A prompt would be trained on twice, or trained without having been planned (invariant 6)."""

    exit_code = 10


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. ``status``: running | finished | failed | interrupted."""

    id: str
    name: str
    directory: Path
    recipe: dict[str, Any]
    seed: int
    status: str
    machine: dict[str, Any]
    created: float
    updated: float


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One stage of a run; ``figures`` are what it returned when it finished."""

    run: str
    name: str
    position: int
    config_digest: str
    config: dict[str, Any]
    status: str
    started: float
    finished: float | None
    artifact_digest: str | None
    figures: dict[str, Any] | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step of an RL run, with the metrics it logged, so that a resume restores them too."""

    step: int
    policy_version: int
    metrics: dict[str, Any]
    created: float


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One prompt of an RL run. ``status``: planned | trained | dropped."""

    task_id: str
    group_id: str
    planned_step: int
    trained_step: int | None
    status: str


@dataclass(frozen=True, slots=True)
class AliasRecord:
    """What an alias of a run points at: a version of the policy that ``stage`` made. ``alias``: candidate | canary |
    serving. ``since``: when it was moved there."""

    alias: str
    stage: str
    version: int
    digest: str
    since: float


class RunDatabase:
    """Typed access. Safe to use from several threads; each process opens its own. Close it, or use ``with``."""

    def __init__(self, engine: sa.Engine, where: str, commit_interval_s: float = 0.05) -> None:
        self.where = where
        self._engine = engine
        self._writer = GroupedWriter(engine.execution_options(write=True), where, commit_interval_s)

    @classmethod
    def open(cls, location: Path | str, commit_interval_s: float = 0.05) -> RunDatabase:
        """Opens, creates or migrates.

        Args:
            location: a file, or an SQLAlchemy URL (text with ``://``).
            commit_interval_s: least time between two commits of this process.

        Raises:
            CorruptArtifact: not a database, or one written by a newer Cadenza.
            ConfigError: the folder cannot be written.
        """
        url: str | sa.URL = str(location)
        if "://" not in url:
            Path(url).parent.mkdir(parents=True, exist_ok=True)
            url = sa.URL.create("sqlite", database=url)  # as text, a ? in the path would begin a query
        engine = make_engine(url)
        try:
            with database_errors(str(location)):
                migrate(engine, str(location))
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, str(location), commit_interval_s)

    @classmethod
    def observe(cls, location: Path | str) -> RunDatabase:
        """Opens for reading alone: creates and migrates nothing, and needs no right to write where a file lies.

        Args:
            location: as of ``open``.

        Raises:
            MissingArtifact: no database there, or an empty one.
            CorruptArtifact: not a database, or one written by an older or newer Cadenza.
            ConfigError: it cannot be opened.
        """
        text = str(location)
        engine = make_engine(reading_url(text), read_only=True)
        try:
            with database_errors(text):
                require_current(engine, text)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, text)

    def close(self) -> None:
        """Commits what was submitted and frees the connections."""
        self._writer.close()
        self._engine.dispose()

    def __enter__(self) -> RunDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # runs

    def begin_run(
        self, run: str, name: str, directory: Path, recipe: dict[str, Any], seed: int, machine: dict[str, Any]
    ) -> None:
        """Records a new run, or that a known one goes on with this recipe and machine."""
        now = time.time()
        values = {
            "name": name,
            "directory": str(directory),
            "recipe": recipe,
            "seed": seed,
            "status": "running",
            "machine": machine,
            "updated": now,
        }

        def write(connection: sa.Connection) -> None:
            changed = connection.execute(
                sa.update(tables.runs).where(tables.runs.c.id == run).values(**values)
            )
            if changed.rowcount == 0:
                connection.execute(sa.insert(tables.runs).values(id=run, created=now, **values))

        self._wait(self._writer.submit(write))

    def set_run_status(self, run: str, status: str) -> None:
        """``status``: running | finished | failed | interrupted."""
        statement = sa.update(tables.runs).where(tables.runs.c.id == run)
        self._execute(statement.values(status=status, updated=time.time()))

    def runs(self) -> list[RunRecord]:
        """All runs, newest first."""
        rows = self._read(sa.select(tables.runs).order_by(tables.runs.c.created.desc()))
        return [RunRecord(**{**row, "directory": Path(row["directory"])}) for row in rows]

    def run(self, run: str) -> RunRecord | None:
        """The run with this id, None when it was never begun."""
        return next((record for record in self.runs() if record.id == run), None)

    # stages

    def start_stage(
        self, run: str, name: str, position: int, config_digest: str, config: dict[str, Any]
    ) -> None:
        """Records that a stage runs now; what an earlier attempt left in its row is replaced."""

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(tables.stages).where(_stage(run, name)))
            connection.execute(
                sa.insert(tables.stages).values(
                    run=run,
                    name=name,
                    position=position,
                    config_digest=config_digest,
                    config=config,
                    status="running",
                    started=time.time(),
                )
            )

        self._wait(self._writer.submit(write))

    def finish_stage(self, run: str, name: str, artifact_digest: str, figures: dict[str, Any]) -> None:
        """Records that a started stage made its artifact."""
        self._execute(
            sa.update(tables.stages)
            .where(_stage(run, name))
            .values(
                status="finished",
                finished=time.time(),
                artifact_digest=artifact_digest,
                figures=figures,
                reason=None,
            )
        )

    def stop_stage(self, run: str, name: str, status: str, reason: str) -> None:
        """Records why a stage did not finish. ``status``: failed | interrupted."""
        statement = sa.update(tables.stages).where(_stage(run, name))
        self._execute(statement.values(status=status, finished=time.time(), reason=reason))

    def forget_stage(self, run: str, name: str) -> None:
        """Removes a stage, everything an RL run of that name recorded, and the aliases that point at its policies."""
        rl_run = rl_run_id(run, name)

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(tables.stages).where(_stage(run, name)))
            for table in (tables.rl_steps, tables.ledger, tables.policies, tables.aliases, tables.events):
                connection.execute(sa.delete(table).where(table.c.run == rl_run))

        self._wait(self._writer.submit(write))

    def stages(self, run: str) -> list[StageRecord]:
        """The stages that have been started, in recipe order."""
        query = sa.select(tables.stages).where(tables.stages.c.run == run).order_by(tables.stages.c.position)
        return [StageRecord(**row) for row in self._read(query)]

    # RL steps and the ledger

    def plan(
        self, rl_run: str, step: int, prompts: Sequence[tuple[str, str]], wait: bool = True
    ) -> Future[Any] | None:
        """Plans (task_id, group_id) prompts for ``step``, all or none.

        Raises:
            LedgerViolation: one of them was planned before in this RL run.
        """

        def write(connection: sa.Connection) -> None:
            rows = [
                {"run": rl_run, "task_id": task, "group_id": group, "planned_step": step, "status": "planned"}
                for task, group in prompts
            ]
            try:
                if rows:
                    connection.execute(sa.insert(tables.ledger), rows)
            except IntegrityError as error:
                raise LedgerViolation(
                    f"step {step} of {rl_run} plans a prompt twice",
                    "this is a defect of the sampler; report it",
                ) from error

        return self._finish(self._writer.submit(write, urgent=wait), wait)

    def record_step(
        self,
        rl_run: str,
        step: int,
        policy_version: int,
        metrics: dict[str, Any],
        trained: Iterable[str] = (),
        dropped: Iterable[str] = (),
        wait: bool = True,
    ) -> Future[Any] | None:
        """Records a finished step and the task ids it trained on or dropped, in one transaction.

        Raises:
            LedgerViolation: a task was not planned, or was already trained or dropped.
        """
        outcomes = [(task, "trained") for task in trained] + [(task, "dropped") for task in dropped]

        def write(connection: sa.Connection) -> None:
            for task, status in outcomes:
                changed = connection.execute(
                    sa.update(tables.ledger)
                    .where(_prompt(rl_run, task), tables.ledger.c.status == "planned")
                    .values(trained_step=step if status == "trained" else None, status=status)
                )
                if changed.rowcount != 1:
                    raise LedgerViolation(
                        f"step {step} of {rl_run} would have {status} task {task}, which is not waiting to be trained",
                        "this is a defect of the reconciler; report it",
                    )
            connection.execute(
                sa.insert(tables.rl_steps).values(
                    run=rl_run, step=step, policy_version=policy_version, metrics=metrics, created=time.time()
                )
            )

        return self._finish(self._writer.submit(write, urgent=wait), wait)

    def rewind(self, rl_run: str, step: int) -> None:
        """Forgets everything after ``step``: what a crash left between a commit and the checkpoint that should follow.

        Steps and policies past it are deleted with the aliases that point there, prompts trained past it wait again,
        prompts planned past it are free.
        """
        ledger, steps = tables.ledger.c, tables.rl_steps.c
        kept = sa.select(sa.func.coalesce(sa.func.max(steps.policy_version), 0)).where(steps.run == rl_run)

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(tables.rl_steps).where(steps.run == rl_run, steps.step > step))
            for table in (tables.policies, tables.aliases):
                connection.execute(
                    sa.delete(table).where(table.c.run == rl_run, table.c.version > kept.scalar_subquery())
                )
            connection.execute(
                sa.delete(tables.ledger).where(ledger.run == rl_run, ledger.planned_step > step)
            )
            connection.execute(
                sa.update(tables.ledger)
                .where(ledger.run == rl_run, ledger.trained_step > step)
                .values(trained_step=None, status="planned")
            )

        self._wait(self._writer.submit(write))

    def steps(self, rl_run: str) -> list[StepRecord]:
        """The steps of an RL run, in order."""
        table = tables.rl_steps
        columns = (table.c.step, table.c.policy_version, table.c.metrics, table.c.created)
        rows = self._read(sa.select(*columns).where(table.c.run == rl_run).order_by(table.c.step))
        return [StepRecord(**row) for row in rows]

    def ledger(self, rl_run: str, status: str | None = None) -> list[LedgerEntry]:
        """Prompts by planned step, then task; all, or those of one status."""
        c = tables.ledger.c
        query = sa.select(c.task_id, c.group_id, c.planned_step, c.trained_step, c.status).where(
            c.run == rl_run
        )
        if status is not None:
            query = query.where(c.status == status)
        return [LedgerEntry(**row) for row in self._read(query.order_by(c.planned_step, c.task_id))]

    # policies, aliases, events

    def add_policy(self, rl_run: str, policy: Policy) -> None:
        """Records a version; recording the same version again replaces it (a resumed run makes it anew)."""

        def write(connection: sa.Connection) -> None:
            c = tables.policies.c
            connection.execute(sa.delete(tables.policies).where(c.run == rl_run, c.version == policy.version))
            connection.execute(
                sa.insert(tables.policies).values(
                    run=rl_run,
                    version=policy.version,
                    name=policy.name,
                    parent=policy.parent,
                    digest=policy.digest,
                    created=time.time(),
                )
            )

        self._wait(self._writer.submit(write))

    def policies(self, rl_run: str) -> list[Policy]:
        """The recorded versions of an RL run's policy, oldest first."""
        c = tables.policies.c
        query = sa.select(c.name, c.version, c.parent, c.digest).where(c.run == rl_run).order_by(c.version)
        return [Policy(**row) for row in self._read(query)]

    def point(self, alias: str, rl_run: str, version: int) -> None:
        """Moves an alias (``RUN/candidate``, ``RUN/canary``, ``RUN/serving``) in one transaction.

        Raises:
            MissingArtifact: the policy was never recorded.
        """

        def write(connection: sa.Connection) -> None:
            c = tables.policies.c
            known = connection.execute(
                sa.select(c.version).where(c.run == rl_run, c.version == version)
            ).first()
            if known is None:
                raise MissingArtifact(
                    f"no policy version {version} in {rl_run}", "point at a recorded version"
                )
            connection.execute(sa.delete(tables.aliases).where(tables.aliases.c.name == alias))
            connection.execute(
                sa.insert(tables.aliases).values(name=alias, run=rl_run, version=version, updated=time.time())
            )

        self._wait(self._writer.submit(write))

    def unpoint(self, alias: str) -> None:
        """Removes an alias; idempotent."""
        self._execute(sa.delete(tables.aliases).where(tables.aliases.c.name == alias))

    def aliases(self, run: str) -> list[AliasRecord]:
        """The aliases of a run by name, with the digest of the weights that each names."""
        c, policies = tables.aliases.c, tables.policies.c
        known = sa.and_(policies.run == c.run, policies.version == c.version)
        query = (
            sa.select(c.name, c.run, c.version, policies.digest, c.updated)
            .join_from(tables.aliases, tables.policies, known)
            .where(c.name.startswith(f"{run}/", autoescape=True))
            .order_by(c.name)
        )
        return [
            AliasRecord(
                alias=row["name"].removeprefix(f"{run}/"),
                stage=row["run"].removeprefix(f"{run}/"),
                version=row["version"],
                digest=row["digest"],
                since=row["updated"],
            )
            for row in self._read(query)
        ]

    def event(self, run: str, kind: str, data: dict[str, Any], wait: bool = False) -> Future[Any] | None:
        """Appends to the log of things that happened: a retry, a lost sandbox, a late straggler."""
        statement = sa.insert(tables.events).values(run=run, kind=kind, data=data, created=time.time())
        return self._finish(
            self._writer.submit(lambda connection: connection.execute(statement) and None, urgent=wait), wait
        )

    def events(self, run: str, kind: str | None = None) -> list[dict[str, Any]]:
        """Events in order: ``{"kind", "data", "created"}``."""
        c = tables.events.c
        query = sa.select(c.kind, c.data, c.created).where(c.run == run).order_by(c.id)
        return self._read(query if kind is None else query.where(c.kind == kind))

    def flush(self) -> None:
        """Waits until everything submitted so far is committed; raises nothing for writes whose futures failed."""
        self._wait(self._writer.submit(lambda _: None))

    def _execute(self, statement: sa.Executable) -> None:
        self._wait(self._writer.submit(lambda connection: connection.execute(statement) and None))

    def _read(self, query: sa.Select) -> list[dict[str, Any]]:
        with database_errors(self.where), self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def _finish(self, future: Future[Any], wait: bool) -> Future[Any] | None:
        return self._wait(future) if wait else future

    def _wait(self, future: Future[Any]) -> Any:
        try:
            return future.result(timeout=WRITE_DEADLINE_S)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"waited {WRITE_DEADLINE_S} s for a write to {self.where}", "check the disk and run again"
            ) from None


def rl_run_id(run: str, stage: str) -> str:
    """The name under which an RL stage keeps its steps, ledger and policies."""
    return f"{run}/{stage}"


def _stage(run: str, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(tables.stages.c.run == run, tables.stages.c.name == name)


def _prompt(rl_run: str, task: str) -> sa.ColumnElement[bool]:
    return sa.and_(tables.ledger.c.run == rl_run, tables.ledger.c.task_id == task)
