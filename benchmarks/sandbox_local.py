"""What one sandbox of backend ``local`` costs: create, exec, a warm test run, fork; against the plain process.

Run: ``python benchmarks/sandbox_local.py --json``. Prints one line a figure, as a ratio to a peer measured in the
same run (``ms`` is the absolute median). ``local_create_ratio`` counts creation and destruction together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from cadenza.sandbox import LocalBackend, SandboxSpec

SHOP = "def total(xs):\n    return sum(xs) + 1\n\n\ndef mean(xs):\n    return sum(xs) / len(xs)\n"
TESTS = (
    "from shop import mean, total\n\n\ndef test_total():\n    assert total([3, 4]) == 7\n\n\n"
    "def test_mean():\n    assert mean([1, 3]) == 2\n\n\ndef test_empty():\n    assert total([]) == 0\n\n\n"
    "def test_one():\n    assert mean([5]) == 5\n"
)


async def sample(action: Callable[[], Awaitable[Any]], n: int) -> list[float]:
    """Milliseconds of ``n`` calls, after one that is not counted."""
    await action()
    times = []
    for _ in range(n):
        start = time.perf_counter()
        await action()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def sample_plain(action: Callable[[], Any], n: int) -> list[float]:
    """The same for a plain function."""
    action()
    times = []
    for _ in range(n):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def ratio(
    name: str, times: list[float], peer: str, peers: list[float], better: str = "lower"
) -> dict[str, Any]:
    """One figure: how many times the peer's median ``times`` are (or, for ``higher``, the other way round)."""
    base = statistics.median(peers)
    values = sorted(t / base if better == "lower" else base / t for t in times)
    low, high = (values[int(len(values) * q)] for q in (0.05, 0.95))
    return {
        "figure": name,
        "value": statistics.median(values),
        "unit": "x",
        "better": better,
        "peer": peer,
        "peer_value": base,
        "ms": statistics.median(times),
        "n": len(times),
        "interval": [low, high],
    }


async def measure(n: int, parallel: int) -> AsyncIterator[dict[str, Any]]:
    """All figures, one after the other. Intervals are the 5th and 95th percentile."""
    repo = Path(tempfile.mkdtemp(prefix="bench-sandbox-"))
    try:
        (repo / "shop.py").write_text(SHOP)
        (repo / "test_shop.py").write_text(TESTS)
        (repo / "data").mkdir()
        for number in range(1000):
            (repo / "data" / f"{number}.txt").write_text(str(number))
        async with LocalBackend() as backend:
            async for figure in _one_at_a_time(backend, repo, n):
                yield figure
            async for figure in _many_at_once(backend, repo, parallel):
                yield figure
    finally:
        shutil.rmtree(repo)


async def _one_at_a_time(backend: LocalBackend, repo: Path, n: int) -> AsyncIterator[dict[str, Any]]:
    spec = SandboxSpec(layers=(repo,))
    true = "subprocess.run(['true'])"
    plain = sample_plain(lambda: subprocess.run(["true"], check=True), n)

    async def create_destroy() -> None:
        await (await backend.create(spec)).destroy()

    yield ratio("local_create_ratio", await sample(create_destroy, n), true, plain)
    sandbox = await backend.create(spec)
    yield ratio("local_exec_ratio", await sample(lambda: sandbox.exec(["true"]), n), true, plain)
    warm = await sample(lambda: sandbox.pytest(["test_shop.py"]), n)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    cold = sample_plain(
        lambda: subprocess.run(argv, cwd=repo, env=environment, capture_output=True), max(3, n // 10)
    )
    yield ratio("pytest_warm_speedup", warm, "python -m pytest without plug-ins", cold, better="higher")

    async def fork() -> None:
        (child,) = await sandbox.fork(1)
        assert not isinstance(child, Exception), child
        await child.destroy()

    def copy() -> None:
        with tempfile.TemporaryDirectory() as target:
            subprocess.run(["cp", "-a", str(repo), target], check=True)

    await sandbox.write("shop.py", b"# changed\n")
    copies = sample_plain(copy, max(3, n // 10))
    yield ratio("local_fork_vs_cp", await sample(fork, n), "cp -a of 1,002 files, and rm -r", copies)
    await sandbox.destroy()


async def _many_at_once(backend: LocalBackend, repo: Path, parallel: int) -> AsyncIterator[dict[str, Any]]:
    spec = SandboxSpec(layers=(repo,))
    start = time.perf_counter()
    many = await asyncio.gather(*(backend.create(spec) for _ in range(parallel)))
    took = time.perf_counter() - start
    figure = {"figure": f"local_creates_per_s_{parallel}", "value": parallel / took, "unit": "1/s"}
    yield figure | {"better": "higher", "n": parallel}
    private = [_private_kb(pid) for pid in _children(backend.pid)]
    figure = {"figure": "local_mb_each", "value": statistics.median(private) / 1024, "unit": "MB"}
    yield figure | {"better": "lower", "n": len(private)}
    await asyncio.gather(*(sandbox.destroy() for sandbox in many))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _private_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    return {
        "cpu": cpu.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("-n", type=int, default=100, help="calls per figure")
    parser.add_argument("--parallel", type=int, default=200, help="sandboxes created at once")
    args = parser.parse_args()
    asyncio.run(_print(args))


async def _print(args: argparse.Namespace) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    extra = {"seeds": [], "commit": commit, "machine": machine(), "command": " ".join(["python", *sys.argv])}
    async for figure in measure(args.n, args.parallel):
        if args.json:
            print(json.dumps(figure | extra), flush=True)
        else:
            milliseconds = f"{figure['ms']:8.2f} ms" if "ms" in figure else ""
            print(
                f"{figure['figure']:24} {figure['value']:8.2f} {figure['unit']:4} {milliseconds}", flush=True
            )


if __name__ == "__main__":
    main()
