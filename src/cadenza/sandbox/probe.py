"""Whether the ``local`` backend works here, found out by using it; and if not, which setting to change."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from cadenza.core.errors import CadenzaError, ConfigError, SandboxUnavailable
from cadenza.sandbox.spec import Capabilities, SandboxSpec

if TYPE_CHECKING:
    from cadenza.sandbox.local import LocalBackend

_SETTINGS = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("/proc/sys/user/max_mnt_namespaces", "0", "sysctl -w user.max_mnt_namespaces=15000"),
    ("/proc/sys/user/max_pid_namespaces", "0", "sysctl -w user.max_pid_namespaces=15000"),
    ("/proc/sys/user/max_net_namespaces", "0", "sysctl -w user.max_net_namespaces=15000"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)
_DOCKER = "docker run " + " ".join(
    f"--security-opt {what}=unconfined" for what in ("seccomp", "apparmor", "systempaths")
)


def probe(backend: type[LocalBackend]) -> Capabilities:
    """Creates a sandbox and runs a command in it, in a thread with a loop of its own."""
    found: list[Capabilities] = []

    def work() -> None:
        found.append(asyncio.run(_try(backend)))

    thread = threading.Thread(target=work, name="sandbox-probe")
    thread.start()
    thread.join()
    return (
        found[0]
        if found
        else Capabilities("local", False, "the probe ended without an answer", "see its traceback")
    )


async def _try(backend: type[LocalBackend]) -> Capabilities:
    try:
        async with backend() as local:
            sandbox = await local.create(SandboxSpec(ttl_s=30))
            result = await sandbox.exec(["/bin/sh", "-c", "echo works"], timeout_s=10)
            if result.stdout != b"works\n":
                reason = (
                    f"a command in a sandbox gave rc {result.rc}: {result.stderr.decode(errors='replace')}"
                )
                return Capabilities("local", False, reason, "see docs/explanation/sandbox.md")
            return Capabilities(
                "local",
                True,
                fs_snapshot=True,
                isolation="namespace",
                details={"scratch": local.scratch_kind},
            )
    except CadenzaError as error:
        return Capabilities("local", False, error.cause, error.mend)
    except Exception as error:
        return Capabilities(
            "local", False, f"{type(error).__name__}: {error}", "see docs/explanation/sandbox.md"
        )


def refusal(
    number: int, at: str, settings: tuple[tuple[str, str, str], ...] = _SETTINGS
) -> SandboxUnavailable:
    """The error for a refused system call ``at``, naming the kernel setting that refuses it where one can be found."""
    cause = f"the kernel refused a sandbox ({errno.errorcode.get(number, number)} at {at})"
    for path, refusing, mend in settings:
        if _value(path) == refusing:
            name = path.removeprefix("/proc/sys/").replace("/", ".")
            return SandboxUnavailable(f"{cause}: {name} is {refusing}", f"run: {mend}")
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS) and _seccomp_filtered():
        return SandboxUnavailable(
            f"{cause}: a seccomp filter is active, as in a default container", f"use: {_DOCKER}"
        )
    if "proc" in at and number == errno.EPERM:
        return SandboxUnavailable(
            f"{cause}: parts of /proc are covered, as in a container", f"use: {_DOCKER}"
        )
    if "overlay" in at:
        return SandboxUnavailable(
            f"{cause}: no overlayfs in user namespaces", "use Linux 5.11 or newer; modprobe overlay"
        )
    if number in (errno.ENOSPC, errno.EUSERS):
        return SandboxUnavailable(f"{cause}: too many namespaces", "raise the user.max_*_namespaces settings")
    return SandboxUnavailable(cause, "see docs/explanation/sandbox.md; cadenza doctor tries it again")


def choose_scratch(wanted: str, directory: Path) -> str:
    """``tmpfs`` or ``disk``: the place where overlayfs can keep its marks (user attributes).

    Raises:
        ConfigError: the wanted place cannot keep them, or the word is not known.
    """
    if wanted not in ("auto", "tmpfs", "disk"):
        raise ConfigError(f"scratch = {wanted!r}", "use auto, tmpfs or disk")
    if wanted in ("auto", "tmpfs"):
        fd = os.memfd_create("probe")  # a file of the same kind as those of any tmpfs
        try:
            os.setxattr(fd, "user.cadenza", b"1")
            return "tmpfs"
        except OSError:
            if wanted == "tmpfs":
                raise ConfigError(
                    "tmpfs has no user attributes here (Linux 6.6 has)", "use scratch = disk"
                ) from None
        finally:
            os.close(fd)
    try:
        os.setxattr(directory, "user.cadenza", b"1")
    except OSError as error:
        raise ConfigError(
            f"{directory} has no user attributes ({error.strerror})", "set directory to ext4, xfs or btrfs"
        ) from None
    return "disk"


def _value(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _seccomp_filtered() -> bool:
    status = _value("/proc/self/status") or ""
    return any(line.split() == ["Seccomp:", "2"] for line in status.splitlines())
