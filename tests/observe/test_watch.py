"""A page that follows a run shows what is there, asks for nothing else, and never writes."""

from __future__ import annotations

import fcntl
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza.core.errors import ConfigError, MissingArtifact
from cadenza.core.rundb import RunDatabase
from cadenza.evaluation.report_html import render_html
from cadenza.evaluation.report_inputs import DecisionRecord, MetricWriter, Span, append_lines
from cadenza.observe import live, live_report, serve
from cadenza.observe.live import version_of


@pytest.fixture
def run(tmp_path) -> Iterator[tuple[Path, Path]]:
    """(folder, database) of a run whose stage rl is at work."""
    folder, path = tmp_path / "runs" / "demo", tmp_path / "runs" / "cadenza.db"
    (folder / "rl.partial").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"format": 1, "id": "r"}))
    with RunDatabase.open(path) as database:
        database.begin_run("r", "demo", folder, {"name": "demo"}, 7, {"cpu": "x"})
        database.start_stage("r", "sft", 0, "d", {})
        database.finish_stage("r", "sft", "a", {"steps": 3})
        database.start_stage("r", "rl", 1, "d", {})
        database.event("r", "gate", {**_gate(), "candidate": "of an attempt that was thrown away"}, wait=True)
    append_lines(folder / "gate.partial" / "decisions.jsonl", [DecisionRecord.from_event("gate", _gate())])
    with MetricWriter(folder / "rl.partial", "rl") as metrics:
        for step in (1, 2, 3):
            metrics.write(10.0 * step, step, pass_rate=0.2 * step, entropy=0.1)
    spans = [Span(lane="engine", start=5.0 * i, end=5.0 * i + 4) for i in range(40)]
    append_lines(folder / "rl.partial" / "timeline.jsonl", spans)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, path


def _gate() -> dict:
    checks = [{"name": "pass@1", "passed": False, "detail": "pass@1 changed by −9.0 points"}]
    return {"candidate": "rl", "baseline": "sft", "promote": False, "checks": checks}


