"""A report must show what was measured, say what was not, and never break or reach out to the network."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
from html.parser import HTMLParser

import pytest
from rich.console import Console
from rollouts_made import rollout as made_rollout
from rollouts_made import segment, task
from runs_made import evaluation, run_info, write_run

from cadenza.core.errors import MissingArtifact
from cadenza.evaluation.comparison import compare
from cadenza.evaluation.report import Report, build_report, write_report
from cadenza.evaluation.report_headline import headline
from cadenza.evaluation.report_inputs import (
    MetricWriter,
    RunInfo,
    StageInfo,
    Trajectory,
    Turn,
    append_lines,
    read_run,
    trajectory_of,
)
from cadenza.evaluation.report_terminal import print_report


class Checked(HTMLParser):
    """Collects text and refuses tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.words.append(data)


def page_text(html: str) -> str:
    page = Checked()
    page.feed(html)
    assert page.open == []
    return re.sub(r"\s+", " ", " ".join(page.words))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("run") / "demo")
    return folder, write_report(folder)


def test_a_full_run_shows_every_part_in_page_json_and_terminal(full):
    folder, report = full
    text = page_text((folder / "report.html").read_text())
    for words in ("RL lifted the agent", "Families never trained on", "Perplexity", "Entropy", "Staleness",
                  "Busy shares", "trainer", "environment", "solved", "cadenza train demo", "AMD EPYC", "2.13.0",
                  "The base model ships with the package"):  # fmt: skip
        assert words in text, words
    body = json.loads((folder / "report.json").read_text())
    heldout = next(v for v in body["views"] if v["view"] == "heldout")
    assert [p["policy"] for p in heldout["policies"]] == ["base", "sft", "sft_continued", "rl"]
    assert {(c["old"], c["new"]) for c in heldout["changes"]} == {
        ("base", "sft"), ("sft", "rl"), ("sft_continued", "rl"),
    }  # fmt: skip
    assert body["run"]["seeds"] == [0] and body["problems"] == []
    console = Console(width=80, record=True, file=io.StringIO())
    print_report(report, console, folder / "report.html")
    shown = console.export_text()
    assert "SFT → RL" in shown and "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_page_is_one_file_without_script_or_network(full):
    html = (full[0] / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://", html)
    assert len(html) < 400_000


def test_pictures_speak_and_tables_have_headers(full):
    html = (full[0] / "report.html").read_text()
    for svg in re.findall(r"<svg[^>]*>", html):
        assert 'aria-hidden="true"' in svg or 'aria-label="' in svg
    assert 'lang="en"' in html and html.count("<h1") == 1
    assert re.search(r'aria-label="Entropy\. step 0 to 57\. nats a sampled token: from', html)


def test_an_empty_run_says_everything_that_was_not_run(tmp_path):
    report = write_report(tmp_path)
    text = page_text((tmp_path / "report.html").read_text())
    assert report.headline.tone == "open"
    for words in ("No evaluation was run", "No training metrics were recorded", "No timeline", "No trajectories",
                  "Reinforcement learning: no metrics were recorded", "run_info.json is missing"):  # fmt: skip
        assert words in text, words
    print_report(report, Console(file=io.StringIO()))
    with pytest.raises(MissingArtifact):
        write_report(tmp_path / "nowhere")


def test_a_run_without_rl_claims_no_gain(tmp_path):
    report = write_report(write_run(tmp_path / "r", policies=("base", "sft")))
    assert report.headline.text.startswith("Held-out tasks solved: Base")
    assert any("Not evaluated on held-out tasks: RL" in text for text in report.missing)


@pytest.mark.parametrize(
    ("skill", "tone", "word"), [(1.5, "good", "lifted"), (-2.5, "bad", "worse"), (-0.5, "open", "no certain")]
)
def test_the_headline_follows_the_interval(skill, tone, word):
    results = [
        evaluation("sft", "heldout", 0, 0.7, 60, 8),
        evaluation("rl", "heldout", 0, 0.7, 60, 8, skill=skill),
    ]
    told = headline(compare(results))
    assert told.tone == tone and word in told.text


def test_text_from_a_run_cannot_become_markup(tmp_path):
    evil = "<script>alert(1)</script>"
    turns = (Turn(kind="call", text=evil), Turn(kind="output", text="</pre>" + evil))
    append_lines(
        tmp_path / "trajectories.jsonl",
        [Trajectory(task_id="t", policy="rl", solved=False, prompt=evil, turns=turns, patch=evil)],
    )
    with MetricWriter(tmp_path, "rl") as out:
        out.write(0, 0, **{evil: 1.0, "pass_rate": 0.5})
    write_report(tmp_path, run=RunInfo(name=evil, config={evil: evil}, notes=(evil,)))
    html = (tmp_path / "report.html").read_text()
    assert "<script" not in html and "&lt;script&gt;" in html
    page_text(html)


def test_no_run_with_a_summary_is_among_those_that_are_shown(tmp_path):
    def rollouts(task: str, *kinds: str) -> list[Trajectory]:
        turns = tuple(Turn(kind=kind, text="x") for kind in kinds)
        return [
            Trajectory(task_id=task, policy=policy, solved=policy == "rl", prompt="p", turns=turns)
            for policy in ("sft", "rl")
        ]

    short = [t for n in range(9) for t in rollouts(f"short{n}", "call", "output")]
    append_lines(tmp_path / "trajectories.jsonl", short)
    assert "long" not in {e.task_id for e in build_report(read_run(tmp_path)).examples}
    append_lines(
        tmp_path / "trajectories.jsonl", rollouts("long", *["call", "output"] * 9, "summary", "call")
    )
    shown = [e.task_id for e in build_report(read_run(tmp_path)).examples]
    assert shown[-1] == "long" and len(shown) == 3


def test_damaged_lines_are_told_and_the_rest_is_shown(tmp_path):
    folder = write_run(tmp_path / "r", policies=("sft", "rl"), tasks=20)
    with (folder / "metrics" / "rl.jsonl").open("a") as file:
        file.write('{"t": 1, "step": 58, "pass_rate": NaN}\n{"t": 1, "ste')
    (folder / "trajectories.jsonl").write_text('{"policy": 3}\n')
    (folder / "evaluations" / "broken.json").write_text("{}")
    report = write_report(folder)
    told = " ".join(report.problems)
    assert "rl.jsonl: 1 line could not be read" in told
    assert "trajectories.jsonl: 1 entries do not fit" in told and "broken.json" in told
    assert report.sections[-1].stage == "rl"


def test_a_resumed_run_shows_a_step_once_and_heals_a_torn_line(tmp_path):
    with MetricWriter(tmp_path, "rl") as out:
        out.write(1, 1, loss=5.0)
    with (tmp_path / "metrics" / "rl.jsonl").open("a") as file:
        file.write('{"t": 2, "st')
    with MetricWriter(tmp_path, "rl") as out:
        out.write(3, 2, loss=4.0)
        out.write(4, 1, loss=3.0)
        out.write(5, 3, loss=float("nan"))
    found = read_run(tmp_path)
    assert found.metrics["rl"].series("loss") == ([1.0, 2.0], [3.0, 4.0])


def test_parts_are_found_in_the_folders_of_stages_and_a_finished_stage_hides_its_partial(tmp_path):
    for stage, value in (("sft", 1.0), ("rl", 0.5), ("rl.partial", 0.1)):
        with MetricWriter(tmp_path / stage, stage.split(".")[0]) as out:
            out.write(0, 0, loss=value)
    found = read_run(tmp_path, run_info((0,)))
    assert found.metrics["rl"].last("loss") == 0.5 and found.metrics["sft"].last("loss") == 1.0
    assert found.problems == []
    assert build_report(found).run.recipe == "demo"


@pytest.mark.needs_browser
def test_the_page_fits_a_narrow_window(full, tmp_path, chromium):
    """Chromium lays the page out at 500 pixels; nothing may be wider than the window."""
    probe = tmp_path / "probe.html"
    measure = (
        "<script>onload=()=>document.documentElement.setAttribute('data-size',"
        "document.documentElement.scrollWidth+' '+innerWidth)</script>"
    )
    probe.write_text((full[0] / "report.html").read_text().replace("</head>", measure + "</head>"))
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=500,900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", probe.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-size="(\d+) (\d+)"', done.stdout)
    assert found and int(found[1]) <= int(found[2]) <= 500


def test_a_run_whose_rl_made_no_step_is_told_as_rl_without_a_gain(tmp_path):
    def told(**detail: int) -> Report:
        stages = (StageInfo(name="rl", status="done", detail=dict(detail)),)
        config = {
            "stage": [{"name": "sft", "epochs": 4.0, "budget_s": 1e9}, {"name": "rl", "max_seconds": 14.0}]
        }
        command = "cadenza train quick --set rl.max_seconds=7 --set 'description=a b'"
        run = RunInfo(name="r", stages=stages, config=config, command=command)
        return write_report(tmp_path, run=run)

    with MetricWriter(tmp_path, "rl") as out:
        out.write(0, 0, lr=0.1)
    report = told(steps=0)
    assert report.headline.text.startswith("RL made no step")
    mend = "cadenza train quick --set 'description=a b' --set rl.max_seconds=28 --restart-from rl"
    assert report.headline.command == mend
    assert mend in page_text((tmp_path / "report.html").read_text())
    assert not any("curve" in text for text in report.missing)  # the headline has said it
    report = told(steps=1, samples_trained=0)
    assert report.headline.text.startswith("RL changed nothing")
    assert report.headline.command.endswith("--set sft.epochs=8 --restart-from sft")
    assert any("curve" in text for text in report.missing)
    assert "no step" not in told(steps=2, samples_trained=9).headline.text


def test_a_note_has_backticks_for_code(tmp_path):
    notes = ("It ships; `cadenza train <x>` trains one.", "one ` alone & <b>")
    write_report(tmp_path, run=RunInfo(name="r", notes=notes))
    shown = (tmp_path / "report.html").read_text()
    assert "It ships; <code>cadenza train &lt;x&gt;</code> trains one." in shown
    assert "one ` alone &amp; &lt;b&gt;" in shown


def test_a_new_context_begins_unseen_or_a_broken_summary_is_left_out(tmp_path):
    trace = [
        {"call": "run_tests", "output": "1 failed"},
        {"carried": "fix total"},
        {"call": "ls"},
        {"carried": ""},
    ]
    rollout = dataclasses.replace(made_rollout(task("t"), 0, 0.0), segments=[segment(1)] * 3, trace=trace)
    read = trajectory_of(task("t"), "p", "rl", 0, rollout)
    assert [turn.kind for turn in read.turns] == ["call", "output", "summary", "call", "summary"]
    forgets = read.model_copy(update={"task_id": "u", "turns": read.turns[:2]})
    append_lines(tmp_path / "trajectories.jsonl", [read, forgets])
    write_report(tmp_path)
    text = page_text((tmp_path / "report.html").read_text())
    assert "carries over fix total Context 2 begins with the task, this summary" in text
    assert "carries over nothing: its summary was cut or broken Context 3 begins" in text
    assert "3 contexts, at each of which the oldest steps are forgotten" in text


def test_perplexity_by_position_is_a_row_of_numbers_among_the_facts(tmp_path):
    quarters = {
        f"perplexity_{w}_quarter{n}": 10.0 * n + a
        for w, a in (("before", 0), ("after", 0.4))
        for n in (1, 2, 3, 4)
    }
    detail = {"row_length": 2048, "shipped": True, **quarters}
    stages = (StageInfo(name="long", status="done", detail=detail), StageInfo(name="sft", status="done"))
    for name in ("sft", "rl", "long"):
        with MetricWriter(tmp_path, name) as out:
            out.write(1, 1, entropy=1.0, train_loss=1.0, heldout_perplexity=3.0)
    report = write_report(tmp_path, run=RunInfo(name="r", stages=stages))
    text = page_text((tmp_path / "report.html").read_text())
    assert "to 512 to 1024 to 1536 to 2048 before 10.0 20.0 30.0 40.0 after 10.4 20.4 30.4 40.4" in text
    assert "quarter1" not in text and "shipped yes" in text
    assert [s.stage for s in report.sections] == ["long", "sft", "rl"]  # the order of the run
