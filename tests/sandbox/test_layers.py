"""Changes, snapshots and forks: what overlayfs did is what we say it did."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadenza.core.errors import MissingArtifact
from cadenza.sandbox import NotSupported, PathRefused, SandboxSpec
from cadenza.sandbox.layers import COMPACT_AT, BrokenEntry, LayerStore, files_below

needs_namespaces = pytest.mark.needs_namespaces

PATHS = ["a", "b", "d/a", "d/b", "d/e/a", "d/e", "d", "e/a"]
step = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(PATHS), st.sampled_from(["one", "two", ""])),
    st.tuples(st.just("remove"), st.sampled_from(PATHS), st.just("")),
    st.tuples(st.just("move"), st.sampled_from(PATHS), st.sampled_from(PATHS)),
    st.tuples(st.just("mkdir"), st.sampled_from(PATHS), st.just("")),
    st.tuples(st.just("link"), st.sampled_from(PATHS), st.sampled_from(PATHS)),
)
# The same program runs on a plain directory (the model) and inside the sandbox.
PROGRAM = """
import os, shutil
def do(kind, path, more):
    try:
        if kind == "write":
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            if os.path.islink(path): os.unlink(path)
            open(path, "w").write(more)
        elif kind == "remove":
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        elif kind == "move": shutil.move(path, more)
        elif kind == "mkdir": os.makedirs(path)
        elif kind == "link": os.symlink("nowhere-" + os.path.basename(more), path)
    except (OSError, shutil.Error): pass
