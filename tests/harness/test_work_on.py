from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from cadenza.core.errors import CadenzaError, MissingArtifact
from cadenza.harness import Agent, demo_tools
from cadenza.harness.work_on import Work, work_on
from cadenza.sandbox import LocalBackend
from cadenza.tasks.patch import make_patch
from cadenza.tokens import Call

BEFORE = b"def one():\r\n    return 2\r\n"
AFTER = b"def one():\r\n    return 1\r\n"
CALLS = (
    Call("read_file", "a.py"),
    Call("replace_def", "a.py", "def one():\n    return 1"),
    Call("run_tests"),
    Call("finish"),
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.py").write_bytes(BEFORE)
    (tmp_path / "a.py").chmod(0o755)
    (tmp_path / "test_a.py").write_text("from a import one\n\ndef test_one():\n    assert one() == 1\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / "link.py").symlink_to("a.py")
    return tmp_path


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def backend(runner):
    backend = LocalBackend()
    runner.run(backend.start())
    yield backend
    runner.run(backend.aclose())


@pytest.fixture
def work(renderer, backend, runner):
    def run(session, folder, **keywords):
        async def factory():
            return session

        agent = Agent(renderer, demo_tools(test_timeout_s=10))
        return runner.run(
            work_on(folder, "Fix one.", factory, backend, agent=agent, make_patch=make_patch, **keywords)
        )

    return run


def tree(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.needs_namespaces
def test_the_folder_is_untouched_until_the_user_accepts(work, replay, folder):
    before, steps = tree(folder), []
    session = replay(*CALLS)
    done = work(session, folder, on_step=steps.append)
    assert tree(folder) == before and session.closed
    assert [step.get("tool") for step in steps] == ["read_file", "replace_def", "run_tests", "finish", None]
    assert steps[2]["output"] == "ok: 1 passed"
    assert done.patch.startswith("diff --git a/a.py b/a.py") and "-    return 2" in done.patch
    assert done.apply() == ["a.py"]
    assert (folder / "a.py").read_bytes() == AFTER and (folder / "a.py").stat().st_mode & 0o777 == 0o755
    assert sorted(p.name for p in folder.iterdir()) == [".git", "a.py", "link.py", "test_a.py"]


@pytest.mark.needs_namespaces
def test_a_file_the_user_changed_meanwhile_is_not_overwritten(work, replay, folder):
    done = work(replay(*CALLS), folder)
    (folder / "a.py").write_text("mine\n")
    with pytest.raises(CadenzaError, match=r"a\.py changed while the agent worked"):
        done.apply()
    assert (folder / "a.py").read_text() == "mine\n"


@pytest.mark.needs_namespaces
def test_a_change_is_not_written_through_a_link_that_leads_out(work, replay, folder, tmp_path_factory):
    done = work(replay(*CALLS), folder)
    outside = tmp_path_factory.mktemp("outside") / "a.py"
    outside.write_bytes(BEFORE)
    (folder / "a.py").unlink()
    (folder / "a.py").symlink_to(outside)
    with pytest.raises(CadenzaError, match="leads out"):
        done.apply()
    assert outside.read_bytes() == BEFORE


@pytest.mark.needs_namespaces
def test_history_is_not_copied_and_no_change_is_an_empty_patch(work, replay, folder):
    steps = []
    done = work(replay(Call("list_dir"), Call("finish")), folder, on_step=steps.append)
    assert steps[0]["output"] == "a.py link.py test_a.py"
    assert done.patch == "" and done.apply() == []


@pytest.mark.needs_namespaces
def test_a_folder_that_is_none_is_named(work, replay, tmp_path):
    with pytest.raises(MissingArtifact):
        work(replay(), tmp_path / "nowhere")


@pytest.mark.needs_namespaces
def test_a_file_that_cannot_be_read_is_a_stack_trace_or_left_out(work, replay, folder, monkeypatch):
    def refuse(source, *_):
        raise PermissionError(13, "Permission denied", str(source))

    with monkeypatch.context() as patch:
        patch.setattr("cadenza.harness.work_on.shutil.copy2", refuse)
        with pytest.raises(CadenzaError, match=r"cannot copy .*\.py: Permission denied; make it readable"):
            work(replay(), folder)
    real = os.scandir
    with monkeypatch.context() as patch:  # a folder
        patch.setattr(os, "scandir", lambda path: refuse(path) if str(path) == str(folder) else real(path))
        with pytest.raises(CadenzaError, match="cannot copy .*: Permission denied"):
            work(replay(), folder)


@pytest.mark.needs_namespaces
def test_a_place_that_cannot_be_written_is_a_stack_trace(work, replay, folder, monkeypatch):
    done = work(replay(*CALLS), folder)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("cadenza.harness.work_on.tempfile.mkstemp", refuse)
    with pytest.raises(
        CadenzaError, match="cannot write into .*: Permission denied; apply the patch by hand"
    ):
        done.apply()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "no")])
def test_a_disk_that_fills_half_way_leaves_half_of_the_work(tmp_path, monkeypatch, error):
    (tmp_path / "a.py").write_text("old")
    (tmp_path / "z.py").write_text("goes")
    changes: dict[str, bytes | None] = {"a.py": b"new", "new/b.py": b"b", "new/deep/c.py": b"c", "z.py": None}
    base = {"a.py": b"old", "z.py": b"goes"}
    done = Work(tmp_path, "", base, changes, result=None)  # type: ignore[arg-type]
    before, real, calls = tree(tmp_path), tempfile.mkstemp, []

    def fill(*arguments, **keys):
        calls.append(keys)
        if len(calls) == 3:
            raise error
        return real(*arguments, **keys)

    with monkeypatch.context() as patch:
        patch.setattr("cadenza.harness.work_on.tempfile.mkstemp", fill)
        with pytest.raises(CadenzaError):
            done.apply()
    assert tree(tmp_path) == before and not (tmp_path / "new").exists()
    assert done.apply() == sorted(changes)
    assert tree(tmp_path) == {Path("a.py"): b"new", Path("new/b.py"): b"b", Path("new/deep/c.py"): b"c"}


@pytest.mark.parametrize("nth", range(1, 6))  # two files put aside, three put in place
def test_a_rename_that_fails_half_way_leaves_half_of_the_work(tmp_path, monkeypatch, nth):
    (tmp_path / "a.py").write_text("old")
    (tmp_path / "z.py").write_text("goes")
    changes: dict[str, bytes | None] = {"z.py": None, "a.py": b"new", "new/b.py": b"b", "c.py": b"c"}
    base = {"a.py": b"old", "z.py": b"goes"}
    done = Work(tmp_path, "", base, changes, result=None)  # type: ignore[arg-type]
    before, real, calls = tree(tmp_path), os.replace, []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == nth:
            raise PermissionError(1, "Operation not permitted")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("cadenza.harness.work_on.os.replace", fail)
        with pytest.raises(CadenzaError, match="not permitted"):
            done.apply()
        assert tree(tmp_path) == before and not (tmp_path / "new").exists()
    assert done.apply() == sorted(changes)
    assert tree(tmp_path) == {Path("a.py"): b"new", Path("new/b.py"): b"b", Path("c.py"): b"c"}
