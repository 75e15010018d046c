"""The identity of a set of weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cadenza.model.hf import load_model


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """First 16 hex digits of a BLAKE2 over names and raw bytes, so it depends on the dtype too. The engine takes it of
    what it serves and echoes it with every sample; the trainer knows it of what it sent."""
    h = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(state.items()):
        h.update(name.encode())
        h.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def served_digest(directory: Path, dtype: torch.dtype) -> str:
    """What an engine that serves this model directory in ``dtype`` tells. Raises what ``load_model`` raises."""
    return weights_digest(load_model(directory, dtype).state_dict())