for s in steps: do(*s)
"""


def regular_files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def difference(before: dict[str, bytes], after: dict[str, bytes]) -> dict[str, bytes | None]:
    gone = dict.fromkeys(before.keys() - after.keys())
    return gone | {name: data for name, data in after.items() if before.get(name) != data}


def model(base: Path, steps, tmp: Path) -> dict[str, bytes]:
    shutil.rmtree(tmp, ignore_errors=True)
    shutil.copytree(base, tmp, symlinks=True)
    with contextlib.chdir(tmp):
        exec(PROGRAM, {"steps": steps})
    return regular_files(tmp)


@needs_namespaces
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.lists(step, max_size=6), second=st.lists(step, max_size=6))
def test_changes_and_forks_agree_with_a_plain_directory(backend, run, tmp_path, first, second):
    base = tmp_path / "base"
    if not base.exists():
        for name in ("a", "d/a", "d/e/a", "e/a"):
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_text("one" + name)

    async def scenario():
        sandbox = await backend.create(SandboxSpec(layers=(base,)))
        await sandbox.exec(["python3", "-S", "-c", f"steps = {first!r}\n{PROGRAM}"])
        changes = await sandbox.changes()
        (child,) = await sandbox.fork(1)
        await sandbox.destroy()
        await child.exec(["python3", "-S", "-c", f"steps = {second!r}\n{PROGRAM}"])
        child_changes = await child.changes()
        links = (await child.exec(["find", ".", "-type", "l"])).stdout.decode().split()
        names = [name for name in await child.list() if f"./{name}" not in links]
        contents = {name: await child.read(name) for name in names}
        await child.destroy()
        return changes, child_changes, contents

    changes, child_changes, contents = run(scenario())
    before = regular_files(base)
    middle = model(base, first, tmp_path / "model")
    assert changes == difference(before, middle)
    after = model(tmp_path / "model", second, tmp_path / "model2")
    assert contents == after
    assert child_changes == difference(before, after)


@needs_namespaces
def test_changes_name_new_changed_and_deleted_files_and_no_caches(sandbox, run):
    script = (
        "echo 1 > new; echo 2 > shop.py; rm -r pkg; mkdir -p x/__pycache__; echo c > x/__pycache__/m.pyc;"
        "touch test_shop.py; ln -s /etc/passwd stolen; mkfifo pipe;"
        "mkdir hidden; echo h > hidden/f; chmod 0 hidden/f; chmod 0 hidden"
    )
    run(sandbox.exec(["sh", "-c", script]))
    deleted = dict.fromkeys(["pkg/__init__.py", "pkg/one.py", "pkg/deep/two.py"])
    assert run(sandbox.changes()) == {"new": b"1\n", "hidden/f": b"h\n", "shop.py": b"2\n", **deleted}


@needs_namespaces
def test_hostile_tree_is_an_error_and_not_the_end_of_the_sandbox(sandbox, run):
    deep = "import os\nfor _ in range(3000):\n  os.mkdir('d'); os.chdir('d')"
    run(sandbox.exec(["python3", "-S", "-c", deep]))
    with pytest.raises((PathRefused, OSError)):
        run(sandbox.changes())
    with pytest.raises((PathRefused, OSError)):
        run(sandbox.list())
    run(sandbox.exec(["rm", "-r", "d"]))
    run(sandbox.exec(["sh", "-c", "for i in 1 2 3 4 5; do truncate -s 100M s$i; done"]))
    with pytest.raises((PathRefused, OSError)):
        run(sandbox.changes())
    run(sandbox.exec(["sh", "-c", "rm s*; echo fine > f"]))
    assert run(sandbox.changes())["f"] == b"fine\n"


@needs_namespaces
def test_directory_removed_and_made_again_hides_the_old_one(sandbox, run):
    run(sandbox.exec(["sh", "-c", "rm -r pkg; mkdir pkg; echo 5 > pkg/one.py"]))
    deleted = dict.fromkeys(["pkg/__init__.py", "pkg/deep/two.py"])
    assert run(sandbox.changes()) == {"pkg/one.py": b"5\n", **deleted}

    async def scenario():
        (child,) = await sandbox.fork(1)
        names = await child.list("pkg")
        await child.destroy()
        return names

    assert run(scenario()) == ["pkg/one.py"]


@needs_namespaces
def test_forks_start_equal_and_diverge(sandbox, run):
    async def scenario():
        await sandbox.write("note", b"before")
        children = await sandbox.fork(3)
        await sandbox.write("note", b"parent")
        for number, child in enumerate(children):
            assert await child.read("note") == b"before"
            await child.write("note", b"%d" % number)
        notes = [await child.read("note") for child in children] + [await sandbox.read("note")]
        await asyncio.gather(*(child.destroy() for child in children))
        return notes

    assert run(scenario()) == [b"0", b"1", b"2", b"parent"]


@needs_namespaces
def test_layers_of_a_long_chain_of_forks_are_merged_and_freed(backend, run, repo):
    async def scenario():
        sandbox = await backend.create(SandboxSpec(layers=(repo,)))
        depths = []
        for number in range(COMPACT_AT * 2 + 1):
            await sandbox.write(f"n{number}", b"x")
            await sandbox.exec(["rm", "-f", f"n{number - 3}"])
            (child,) = await sandbox.fork(1)
            await sandbox.destroy()
            sandbox = child
            depths.append(len(sandbox.spec.layers))
        names = await sandbox.list()
        await sandbox.destroy()
        return names, depths

    names, depths = run(scenario())
    last = COMPACT_AT * 2
    assert [n for n in names if n.startswith("n")] == sorted(f"n{i}" for i in range(last - 2, last + 1))
    assert max(depths) <= COMPACT_AT + 1
    assert not backend.layers.counts and not list((backend._work.path / "layers").iterdir())


@needs_namespaces
def test_snapshot_outlives_its_sandbox_and_is_gone_after_release(sandbox, backend, run):
    async def scenario():
        await sandbox.write("kept", b"yes")
        snapshot = await sandbox.snapshot()
        await sandbox.destroy()
        one, two = await backend.restore(snapshot, 2)
        backend.release(snapshot)
        backend.release(snapshot)
        assert await one.read("kept") == b"yes"
        await one.destroy()
        assert await two.read("kept") == b"yes"
        await two.destroy()
        with pytest.raises(MissingArtifact):
            await backend.restore(snapshot)
        return snapshot

    snapshot = run(scenario())
    assert (snapshot.backend, snapshot.mode, snapshot.bytes) == ("local", "filesystem", 3)
    assert not backend.layers.counts


@needs_namespaces
def test_memory_snapshot_is_refused_by_name(sandbox, run):
    with pytest.raises(NotSupported, match="'full'"):
        run(sandbox.snapshot("full"))


@needs_namespaces
def test_one_failing_fork_does_not_take_the_others_with_it(sandbox, backend, run, monkeypatch):
    real, calls = backend.create, []

    async def sometimes(spec):
        calls.append(spec)
        if len(calls) == 2:
            raise OSError("no more")
        return await real(spec)

    monkeypatch.setattr(backend, "create", sometimes)

    async def scenario():
        made = await sandbox.fork(3)
        kinds = [type(m).__name__ for m in made]
        await asyncio.gather(*(m.destroy() for m in made if not isinstance(m, Exception)))
        return kinds

    assert run(scenario()) == ["Sandbox", "OSError", "Sandbox"]


@pytest.mark.parametrize(
    "entries",
    [
        [("link", "a", b"/tmp"), ("file", "a/planted", b"x")],
        [("file", "../planted", b"x")],
        [("file", "/tmp/planted", b"x")],
        [("dir", "..", b"")],
    ],
)
def test_forged_entry_cannot_write_outside_the_layer(tmp_path, entries):
    (tmp_path / "layers").mkdir()
    store = LayerStore(tmp_path / "layers")
    forged = [({"kind": k, "path": p, "mode": 0o644, "opaque": False}, data) for k, p, data in entries]
    with pytest.raises(BrokenEntry):
        store.add(forged, ())
    assert not (tmp_path / "planted").exists() and not Path("/tmp/planted").exists()


def test_merged_view_prefers_the_top_layer(tmp_path):
    for layer, text in (("top", "new"), ("base", "old")):
        (tmp_path / layer / "d").mkdir(parents=True)
        (tmp_path / layer / "d" / "f").write_text(text)
    (tmp_path / "base" / "d" / "g").write_text("g")
    found = {name: path.read_text() for name, path in files_below([tmp_path / "top", tmp_path / "base"], "")}
    assert found == {"d/f": "new", "d/g": "g"}
