"""Harbor task directories: written once, read with their content hash checked.

Layout (Harbor schema 1.4): task.toml, instruction.md, environment/Dockerfile, environment/repo/** (the buggy
repository with its visible tests), tests/test.sh, tests/test_*.py (hidden tests, and the trusted visible ones),
solution/solve.sh, solution/patch.diff. A directory is named by the hash of its content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.core.errors import ConfigError, CorruptArtifact, MissingArtifact
from cadenza.core.files import read_json
from cadenza.core.types import FORMAT_VERSION, Task

MANIFEST = "manifest.json"
SOURCE = "cadenza/planted"
_ID = re.compile(
    "[0-9a-f]{16}"
)  # of a task, see content_id: a manifest names folders beside it and no others
_DOCKERFILE = """\
FROM python:3.11.9-slim
RUN pip install --no-cache-dir pytest==8.4.2
WORKDIR /app
COPY repo/ /app/
"""
# Exit codes of pytest: 0 passed, 1 failed, 2 collection error, 5 nothing collected; anything else is the grader's own
# failure and must leave no reward.
_TEST_SH = """\
#!/bin/sh
cd "${APP_DIR:-/app}" || exit 3
rm -f conftest.py pytest.ini tox.ini setup.cfg pyproject.toml sitecustomize.py usercustomize.py *.pth
cp /tests/test_*.py . || exit 3
python -B -m pytest -q --noconftest -c /dev/null --rootdir . -p no:cacheprovider %s
case $? in
0) echo 1 > /logs/verifier/reward.txt ;;
1|2|5) echo 0 > /logs/verifier/reward.txt ;;
*) exit 4 ;;
esac
"""
_SOLVE_SH = """\
#!/bin/sh
cd "${APP_DIR:-/app}" && git apply /solution/patch.diff
"""


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """A task in memory. ``repo``: buggy, with visible tests; ``hidden``: hidden tests; ``patch``: gold."""

    instruction: str
    repo: dict[str, bytes]
    hidden: dict[str, bytes]
    patch: str
    metadata: dict[str, Any]

    def files(self) -> dict[str, bytes]:
        """Every file of the directory by relative path."""
        visible = {p: d for p, d in self.repo.items() if is_visible_test(p)}
        names = " ".join(sorted((*visible, *self.hidden)))
        out = {
            "task.toml": _task_toml(self.metadata).encode(),
            "instruction.md": self.instruction.encode(),
            "environment/Dockerfile": _DOCKERFILE.encode(),
            "tests/test.sh": (_TEST_SH % names).encode(),
            "solution/solve.sh": _SOLVE_SH.encode(),
            "solution/patch.diff": self.patch.encode(),
        }
        out |= {f"environment/repo/{p}": d for p, d in self.repo.items()}
        out |= {f"tests/{p}": d for p, d in (*visible.items(), *self.hidden.items())}
        return out


def is_visible_test(path: str) -> bool:
    """Whether a repository path is one of the visible tests (``test_*.py`` in the root)."""
    return path.startswith("test_") and path.endswith(".py") and "/" not in path


def _task_toml(metadata: dict[str, Any]) -> str:
    rows = "\n".join(f"{key} = {json.dumps(value)}" for key, value in metadata.items())
    return (
        f'schema_version = "1.4"\nsource = "{SOURCE}"\n\n[metadata]\n{rows}\n\n'
        '[agent]\ntimeout_sec = 120.0\nnetwork_mode = "no-network"\n\n'
        '[verifier]\ntimeout_sec = 30.0\nenvironment_mode = "separate"\nnetwork_mode = "no-network"\n\n'
        '[environment]\ncpus = 1\nmemory_mb = 512\nstorage_mb = 256\nworkdir = "/app"\nnetwork_mode = "no-network"\n'
    )


def content_id(files: dict[str, bytes]) -> str:
    """16 hexadecimal digits over every path and content, independent of order."""
    h = hashlib.sha256()
    for path in sorted(files):
        data = files[path]
        h.update(f"{len(path)} {path} {len(data)} ".encode())
        h.update(data)
    return h.hexdigest()[:16]


def write_task(files: TaskFiles, out_dir: Path) -> Task:
    """Writes one task under ``out_dir`` and returns it. A directory that exists has this very content."""
    everything = files.files()
    id = content_id(everything)
    directory = out_dir / id
    if not directory.exists():
        partial = out_dir / f".{id}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        for folder in sorted({os.path.dirname(p) for p in everything}):
            os.makedirs(partial / folder, exist_ok=True)
        for path, data in everything.items():
            with open(partial / path, "wb") as f:
                f.write(data)
        for script in ("tests/test.sh", "solution/solve.sh"):
            os.chmod(partial / script, 0o755)
        os.rename(partial, directory)
    return _task(id, directory, files.metadata)


def _task(id: str, directory: Path, metadata: dict[str, Any]) -> Task:
    return Task(
        id, directory, metadata["split"], metadata["ambiguity"], SOURCE, metadata["created_at"], metadata
    )


def write_split(tasks: Iterable[TaskFiles], split: str, out_dir: Path, digest: str) -> list[Task]:
    """Writes tasks, then a manifest that makes them a split. A finished split of the same digest is only read.

    Raises:
        ConfigError: ``out_dir`` holds a split of another configuration.
        CorruptArtifact: a finished split does not match its hashes.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    manifest = out_dir / MANIFEST
    if manifest.exists():
        if _manifest(manifest).get("config") == digest:
            return load_tasks(out_dir)
        raise ConfigError(
            f"{out_dir} holds tasks of another configuration", "remove it or choose another directory"
        )
    written = [write_task(files, out_dir) for files in tasks]
    data = {
        "format_version": FORMAT_VERSION,
        "split": split,
        "config": digest,
        "ids": [t.id for t in written],
    }
    partial = out_dir / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(partial, manifest)
    return written


