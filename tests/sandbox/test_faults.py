"""Whoever is killed, however: nobody waits for ever and nothing is left on the machine."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.core.errors import ConfigError, SandboxUnavailable, ServiceDied
from cadenza.sandbox import LocalBackend, LocalConfig, SandboxGone, SandboxSpec
from cadenza.sandbox import probe as probing
from cadenza.sandbox.workdir import WorkDir

SOURCE = Path(__file__).parents[2] / "src"
needs_namespaces = pytest.mark.needs_namespaces

HOST = """
import asyncio, sys
from pathlib import Path
from cadenza.sandbox import LocalBackend, LocalConfig, SandboxSpec
async def main():
    backend = LocalBackend(LocalConfig(directory=Path(sys.argv[1]), scratch=sys.argv[2]))
    await backend.start()
    sandbox = await backend.create(SandboxSpec())
    await sandbox.write("file", b"x")
    await sandbox.exec(["sh", "-c", f"setsid sleep {sys.argv[3]} >/dev/null 2>&1 &"])
    snapshot = await sandbox.snapshot()
    print(backend.pid, flush=True)
    await sandbox.exec(["sleep", "300"], timeout_s=300)
asyncio.run(main())
"""


def pids_of(word):
    """Host processes whose command line has ``word``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def wait_gone(fds, seconds=20.0):
    """Waits until every process behind the pid descriptors has ended."""
    for fd in fds:
        assert select.select([fd], [], [], seconds)[0], "a process is still alive"
        os.close(fd)


@needs_namespaces
@pytest.mark.parametrize("victim", ["host", "zygote"])
@pytest.mark.parametrize("scratch", ["auto", "disk"])
def test_kill_9_leaves_no_process_and_the_next_start_no_file(tmp_path, victim, scratch):
    marker = str(
        3_000_000 + os.getpid() * 10 + len(victim) + len(scratch) * 1000
    )  # seconds of a sleep nobody else has
    argv = [sys.executable, "-c", HOST, str(tmp_path), scratch, marker]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    host = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    try:
        assert host.stdout is not None
        zygote = int(host.stdout.readline())
        (daemon,) = [pid for pid in pids_of(marker) if pid != host.pid]
        fds = [os.pidfd_open(pid) for pid in (zygote, daemon)]
        os.kill(host.pid if victim == "host" else zygote, signal.SIGKILL)
        wait_gone(fds)
        host.wait(20)
        assert victim == "host" or host.returncode == 1  # a typed error ended it, not a hang
    finally:
        host.kill()
        host.wait()
        if host.stdout is not None:
            host.stdout.close()
    base = next(tmp_path.iterdir())
    assert [p for p in base.iterdir() if p.is_dir()]
    WorkDir.make(tmp_path).remove()
    assert not [p for p in base.iterdir() if p.is_dir()]


@needs_namespaces
def test_killed_agent_is_sandbox_gone_for_every_waiting_call(backend, run):
    async def scenario():
        sandbox = await backend.create(SandboxSpec())
        marker = str(4_000_000 + os.getpid())
        calls = [asyncio.ensure_future(sandbox.exec(["sleep", marker], timeout_s=60)) for _ in range(3)]
        while not (found := pids_of(marker)):
            await asyncio.sleep(0)
        status = Path(f"/proc/{found[0]}/status").read_text()
        agent = int(status.split("PPid:\t")[1].split()[0])
        os.kill(agent, signal.SIGKILL)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, SandboxGone) for result in results), results
        await sandbox.destroy()
        assert not pids_of(marker)

    run(scenario())


@needs_namespaces
def test_killed_zygote_is_a_typed_error_and_close_still_works(run, tmp_path):
    async def scenario():
        backend = LocalBackend(LocalConfig(directory=tmp_path))
        await backend.start()
        sandbox = await backend.create(SandboxSpec())
        assert backend._process is not None
        os.kill(backend.pid, signal.SIGKILL)
        with pytest.raises(SandboxGone):
            await sandbox.exec(["sleep", "60"], timeout_s=60)
        with pytest.raises(ServiceDied):
            await backend.create(SandboxSpec())
        await sandbox.destroy()
        await backend.aclose()

    run(scenario())
    assert not [p for p in next(tmp_path.iterdir()).iterdir() if p.is_dir()]


@needs_namespaces
def test_close_destroys_what_is_left_and_is_idempotent(run, tmp_path):
    async def scenario():
        backend = LocalBackend(LocalConfig(directory=tmp_path))
        async with backend:
            kept = [await backend.create(SandboxSpec()) for _ in range(3)]
            running = asyncio.ensure_future(kept[0].exec(["sleep", "60"], timeout_s=60))
            await asyncio.sleep(0)
        with pytest.raises(SandboxGone):
            await running
        await backend.aclose()
        assert not any(sandbox.alive for sandbox in kept)

    run(scenario())
    assert not [p for p in next(tmp_path.iterdir()).iterdir() if p.is_dir()]


