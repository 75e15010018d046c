"""Every stage of the demo, very small, in processes of its own: killed, interrupted, and finished all the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from experiments_made import experiment

from cadenza.pipelines.overview import list_runs

pytestmark = [pytest.mark.slow, pytest.mark.needs_train, pytest.mark.needs_namespaces]
SOURCE = Path(__file__).parents[2] / "src"
DEADLINE_S = 240.0
RECIPE = """
extends = "demo-quick"
name = "tiny"

[[stage]]
name = "tasks"
[stage.splits.demo]
count = 24
[stage.splits.train]
count = 24
[stage.splits.val]
count = 4
[stage.splits.heldout]
count = 8
[stage.splits.heldout_hard]
count = 4

[[stage]]
name = "cpt"
steps = 2
source_documents = 20
held_out_tokens = 2048
evaluate_every = 2

[[stage]]
name = "mtp"
steps = 2
source_documents = 20
held_out_tokens = 2048
evaluate_every = 2

[[stage]]
name = "long"
steps = 1
source_documents = 20
held_out_tokens = 2048
evaluate_every = 1

[[stage]]
name = "sft"
epochs = 1
budget_s = 20

[[stage]]
name = "rl"
max_steps = 1
max_seconds = 60
groups_per_step = 1
groups_in_flight = 2
most_groups_per_step = 3

[[stage]]
name = "evaluate"
validation_tasks = 4
validation_samples = 1

[[stage]]
name = "realtime"
answers = 3
gate_tasks = 4
"""


def start(folder: Path, resume: bool) -> subprocess.Popen[str]:
    (folder / "tiny.toml").write_text(RECIPE)
    argv = [sys.executable, "-m", "cadenza", "train", "./tiny.toml", "--run-dir", "run"]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*argv, *(["--resume"] if resume else [])], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        # A shell that started the tests in its background had SIGINT ignored, and so would the child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def end_at(folder: Path, line: str, number: int, resume: bool) -> tuple[int, str]:
    """Sends signal ``number`` once the command has printed ``line``; its exit code and all it printed."""
    process = start(folder, resume)
    assert process.stdout is not None
    printed = ""
    try:
        while line not in printed:
            more = process.stdout.readline()
            assert more, f"the command ended before it said {line!r}:\\n{printed}"
            printed += more
        process.send_signal(number)
        rest, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, printed + rest
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def test_a_loop_that_is_killed_in_sft_and_interrupted_in_rl_does_not_come_to_its_report(tmp_path):
    code, _ = end_at(tmp_path, "sft: started", signal.SIGKILL, resume=False)
    assert code == -signal.SIGKILL
    code, printed = end_at(tmp_path, "rl: started", signal.SIGINT, resume=True)
    assert code == 130 and "Traceback" not in printed
    assert "tasks: finished in" not in printed, "a finished stage was run again"
    last = start(tmp_path, resume=True)
    printed, _ = last.communicate(timeout=DEADLINE_S)
    assert last.returncode == 0, printed
    assert "Traceback" not in printed and "sft: finished in" not in printed
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    assert report and (tmp_path / "run" / "report" / "report.html").stat().st_size > 10_000
    busy = report["busy_in_window"]
    assert {"trainer", "engine", "environment", "weights"} <= busy.keys()
    assert all(0 < busy[lane] <= 1 for lane in ("trainer", "engine", "environment"))
    record = json.loads((tmp_path / "run" / "rl" / "manifest.json").read_text())
    assert record["format"] == 1
    served(tmp_path / "run")
    measured(tmp_path / "run")


def served(run: Path) -> None:
    """Feedback and aliases name the weights that answered: those that the evaluation has measured."""
    (told,) = list_runs(run.parent)
    serving = next(alias for alias in told["aliases"] if alias["alias"] == "serving")
    assert serving["stage"] == "realtime" and serving["digest"] and serving["state"] == "there"
    lines = (run / "realtime" / "feedback.jsonl").read_text().splitlines()
    answered = {json.loads(line)["policy"]["digest"] for line in lines if "serving-0" in line}
    results = (run / "evaluate" / "evaluations").glob("*.json")
    assert len(answered) == 1 and answered <= {json.loads(r.read_text())["policy_digest"] for r in results}


def measured(run: Path) -> None:
    """The proof's measurements of a trained model: heads that guess change no token, whole routes bring the trainer
    nearer to the engine than its own."""
    with experiment("speculative") as speculative:
        _, sft = speculative.sft_of(run, "sft")
        rows = speculative.measure(run, "rl", sft, speculative.Sizes(turns=3, draft=2, repeats=1))
        exact = [row for row in rows if row["dtype"] == "float32"]
        assert len(exact) == 3 and all(row["turns_that_differ"] == 0 < row["tokens"] for row in exact)
        figures = {f.figure: f for f in speculative.figures_of({0: json.loads(json.dumps(rows))})}
        assert figures["mtp_mismatch_fp32"].value == 0 < figures["mtp_speedup"].value
    with experiment("router_replay") as router_replay:
        wanted = router_replay.Conditions(turns=12, noise=(2.0, 0.0), dtype="float32")
        found = router_replay.measure(run, "rl", "demonstrations", wanted)
        noisy, clean = found["noise 2"], found["noise 0"]
        assert noisy["other"] > 0.1 and noisy["pure"] < noisy["none"]
        assert clean["other"] == 0 and max(clean[mode] for mode in router_replay.MODES) < 1e-4
        names = {f.figure for f in router_replay.figures_of({0: json.loads(json.dumps(found))})}
        assert names == {"replay_p99_none", "replay_p99_pure", "replay_p99_filtered"}
