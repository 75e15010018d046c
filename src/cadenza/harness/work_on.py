"""Lets the agent work on a user's folder: the same loop as in training, on a copy, with a patch to accept.

The folder is copied and the copy becomes the read-only layer of a sandbox, so nothing the agent or the tests do
reaches the user's files. ``Work.apply`` writes the changes when the user says so.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cadenza.core.errors import CadenzaError, MissingArtifact, ResourceExhausted
from cadenza.core.files import disk_full, is_disk_full
from cadenza.harness.agent import Agent, AgentResult
from cadenza.harness.tools.list_dir import is_litter
from cadenza.sandbox.spec import SandboxSpec
from cadenza.tokens import Sampling, TokenSession

# Never copied: history, environments and caches are large and no part of the work.
SKIPPED = frozenset(
    {
        ".git",
        ".hg",
        ".venv",
        "venv",
        "node_modules",
        "__pycache__",
        ".pytest_cache",
        ".mypy_cache",
        ".ruff_cache",
        ".tox",
    }
)
MOST_BYTES = 200 << 20


@dataclass(slots=True)
class Work:
    """What the agent did. ``patch`` is a unified git diff, empty when nothing changed."""

    directory: Path
    patch: str
    base: dict[str, bytes]  # content the changed files had when the agent began; new files are missing
    changes: dict[str, bytes | None]  # None: deleted
    result: AgentResult

    def apply(self) -> list[str]:
        """Writes the changes into the folder and returns the paths: all of them, or none.

        Raises CadenzaError when a file changed since the agent began, lies outside the folder or cannot be written,
        ResourceExhausted when the disk is full.
        """
        root = self.directory.resolve()
        for path in self.changes:
            target = root / path
            if not target.resolve().is_relative_to(root) or target.is_symlink():
                raise CadenzaError(f"{path} leads out of {root}", "apply the patch by hand")
            now = target.read_bytes() if target.is_file() else None
            if now != self.base.get(path):
                raise CadenzaError(f"{path} changed while the agent worked", "run the agent again")
        try:
            _write_all({root / path: data for path, data in self.changes.items()})
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(root) from error
            raise CadenzaError(
                f"cannot write into {root}: {error.strerror or error}", "apply the patch by hand"
            ) from error
        return sorted(self.changes)


async def work_on(
    directory: Path | str,
    prompt: str,
    session_factory: Callable[[], Awaitable[TokenSession]],
    backend: Any,
    *,
    agent: Agent,
    make_patch: Callable[[dict[str, bytes], dict[str, bytes | None]], str],
    sampling: Sampling | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Work:
    """Runs the agent on a copy of ``directory`` and returns its work; the folder is not touched.

    Args:
        session_factory: opens the session that samples; it is closed here.
        backend: a started sandbox backend.
        make_patch: ``cadenza.tasks.patch.make_patch``, handed in because tasks lie above this room.
        on_step: called with each entry of the trace as it happens.

    Raises:
        MissingArtifact: ``directory`` is no folder.
        ResourceExhausted: the folder holds more than ``MOST_BYTES`` besides what is skipped, or the disk is full.
        CadenzaError: something in the folder cannot be read.
        SandboxUnavailable, SandboxGone, SessionLost: as their rooms say.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise MissingArtifact(f"{directory} is not a folder", "name the folder to work on")
    with tempfile.TemporaryDirectory(prefix="cadenza-work-") as scratch:
        layer = Path(scratch) / "layer"
        try:
            _copy(directory, layer)
        except OSError as error:  # shutil.Error is one too, and has no file name
            if is_disk_full(error):
                raise disk_full(scratch) from error
            raise CadenzaError(
                f"cannot copy {error.filename or directory}: {error.strerror or error}",
                "make it readable, or name a folder without it",
            ) from error
        spec = SandboxSpec(
            layers=(layer,), ttl_s=agent.limits.wall_s + 30.0, labels={"work_on": directory.name}
        )
        sandbox = await backend.create(spec)
        try:
            session = await session_factory()
            try:
                result = await agent.run(session, sandbox, prompt, sampling, on_step=on_step)
            finally:
                session.close()
            changes = {path: data for path, data in (await sandbox.changes()).items() if not is_litter(path)}
        finally:
            await sandbox.destroy()
        base = {path: (layer / path).read_bytes() for path in changes if (layer / path).is_file()}
    changes = {path: data for path, data in changes.items() if data != base.get(path)}
    base = {path: data for path, data in base.items() if path in changes}
    return Work(directory, make_patch(base, changes) if changes else "", base, changes, result)


def _write_all(contents: dict[Path, bytes | None]) -> None:
    """Writes every content beside its file first, which is where a full disk or a missing permission shows, and then
    renames; None removes the file. After a failure, at whatever file, every one is as it was before."""
    staged: dict[Path, Path] = {}
    folders: list[Path] = []
    undo: list[Callable[[], object]] = []
    put_aside: list[Path] = []
    try:
        for target, data in contents.items():
            if data is not None:
                folders += [p for p in target.parents if not p.exists()]
                target.parent.mkdir(parents=True, exist_ok=True)
                staged[target] = _beside(target, data)
        for target in contents:
            if target.exists():  # renamed, not copied: to put it back needs no room on the disk
                aside = _beside(target, b"")
                put_aside.append(aside)
                os.replace(target, aside)
                undo.append(partial(os.replace, aside, target))
            if target in staged:
                os.replace(staged[target], target)
                undo.append(partial(os.unlink, target))
    except BaseException:
        for step in reversed(undo):
            step()
        for temporary in (*staged.values(), *put_aside):
            temporary.unlink(missing_ok=True)
        for folder in sorted(folders, key=lambda p: len(p.parts), reverse=True):
            try:
                folder.rmdir()
            except OSError:  # it was never made, or holds a file by now
                pass
        raise
    for aside in put_aside:
        aside.unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    """Copies files and links (as links) and refuses a folder too large to be one project."""
    budget = MOST_BYTES
    for folder, names, files in os.walk(source, onerror=_unreadable):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        for name in list(names):
            if (Path(folder) / name).is_symlink():
                names.remove(name)
                os.symlink(os.readlink(Path(folder) / name), place / name)
        for name in files:
            path = Path(folder) / name
            if path.is_symlink():
                os.symlink(os.readlink(path), place / name)
            elif path.is_file():
                budget -= path.stat().st_size
                if budget < 0:
                    raise ResourceExhausted(
                        f"{source} holds more than {MOST_BYTES >> 20} MiB", "name a smaller folder"
                    )
                shutil.copy2(path, place / name)


def _unreadable(error: OSError) -> None:
    """A folder that cannot be read would be left out without a word."""
    raise error


def _beside(target: Path, data: bytes) -> Path:
    """A new file in the same folder with ``data`` and the mode of ``target``."""
    mode = target.stat().st_mode & 0o7777 if target.exists() else None
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, mode if mode is not None else 0o644)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)
