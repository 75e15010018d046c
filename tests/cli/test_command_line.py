"""The command line: a user's mistake is one line on stderr and its own exit code, and never a stack trace."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.cli.app import main
from cadenza.cli.failures import report
from cadenza.core.errors import ConfigError, Interrupted, MissingArtifact, ServiceDied
from cadenza.core.rundb import RunDatabase
from cadenza.core.types import Policy
from cadenza.pipelines.assist import readable_step
from cadenza.pipelines.plan import plan_recipe


@pytest.fixture(autouse=True)
def ctrl_c():
    """A command that was interrupted ignores the next Ctrl-C; these tests go on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def cadenza(tmp_path, command_environment):
    """Runs the command in an empty folder."""

    def go(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "cadenza", *arguments],
            env={**command_environment, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return go


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "dmo"], 2, "error: unknown recipe 'dmo'; did you mean 'demo'?"),
        (["train", "demo", "--set", "sed=1"], 2, "error: unknown key 'sed'; did you mean 'seed'?"),
        (["train", "demo", "--set", "seed"], 2, "error: --set 'seed' is not KEY=VALUE; "),
        (["train", "./none.toml"], 2, "error: no recipe file ./none.toml; "),
        (
            ["train", "./numbers.toml", "--set", "numbers.cuont=1"],
            2,
            "error: unknown key 'numbers.cuont'; did you mean 'count'?",
        ),
        (["train", "./numbers.toml", "--resume"], 3, "error: no run to resume at "),
        (["train", "./numbers.toml", "--run-dir", "numbers.toml/x"], 2, "error: cannot use "),
        (["eval", "nowhere", "--tasks", "."], 3, "error: no model directory at nowhere; "),
        (["eval", ".", "--tasks", "nowhere"], 3, "error: no task directory at nowhere; "),
        (["agent", "nowhere", "--task", "x"], 3, "error: no folder to work on at nowhere; "),
        (["agent", ".", "--task", "x", "--model", "nowhere"], 3, "error: no model directory at nowhere; "),
        (["runs"], 3, "error: no runs in "),
        (["train", "./numbers.toml", "--restart-from", "nmbers"], 2, "error: recipe 'numbers' has no stage "),
        (
            ["train", "./numbers.toml", "--restart-from", "nmbers", "--dry-run"],
            2,
            "error: recipe 'numbers' has no stage 'nmbers'; did you mean 'numbers'?",
        ),
        (["train"], 2, "error: no recipe was named; name one of those that cadenza train --list shows"),
        (["train", "--dry-run"], 2, "error: no recipe was named; "),
        (
            ["train", "demo", "--dry-run", "--set", "rl.inputs.tasks=/none"],
            3,
            "error: input 'tasks' of stage 'rl' ",
        ),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(cadenza, tmp_path, arguments, code, message):
    (tmp_path / "numbers.toml").write_text('[[stage]]\nname = "numbers"\nkind = "example_stages:Numbers"\n')
    done = cadenza(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)
    assert "; " in line


