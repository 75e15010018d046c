"""Generated tasks: the same bytes every time, splits that share nothing, tests that differ, issues that do not leak."""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from pydantic import ValidationError

from cadenza.core.errors import ConfigError, CorruptArtifact, MissingArtifact
from cadenza.tasks.bugs import DEMO_FAMILIES, UNSEEN_FAMILIES
from cadenza.tasks.directory import TaskFiles, load_task
from cadenza.tasks.draft import spec_digest
from cadenza.tasks.generate import GeneratorConfig, SplitConfig, draw_tasks, generate_split, load_tasks
from cadenza.tasks.issues import LISTED, REPORTS, Symptom, issue_text, leaks
from cadenza.tasks.modules import MAX_LINES
from cadenza.tasks.partition import owner_of
from cadenza.tasks.patch import apply_patch

CONFIG = GeneratorConfig(seed=11)
SPLITS = tuple(CONFIG.splits)


@cache
def sample(split: str) -> list[TaskFiles]:
    return list(draw_tasks(CONFIG, split, 40))


def modules(task: TaskFiles) -> dict[str, str]:
    return {p: d.decode() for p, d in task.repo.items() if p.endswith(".py") and not p.startswith("test_")}


def functions(source: str) -> list[str]:
    nodes = [n for n in ast.parse(source).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    return [ast.get_source_segment(source, n) or "" for n in nodes]


@pytest.mark.parametrize("split", SPLITS)
def test_a_function_that_two_splits_share(split):
    for task in sample(split):
        for source in modules(task).values():
            assert {owner_of(spec_digest(f)) for f in functions(source)} == {split}


@pytest.mark.parametrize("split", SPLITS)
def test_a_buggy_function_that_appears_twice(split):
    seen = [p for t in sample(split) for p in re.findall(r"^-(?!--).*|^@@.*", t.patch, re.M)]
    ids = [json.dumps(sorted((p, d.decode()) for p, d in t.files().items())) for t in sample(split)]
    assert len(set(ids)) == len(ids) and seen


def test_families_are_where_they_belong():
    used = {split: {f for t in sample(split) for f in t.metadata["families"]} for split in SPLITS}
    assert used["demo"] <= set(DEMO_FAMILIES)
    for split in ("demo", "train", "val"):
        assert not used[split] & set(UNSEEN_FAMILIES)
    for split in ("heldout", "heldout_hard"):
        assert set(UNSEEN_FAMILIES) <= used[split]
    assert all(t.metadata["edits"] == 1 for s in ("demo", "heldout") for t in sample(s))
    assert all(len(t.metadata["buggy_files"]) == 2 for t in sample("heldout_hard"))
    two = sum(t.metadata["edits"] == 2 for t in sample("train"))
    assert 2 <= two <= 18


@pytest.mark.parametrize("split", SPLITS)
def test_repositories_that_a_tiny_model_cannot_read(split):
    for task in sample(split):
        files = modules(task)
        assert 1 <= len(files) <= 6
        for source in files.values():
            assert len(source.splitlines()) <= MAX_LINES
            assert 1 <= len(functions(source)) <= 4
        assert len(task.instruction.split()) <= 75


@pytest.mark.parametrize("split", SPLITS)
def test_visible_and_hidden_tests_with_the_same_input(split):
    for task in sample(split):
        visible = {p: d.decode() for p, d in task.repo.items() if p.startswith("test_")}
        hidden = {p: d.decode() for p, d in task.hidden.items()}
        for path, text in hidden.items():
            other = visible[path.replace("test_hidden_", "test_")]
            assert not set(bodies(text)) & set(bodies(other)), path
        assert {f"test_{p}" for p in task.metadata["buggy_files"]} <= set(visible)
        assert {f"test_hidden_{p}" for p in task.metadata["buggy_files"]} == set(hidden)
        count = sum(len(bodies(t)) for t in hidden.values())
        assert count >= 3
        assert sum(len(bodies(t)) for t in (*visible.values(), *hidden.values())) == len(
            task.metadata["expected_tests"]
        )


def bodies(text: str) -> list[str]:
    """The statements of each test function; one assert each."""
    out = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            assert sum(isinstance(s, ast.Assert) for s in node.body) == 1
            out.append("\n".join(ast.unparse(s) for s in node.body))
    return out


@pytest.mark.parametrize("split", SPLITS)
def test_a_gold_patch_that_does_not_apply_or_edits_more_than_one_line_a_bug(split):
    for task in sample(split):
        good = apply_patch(task.repo, task.patch)
        assert good != task.repo
        removed = len(re.findall(r"^-(?!-- )", task.patch, re.M))
        added = len(re.findall(r"^\+(?!\+\+ )", task.patch, re.M))
        assert added == task.metadata["edits"] and removed <= added


@pytest.mark.parametrize("split", SPLITS)
def test_an_issue_that_says_more_than_its_level(split):
    for task in sample(split):
        level = task.metadata["ambiguity"]
        names = re.findall(r"^(?:def|class) (\w+)", "\n".join(modules(task).values()), re.M)
        assert not leaks(task.instruction, level, names, [])
        if level == 0:
            assert any(name in task.instruction for name in names)
        gold = [
            line[1:].strip() for line in task.patch.splitlines() if line.startswith("+") and line[1] != "+"
        ]
        assert not any(line in task.instruction for line in gold)
    assert {t.metadata["ambiguity"] for t in sample(split)} == {0, 1, 2}


REPORTED = GeneratorConfig(
    seed=11, splits={"train": SplitConfig(count=10, families=DEMO_FAMILIES, reports_share=1.0)}
)


@cache
def reported() -> list[TaskFiles]:
    return list(draw_tasks(REPORTED, "train", 10))


@pytest.mark.parametrize(("share", "count"), [(0.02, 8), (0.5, 6), (0.25, 9)])
def test_a_beginning_of_a_split_with_another_share_of_reports_than_the_whole(share, count):
    config = REPORTED.splits["train"].model_copy(update={"reports_share": share})
    drawn = draw_tasks(GeneratorConfig(seed=11, splits={"train": config}), "train", count)
    having = [bool(t.metadata.get("reports")) for t in drawn]
    assert all(sum(having[:n]) == int(n * share + 1e-9) for n in range(count + 1))


def test_reports_on_more_files_than_a_repository_may_have():
    with pytest.raises(ValidationError, match="reports are about 3 files"):
        GeneratorConfig.model_validate(
            {"splits": {"val": {"count": 1, "reports_share": 0.5, "max_modules": 2}}}
        )


def test_a_list_of_reports_that_leaves_a_bug_out_or_says_it_elsewhere_too():
    for task in reported():
        lines = task.repo[REPORTS].decode().splitlines()
        assert REPORTS in task.instruction and len(task.repo[REPORTS]) <= 700
        assert task.metadata["edits"] == len(task.metadata["buggy_files"]) == 3 == len(lines)
        names = re.findall(r"^(?:def|class) (\w+)", "\n".join(modules(task).values()), re.M)
        for path in task.metadata["buggy_files"]:
            assert any(line.startswith(f"- {path}, ") for line in lines)
            assert path not in task.instruction
        assert not any(name in task.instruction for name in names)
        assert all(any(name in line for name in names) for line in lines)
        assert task.metadata["ambiguity"] == LISTED and task.metadata["files"] >= 5
        asked = {call_of(body) for test in task.hidden.values() for body in bodies(test.decode())}
        told = task.repo[REPORTS].decode()
        assert len(asked) >= 3 and not any(
            f" {call} {word}" in told for call in asked for word in ("gives", "raises")
        )


def call_of(test: str) -> str:
    """As an issue says it: statements and the call, without what is expected."""
    *setup, asked = test.splitlines()
    return "; ".join([*setup, asked.removeprefix("assert ").partition(" == ")[0]]).replace("'", '"')


def test_a_visible_test_that_says_which_reports_are_left(tmp_path):
    """On the repository with its bugs they all pass, and the hidden ones of every buggy file do not."""
    for i, task in enumerate(reported()[:4]):
        for path, data in {**task.repo, **task.hidden}.items():
            (tmp_path / str(i) / path).parent.mkdir(exist_ok=True)
            (tmp_path / str(i) / path).write_bytes(data)
        visible = sorted(p for p in task.repo if p.startswith("test_"))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        run = subprocess.run([*command, *visible], cwd=tmp_path / str(i), capture_output=True, timeout=60)
        assert run.returncode == 0, run.stdout
        for path in task.metadata["buggy_files"]:
            hidden = [*command, f"test_hidden_{path}"]
            assert (
                subprocess.run(hidden, cwd=tmp_path / str(i), capture_output=True, timeout=60).returncode == 1
            )


def test_issue_levels():
    symptom = Symptom(
        "total_prices", "the sum over the prices", "total_prices([3])", "4", "gives 3", "prices.py", "shop"
    )
    for seed in range(60):
        rng = random.Random(seed)
        precise = issue_text([symptom], 0, rng)
        assert all(part in precise for part in ("total_prices([3])", "gives 3", "4"))
        assert "the sum over the prices" in issue_text([symptom], 1, rng).lower()
        vague = issue_text([symptom] * 2, 2, rng)
        assert not leaks(vague, 2, ["total_prices"], ["the sum over the prices"])
    with pytest.raises(ValueError):
        issue_text([], 0, random.Random(0))
    assert leaks("look at total_prices", 1, ["total_prices"], []) == ["total_prices"]
    assert leaks("it gives 3", 1, [], []) == ["3"]
    assert leaks("the sum over the prices is off", 2, [], ["the sum over the prices"])


def small(split: str = "train", count: int = 6, seed: int = 2) -> GeneratorConfig:
    return GeneratorConfig(
        seed=seed, splits={split: CONFIG.splits[split].model_copy(update={"count": count})}
    )


def test_two_generations_that_differ(tmp_path: Path):
    first = generate_split(small(), "train", tmp_path / "a")
    second = generate_split(small(), "train", tmp_path / "b")
    assert [t.id for t in first] == [t.id for t in second] and len({t.id for t in first}) == 6
    assert load_tasks(tmp_path / "a") == first
    more = generate_split(small(count=8), "train", tmp_path / "c")
    assert [t.id for t in more][:6] == [t.id for t in first]  # a larger count only adds
    assert [t.id for t in generate_split(small(seed=3), "train", tmp_path / "d")] != [t.id for t in first]


def test_a_second_generation_into_the_same_directory(tmp_path: Path):
    first = generate_split(small(), "train", tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert generate_split(small(), "train", tmp_path) == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    with pytest.raises(ConfigError, match="another configuration"):
        generate_split(small(seed=9), "train", tmp_path)


def test_a_task_that_was_changed_on_disk(tmp_path: Path):
    task = generate_split(small(), "train", tmp_path)[0]
    (task.directory / "instruction.md").write_text("something else\n")
    with pytest.raises(CorruptArtifact, match=task.id):
        load_tasks(tmp_path)
    with pytest.raises(MissingArtifact):
        load_task(tmp_path)


def test_a_generation_that_was_interrupted_is_not_a_task_set(tmp_path: Path):
    generate_split(small(), "train", tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(MissingArtifact):
        load_tasks(tmp_path)
    assert len(generate_split(small(), "train", tmp_path)) == 6


def test_the_folder_above_a_task_set_asks_to_generate_it_again(tmp_path: Path):
    generate_split(small(), "train", tmp_path / "tasks" / "train")
    with pytest.raises(MissingArtifact, match=r"is no task set; name one of those in it: .*/tasks/train$"):
        load_tasks(tmp_path / "tasks")
    (tmp_path / "tasks" / "manifest.json").write_text('{"files": {}}')  # as a finished stage has one
    with pytest.raises(MissingArtifact, match="name one of those in it"):
        load_tasks(tmp_path / "tasks")


@pytest.mark.parametrize(
    "torn", ['{"ids": [', "[]", '{"format_version": 1}', '{"format_version": 1, "ids": ["../../elsewhere"]}']
)
def test_a_torn_manifest_is_a_stack_trace(tmp_path: Path, torn: str):
    (tmp_path / "manifest.json").write_text(torn)
    with pytest.raises(CorruptArtifact, match=r"manifest\.json .*; generate the tasks again"):
        load_tasks(tmp_path)


def test_harbor_layout(tmp_path: Path):
    task = generate_split(small(count=1), "train", tmp_path)[0]
    have = {str(p.relative_to(task.directory)) for p in task.directory.rglob("*") if p.is_file()}
    assert {
        "task.toml",
        "instruction.md",
        "environment/Dockerfile",
        "tests/test.sh",
        "solution/solve.sh",
        "solution/patch.diff",
    } <= have
    assert (task.directory / "instruction.md").read_text().strip()
    assert not any(p.startswith("environment/repo/") and "hidden" in p for p in have)
    assert (task.directory / "tests" / "test.sh").stat().st_mode & 0o111


@pytest.mark.parametrize(
    "splits, message",
    [
        ({"trian": {"count": 1, "families": ("missing_call",)}}, "unknown split"),
        ({"corpus": {"count": 1, "families": ("missing_call",)}}, "unknown split"),
        ({"train": {"count": 1, "families": ("nonsense",)}}, "unknown bug families"),
        ({"train": {"count": 1, "families": ("swapped_arguments",)}}, "unseen"),
        ({"train": {"count": 0, "families": ("missing_call",)}}, "count"),
        ({"train": {"count": 1, "families": ("missing_call",), "cuont": 1}}, "cuont"),
    ],
)
def test_a_config_that_would_train_on_the_wrong_thing(splits, message):
    with pytest.raises(ValidationError, match=message):
        GeneratorConfig.model_validate({"splits": splits})


def test_a_split_without_families_gets_those_its_name_allows():
    splits = GeneratorConfig.model_validate({"splits": {name: {"count": 1} for name in SPLITS}}).splits
    assert splits["demo"].families == DEMO_FAMILIES
    assert not set(splits["train"].families) & set(UNSEEN_FAMILIES)
    assert set(UNSEEN_FAMILIES) < set(splits["heldout"].families)


def test_an_unknown_split_is_named():
    with pytest.raises(ConfigError, match="nonsense"):
        generate_split(
            GeneratorConfig(splits={"val": SplitConfig(count=1, families=("missing_call",))}),
            "nonsense",
            Path("unused"),
        )
