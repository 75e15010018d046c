"""What a result was measured on: written into every run, report and figure."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import cadenza


def describe(root: Path | None = None) -> dict[str, Any]:
    """The machine and the code, JSON-ready, without importing torch.

    Keys: cpu (model name), cores (usable by this process), memory_gb, bf16 (the CPU multiplies it natively), python,
    platform, torch (installed version or None), cadenza, commit (of the source tree at ``root``, with ``+dirty``, or
    None outside a repository).
    """
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "bf16": has_bf16(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": installed("torch"),
        "cadenza": cadenza.__version__,
        "commit": commit(root),
    }


@cache
def cpu_model() -> str:
    """The processor's name as the kernel gives it; where it gives none, the architecture."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def has_bf16() -> bool:
    """Whether the CPU has bf16 dot products (AVX512-BF16, AMX, Armv8.6 BF16). Without them fp32 is faster."""
    flags = {flag for line in _cpuinfo() if line.startswith(("flags", "Features")) for flag in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def usable_cores() -> int:
    """Cores this process may use: its affinity, and the cgroup's CPU quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores


def memory_bytes() -> int:
    """Memory this process may use: the machine's, or the cgroup's limit where that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            pass
    return total


def available_memory_bytes() -> int:
    """Memory that can be had now without swapping, as the kernel estimates it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, memory_bytes())
    except OSError:
        pass
    return memory_bytes()


def free_disk_bytes(path: Path) -> int:
    """Free space of the file system that holds ``path`` (or its nearest existing parent)."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def installed(package: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(root: Path | None = None) -> str | None:
    """The git commit of the tree that holds ``root`` (default: this package), with ``+dirty`` when files differ."""
    root = root or Path(cadenza.__file__).parent
    head = _git(root, "rev-parse", "HEAD")
    if head is None or _git(root, "ls-files", "--error-unmatch", ".") is None:
        return None  # no repository, or one that merely contains the environment we are installed in
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return head[:12] + ("+dirty" if changes else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
