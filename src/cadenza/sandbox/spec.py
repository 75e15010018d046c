"""Plain values that go into and come out of a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cadenza.core.config import StrictConfig


class Limits(StrictConfig):
    """Bounds of one sandbox. Sizes in bytes.

    ``memory_bytes``: address space of each process, and resident memory of all together (looked at every 100 ms).
    ``disk_bytes``: ``/work`` and ``/tmp`` together (scratch tmpfs only). ``cpu_s``: processor seconds of one process.
    ``output_bytes``: kept of each stream of a command; beyond it the middle is left out.
    """

    memory_bytes: int = 1 << 30
    processes: int = 128
    disk_bytes: int = 256 << 20
    file_bytes: int = 128 << 20
    cpu_s: int = 120
    output_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made of. ``layers``: read-only directories seen merged at ``/work``, top first."""

    layers: tuple[Path, ...] = ()
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    ttl_s: float = 600.0
    labels: Mapping[str, str] = field(default_factory=dict)


class LocalConfig(StrictConfig):
    """Settings of the ``local`` backend.

    ``scratch``: where changed files live: ``tmpfs`` (memory; needs user attributes on tmpfs, Linux 6.6), ``disk`` (a
    directory below ``directory``), or ``auto``: tmpfs where the kernel can, else disk. ``directory``: parent of the
    backend's working directory; None: the system's temporary directory. ``start_timeout_s``: seconds the backend's
    start may take; ``create_timeout_s``: seconds the creation of one sandbox may take; ``destroy_timeout_s``: seconds
    its end may take. ``reply_grace_s``: seconds a sandbox has beyond a command's own timeout to answer.
    """

    scratch: str = "auto"
    directory: Path | None = None
    start_timeout_s: float = 60.0
    create_timeout_s: float = 60.0
    destroy_timeout_s: float = 10.0
    reply_grace_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ExecResult:
    """A finished command. ``rc`` is negative for a signal.

    ``limit``: the limit of all processes together that ended it (``memory`` or ``processes``), or None.
    """

    rc: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool
    duration_s: float
    limit: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed test, or a module that could not be collected (then ``nodeid`` is the file).

    ``path`` is relative to ``/work``; ``line`` counts from 1; ``source`` is that line, stripped.
    """

    nodeid: str
    message: str
    path: str
    line: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class PytestResult:
    """A test run. ``exit_code``: pytest's own 0-5; negative for a signal; 70 when the tests ended the process early.

    ``tests``: exact node id -> ``passed``, ``failed``, ``error`` or ``skipped``. A test that never ran is missing.
    """

    exit_code: int
    tests: dict[str, str]
    failures: list[Failure]
    output: str
    timed_out: bool
    duration_s: float
    limit: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do here. ``reason`` and ``mend`` say why it is not ``available`` and what to change."""

    backend: str
    available: bool
    reason: str = ""
    mend: str = ""
    fs_snapshot: bool = False
    mem_snapshot: bool = False
    isolation: str = "none"  # none | namespace | gvisor | vm
    details: dict[str, str] = field(default_factory=dict)
