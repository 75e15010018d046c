"""The object store: weights, snapshots, tasks and reports by key, in a folder or in anything fsspec speaks to.

Keys are relative paths with ``/``. A local object appears whole or not at all; a remote one as its service defines.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

import fsspec
from fsspec.implementations.local import LocalFileSystem

from cadenza.core.errors import ConfigError, CorruptArtifact, MissingArtifact
from cadenza.core.files import disk_errors, write_bytes


class ObjectStore:
    """Objects under one address.

    Args:
        address: a folder, or an fsspec URL such as ``memory://runs`` or ``s3://bucket/prefix``.

    Raises:
        ConfigError: the URL's scheme is unknown or needs a package that is not installed.
    """

    def __init__(self, address: Path | str) -> None:
        try:
            self._fs, root = fsspec.core.url_to_fs(str(address))
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"cannot use object store {address}: {error}", "install its fsspec package"
            ) from None
        self.address = str(address)
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)

    def put(self, key: str, data: bytes) -> str:
        """Stores bytes and returns their sha256 (64 hex digits). Replaces what was there.

        Raises:
            ResourceExhausted: disk full; what was there is untouched.
        """
        path = self._path(key)
        if self._local:
            with disk_errors(path):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(Path(path), data)
        else:
            self._fs.pipe_file(path, data)
        return hashlib.sha256(data).hexdigest()

    def get(self, key: str, digest: str | None = None) -> bytes:
        """The bytes of an object.

        Args:
            digest: the sha256 they must have.

        Raises:
            MissingArtifact: no such object.
            CorruptArtifact: other bytes than ``digest`` says.
        """
        try:
            data = self._fs.cat_file(self._path(key))
        except FileNotFoundError:
            raise MissingArtifact(
                f"no object {key} in {self.address}", "check the key and the store"
            ) from None
        if digest is not None and hashlib.sha256(data).hexdigest() != digest:
            raise CorruptArtifact(f"object {key} in {self.address} is not what was stored", "store it again")
        return data

    def exists(self, key: str) -> bool:
        """Whether something is stored under the key."""
        return self._fs.isfile(self._path(key))

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that start with ``prefix``, sorted; temporary files of unfinished writes are not keys."""
        found = []
        for path in self._fs.find(self._root):
            key = path[len(self._root) :].lstrip("/")
            if key.startswith(prefix) and not PurePosixPath(key).name.startswith("."):
                found.append(key)
        return sorted(found)

    def delete(self, key: str) -> None:
        """Removes an object; removing one that is not there does nothing."""
        try:
            self._fs.rm_file(self._path(key))
        except FileNotFoundError:
            pass

    def _path(self, key: str) -> str:
        parts = PurePosixPath(key).parts
        if not parts or key.startswith("/") or ".." in parts or parts[-1].startswith("."):
            raise ValueError(f"not an object key: {key!r}")
        return f"{self._root}/{'/'.join(parts)}"
