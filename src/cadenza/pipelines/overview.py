"""What the run database knows, for people and scripts."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from cadenza.core.config import nearest
from cadenza.core.errors import CorruptArtifact, MissingArtifact
from cadenza.core.progress import clock
from cadenza.core.rundb import AliasRecord, RunDatabase, RunRecord, StageRecord
from cadenza.core.types import to_plain
from cadenza.pipelines.run_folder import RunFolder, database_of

TIME = "%Y-%m-%d %H:%M"


def list_runs(folder: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Runs under ``folder``, newest first, with their stages and aliases, JSON-ready. ``status``: running | finished |
    failed | interrupted | killed | gone. ``state`` of an alias: whether the artifact of the stage that it points at is
    there | unfinished | gone.

    Raises:
        MissingArtifact: nothing was run there, or nothing with this name.
        CorruptArtifact: the run database is none, or was written by an older or newer Cadenza.
    """
    location = database_of(folder)
    if isinstance(location, Path) and not location.is_file():
        raise MissingArtifact(f"no runs in {folder.absolute()}", "start one with: cadenza train demo-quick")
    with RunDatabase.observe(location) as database:
        records = database.runs()
        chosen = [record for record in records if name is None or record.name == name]
        if name is not None and not chosen:
            names = {record.name for record in records}
            near = nearest(name, names)
            mend = (
                f"did you mean {near!r}?" if near else "known runs: " + (", ".join(sorted(names)) or "none")
            )
            raise MissingArtifact(f"no run named {name!r}", mend)
        return [_run(database, record) for record in chosen]


def newest_run(folder: Path) -> Path:
    """The folder of the run that was begun or continued last and is still there. Raises MissingArtifact."""
    found = [run for run in list_runs(folder) if run["status"] != "gone"]
    if not found:
        raise MissingArtifact(f"no run in {folder.absolute()} is still there", "name the folder of a run")
    return Path(max(found, key=lambda run: run["updated"])["run_dir"])


def _run(database: RunDatabase, record: RunRecord) -> dict[str, Any]:
    status = _status(record)
    return {
        "id": record.id,
        "name": record.name,
        "run_dir": str(record.directory),
        "seed": record.seed,
        "status": status,
        "created": record.created,
        "updated": record.updated,
        "machine": record.machine,
        "stages": [_plain(stage) for stage in database.stages(record.id)],
        "aliases": [
            to_plain(alias) | {"state": _state(record, status, alias)}
            for alias in database.aliases(record.id)
        ],
    }


def _status(record: RunRecord) -> str:
    """The recorded status, unless the folder knows better: a run that no process works on was killed, and one whose
    folder was deleted, moved or taken by another run (``--fresh``) is gone."""
    folder = RunFolder(record.directory)
    if not folder.exists:
        return "gone"
    with contextlib.suppress(CorruptArtifact):  # whose it is cannot be told then
        if folder.identity() != record.id:
            return "gone"
    return "killed" if record.status == "running" and not folder.in_use() else record.status


def _state(record: RunRecord, status: str, alias: AliasRecord) -> str:
    """Whether what an alias points at can be served: the database does not notice that a folder was removed."""
    folder = RunFolder(record.directory)
    if status != "gone" and folder.artifact(alias.stage).is_dir():
        return "there"
    return "unfinished" if status != "gone" and folder.partial(alias.stage).is_dir() else "gone"


def _plain(stage: StageRecord) -> dict[str, Any]:
    return {
        "name": stage.name,
        "status": stage.status,
        "started": stage.started,
        "finished": stage.finished,
        "artifact_digest": stage.artifact_digest,
        "figures": stage.figures,
        "reason": stage.reason,
    }


def runs_table(runs: list[dict[str, Any]]) -> Table:
    """A table with a row for each run."""
    table = _table("run", "seed", "started", "status", "stages", "folder")
    for run in runs:
        done = sum(stage["status"] == "finished" for stage in run["stages"])
        started = time.strftime(TIME, time.localtime(run["created"]))
        table.add_row(run["name"], str(run["seed"]), started, run["status"], str(done), run["run_dir"])
    return table


def heading(run: dict[str, Any]) -> str:
    """One line on a run."""
    return f"{run['name']}, seed {run['seed']}: {run['status']}, in {run['run_dir']}"


def stages_table(run: dict[str, Any]) -> Table:
    """A table of one run's stages."""
    table = _table("stage", "status", "time", "figures")
    for stage in run["stages"]:
        spent = clock(stage["finished"] - stage["started"]) if stage["finished"] else ""
        note = stage["reason"] or _figures(stage["figures"] or {})
        status = run["status"] if stage["status"] == "running" else stage["status"]
        table.add_row(stage["name"], status, spent, note)
    return table


def aliases_table(run: dict[str, Any]) -> Table:
    """A table of the policies that one run's aliases point at."""
    table = _table("alias", "stage", "version", "weights", "since", "its folder is")
    for alias in run["aliases"]:
        since = time.strftime(TIME, time.localtime(alias["since"]))
        version, weights = str(alias["version"]), alias["digest"] or "unknown"
        table.add_row(alias["alias"], alias["stage"], version, weights, since, alias["state"])
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _figures(figures: dict[str, Any]) -> str:
    scalars = {k: v for k, v in figures.items() if isinstance(v, (int, float, str))}
    return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in scalars.items())
