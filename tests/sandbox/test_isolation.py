"""What untrusted code can see and reach: nothing of the host but read-only programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.sandbox import SandboxSpec

pytestmark = pytest.mark.needs_namespaces


def python(sandbox, code, **more):
    return sandbox.exec(["python3", "-S", "-c", code], **more)


def test_no_capability_and_no_way_to_gain_one(sandbox, run):
    status = run(sandbox.exec(["cat", "/proc/self/status"]))
    lines = dict(line.split(":\t", 1) for line in status.stdout.decode().splitlines() if ":\t" in line)
    assert {lines[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert lines["NoNewPrivs"] == "1"
    assert run(sandbox.exec(["unshare", "-Ur", "true"])).rc != 0
    assert run(sandbox.exec(["mount", "-t", "tmpfs", "x", "/tmp"])).rc != 0


def test_no_network(sandbox, run):
    code = (
        "import socket\n"
        "for host, port in (('1.1.1.1', 53), ('127.0.0.1', 22)):\n"
        "  s = socket.socket(); s.settimeout(2)\n"
        "  try: s.connect((host, port)); print('connected')\n"
        "  except OSError as e: print(type(e).__name__)\n"
        "print([n for _, n in socket.if_nameindex()])"
    )
    assert b"connected" not in run(python(sandbox, code)).stdout
    local = "import socket as k; s = k.create_server(('127.0.0.1', 0)); k.create_connection(s.getsockname()); print('ok')"  # noqa: E501
    assert run(python(sandbox, local)).stdout == b"ok\n"


def test_files_of_the_host_are_not_there(sandbox, run, tmp_path):
    (tmp_path / "secret").write_text("s")
    paths = [
        str(tmp_path / "secret"),
        "/etc/shadow",
        "/root/.ssh",
        str(Path.home() / ".bashrc"),
        "/sys/kernel",
        "/home",
    ]
    result = run(sandbox.exec(["ls", "-d", *paths]))
    assert result.stdout == b""


def test_system_directories_are_read_only(sandbox, run):
    for path in (
        "/x",
        "/etc/x",
        "/usr/x",
        "/proc/sys/kernel/core_pattern",
        f"{sys.base_prefix}/x",
        "/proc/sysrq-trigger",
    ):
        result = run(sandbox.exec(["sh", "-c", f"echo x > {path}"]))
        assert result.rc != 0, path


def test_agent_is_closed_to_the_code_it_runs(sandbox, run):
    code = (
        "import os\n"
        "paths = [f'/proc/1/fd/{n}' for n in range(64)] + ['/proc/1/root', '/proc/1/cwd', '/proc/1/exe']\n"
        "for path in paths + ['/proc/1/mem', '/proc/1/environ', '/proc/1/maps']:\n"
        "  try: os.open(path, os.O_RDONLY); print('opened', path)\n"
        "  except OSError: pass\n"
        "os.kill(1, 9)\n"
    )
    assert run(python(sandbox, code)).stdout == b""
    assert run(sandbox.exec(["echo", "still here"])).stdout == b"still here\n"


def test_test_process_has_no_descriptor_of_the_agent(sandbox, run):
    code = b"import os\ndef test_a():\n    for fd in os.listdir('/proc/self/fd'):\n"
    code += b"        try: print(fd, os.readlink(f'/proc/self/fd/{fd}'))\n        except OSError: pass\n"
    run(sandbox.write("test_shop.py", code))
    result = run(sandbox.pytest())
    assert set(result.tests.values()) == {"passed"}
    targets = [line.split(" ", 1)[1] for line in result.output.splitlines()]
    assert not [t for t in targets if t.startswith(("socket:", "anon_inode:")) or "upper" in t], targets
    assert sum(t.startswith("pipe:") for t in targets) == 2  # stdout, stderr


def test_other_sandboxes_are_invisible(backend, run):
    async def scenario():
        one = await backend.create(SandboxSpec())
        two = await backend.create(SandboxSpec())
        await one.exec(["sh", "-c", "sleep 44 >/dev/null 2>&1 & echo hello > /tmp/f"])
        seen = await two.exec(["sh", "-c", "ls /tmp; cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
        await one.destroy()
        await two.destroy()
        return seen.stdout

    out = run(scenario())
    assert b"sleep 44" not in out and b"f\n" not in out


def test_zygote_has_none_of_the_hosts_environment(backend, run, monkeypatch):
    pid = backend.pid
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert environment == b"PYTHONHASHSEED=0\0"


@pytest.mark.needs_root
def test_unprivileged_user_gets_the_same_sandbox(tmp_path):
    """The whole backend again as an ordinary user, in a process of its own."""
    code = (
        "import asyncio\n"
        "from cadenza.sandbox import LocalBackend, LocalConfig, SandboxSpec\n"
        "from pathlib import Path\n"
        "async def main():\n"
        f"  async with LocalBackend(LocalConfig(directory=Path({str(tmp_path / 'own')!r}))) as backend:\n"
        "    sandbox = await backend.create(SandboxSpec())\n"
        "    await sandbox.write('test_x.py', b'def test_a(): pass')\n"
        "    result = await sandbox.pytest()\n"
        "    (child,) = await sandbox.fork(1)\n"
        "    print(result.tests, await child.list())\n"
        "asyncio.run(main())\n"
    )
    if not _readable_by_others(sys.base_prefix) or not _readable_by_others(sys.prefix):
        pytest.xfail("the Python of this test run lies in a directory that other users cannot enter")
    (tmp_path / "own").mkdir()
    os.chown(tmp_path / "own", 12345, 12345)
    for parent in (tmp_path, *tmp_path.parents):
        parent.chmod(parent.stat().st_mode | 0o711)
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], user=12345, group=12345, extra_groups=[], cwd="/", capture_output=True, text=True,
        env={"PYTHONPATH": str(source), "HOME": "/nowhere"}, timeout=60,
    )  # fmt: skip
    assert done.stdout == "{'test_x.py::test_a': 'passed'} ['test_x.py']\n", done.stderr


def _readable_by_others(path: str) -> bool:
    real = Path(path).resolve()
    return all(parent.stat().st_mode & 0o1 for parent in (real, *real.parents))
