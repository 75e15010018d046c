"""The report of a run that has not ended: what there is by now."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path

from cadenza.core import machine
from cadenza.core.errors import MissingArtifact
from cadenza.core.files import read_table
from cadenza.core.rundb import RunDatabase, StageRecord
from cadenza.evaluation.report import Headline, Report, build_report
from cadenza.evaluation.report_inputs import Metrics, RunInfo, StageInfo, read_run

SHOWN = ("metrics", "evaluations")  # folders of a stage whose files are shown, beside single ones
FILES = ("timeline.jsonl", "trajectories.jsonl", "decisions.jsonl", "feedback.jsonl")
QUIET_S = 60.0  # without a word from a running stage, the page says so


def run_info(
    database: RunDatabase, run_id: str, name: str, seed: int, notes: tuple[str, ...] = ()
) -> RunInfo:
    """What the run database knows of a run: its recipe, machine, and how far its stages came."""
    run, stages = database.run(run_id), database.stages(run_id)
    given = database.events(run_id, "command")
    return RunInfo(
        name=name,
        recipe=run.name if run else "",
        seeds=(seed,),
        wall_s=sum((s.finished or s.started) - s.started for s in stages),
        command=given[-1]["data"]["text"] if given else "",
        config=run.recipe if run else {},
        machine=run.machine if run else machine.describe(),
        stages=tuple(_stage(s) for s in stages),
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
    inputs = read_run(run_dir, info)
    report = build_report(inputs, latest=True)
    headline = _headline(run.status if run else "", stages, inputs.metrics)
    return dataclasses.replace(report, headline=headline or report.headline)


def version_of(run_dir: Path, database: Path | str) -> str:
    """Changes whenever something that is shown has changed: a digest of names, sizes and times of the files."""
    h = hashlib.blake2b(digest_size=8)
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


def _stage(s: StageRecord) -> StageInfo:
    facts = {k: v for k, v in (s.figures or {}).items() if isinstance(v, (int, float, str))}
    return StageInfo(
        name=s.name,
        status="done" if s.status == "finished" else s.status,
        wall_s=s.finished - s.started if s.finished else None,
        detail={**facts, **({"why": s.reason} if s.reason else {})},
    )


def _headline(status: str, stages: list[StageRecord], metrics: dict[str, Metrics]) -> Headline | None:
    """Where the run stands; None once it has ended well, when its result is the headline."""
    now = next((s for s in stages if s.status == "running"), None)
    if status in ("failed", "interrupted"):
        last = next((s for s in reversed(stages) if s.reason), None)
        return Headline(f"The run was {status}.", last.reason if last and last.reason else "", "bad")
    if now is None or status != "running":
        return None
    since = time.time() - now.started
    text = f"Stage {now.name} is running, {since / 60:.0f} minutes by now."
    rows = metrics[now.name].rows if now.name in metrics else []
    if not rows:
        return Headline(text, f"{sum(s.status == 'finished' for s in stages)} stages are done.", "open")
    last = rows[-1]
    told = [f"step {int(last['step'])}"]
    for key, shown in (("pass_rate", "solved"), ("heldout_loss", "held-out loss"), ("train_loss", "loss")):
        if key in last:
            told.append(
                f"{shown} {100 * last[key]:.0f}%" if key == "pass_rate" else f"{shown} {last[key]:.3f}"
            )
    return Headline(text, ", ".join(told) + ".", "open")
