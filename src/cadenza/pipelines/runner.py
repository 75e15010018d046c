"""Runs a plan in a folder, stage by stage, and goes on where an earlier run stopped.

The artifact's manifest is the truth about what is finished; the run database is its readable record and is mended
from the manifest if a process died between the two. Nothing that was complete is ever lost without being asked for.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cadenza.core import machine
from cadenza.core.artifacts import MANIFEST, Manifest, publish, read_manifest, verify
from cadenza.core.config import differences
from cadenza.core.errors import (
    CadenzaError,
    ConfigError,
    CorruptArtifact,
    Interrupted,
    MissingArtifact,
    ResourceExhausted,
)
from cadenza.core.extras import missing_extra, require_packages
from cadenza.core.files import (
    copy_file,
    disk_full,
    is_disk_full,
    read_table,
    refuse_folder,
    write_bytes,
    write_json,
)
from cadenza.core.memory import is_out_of_memory, out_of_memory
from cadenza.core.progress import Progress, clock
from cadenza.core.rundb import RunDatabase, rl_run_id
from cadenza.core.telemetry import Telemetry
from cadenza.core.types import to_plain
from cadenza.orchestration.placement import OPENMP
from cadenza.pipelines.plan import Plan, PlannedStage, require_input
from cadenza.pipelines.run_folder import RunFolder
from cadenza.pipelines.stages import Figures, StageContext

RESUME = "run the same command again to go on"
for _name, _value in OPENMP.items():  # before a stage loads torch
    os.environ.setdefault(_name, _value)
_SAME = "the same command"  # in mends
BEGUN = ".stage.json"  # in a partial artifact: whose configuration it belongs to
# What a stage's manifest says about it.
_ABOUT = {"config_digest": str, "inputs": dict, "figures": dict, "seconds": (int, float)}


@dataclass(frozen=True)
class StageOutcome:
    """``skipped``: it was finished before. ``seconds``: how long it took when it ran, this time or earlier."""

    name: str
    skipped: bool
    seconds: float
    figures: Figures
    path: Path


@dataclass(frozen=True)
class RunOutcome:
    """What a finished run hands back."""

    run_id: str
    run_dir: Path
    stages: list[StageOutcome] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready."""
        return to_plain(self)


def run_plan(
    plan: Plan,
    run_dir: Path,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    fresh: bool = False,
    restart_from: str | None = None,
    command: str = "",
) -> RunOutcome:
    """Runs every stage that is not finished.

    Args:
        progress: what a person sees; nothing by default.
        resume: the run must exist already.
        fresh: throw the run's artifacts away first and begin a new run in the same folder.
        restart_from: throw away this stage and those that read it, and make them again.
        command: what a person has to give to go on with this run, for its page; "" when no command began it.

    Raises:
        ConfigError: a finished or begun stage has another configuration, another process runs this folder, or a
            folder lies where a stage puts a file.
        Interrupted: Ctrl-C or SIGTERM. ResourceExhausted: disk full. Any CadenzaError of a stage.
    """
    if not plan.stages:
        raise ConfigError(
            f"recipe {plan.name!r} has no stages", "add a [[stage]] table, or extend another recipe"
        )
    folder = RunFolder(run_dir)
    _restore_identity(folder)
    if resume and not folder.exists:
        raise MissingArtifact(f"no run to resume at {folder.path}", "check --run-dir, or leave out --resume")
    if restart_from is not None:
        plan.stage_named(restart_from)
    plan.require_inputs()
    for copy in (name for planned in plan.stages for name in planned.stage.copies):
        refuse_folder(folder.path / copy)  # now, and not after hours of training
    again = fresh or restart_from is not None
    to_run = [stage for stage in plan.stages if again or not folder.artifact(stage.name).is_dir()]
    for planned in to_run:
        require_packages(planned.stage.packages, f"stage {planned.name!r}")
    if to_run:
        _check_room(plan, folder.path)
    with folder.lock(), ExitStack() as owned:
        database = owned.enter_context(RunDatabase.open(folder.database))
        if (
            fresh and folder.exists
        ):  # only now that the run can begin: a database that is damaged stops it before
            _clear(plan, folder, [stage.name for stage in plan.stages])
            (folder.path / "run.json").unlink()
        run_id = folder.identity()
        telemetry = owned.enter_context(Telemetry(folder.metrics))
        owned.enter_context(_log_file(folder.log))
        run = _Run(plan, folder, run_id, database, telemetry, progress or Progress(), command)
        if restart_from is not None:
            run.forget(plan.dependents(restart_from))
        try:
            return run.run()
        except CadenzaError as error:
            if fresh or restart_from is not None:
                # Given again they would throw away what this attempt has made.
                flag = "--fresh" if fresh else "--restart-from"
                raise error.with_mend(error.mend.replace(_SAME, f"{_SAME} without {flag}")) from error
            raise


