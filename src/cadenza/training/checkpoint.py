"""Training state on disk: whole or not there, and checked when it is read."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from cadenza.core.errors import CorruptCheckpoint
from cadenza.core.files import disk_full, is_disk_full
from cadenza.core.memory import is_out_of_memory, out_of_memory

BEGIN_AGAIN = "add --restart-from STAGE to begin the stage again"


def save_state(state: dict[str, Any], path: Path) -> None:
    """Writes a state of tensors and plain values beside ``path`` and renames it. Raises ResourceExhausted."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open(
            "wb"
        ) as file:  # a file of Python's own keeps the error number that torch's would lose
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        if is_disk_full(error):
            raise disk_full(path) from error
        raise
    os.replace(partial, path)


def load_state(path: Path) -> dict[str, Any]:
    """Reads what ``save_state`` wrote. Raises CorruptCheckpoint (torch itself would read flipped bits as weights), or
    ResourceExhausted when there is no memory for it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} has another checksum")
        state = torch.load(path, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
    except Exception as error:  # zipfile and torch raise many kinds; all mean the same here
        if is_out_of_memory(error):
            raise out_of_memory(f"reading the checkpoint {path}") from error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CorruptCheckpoint(f"the checkpoint {path} cannot be read ({reason})", BEGIN_AGAIN) from error
    return state