@needs_namespaces
def test_two_backends_on_one_machine_do_not_sweep_each_other(run, tmp_path):
    async def scenario():
        async with LocalBackend(LocalConfig(directory=tmp_path)) as one:
            first = await one.create(SandboxSpec())
            async with LocalBackend(LocalConfig(directory=tmp_path)) as two:
                second = await two.create(SandboxSpec())
                assert first.id != second.id
                assert (await second.exec(["true"])).rc == 0
            (child,) = await first.fork(1)
            assert not isinstance(child, Exception) and (await child.exec(["true"])).rc == 0

    run(scenario())


@needs_namespaces
def test_disk_scratch_works_and_is_freed_with_the_sandbox(run, tmp_path, repo):
    async def scenario():
        async with LocalBackend(LocalConfig(directory=tmp_path, scratch="disk")) as backend:
            sandbox = await backend.create(SandboxSpec(layers=(repo,)))
            await sandbox.exec(["sh", "-c", "rm -r pkg; mkdir pkg; echo 1 > new; chmod 0 pkg"])
            changes = await sandbox.changes()
            assert changes["new"] == b"1\n" and changes["pkg/one.py"] is None
            await sandbox.destroy()
            return list(tmp_path.glob("*/*/scratch/*"))

    assert run(scenario()) == []


@needs_namespaces
def test_many_sandboxes_at_once_all_answer(backend, run):
    async def one(number):
        sandbox = await backend.create(SandboxSpec())
        await sandbox.write("n", b"%d" % number)
        answer = await sandbox.read("n")
        await sandbox.destroy()
        return answer

    async def scenario():
        return await asyncio.gather(*(one(number) for number in range(64)))

    assert run(scenario()) == [b"%d" % number for number in range(64)]


@needs_namespaces
def test_missing_layer_is_named_and_costs_no_sandbox(backend, run, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run(backend.create(SandboxSpec(layers=(tmp_path / "nowhere",))))
    assert not backend._sandboxes and not backend._deaths


@needs_namespaces
def test_layer_with_separators_in_its_name_is_mounted(backend, run, tmp_path):
    layer = tmp_path / "a:b,c\\d e"
    layer.mkdir()
    (layer / "f").write_text("here")

    async def scenario():
        sandbox = await backend.create(SandboxSpec(layers=(layer,)))
        data = await sandbox.read("f")
        await sandbox.destroy()
        return data

    assert run(scenario()) == b"here"


@needs_namespaces
@pytest.mark.needs_root
@pytest.mark.parametrize("first", ["whichever", "end of the connection"])
def test_refused_namespaces_name_the_setting_and_the_mend(tmp_path, first):
    """In a user namespace of its own, whose limit is set to zero: the kernel really refuses.

    The refusal and the end of the connection to the agent arrive over two sockets, in either order.
    """
    late = (
        "refused = LocalBackend._on_control\n"
        "def after_the_end(self):\n"
        "  if all(s._end == 'the agent ended' for s in self._sandboxes.values()): refused(self)\n"
        "LocalBackend._on_control = after_the_end\n"
    )
    code = (
        "import asyncio\n"
        "from cadenza.sandbox import LocalBackend, SandboxSpec\n"
        "from cadenza.core.errors import SandboxUnavailable\n"
        f"{late if first != 'whichever' else ''}"
        "found = LocalBackend.probe()\n"
        "assert not found.available\n"
        "print(found.reason); print(found.mend)\n"
        "async def main():\n"
        "  async with LocalBackend() as b:\n"
        "    try: await b.create(SandboxSpec())\n"
        "    except SandboxUnavailable as e: print(e)\n"
        "asyncio.run(main())\n"
    )
    script = f'echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} -c "$0"'
    argv = ["unshare", "-Ur", "sh", "-c", script, code]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=60)
    assert "user.max_user_namespaces is 0" in done.stdout, done.stderr
    assert "sysctl -w user.max_user_namespaces=15000" in done.stdout
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("path", "value", "mend"),
    [(p, v, m) for p, v, m in probing._SETTINGS],
    ids=lambda x: str(x).rsplit("/", 1)[-1],
)
def test_every_refusing_setting_is_recognized(tmp_path, path, value, mend):
    file = tmp_path / "setting"
    file.write_text(value + "\n")
    error = probing.refusal(1, "clone", ((str(file), value, mend),))
    assert isinstance(error, SandboxUnavailable) and mend in error.mend and f"is {value}" in error.cause


@needs_namespaces
def test_probe_really_runs_a_command():
    found = LocalBackend.probe()
    assert found.available and found.fs_snapshot and not found.mem_snapshot
    assert found.details["scratch"] in ("tmpfs", "disk")


def test_shared_directory_of_another_owner_is_refused(tmp_path):
    (tmp_path / f"cadenza-sandbox-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(ConfigError):
        WorkDir.make(tmp_path)


def test_unknown_scratch_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="ramdisk"):
        probing.choose_scratch("ramdisk", tmp_path)
