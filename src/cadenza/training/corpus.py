"""Pretraining text: Python source that the machine has, cut into training and held-out documents by content."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from cadenza.core.errors import MissingArtifact
from cadenza.tokens.tokenizer import Tokenizer

HELD_OUT_ONE_IN = 40
_SKIPPED_PARTS = {"test", "tests", "idlelib", "lib2to3", "__pycache__", "_vendor", "idle_test"}
_MAX_FILE_BYTES = 60_000


def source_directories() -> list[Path]:
    """The standard library and the packages installed beside this interpreter."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(Path(paths[k]) for k in ("stdlib", "purelib", "platlib")))


def python_documents(directories: Iterable[Path], *, held_out: bool) -> Iterator[str]:
    """Python files below ``directories`` in the order of their content hash, duplicates once.

    The order and the split (one file in 40 is held out) depend on the content alone, not on where or in which
    order files lie. Files that are tests, over 60 kB, unreadable, or not UTF-8 are left out.

    Raises MissingArtifact when there is no file at all.
    """
    seen: dict[str, Path] = {}
    for root in directories:
        for path in root.rglob("*.py"):
            if not _SKIPPED_PARTS.isdisjoint(path.relative_to(root).parts):
                continue
            try:  # a folder of that name, a dangling link, a file we may not read
                if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
                    seen.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
            except OSError:
                continue
    if not seen:
        raise MissingArtifact(
            "no Python source found to train on", "install a Python with its standard library"
        )
    for digest in sorted(seen):
        if (int(digest[:8], 16) % HELD_OUT_ONE_IN == 0) != held_out:
            continue
        try:
            yield seen[digest].read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue


def token_stream(documents: Iterable[str], tokenizer: Tokenizer, limit: int) -> np.ndarray:
    """Documents as one uint16 array, each ``<|bos|> text <|end|>``, until ``limit`` tokens."""
    bos, end = tokenizer.id("<|bos|>"), tokenizer.id("<|end|>")
    parts: list[np.ndarray] = []
    total = 0
    for text in documents:
        ids = np.array([bos, *tokenizer.encode(text), end], dtype=np.uint16)
        parts.append(ids)
        total += len(ids)
        if total >= limit:
            break
    return np.concatenate(parts)[:limit] if parts else np.zeros(0, dtype=np.uint16)


def stream_rows(stream: np.ndarray, row: int, count: int, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """``count`` windows of ``length`` tokens starting at window ``row`` (wrapping), all weights 1."""
    windows = max(1, len(stream) // length)
    out = []
    for i in range(count):
        start = ((row + i) % windows) * length
        ids = stream[start : start + length]
        out.append((ids, np.ones(len(ids), dtype=np.float32)))
    return out