def read_tree(directory: Path) -> dict[str, bytes]:
    """Relative path -> content of every regular file below ``directory``, without following links."""
    out = {}
    base = str(directory)
    for folder, _, names in os.walk(base):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                with open(path, "rb") as f:
                    out[os.path.relpath(path, base)] = f.read()
    return out


def load_task(directory: Path) -> Task:
    """Reads one Harbor task directory.

    Raises:
        MissingArtifact: no task.toml.
        CorruptArtifact: the content does not match the directory's name, or an unknown schema version.
    """
    if not (directory / "task.toml").is_file():
        raise MissingArtifact(f"{directory} is not a task directory", "generate the tasks again")
    files = read_tree(directory)
    if content_id(files) != directory.name:
        raise CorruptArtifact(f"task {directory} does not match its content hash", "generate the tasks again")
    parsed = tomllib.loads(files["task.toml"].decode())
    if parsed.get("schema_version") != "1.4":
        raise CorruptArtifact(
            f"task {directory} has schema {parsed.get('schema_version')}", "only 1.4 is known"
        )
    return _task(directory.name, directory, parsed["metadata"])


def load_tasks(directory: Path) -> list[Task]:
    """The tasks of a written split, in their order.

    Raises:
        MissingArtifact: there is no manifest, or a task is gone.
        CorruptArtifact: a task does not match its hash, or the manifest has another format version.
    """
    path = Path(directory) / MANIFEST
    inside = sorted(str(p.parent) for p in Path(directory).glob(f"*/{MANIFEST}"))
    if inside or not path.is_file():  # the folder of a stage has a manifest too, and holds the sets
        raise MissingArtifact(
            f"{directory} is no task set",
            f"name one of those in it: {', '.join(inside)}" if inside else "generate it first",
        )
    manifest = _manifest(path)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CorruptArtifact(
            f"{path} has format {manifest.get('format_version')}", "generate the tasks again"
        )
    ids = manifest.get("ids")
    if not isinstance(ids, list) or not all(isinstance(id, str) and _ID.fullmatch(id) for id in ids):
        raise CorruptArtifact(f"{path} names no tasks", "generate the tasks again")
    return [load_task(Path(directory) / id) for id in ids]


def _manifest(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except CorruptArtifact as error:
        raise CorruptArtifact(error.cause, "generate the tasks again") from None
    if not isinstance(found, dict):
        raise CorruptArtifact(f"{path} is not a manifest", "generate the tasks again")
    return found