class _Run:
    """One execution of a plan; holds what its stages share."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        run_id: str,
        database: RunDatabase,
        telemetry: Telemetry,
        progress: Progress,
        command: str,
    ) -> None:
        self.plan, self.folder, self.run_id, self.command = plan, folder, run_id, command
        self.database, self.telemetry, self.progress = database, telemetry, progress
        self.logger = logging.getLogger("cadenza")
        self.verified: set[Path] = set()

    def forget(self, stages: list[str]) -> None:
        """Removes what was made of these stages, once everything that they will read was found whole."""
        for planned in self.plan.stages:
            for role, source in planned.inputs.items() if planned.name in stages else ():
                if not isinstance(source, str):
                    path = require_input(planned.name, role, source)
                    if (path / MANIFEST).is_file():
                        verify(path)
                elif source not in stages and self.folder.artifact(source).is_dir():
                    self._verified(self.folder.artifact(source), source, deep=True)
        _clear(self.plan, self.folder, stages)
        for name in stages:
            self.database.forget_stage(self.run_id, name)

    def run(self) -> RunOutcome:
        self._check_unchanged()
        where = machine.describe()
        resolved = self.plan.resolved()
        write_bytes(self.folder.path / "recipe.toml", self.plan.toml().encode())
        self.database.begin_run(
            self.run_id, self.plan.name, self.folder.path, resolved, self.plan.seed, where
        )
        self.database.event(self.run_id, "command", {"text": self.command}, wait=True)
        self.telemetry.log("run", name=self.plan.name, seed=self.plan.seed, machine=where)
        outcome = RunOutcome(self.run_id, self.folder.path)
        try:
            with _sigterm_interrupts():
                for number, planned in enumerate(self.plan.stages):
                    outcome.stages.append(self._finished(planned, number) or self._run_stage(planned, number))
                self._restore_copies()
        except (KeyboardInterrupt, Interrupted) as error:
            self._close_run("interrupted")
            if isinstance(error, Interrupted):
                raise
            raise Interrupted("interrupted between two stages", RESUME) from error
        except BaseException:
            self._close_run("failed")
            raise
        self._close_run("finished")
        return outcome

    def _restore_copies(self) -> None:
        """Brings back what stages put into the run's folder and somebody removed. From the last stage on: where two
        put the same name, the later one's is what lay there."""
        for planned in reversed(self.plan.stages):
            for name in planned.stage.copies:
                source, target = self.folder.artifact(planned.name) / name, self.folder.path / name
                if source.is_file() and not target.exists():
                    copy_file(source, target)

    def _close_run(self, status: str) -> None:
        try:
            self.database.set_run_status(self.run_id, status)
        except CadenzaError:  # a full disk: the error that is on its way says so already
            self.logger.warning("the status of the run could not be recorded")

    def _check_unchanged(self) -> None:
        """Refuses, before anything runs, when a finished or begun stage was asked for with another configuration."""
        for planned in self.plan.stages:
            final = self.folder.artifact(planned.name)
            if final.exists() and not final.is_dir():
                raise ConfigError(
                    f"{final} is in the way of stage {planned.name!r}",
                    "move it away, or use another --run-dir",
                )
            if final.is_dir():
                about = self._manifest(planned).about
                state = "finished"
            elif (begun := self._begun(planned)) is not None:
                about, state = begun, "begun"
            else:
                continue
            if about.get("config_digest") == planned.digest:
                continue
            if state == "begun" and not planned.stage.resumable:
                continue  # nothing in it would be used again
            settings = about.get("settings")
            changed = differences(settings if isinstance(settings, dict) else {}, planned.settings)
            shown = "; ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            raise ConfigError(
                f"stage {planned.name!r} was {state} with another configuration ({shown or 'an input changed'})",
                f"add --restart-from {planned.name} to make it again, give the --set it was made with, or use another "
                "--run-dir",
            )

    def _begun(self, planned: PlannedStage) -> dict[str, Any] | None:
        """What an unfinished attempt at a stage recorded when it began, None when there is none."""
        partial = self.folder.partial(planned.name)
        try:
            return read_table(partial / BEGUN, f"remove {partial} and run {_SAME} again")
        except FileNotFoundError:
            return None

    def _manifest(self, planned: PlannedStage) -> Manifest:
        mend = f"restore it, or add --restart-from {planned.name} to make it again"
        path = self.folder.artifact(planned.name)
        try:
            manifest = read_manifest(path)
        except (MissingArtifact, CorruptArtifact) as error:
            raise CorruptArtifact(error.cause, mend) from None
        for key, kind in _ABOUT.items():
            if not isinstance(manifest.about.get(key), kind):
                raise CorruptArtifact(f"{path / MANIFEST} does not say its {key}", mend)
        return manifest

    def _finished(self, planned: PlannedStage, number: int) -> StageOutcome | None:
        """The outcome of a stage that is finished already; also mends its record in the database."""
        path = self.folder.artifact(planned.name)
        if not path.is_dir():
            return None
        manifest = self._verified(path, planned.name, deep=False)
        about = manifest.about
        _, digests = self._inputs(planned, deep=False)
        if about.get("inputs") != digests:
            raise ConfigError(
                f"stage {planned.name!r} was made from other inputs than there are now",
                f"add --restart-from {planned.name} to make it again",
            )
        known = {stage.name: stage for stage in self.database.stages(self.run_id)}.get(planned.name)
        if known is None or known.status != "finished" or known.artifact_digest != manifest.digest:
            self.database.start_stage(self.run_id, planned.name, number, planned.digest, planned.settings)
            self.database.finish_stage(self.run_id, planned.name, manifest.digest, about["figures"])
        self.progress.line(f"{planned.name}: finished earlier ({clock(about['seconds'])}), skipped")
        return StageOutcome(planned.name, True, about["seconds"], about["figures"], path)

    def _verified(self, path: Path, owner: str, deep: bool) -> Manifest:
        try:
            manifest = verify(path, deep=deep and path not in self.verified)
        except CorruptArtifact as error:
            raise CorruptArtifact(
                error.cause, f"restore it, or add --restart-from {owner} to make it again"
            ) from None
        if deep:
            self.verified.add(path)
        return manifest

    def _inputs(self, planned: PlannedStage, deep: bool) -> tuple[dict[str, Path], dict[str, str]]:
        """The folder and the content digest that fill each role; ``deep``: checked byte by byte."""
        paths: dict[str, Path] = {}
        digests: dict[str, str] = {}
        for role, source in planned.inputs.items():
            if isinstance(source, str):
                paths[role] = self.folder.artifact(source)
                digests[role] = self._verified(paths[role], source, deep).digest
                continue
            paths[role] = require_input(planned.name, role, source)
            if (paths[role] / MANIFEST).is_file():
                digests[role] = verify(paths[role], deep).digest
        return paths, digests

    def _run_stage(self, planned: PlannedStage, number: int) -> StageOutcome:
        inputs, input_digests = self._inputs(planned, deep=True)
        settings = planned.settings
        self.database.start_stage(self.run_id, planned.name, number, planned.digest, settings)
        self.progress.line(f"{planned.name}: started")
        begun = time.monotonic()
        try:
            out, earlier = self._open_partial(planned)
            context = self._context(planned, out, earlier is not None, inputs)
            figures = to_plain(planned.stage(planned.config).run(context))
            seconds = (earlier or 0.0) + time.monotonic() - begun
            about = {
                "stage": planned.name,
                "config_digest": planned.digest,
                "settings": settings,
                "inputs": input_digests,
                "figures": figures,
                "seconds": round(seconds, 3),
            }
            (out / BEGUN).unlink()
            manifest = publish(out, self.folder.artifact(planned.name), about)
            self.database.finish_stage(self.run_id, planned.name, manifest.digest, figures)
        except BaseException as error:
            raise self._stopped(planned, error, time.monotonic() - begun) from error
        self.telemetry.log("stage", stage=planned.name, seconds=seconds, figures=figures)
        self.progress.line(f"{planned.name}: finished in {clock(seconds)}")
        self.verified.add(self.folder.artifact(planned.name))
        return StageOutcome(planned.name, False, seconds, figures, self.folder.artifact(planned.name))

    def _open_partial(self, planned: PlannedStage) -> tuple[Path, float | None]:
        """The folder to fill, and the seconds spent on it earlier, None when it starts empty."""
        partial = self.folder.partial(planned.name)
        begun = self._begun(planned)
        if planned.stage.resumable and begun is not None:
            return partial, _seconds(begun)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write_json(
            partial / BEGUN, {"config_digest": planned.digest, "settings": planned.settings, "seconds": 0.0}
        )
        return partial, None

    def _context(
        self, planned: PlannedStage, out: Path, resumed: bool, inputs: dict[str, Path]
    ) -> StageContext:
        return StageContext(
            name=planned.name,
            run_dir=self.folder.path,
            out=out,
            resumed=resumed,
            run_id=self.run_id,
            rl_run=rl_run_id(self.run_id, planned.name),
            seed=planned.seed,
            database=self.database,
            telemetry=self.telemetry,
            progress=self.progress,
            logger=self.logger.getChild(planned.name),
            artifacts=inputs,
        )

    def _stopped(self, planned: PlannedStage, error: BaseException, seconds: float) -> BaseException:
        """Records why a stage did not finish, and gives the error to raise instead."""
        told: BaseException = error
        if isinstance(error, KeyboardInterrupt):
            told = Interrupted(f"interrupted in stage {planned.name!r}", RESUME)
        elif (absent := missing_extra(error, f"stage {planned.name!r}")) is not None:
            told = absent
        elif not isinstance(error, CadenzaError) and is_disk_full(error):
            told = disk_full(self.folder.path)
        elif not isinstance(error, ResourceExhausted) and is_out_of_memory(error):
            told = out_of_memory(f"stage {planned.name!r}")
        elif isinstance(error, CadenzaError):
            told = error.for_stage(planned.name)
        status = "interrupted" if isinstance(told, Interrupted) else "failed"
        self.logger.info("stage %s %s: %s", planned.name, status, told)
        try:
            self._add_seconds(planned, seconds)
            self.database.stop_stage(self.run_id, planned.name, status, str(told) or type(told).__name__)
        except (OSError, CadenzaError):  # most likely the same full disk; the artifact tells the truth anyway
            pass
        return told

    def _add_seconds(self, planned: PlannedStage, seconds: float) -> None:
        begun = self._begun(planned)
        if begun is not None:
            begun["seconds"] = _seconds(begun) + seconds
            write_json(self.folder.partial(planned.name) / BEGUN, begun)


