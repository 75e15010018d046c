"""Patches: made as git writes them, applied byte for byte or refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.tasks.directory import read_tree
from cadenza.tasks.patch import PatchRefused, apply_patch, make_patch

LINES = st.lists(
    st.sampled_from(["", "a", "b", "c  ", "\td", "e\r", "--- x", "+++ y", "@@ -1 +1 @@", "\\ z", "é", "\x0c"])
)
CONTENT = st.builds(
    lambda lines, end: ("\n".join(lines) + end).encode(), LINES, st.sampled_from(["", "\n", "\n\n"])
)
NAMES = st.sampled_from(
    ["a.py", "b.py", "d/c.py", "with space.txt", "é.txt", 'quo"te', "back\\slash", "tab\tname"]
)
TREES = st.dictionaries(NAMES, CONTENT, max_size=4)
CHANGES = st.dictionaries(NAMES, st.one_of(st.none(), CONTENT), max_size=4)


def changed(base: dict[str, bytes], changes: dict[str, bytes | None]) -> dict[str, bytes]:
    tree = dict(base)
    for path, data in changes.items():
        if data is None:
            tree.pop(path, None)
        else:
            tree[path] = data
    return tree


@given(TREES, CHANGES)
@settings(max_examples=100, deadline=None)
def test_a_patch_that_gives_other_bytes_than_the_agent_left(base, changes):
    patch = make_patch(base, changes)
    assert apply_patch(base, patch) == changed(base, changes)
    assert not patch or patch.endswith("\n")


@given(TREES, CHANGES)
@settings(max_examples=25, deadline=None)
def test_a_patch_that_git_reads_differently(tmp_path_factory, base, changes):
    patch = make_patch(base, changes)
    if not patch:
        return
    root: Path = tmp_path_factory.mktemp("git")
    for path, data in base.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(data)
    run = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=root,
        input=patch.encode(),
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert read_tree(root) == changed(base, changes)
    shutil.rmtree(root)


@given(st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_a_malformed_patch_that_is_neither_applied_nor_refused(text):
    base = {"a.py": b"x = 1\n"}
    try:
        assert apply_patch(base, text) == base or "diff --git" in text
    except PatchRefused:
        pass


GOOD = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n"
BASE = {"a.py": b"one\ntwo\nthree\n"}


def test_a_diff_without_its_final_newline():
    assert apply_patch(BASE, GOOD.rstrip("\n")) == apply_patch(BASE, GOOD) == {"a.py": b"one\nTWO\nthree\n"}
    assert apply_patch(BASE, GOOD + "\n\n") == apply_patch(BASE, GOOD)


def test_a_new_file_that_the_patch_leaves_out():
    patch = make_patch(BASE, {"new/n.py": b"x = 1\n"})
    assert apply_patch(BASE, patch)["new/n.py"] == b"x = 1\n"


def test_only_the_changed_line_of_a_crlf_file_is_in_the_patch():
    base = {"a.py": b"one\r\ntwo\r\nthree\r\n"}
    patch = make_patch(base, {"a.py": b"one\r\nTWO\r\nthree\r\n"})
    assert [line for line in patch.split("\n")[3:] if line[:1] in "+-"] == ["-two\r", "+TWO\r", ""]


@pytest.mark.parametrize(
    "patch",
    [
        GOOD.replace(" one", " ONE"),  # context differs: no fuzz
        GOOD.replace("-1,3", "-2,3"),  # another place: no offset
        GOOD.replace("+1,3 @@", "+2,3 @@"),
        GOOD.replace("@@ -1,3 +1,3 @@", "@@ -1,4 +1,4 @@"),
        GOOD.replace("a.py", "../a.py"),
        GOOD.replace("a/a.py", "a//etc/x").replace("b/a.py", "b//etc/x"),
        GOOD.replace("a.py", ".git/config"),
        GOOD.replace("a.py", "missing.py"),
        GOOD + GOOD,
        "diff --git a/a.py b/b.py\nsimilarity index 100%\nrename from a.py\nrename to b.py\n",
        "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n",
        "diff --git a/a.py b/a.py\nGIT binary patch\nliteral 0\n",
        "hello\n",
        "--- a/a.py\n+++ b/a.py\n",
    ],
)
def test_a_patch_that_must_be_refused(patch):
    with pytest.raises(PatchRefused):
        apply_patch(BASE, patch)


@pytest.mark.parametrize(
    "changes", [{"x": b"\0"}, {"x": b"\xff"}, {"../x": b""}, {"/x": b""}, {".git/hooks/x": b"a"}]
)
def test_changes_that_no_text_patch_can_hold(changes):
    with pytest.raises(PatchRefused):
        make_patch({}, changes)


def test_caches_of_a_test_run_in_the_patch():
    assert make_patch({}, {"__pycache__/a.pyc": b"\0", ".pytest_cache/x": b"1", "d/b.pyc": b"\0"}) == ""