def test_a_dry_run_prints_a_recipe_that_trains_and_imports_no_torch(tmp_path, command_environment):
    (tmp_path / "numbers.toml").write_text(
        '[[stage]]\nname = "numbers"\nkind = "example_stages:NeedsTorch"\n'
    )
    code = (
        "import sys; from cadenza.cli.app import app; "
        "app(['train', sys.argv[1], '--dry-run'], standalone_mode=False); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'sqlalchemy', 'matplotlib')))"
    )
    for recipe in ("./numbers.toml", "demo", "demo-quick", "demo-base"):
        done = subprocess.run(
            [sys.executable, "-c", code, recipe],
            env=command_environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{recipe}: {done.stderr}"
        assert done.stdout.startswith("name = ")
    assert not (tmp_path / "runs").exists()


def test_train_runs_and_the_overview_tells_it(cadenza, tmp_path):
    (tmp_path / "numbers.toml").write_text('[[stage]]\nname = "numbers"\nkind = "example_stages:Numbers"\n')
    done = cadenza("train", "./numbers.toml", "--json", "--set", "numbers.count=4")
    assert done.returncode == 0 and done.stderr == ""
    outcome = json.loads(done.stdout)
    assert outcome["stages"][0]["figures"] == {"count": 4}
    assert outcome["run_dir"] == str(tmp_path / "runs" / "numbers")
    (run,) = [json.loads(line) for line in cadenza("runs", "--json").stdout.splitlines()]
    assert (run["name"], run["status"], run["stages"][0]["figures"]) == ("numbers", "finished", {"count": 4})
    assert "count=4" in cadenza("runs", "numbers").stdout and "alias" not in cadenza("runs", "numbers").stdout
    with RunDatabase.open(tmp_path / "runs" / "cadenza.db") as database:
        database.add_policy(f"{run['id']}/numbers", Policy("numbers", 3, None, "0f1e2d3c4b5a6978"))
        database.point(f"{run['id']}/serving", f"{run['id']}/numbers", 3)
    told = cadenza("runs", "numbers").stdout.splitlines()[-1].split()
    assert told[:4] == ["serving", "numbers", "3", "0f1e2d3c4b5a6978"] and told[-1] == "there"
    (alias,) = json.loads(cadenza("runs", "numbers", "--json").stdout)["aliases"]
    assert (alias["alias"], alias["version"], alias["digest"]) == ("serving", 3, "0f1e2d3c4b5a6978")
    assert "did you mean 'numbers'" in cadenza("runs", "number").stderr
    again = cadenza("train", "./numbers.toml", "--set", "numbers.count=5")
    assert again.returncode == 2
    assert again.stderr.splitlines()[-1].startswith(
        "error: stage 'numbers' was finished with another configuration (count: 4 -> 5); add --restart-from numbers"
    )


def test_an_example_of_set_names_an_unknown_key():
    root = Path(__file__).parents[2]
    files = [root / "README.md", root / "CONTRIBUTING.md"]
    files += [
        path for folder in ("docs", "src") for end in ("*.md", "*.py") for path in (root / folder).rglob(end)
    ]
    examples = {
        example: path
        for path in files
        for example in re.findall(
            r"--set ([a-z_]+(?:\.[a-z_]+)*=[^\s`\"]+)", path.read_text(encoding="utf-8")
        )
    }
    assert {"rl.max_steps=40", "sft.epochs=2", "seed=1"} <= set(examples)
    for example, path in examples.items():
        try:
            plan_recipe("demo", [example])
        except ConfigError as error:
            pytest.fail(f"{path}: --set {example}: {error}")


def test_a_report_is_printed_between_a_script_and_its_json(cadenza, tmp_path):
    (tmp_path / "told.toml").write_text(
        '[[stage]]\nname = "numbers"\nkind = "example_stages:Numbers"\n'
        '[[stage]]\nname = "report"\nkind = "cadenza.pipelines.report_stage:Report"\n'
    )
    done = cadenza("train", "./told.toml", "--json")
    assert done.returncode == 0, done.stderr
    assert [stage["name"] for stage in json.loads(done.stdout)["stages"]] == ["numbers", "report"]
    told = cadenza("train", "./told.toml", "--restart-from", "report")
    assert "Stages" in told.stdout and "report.html" in told.stdout


def test_the_command_that_a_report_shows_is_another_than_was_given(cadenza, tmp_path):
    (tmp_path / "my told.toml").write_text(
        '[[stage]]\nname = "numbers"\nkind = "example_stages:Numbers"\n'
        '[[stage]]\nname = "report"\nkind = "cadenza.pipelines.report_stage:Report"\n'
    )
    sets = ("--set", "numbers.count=4", "--set", "description=two words")
    assert cadenza("train", "./my told.toml", *sets, "--run-dir", "a", "--fresh").returncode == 0
    shown = json.loads((tmp_path / "a" / "report.json").read_text())["run"]["command"]
    assert (
        shown
        == "cadenza train './my told.toml' --set numbers.count=4 --set 'description=two words' --run-dir a"
    )
    again = cadenza(*shlex.split(shown)[1:])
    assert again.returncode == 0 and "finished earlier" in again.stdout, again.stderr


@pytest.mark.needs_train
@pytest.mark.parametrize(
    ("command", "work"),
    [
        (["eval", ".", "--tasks", "."], "cadenza.pipelines.measure.measure_model"),
        (["agent", ".", "--model", ".", "--task", "x"], "cadenza.pipelines.assist.assist"),
    ],
)
def test_a_stopped_command_says_nothing(monkeypatch, capsys, tmp_path, command, work):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(work, stopped)
    monkeypatch.setattr(sys, "argv", ["cadenza", *command])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: interrupted while ") and "; " in line


@pytest.mark.needs_train
def test_a_measurement_is_lost_to_an_out_that_cannot_be_written(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "cadenza.pipelines.measure.measure_model", lambda *_, **__: pytest.fail("it measured")
    )
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(sys, "argv", ["cadenza", "eval", ".", "--tasks", ".", "--out", "file/all.json"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: cannot write file/all.json: ")


@pytest.mark.needs_namespaces
@pytest.mark.needs_root
def test_refused_namespaces_are_found_after_the_tasks_were_generated(tmp_path, command_environment):
    """In a user namespace of its own, whose limit is set to zero: the kernel really refuses."""
    (tmp_path / "tasks.toml").write_text(
        '[[stage]]\nname = "tasks"\nkind = "cadenza.pipelines.tasks_stage:Tasks"\n[stage.splits.val]\ncount = 1\n'
    )
    script = (
        f"echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} -m cadenza train ./tasks.toml"
    )
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", script],
        env=command_environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ") and "user.max_user_namespaces is 0" in line and "sysctl -w" in line
    assert not list((tmp_path / "runs").rglob("task.toml"))


def test_help_and_version_need_nothing_installed_but_the_base(cadenza):
    assert cadenza("--version").stdout.startswith("cadenza ")
    text = cadenza("--help").stdout
    for command in ("train", "eval", "agent", "runs", "doctor"):
        assert command in text
        assert "Examples" in cadenza(command, "--help").stdout


def test_shell_completion_knows_no_recipes_runs_or_stages(tmp_path, command_environment):
    command = Path(sys.executable).parent / "cadenza"

    def offered(words: str) -> set[str]:
        """What is offered for the last of the words, which may be empty."""
        asked = {
            "_CADENZA_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        done = subprocess.run(
            [command], env={**command_environment, **asked}, cwd=tmp_path, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0 and done.stderr == ""
        return set(done.stdout.split())

    assert {"demo-quick", "demo-base"} <= offered("cadenza train demo-")
    assert offered("cadenza train demo --restart-from re") == {"realtime", "report"}
    assert {"tasks", "sft", "rl"} <= offered("cadenza train demo --restart-from ")
    assert offered("cadenza train dmo --restart-from ") == set()
    assert offered("cadenza runs ") == set()
    for number, name in enumerate(("first", "second", "second")):
        with RunDatabase.open(tmp_path / "runs" / "cadenza.db") as database:
            database.begin_run(f"r{number}", name, tmp_path / name, {}, 0, {})
    (tmp_path / "runs").rename(tmp_path / "others")
    assert offered("cadenza runs --folder others ") == {"first", "second"}
    (tmp_path / "others").rename(tmp_path / "runs")
    assert offered("cadenza runs s") == {"second"}


def test_a_row_is_broken_where_there_is_no_terminal(cadenza, tmp_path):
    folder = tmp_path / "a folder with a long name" / ("x" * 90)
    with RunDatabase.open(tmp_path / "runs" / "cadenza.db") as database:
        database.begin_run("r", "demo", folder, {}, 0, {})
        database.start_stage("r", "sft", 0, "", {})
        database.finish_stage("r", "sft", "", {f"figure_{n}": n for n in range(40)})
    header, row = cadenza("runs").stdout.splitlines()
    assert header.split()[-1] == "folder" and row.rstrip().endswith(str(folder))
    first, _, row = cadenza("runs", "demo").stdout.splitlines()
    assert first == f"demo, seed 0: gone, in {folder}"
    assert row.startswith("sft") and row.rstrip().endswith("figure_39=39")


def test_an_error_that_ray_wrapped_is_told_as_the_one_inside(capsys):
    wrapped = RuntimeError("ray::Engine.step() trace ...")
    wrapped.cause = MissingArtifact("no model directory at x", "give another")  # type: ignore[attr-defined]
    assert report(wrapped) == 3
    assert capsys.readouterr().err == "error: no model directory at x; give another\n"


def test_errors_survive_being_sent_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(ServiceDied("the engine ended", "start again")))
    assert (error.cause, error.mend, error.exit_code) == ("the engine ended", "start again", 7)


def test_an_unexpected_error_keeps_its_trace_in_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    try:
        raise KeyError("x\ny")
    except KeyError as error:
        assert report(error) == 70
    (line,) = capsys.readouterr().err.splitlines()
    path = line.rsplit(" ", 1)[1]
    assert os.path.dirname(path) == str(tmp_path)
    with open(path, encoding="utf-8") as file:
        assert "KeyError" in file.read()


def test_a_full_disk_anywhere_is_the_users_line(capsys):
    assert report(OSError(28, "No space left on device", "/data/x")) == 6
    assert capsys.readouterr().err.startswith("error: no space left to write /data/x; ")


def test_a_path_that_cannot_be_used_and_too_few_files_are_reported_as_defects(capsys):
    assert report(IsADirectoryError(21, "Is a directory", "/data/x")) == 2
    assert capsys.readouterr().err == (
        "error: cannot use /data/x: Is a directory; move away what lies there or set its permissions, "
        "and run the same command again\n"
    )
    assert report(OSError(24, "Too many open files", "/data/x")) == 6
    assert "raise it with ulimit -n 4096" in capsys.readouterr().err


def test_a_newcomer_cannot_see_which_recipes_there_are(cadenza, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.toml").write_text('extends = "demo"\ndescription = "my own"\n')
    (tmp_path / "recipes" / "broken.toml").write_text("name = ")
    (tmp_path / "recipes" / "fails.toml").write_text('[[stage]]\nname = "a"\nkind = "failing_stage:A"\n')
    (tmp_path / "failing_stage.py").write_text("raise RuntimeError('no luck')\n")
    done = cadenza("train", "--list")
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert done.returncode == 0 and {"demo", "demo-quick", "demo-base"} <= set(told)
    assert told["mine"] == "my own" and told["broken"].startswith("cannot be used: ") and "base" not in told
    assert told["fails"].endswith("failing_stage.py, line 1: RuntimeError: no luck")


def test_a_dry_run_of_the_demo_stays_quick(tmp_path, command_environment):
    """About 0.7 s of CPU on an idle core of 2026. CPU time, the better of two, and room for a busy machine."""
    import resource

    seconds = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "cadenza", "train", "demo", "--dry-run"]
        subprocess.run(command, env=command_environment, cwd=tmp_path, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 2.0, seconds


def test_a_second_ctrl_c_shows_a_trace_of_what_still_closes_down(monkeypatch, capsys):
    def interrupted() -> None:
        raise Interrupted("interrupted in stage 'rl'", "run the same command again to go on")

    monkeypatch.setattr("cadenza.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as left:
        main()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert (
        left.value.code == Interrupted.exit_code and "run the same command again" in capsys.readouterr().err
    )


def test_the_reader_of_a_step_must_guess_why_a_call_failed():
    failed = {
        "call": "replace a.py\ndef f():\n    pass",
        "error_kind": "unknown_tool",
        "output": "error: no tool replace",
    }
    assert readable_step(failed) == "call: replace a.py (+2 lines) -> error: no tool replace"
    assert (
        readable_step({"call": "run_tests", "error_kind": None, "output": "ok: 2 passed"})
        == "call: run_tests"
    )
    assert readable_step({"broken": "bad_name", "error_kind": "bad_name"}) == "broken: bad_name -> bad_name"
