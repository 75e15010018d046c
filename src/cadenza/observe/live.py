"""The report of a run that has not ended: what there is by now."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from datetime import UTC, datetime
from pathlib import Path

from cadenza.core import machine
from cadenza.core.errors import MissingArtifact
from cadenza.core.files import LOCK, is_locked, read_table
from cadenza.core.rundb import RunDatabase, RunRecord, StageRecord
from cadenza.evaluation.report import Report, build_report
from cadenza.evaluation.report_headline import Headline
from cadenza.evaluation.report_inputs import RunInfo, RunInputs, StageInfo, read_run

SHOWN = ("metrics", "evaluations")  # folders of a stage whose files are shown, beside single ones
_ENDED = {"failed": "failed", "interrupted": "was interrupted"}
FILES = ("timeline.jsonl", "trajectories.jsonl", "decisions.jsonl", "feedback.jsonl")


def run_info(
    database: RunDatabase, run_id: str, name: str, seed: int, notes: tuple[str, ...] = ()
) -> RunInfo:
    """What the run database knows of a run: its recipe, machine, and how far its stages came; those of the recipe that
    have not begun are waiting. A stage that runs counts with the time it has taken by now."""
    run, stages = database.run(run_id), database.stages(run_id)
    given = database.events(run_id, "command")
    return RunInfo(
        name=name,
        recipe=run.name if run else "",
        seeds=(seed,),
        started_at=_utc(run.created).isoformat(timespec="seconds") if run else "",
        wall_s=sum(_seconds(s) for s in stages),
        command=given[-1]["data"]["text"] if given else "",
        config=run.recipe if run else {},
        machine=run.machine if run else machine.describe(),
        stages=(*(_stage(s) for s in stages), *_waiting(run, stages)),
        notes=notes,
    )


def live_report(run_dir: Path, database: Path | str) -> Report:
    """Raises MissingArtifact when there is no such run."""
    identity = run_dir / "run.json"
    if not identity.is_file():
        raise MissingArtifact(
            f"no run at {run_dir.absolute()}", "name the folder of a run, for example runs/demo"
        )
    run_id = str(read_table(identity, "restore it, or run the same command again")["id"])
    with RunDatabase.observe(database) as opened:
        run = opened.run(run_id)
        info = run_info(opened, run_id, run_dir.resolve().name, run.seed if run else 0)
        stages = opened.stages(run_id)
    status = run.status if run else ""
    if status == "running" and not is_locked(run_dir / LOCK):
        status, info = "killed", _without_end(info, stages)
    inputs = read_run(run_dir, info)
    report = build_report(inputs, latest=True)
    headline = _headline(status, stages, inputs)
    if status == "running":
        report = dataclasses.replace(report, running=True, missing=[])
    return dataclasses.replace(report, headline=headline or report.headline)


def version_of(run_dir: Path, database: Path | str) -> str:
    """Changes whenever something that is shown has changed: a digest of names, sizes and times of the files, and of
    whether a process is at work."""
    h = hashlib.blake2b(b"locked" if is_locked(run_dir / LOCK) else b"", digest_size=8)
    for path in sorted(_files(run_dir, database)):
        try:
            stat = path.stat()
        except FileNotFoundError:  # renamed meanwhile, when a stage ended
            continue
        if not stat.st_size:  # a reader of the database leaves an empty log beside it
            continue
        h.update(f"{path}/{stat.st_size}/{stat.st_mtime_ns};".encode())
    return h.hexdigest()


def _files(run_dir: Path, database: Path | str) -> list[Path]:
    if not run_dir.is_dir():
        return []
    found = [path for suffix in ("", "-wal") if (path := Path(f"{database}{suffix}")).is_file()]
    for folder in [run_dir, *(p for p in run_dir.iterdir() if p.is_dir())]:
        found += [folder / name for name in FILES]
        for name in SHOWN:
            found += (folder / name).glob("*")
    return found


def _without_end(info: RunInfo, stages: list[StageRecord]) -> RunInfo:
    """Of a run whose process is gone: nobody knows how long the stage at work has been dead."""
    known = [
        s.model_copy(update={"status": "killed", "wall_s": None}) if s.status == "running" else s
        for s in info.stages
    ]
    wall_s = sum(_seconds(s) for s in stages if s.status != "running")
    return info.model_copy(update={"stages": tuple(known), "wall_s": wall_s})


def _waiting(run: RunRecord | None, begun: list[StageRecord]) -> list[StageInfo]:
    known = {s.name for s in begun}
    names = [str(table.get("name")) for table in (run.recipe.get("stage", []) if run else [])]
    return [StageInfo(name=name, status="waiting") for name in names if name not in known]


def _seconds(s: StageRecord) -> float:
    end = time.time() if s.status == "running" else s.finished or s.started
    return max(0.0, end - s.started)


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _stage(s: StageRecord) -> StageInfo:
    facts = {k: v for k, v in (s.figures or {}).items() if isinstance(v, (int, float, str))}
    return StageInfo(
        name=s.name,
        status="done" if s.status == "finished" else s.status,
        wall_s=_seconds(s) if s.finished or s.status == "running" else None,
        detail={**facts, **({"why": s.reason} if s.reason else {})},
    )


def _headline(status: str, stages: list[StageRecord], inputs: RunInputs) -> Headline | None:
    """Where the run stands; None once it has ended well, when its result is the headline."""
    now = next((s for s in stages if s.status == "running"), None)
    if status == "killed":
        told = f" in stage {now.name}" if now else ""
        why = "Its process ended without a word. The same command goes on from there."
        return Headline(f"The run was killed{told}.", why, "bad", inputs.run.command)
    if status in _ENDED:
        last = next((s for s in reversed(stages) if s.reason), None)
        why = last.reason if last and last.reason else ""
        return Headline(f"The run {_ENDED[status]}.", why, "bad", inputs.run.command)
    if now is None or status != "running":
        return None
    # An instant and not a length of time: the page is made anew only when something has changed.
    text = f"Stage {now.name} is running, since {_utc(now.started):%H:%M} UTC."
    rows = inputs.metrics[now.name].rows if now.name in inputs.metrics else []
    if not rows:
        done = sum(s.status == "finished" for s in stages)
        return Headline(text, f"{done} stage{'s are' if done != 1 else ' is'} done.", "open")
    last = rows[-1]
    told = [f"step {int(last['step'])}"]
    for key, shown in (("pass_rate", "solved"), ("heldout_loss", "held-out loss"), ("train_loss", "loss")):
        if key in last:
            told.append(
                f"{shown} {100 * last[key]:.0f}%" if key == "pass_rate" else f"{shown} {last[key]:.3f}"
            )
    return Headline(text, ", ".join(told) + ".", "open")
