"""Slotted key-value cache of the embedded engine, and which experts each cached token went to.

R slots, K key-value heads, S positions, G blocks of KEYS positions, C head width, D model width,
P = short-convolution taps - 1, L layers, J experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cadenza.inference.kernels import KEYS
from cadenza.model.compiled import array
from cadenza.model.config import ModelConfig


@dataclass(frozen=True)
class Tails:
    """The short convolution's last inputs at the end of a prefix: per layer (P, D)."""

    per_layer_PD: list[np.ndarray]


class KVCache:
    """Rotated keys, values and convolution tails of every slot; one list entry per layer."""

    def __init__(self, config: ModelConfig, slots: int, span: int, dtype: torch.dtype) -> None:
        blocks = -(-span // KEYS)
        keys = (slots, config.n_kv_heads, blocks, config.head_dim, KEYS)
        values = (slots, config.n_kv_heads, blocks * KEYS, config.head_dim)
        past = max(0, config.short_conv - 1)
        layers = range(config.n_layers)
        self.span = span
        self.routes_RSLJ = np.zeros((slots, span, config.n_layers, config.experts_per_token), np.uint8)
        self.k_RKGCS = [array(torch.zeros(keys, dtype=dtype)) for _ in layers]
        self.v_RKSC = [array(torch.zeros(values, dtype=dtype)) for _ in layers]
        self.tail_RPD = [np.zeros((slots, past, config.d_model), np.float32) for _ in layers]

    def clear_tail(self, slot: int) -> None:
        """A fresh session has nothing before its first token."""
        for tail in self.tail_RPD:
            tail[slot] = 0.0

    def tails(self, slot: int) -> Tails:
        """A copy of a slot's convolution tails, kept with a shared prefix."""
        return Tails([tail[slot].copy() for tail in self.tail_RPD])

    def copy_prefix(self, source: int, target: int, start: int, length: int, tails: Tails) -> None:
        """Gives slot ``target``, which has the first ``start`` positions, those of slot ``source`` up to ``length``."""
        # What the last block of keys holds beyond the prefix is overwritten before it is seen.
        first, blocks = start // KEYS, -(-length // KEYS)
        self.routes_RSLJ[target, start:length] = self.routes_RSLJ[source, start:length]
        for i, (k, v) in enumerate(zip(self.k_RKGCS, self.v_RKSC, strict=True)):
            k[target, :, first:blocks] = k[source, :, first:blocks]
            v[target, :, start:length] = v[source, :, start:length]
            self.tail_RPD[i][target] = tails.per_layer_PD[i]
