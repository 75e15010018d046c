"""A result says what it was measured on, also outside a repository and without torch."""

import json
import subprocess

from cadenza.core import machine


def test_the_description_is_whole_and_json_ready():
    found = machine.describe()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {
        "cpu",
        "cores",
        "memory_gb",
        "bf16",
        "python",
        "platform",
        "torch",
        "cadenza",
        "commit",
    }
    assert found["cores"] >= 1 and found["memory_gb"] > 0.1 and found["cpu"]


def test_the_commit_says_when_files_differ_from_it(tmp_path):
    assert machine.commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    (tmp_path / "a").write_text("1")
    for command in (["init", "-q"], ["add", "a"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    clean = machine.commit(tmp_path)
    assert clean is not None and len(clean) == 12
    (tmp_path / "a").write_text("2")
    assert machine.commit(tmp_path) == clean + "+dirty"


def test_an_environment_that_merely_lies_inside_a_repository_has_no_commit(tmp_path):
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    inside = tmp_path / "site-packages" / "cadenza"
    inside.mkdir(parents=True)
    assert machine.commit(inside) is None


def test_free_disk_of_a_folder_that_is_not_there_yet(tmp_path):
    assert machine.free_disk_bytes(tmp_path / "a" / "b") > 0
