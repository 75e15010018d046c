"""An artifact is a folder with a manifest: it appears whole under its name, and its content can be checked later.

A stage fills ``NAME.partial``; ``publish`` writes ``manifest.json`` into it and renames it to ``NAME``. What has the
name is complete, whatever was killed when.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.core.config import digest_of
from cadenza.core.errors import CorruptArtifact, MissingArtifact
from cadenza.core.files import disk_errors, read_json, sync_folder, write_json

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is in an artifact. ``files``: relative path -> (bytes, sha256). ``about``: what its maker recorded."""

    digest: str
    files: dict[str, tuple[int, str]]
    about: dict[str, Any]


def publish(partial: Path, final: Path, about: dict[str, Any]) -> Manifest:
    """Seals ``partial`` and gives it its name. ``final`` must not exist.

    Args:
        about: JSON-ready facts to keep in the manifest (configuration, inputs, figures). Not part of the digest.

    Raises:
        ResourceExhausted: disk full; ``partial`` is left as it is.
    """
    with disk_errors(final):
        files = file_digests(partial, durable=True)
        manifest = Manifest(digest_of({name: list(entry) for name, entry in files.items()}), files, about)
        write_json(
            partial / MANIFEST,
            {"format": FORMAT, "digest": manifest.digest, "about": about, "files": files},
        )
        os.rename(partial, final)
        sync_folder(final.parent)
    return manifest


def file_digests(folder: Path, durable: bool = False) -> dict[str, tuple[int, str]]:
    """(bytes, sha256) of every regular file under ``folder`` but the manifest, by sorted relative path.

    Args:
        durable: also wait until the disk has each file.
    """
    found: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or path == folder / MANIFEST:
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if durable:
                os.fsync(file.fileno())
        found[path.relative_to(folder).as_posix()] = (path.stat().st_size, digest)
    return found


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact, without checking its files.

    Raises:
        MissingArtifact: no such folder, or no manifest in it.
        CorruptArtifact: a manifest that cannot be read or has a newer format.
    """
    if not (folder / MANIFEST).is_file():
        raise MissingArtifact(f"no artifact at {folder}", "check the path, or run the stage that makes it")
    table = read_json(folder / MANIFEST)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        found = table.get("format") if isinstance(table, dict) else None
        raise CorruptArtifact(
            f"{folder / MANIFEST} has format {found}, this Cadenza reads {FORMAT}",
            "use the Cadenza that wrote it",
        )
    try:
        files = {name: (int(size), str(digest)) for name, (size, digest) in table["files"].items()}
        digest, about = table["digest"], table["about"]
        whole = isinstance(digest, str) and isinstance(about, dict)
    except (LookupError, TypeError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise CorruptArtifact(f"{folder / MANIFEST} is not whole", "restore it, or make the artifact again")
    return Manifest(digest, files, about)


def verify_if_artifact(folder: Path) -> None:
    """``verify`` for a folder that has a manifest; models of other origin have none."""
    if (folder / MANIFEST).is_file():
        verify(folder)


def verify(folder: Path, deep: bool = True) -> Manifest:
    """Checks that every file of the manifest is there with its size and, if ``deep``, its sha256.

    Raises:
        MissingArtifact: no artifact there.
        CorruptArtifact: names the first file that is missing or changed.
    """
    manifest = read_manifest(folder)
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CorruptArtifact(f"{path} is missing", "restore it, or make the artifact again")
        if path.stat().st_size != size:
            raise CorruptArtifact(
                f"{path} has {path.stat().st_size} bytes, expected {size}",
                "restore it, or make the artifact again",
            )
        if deep and _sha256(path) != digest:
            raise CorruptArtifact(
                f"{path} was changed after it was written", "restore it, or make the artifact again"
            )
    return manifest


def discard(folder: Path) -> None:
    """Removes an artifact so that it is never seen half removed: renamed first, then deleted."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Of a model directory (``cadenza.model.hf``), with its tokenizer and its agent's limits.
MODEL_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "agent.json",
)  # fmt: skip


def copy_model(source: Path, target: Path) -> None:
    """Copies the model that is in an artifact, and nothing else of it. Raises ResourceExhausted: disk full."""
    for name in MODEL_FILES:
        if (source / name).is_file():
            with disk_errors(target / name):
                shutil.copy2(source / name, target / name)
