"""Layers of files: what a merged view of several directories contains, what a sandbox changed in it, and snapshots.

A layer is a directory in overlayfs form: a character device 0:0 hides a name (whiteout), a directory with the
attribute ``user.overlay.opaque`` hides everything below it in lower layers.
"""

from __future__ import annotations

import collections
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cadenza.sandbox.guest.upper import IGNORED, OPAQUE
from cadenza.sandbox.guest.upper import entries as upper_entries
from cadenza.sandbox.workdir import remove_tree

Entry = tuple[dict[str, Any], bytes]  # as guest.upper.entries yields them
COMPACT_AT = 8  # own layers of one snapshot; the kernel walks every layer at each first look-up


class BrokenEntry(Exception):
    """A changed name that cannot be real: the agent was tampered with."""


def _step(directories: Sequence[Path], name: str) -> Path | list[Path] | None:
    """``name`` in a merged directory: a file's path, the directories that merge into it (top first), or None."""
    below: list[Path] = []
    for directory in directories:
        path = directory / name
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            break
        if not stat.S_ISDIR(status.st_mode):
            return below or path
        below.append(path)
        if _is_opaque(path):
            break
    return below or None


def _is_opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def find(layers: Sequence[Path], name: str) -> Path | list[Path] | None:
    """``name`` (with slashes) in the merged view of ``layers``; see ``_step`` for the answer."""
    found: Path | list[Path] | None = list(layers)
    for part in name.split("/"):
        if not isinstance(found, list):
            return None
        found = _step(found, part)
    return found


def files_below(directories: Sequence[Path], prefix: str) -> Iterator[tuple[str, Path]]:
    """Every regular file of a merged directory as (name, path)."""
    names = sorted(set(itertools.chain.from_iterable(os.listdir(d) for d in directories)) - IGNORED)
    for name in names:
        found = _step(directories, name)
        if isinstance(found, list):
            yield from files_below(found, f"{prefix}{name}/")
        elif found is not None and stat.S_ISREG(found.lstat().st_mode):
            yield prefix + name, found


def changed_files(entries: Sequence[Entry], layers: Sequence[Path]) -> dict[str, bytes | None]:
    """The upper directory's entries as changed files: new bytes, or None where a file is no longer there."""
    changes: dict[str, bytes | None] = {}
    for entry, content in entries:
        name, kind = entry["path"], entry["kind"]
        before = find(layers, name)
        if isinstance(before, list):
            if kind != "dir" or entry["opaque"]:
                changes |= {file: None for file, _ in files_below(before, name + "/")}
        elif before is not None and stat.S_ISREG(before.lstat().st_mode):
            if kind == "file" and before.read_bytes() == content:
                changes.pop(name, None)
                continue
            changes[name] = None
        if kind == "file":
            changes[name] = content
    return changes


def _content(layers: Sequence[Path], name: str) -> bytes | None:
    found = find(layers, name)
    if found is None or isinstance(found, list) or not stat.S_ISREG(found.lstat().st_mode):
        return None
    return found.read_bytes()


class Hold:
    """Keeps layers alive until it is released (once; again does nothing)."""

    def __init__(self, store: LayerStore, layers: Sequence[Path]) -> None:
        self._store = store
        self._layers = [layer for layer in layers if store.owns(layer)]
        for layer in self._layers:
            store.counts[layer] += 1

    def release(self) -> None:
        """Gives the layers back; those nobody else holds are deleted."""
        layers, self._layers = self._layers, []
        for layer in layers:
            self._store.counts[layer] -= 1
            if self._store.counts[layer] == 0:
                del self._store.counts[layer]
                remove_tree(layer)


class LayerStore:
    """Snapshot layers of one backend, counted by who uses them and deleted with the last user."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count(1)
        self.counts: collections.Counter[Path] = collections.Counter()

    def owns(self, layer: Path) -> bool:
        """Whether the layer is a snapshot of this store, and no folder of the user."""
        return layer.parent == self._directory

    def hold(self, layers: Sequence[Path]) -> Hold:
        """Keeps those of the layers that are snapshots until the hold is released."""
        return Hold(self, layers)

    def changes(self, entries: Sequence[Entry], layers: Sequence[Path]) -> dict[str, bytes | None]:
        """``entries`` on top of ``layers`` as changed files, counted from the first layer that is not a snapshot."""
        own = list(itertools.takewhile(self.owns, layers))
        base = layers[len(own) :]
        changes: dict[str, bytes | None] = {}
        for number in reversed(range(len(own))):
            fd = os.open(own[number], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                changes |= changed_files(list(upper_entries(fd)), layers[number + 1 :])
            finally:
                os.close(fd)
        changes |= changed_files(entries, layers)
        return {name: data for name, data in changes.items() if data != _content(base, name)}

    def add(self, entries: Sequence[Entry], below: Sequence[Path]) -> tuple[tuple[Path, ...], Hold, int]:
        """Writes ``entries`` as a new layer on top of ``below``. Returns the layers, a hold on them, bytes written.

        A chain of COMPACT_AT own layers is merged into one, so that forks of forks do not get slower.
        """
        own = list(itertools.takewhile(self.owns, below))
        rest = tuple(below[len(own) :])
        if entries:
            layer = self._directory / str(next(self._numbers))
            layer.mkdir()
            size = _write(layer, entries)
            own = [layer, *own]
        else:
            size = 0
        if len(own) >= COMPACT_AT:
            merged = self._directory / str(next(self._numbers))
            merged.mkdir()
            _merge(own, merged)
            if entries:
                remove_tree(own[0])
            own = [merged]
        layers = (*own, *rest)
        return layers, self.hold(layers), size


def _write(layer: Path, entries: Sequence[Entry]) -> int:
    directories = {""}
    size = 0
    for entry, content in entries:
        name, kind = entry["path"], entry["kind"]
        parent, _, leaf = name.rpartition("/")
        if parent not in directories or leaf in ("", ".", ".."):
            raise BrokenEntry(name)  # names come from the untrusted side: never write through a link
        path = layer / name
        if kind == "file":
            path.write_bytes(content)
            os.chmod(path, entry["mode"] & 0o777)
            size += len(content)
        elif kind == "link":
            os.symlink(content, os.fsencode(path))
        elif kind == "gone":
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(0, 0))
        else:
            path.mkdir()
            os.chmod(path, entry["mode"] & 0o777 | 0o700)
            directories.add(name)
            if entry["opaque"]:
                os.setxattr(path, OPAQUE, b"y")
    return size


def _merge(layers: Sequence[Path], target: Path) -> None:
    """One layer that has the effect of ``layers`` (top first) on whatever lies below them."""
    names = sorted(set(itertools.chain.from_iterable(os.listdir(layer) for layer in layers)))
    for name in names:
        parts: list[Path] = []
        for layer in layers:
            path = layer / name
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(mode):
                if not parts:
                    _copy(path, target / name)
                else:
                    _hide_below(target / name)
                break
            if not parts:
                (target / name).mkdir()
                os.chmod(target / name, stat.S_IMODE(mode))
            parts.append(path)
            if _is_opaque(path):
                _hide_below(target / name)
                break
        if parts:
            _merge(parts, target / name)


def _hide_below(directory: Path) -> None:
    os.setxattr(directory, OPAQUE, b"y")


def _copy(source: Path, target: Path) -> None:
    status = source.lstat()
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISCHR(status.st_mode):
        os.mknod(target, stat.S_IFCHR | 0o600, os.makedev(0, 0))
    else:
        os.link(source, target)  # layers are never written again, so the bytes can be shared
