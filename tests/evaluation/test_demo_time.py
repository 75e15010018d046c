"""A committed wall time must be of a whole run of one command, and must not take another figure with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments_made import experiment

MAKEFILE = """
install:
\t@echo install >> made
demo:
\t@test ! -e broken
\t@echo demo >> made
\t@mkdir -p runs/$(if $(QUICK),demo-quick,demo)
"""


@pytest.fixture(scope="module")
def program():
    with experiment("demo_time") as module:
        yield module


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "Makefile").write_text(MAKEFILE)
    return tmp_path


def lines(checkout: Path) -> dict[str, dict]:
    text = (checkout / "docs" / "results" / "demo.jsonl").read_text()
    return {body["figure"]: body for body in map(json.loads, text.splitlines())}


def test_the_installation_is_not_counted_and_the_line_names_its_command(program, checkout, monkeypatch):
    made = checkout / "made"

    def clock() -> float:  # ten seconds for everything that was made so far
        return 10.0 * len(made.read_text().splitlines()) if made.exists() else 0.0

    monkeypatch.setattr(program.time, "monotonic", clock)
    assert program.main(["--root", str(checkout), "--quick"]) == 0
    figure = lines(checkout)["quick_wall_s"]
    assert made.read_text().split() == ["install", "demo"]
    assert figure["value"] == 10.0 and figure["unit"] == "s" and figure["better"] == "lower"
    assert figure["command"] == "make demo QUICK=1" and figure["seeds"] == [0] and figure["n"] == 1
    assert {"cpu", "cores", "python", "torch"} == set(figure["machine"])


def test_a_second_figure_leaves_the_first_as_it_was(program, checkout):
    assert program.main(["--root", str(checkout), "--quick"]) == 0
    before = lines(checkout)["quick_wall_s"]
    assert program.main(["--root", str(checkout), "--full"]) == 0
    assert lines(checkout)["quick_wall_s"] == before
    assert lines(checkout)["demo_wall_s"]["command"] == "make demo"


def test_the_rest_of_a_run_is_never_taken_for_a_whole_one(program, checkout, capsys):
    (checkout / "runs" / "demo").mkdir(parents=True)
    assert program.main(["--root", str(checkout), "--full"]) == 2
    assert "runs/demo is there already" in capsys.readouterr().err
    assert not (checkout / "docs").exists()


def test_a_run_that_fails_leaves_no_figure(program, checkout, capsys):
    (checkout / "broken").touch()
    assert program.main(["--root", str(checkout), "--full"]) == 1
    assert "make demo ended with status" in capsys.readouterr().err
    assert not (checkout / "docs").exists()
