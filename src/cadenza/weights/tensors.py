"""Between torch's tensors and the bits that travel. Apart from the rest of the room, which needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from cadenza.weights.delta import Bits, State

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def state_of(tensors: Mapping[str, Tensor]) -> dict[str, Bits]:
    """The bits of CPU tensors. They share memory with contiguous ones."""
    return {name: _bits(tensor) for name, tensor in tensors.items()}


def tensors_of(state: State) -> dict[str, Tensor]:
    """Tensors with these bits, in memory shared with them: for reading only."""
    return {
        name: torch.from_numpy(bits.values.view(f"i{bits.values.itemsize}")).view(getattr(torch, bits.dtype))
        for name, bits in state.items()
    }


def _bits(tensor: Tensor) -> Bits:
    signed = tensor.detach().contiguous().view(_SIGNED[tensor.element_size()]).numpy()
    return Bits(str(tensor.dtype).removeprefix("torch."), signed.view(np.dtype(f"u{signed.itemsize}")))