def snapshot(folder: Path) -> dict:
    return {
        p: (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if "cadenza.db" not in p.name
    }


def test_a_run_at_work_is_shown_as_if_it_had_ended(run):
    before = snapshot(run[0])
    report = live_report(*run)
    assert (
        report.headline.text.startswith("Stage rl is running")
        and report.headline.detail == "step 3, solved 60%."
    )
    assert [(s.name, s.status) for s in report.run.stages] == [("sft", "done"), ("rl", "running")]
    assert report.run.seeds == (7,)
    assert report.timeline is not None and report.timeline.end == 199.0  # the latest, not the middle
    (decision,) = report.decisions
    assert (decision.outcome, decision.reasons) == ("refused", ((False, "pass@1 changed by −9.0 points"),))
    assert snapshot(run[0]) == before


@pytest.mark.parametrize(
    ("status", "tone"), [("failed", "bad"), ("interrupted", "bad"), ("finished", "open")]
)
def test_the_end_of_a_run_is_not_told(run, status, tone):
    with RunDatabase.open(run[1]) as database:
        database.stop_stage("r", "rl", "failed", "the engine ended")
        database.set_run_status("r", status)
    headline = live_report(*run).headline
    assert headline.tone == tone
    assert (headline.detail == "the engine ended") == (status != "finished")


def test_a_change_is_not_seen_or_seen_where_there_is_none(run):
    first = version_of(*run)
    assert version_of(*run) == first
    with MetricWriter(run[0] / "rl.partial", "rl") as metrics:
        metrics.write(40.0, 4, pass_rate=0.9)
    second = version_of(*run)
    (run[0] / "rl.partial").rename(run[0] / "rl")
    assert len({first, second, version_of(*run)}) == 3


@pytest.fixture
def page(run, monkeypatch):
    """The address of a page that is served."""
    monkeypatch.setattr("cadenza.observe.server.LEAST_S", 0.0)
    monkeypatch.setattr("cadenza.observe.server.REST", 0)
    ready, found = threading.Event(), {}

    def on_ready(address, server):
        found.update(address=address, server=server)
        ready.set()

    thread = threading.Thread(target=serve, args=run, kwargs={"on_ready": on_ready})
    thread.start()
    assert ready.wait(30)
    yield found["address"]
    found["server"].shutdown()
    thread.join(30)
    assert not thread.is_alive()


def get(address: str) -> tuple[int, str]:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.status, answer.read().decode()


def test_what_is_still_to_come_is_told_as_not_run(run):
    with RunDatabase.open(run[1]) as database:
        recipe = {"name": "demo", "stage": [{"name": name} for name in ("sft", "rl", "gate", "report")]}
        database.begin_run("r", "demo", run[0], recipe, 7, {})
    report = live_report(*run)
    waiting = [s.name for s in report.run.stages if s.status == "waiting"]
    assert report.running and report.missing == [] and waiting == ["gate", "report"]
    text = render_html(report, live="v")
    for words in ("What is still to come", "gate, report.", "No evaluation has ended yet.", "so far"):
        assert words in text, words
    for words in ("not run</a>", "No training metrics", "report.json", "minutes by now", "What was not run<"):
        assert words not in text, words
    with RunDatabase.open(run[1]) as database:
        database.stop_stage("r", "rl", "failed", "the engine ended")
        database.set_run_status("r", "failed")
    ended = live_report(*run)
    assert not ended.running and "No evaluation on held-out tasks" in ended.missing


def test_a_run_that_was_killed_is_told_as_one_at_work_for_days(run):
    with RunDatabase.open(run[1]) as database:
        database.event("r", "command", {"text": "cadenza train demo"}, wait=True)
    first = version_of(*run)
    (run[0] / "lock").unlink()  # as good as its holder gone
    report = live_report(*run)
    assert report.headline.text == "The run was killed in stage rl." and not report.running
    assert report.headline.command == "cadenza train demo"
    assert (report.run.stages[1].status, report.run.stages[1].wall_s) == ("killed", None)
    assert version_of(*run) != first  # or the page would not be made anew


def test_the_time_of_a_run_leaves_out_the_stage_at_work(run):
    with RunDatabase.open(run[1]) as database:
        stages = {s.name: s for s in database.stages("r")}
        ended = stages["sft"].finished
        info = live.run_info(database, "r", "demo", 7)
    assert ended is not None and info.wall_s is not None
    done = ended - stages["sft"].started
    assert info.wall_s > done and info.stages[1].wall_s == pytest.approx(info.wall_s - done, abs=5)


def test_the_page_is_served_once_for_each_state(page, run, monkeypatch):
    made = []
    monkeypatch.setattr(
        "cadenza.observe.server.live_report", lambda *a: made.append(1) or live.live_report(*a)
    )
    status, text = get(page)
    assert status == 200 and "Stage rl is running" in text and "What was let through" in text
    version = json.loads(get(page + "state")[1])["version"]
    assert f'let version = "{version}"' in text
    get(page)
    assert made == []  # it was made when the server began, and nothing has changed
    with MetricWriter(run[0] / "rl.partial", "rl") as metrics:
        metrics.write(40.0, 4, pass_rate=0.9)
    assert json.loads(get(page + "state")[1])["version"] != version
    assert "solved 90%" in get(page)[1] and made == [1]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(page + "../../etc/passwd")
    (run[0] / "run.json").unlink()
    (run[0] / "rl.partial" / "timeline.jsonl").unlink()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get(page)


def test_a_run_that_is_not_there_or_a_port_that_is_taken_is_a_stack_trace(run, page):
    with pytest.raises(MissingArtifact, match="no run at"):
        serve(run[0] / "nowhere", run[1])
    port = int(page.rsplit(":", 1)[1].rstrip("/"))
    with pytest.raises(ConfigError, match=r"cannot listen at 127\.0\.0\.1:\d+: .*; choose another --port"):
        serve(*run, port=port)
