"""What one sandbox of backend ``local`` costs: create, exec, a warm test run, fork; against the plain process.

Run: ``python benchmarks/sandbox_local.py --json``. Prints one line a figure (names: docs/results/README.md).
Medians of one caller at a time, and creates per second with ``--parallel`` at once.
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
from collections.abc import Awaitable, Callable
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


async def measure(n: int, parallel: int) -> list[dict[str, Any]]:
    """All figures."""
    repo = Path(tempfile.mkdtemp(prefix="bench-sandbox-"))
    (repo / "shop.py").write_text(SHOP)
    (repo / "test_shop.py").write_text(TESTS)
    spec = SandboxSpec(layers=(repo,))
    figures = []

    def figure(name: str, times: list[float], unit: str = "ms", peer: str = "", peers: Any = None) -> None:
        low, high = statistics.quantiles(times, n=20)[::18] if len(times) > 2 else (min(times), max(times))
        value = statistics.median(times)
        line = {"figure": name, "value": value, "unit": unit, "better": "lower", "n": len(times)}
        line |= {"interval": [low, high], "interval_kind": "5th and 95th percentile"}
        if peers:
            line |= {
                "peer": peer,
                "peer_value": statistics.median(peers),
                "ratio": value / statistics.median(peers),
            }
        figures.append(line)

    try:
        plain = sample_plain(lambda: subprocess.run(["true"], check=True), n)
        async with LocalBackend() as backend:

            async def create_destroy() -> None:
                await (await backend.create(spec)).destroy()

            figure(
                "local_create_destroy_ms",
                await sample(create_destroy, n),
                peer="subprocess.run(['true'])",
                peers=plain,
            )
            sandbox = await backend.create(spec)
            run = await sample(lambda: sandbox.exec(["true"]), n)
            figure("local_exec_ms", run, peer="subprocess.run(['true'])", peers=plain)
            cold = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"]
            colds = sample_plain(lambda: subprocess.run(cold, cwd=repo, capture_output=True), max(3, n // 20))
            warm = await sample(lambda: sandbox.pytest(["test_shop.py"]), n)
            figure("local_pytest_ms", warm, peer="python -m pytest", peers=colds)
            figure("local_read_ms", await sample(lambda: sandbox.read("shop.py"), n))

            async def fork() -> None:
                (child,) = await sandbox.fork(1)
                assert not isinstance(child, Exception), child
                await child.destroy()

            await sandbox.write("shop.py", b"# changed\n")
            figure("local_fork_destroy_ms", await sample(fork, n))
            start = time.perf_counter()
            many = await asyncio.gather(*(backend.create(spec) for _ in range(parallel)))
            took = time.perf_counter() - start
            figures.append(
                {"figure": f"local_creates_per_s_{parallel}", "value": parallel / took, "unit": "1/s"}
            )
            figures[-1] |= {"better": "higher", "n": parallel}
            await asyncio.gather(*(s.destroy() for s in many))
    finally:
        shutil.rmtree(repo)
    return figures


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
    parser.add_argument("--parallel", type=int, default=64, help="sandboxes created at once")
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    for line in asyncio.run(measure(args.n, args.parallel)):
        if args.json:
            extra = {"commit": commit, "machine": machine(), "command": " ".join(["python", *sys.argv])}
            print(json.dumps(line | extra))
        else:
            print(f"{line['figure']:28} {line['value']:8.2f} {line['unit']}  {line.get('interval', '')}")


if __name__ == "__main__":
    main()
