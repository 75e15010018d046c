"""What this machine can do. Each check says what it found and, when something is missing, what mends it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cadenza.core import machine
from cadenza.core.extras import INSTALL

MEMORY_GB = 6  # the demo's peak with room for a desktop
DISK_GB = 2
TORCH_PROBE = """
import torch
a = torch.ones(8, 8, dtype=torch.bfloat16)
assert float((a @ a)[0, 0]) == 8.0
print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.get_num_threads())
"""
NUMBA_PROBE = """
import numba, numpy
double = numba.njit(lambda x: 2 * x)
assert (double(numpy.ones(8)) == 2).all()
print(numba.__version__)
"""


@dataclass(frozen=True)
class Check:
    """``state``: ok | warn (works, slower or smaller) | fail (training cannot run)."""

    name: str
    state: str
    found: str
    mend: str = ""

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def examine(run_dir: Path) -> list[Check]:
    """Runs every check, about five seconds. Raises nothing: what goes wrong is a failing line."""
    return [
        _python(),
        _cores(),
        _memory(),
        _disk(run_dir),
        _torch(),
        _numba(),
        _bf16(),
        _ray(),
        _sandbox(),
    ]


def _python() -> Check:
    return Check("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def _cores() -> Check:
    cores = machine.usable_cores()
    found = f"{cores} x {machine.cpu_model()}"
    if cores < 2:
        return Check(
            "cpu",
            "warn",
            found,
            "with one core, trainer and engine take turns and runs take about twice as long",
        )
    return Check("cpu", "ok", found)


def _memory() -> Check:
    total, free = machine.memory_bytes() / 1e9, machine.available_memory_bytes() / 1e9
    found = f"{free:.1f} GB free of {total:.1f} GB"
    if free < MEMORY_GB:
        return Check("memory", "fail", found, f"close other programs: the demo needs {MEMORY_GB} GB")
    return Check("memory", "ok", found)


def _disk(run_dir: Path) -> Check:
    folder = run_dir.absolute()
    free = machine.free_disk_bytes(folder) / 1e9
    found = f"{free:.1f} GB free for {folder}"
    if not os.access(_existing(folder), os.W_OK):
        return Check("disk", "fail", f"{folder} cannot be written", "choose another --run-dir")
    if free < DISK_GB:
        return Check(
            "disk",
            "fail",
            found,
            f"free some space, or choose another --run-dir: the demo needs {DISK_GB} GB",
        )
    return Check("disk", "ok", found)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _torch() -> Check:
    """Really multiplies two bf16 matrices."""
    found = _tried("torch", TORCH_PROBE)
    if isinstance(found, Check):
        return found
    version, devices, threads = found
    return Check("torch", "ok", f"{version}, {devices} GPUs, {threads} threads")


def _numba() -> Check:
    """Really compiles a function: numba also needs an llvmlite and a numpy that fit it."""
    found = _tried("numba", NUMBA_PROBE)
    return found if isinstance(found, Check) else Check("numba", "ok", found[0])


def _tried(package: str, probe: str) -> list[str] | Check:
    """The words a probe prints, or the failing line; in a process of its own, since a broken build can kill it."""
    if machine.installed(package) is None:
        return Check(package, "fail", "not installed", INSTALL)
    mend = f"reinstall it: pip install --force-reinstall {package}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(package, "fail", "did not load within 120 s", mend)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with status {done.returncode}"]
        return Check(package, "fail", f"{machine.installed(package)} does not work: {last[0][:200]}", mend)
    return done.stdout.split()


def _bf16() -> Check:
    if machine.has_bf16():
        return Check("bf16", "ok", "the CPU multiplies bf16 natively")
    return Check(
        "bf16",
        "warn",
        "the CPU has no bf16 instructions",
        'recipes that set dtype = "float32" are faster here',
    )


def _ray() -> Check:
    version = machine.installed("ray")
    if version is None:
        return Check("ray", "fail", "not installed", INSTALL)
    return Check("ray", "ok", version)


def _sandbox() -> Check:
    """Really creates a sandbox and destroys it."""
    from cadenza.sandbox import LocalBackend

    found = LocalBackend.probe()
    if not found.available:
        return Check("sandbox", "fail", found.reason, found.mend)
    return Check("sandbox", "ok", "local: namespaces and overlayfs work")