def _clear(plan: Plan, folder: RunFolder, stages: list[str]) -> None:
    folder.clear(stages, [copy for name in stages for copy in plan.stage_named(name).stage.copies])


def _seconds(begun: dict[str, Any]) -> float:
    """How long an unfinished attempt has worked so far."""
    seconds = begun.get("seconds")
    return float(seconds) if isinstance(seconds, (int, float)) else 0.0


def _restore_identity(folder: RunFolder) -> None:
    """A run whose ``run.json`` was lost is still known to the run database, by its folder."""
    location = folder.database
    if folder.exists or not (folder.path / "recipe.toml").is_file():
        return
    if isinstance(location, Path) and not location.is_file():
        return
    with RunDatabase.open(location) as database:
        known = [record.id for record in database.runs() if record.directory == folder.path]
    if known:
        folder.restore_identity(known[0])


def _check_room(plan: Plan, path: Path) -> None:
    """Says before the first stage, and not in the middle of the night, that the machine is too small."""
    memory, disk = machine.available_memory_bytes() / 1e9, machine.free_disk_bytes(path) / 1e9
    if memory < plan.needs_memory_gb:
        raise ResourceExhausted(
            f"recipe {plan.name!r} needs {plan.needs_memory_gb:g} GB of memory, {memory:.1f} GB are free",
            "close other programs, or try --set needs_memory_gb=0 at your own risk",
        )
    if disk < plan.needs_disk_gb:
        raise ResourceExhausted(
            f"recipe {plan.name!r} needs {plan.needs_disk_gb:g} GB of disk, {disk:.1f} GB are free at {path}",
            "free some space, or choose another --run-dir",
        )


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends a run as tidily as Ctrl-C. Only the main thread may set a handler; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: object) -> None:
        if signal.getsignal(signal.SIGINT) in (
            signal.SIG_IGN,
            None,
        ):  # a job that a script put in the background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # asyncio turns this one into a tidy cancellation

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _LogFile(logging.FileHandler):
    """A log that never stops the work: what a full disk does not take is lost, and the error is told elsewhere."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        try:
            super().close()
        except OSError:
            pass


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Sends the ``cadenza`` loggers to the run's log for the length of the block."""
    logger = logging.getLogger("cadenza")
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
