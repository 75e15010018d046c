"""Slotted key-value cache of the embedded engine.

R slots, K key-value heads, S positions, C head width, P = short-convolution taps - 1, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cadenza.model.config import ModelConfig
from cadenza.model.transformer import LayerCache, PolicyModel

READ_BLOCK = 128  # positions: spans of decoding reads are multiples, which keeps kernel shapes few
READ_ROWS = 8  # fewer rows are not worth kernel calls of their own


@dataclass(frozen=True)
class Tails:
    """The short convolution's last inputs at the end of a prefix: per layer (P, D)."""

    per_layer_PD: list[Tensor]


class KVCache:
    """Keys, values and convolution tails of every slot."""

    def __init__(self, config: ModelConfig, slots: int, span: int, dtype: torch.dtype) -> None:
        shape = (slots, config.n_kv_heads, span, config.head_dim)
        past = max(0, config.short_conv - 1)
        layers = range(config.n_layers)
        self.span = span
        self.past = past
        self.k_RKSC = [torch.zeros(shape, dtype=dtype) for _ in layers]
        self.v_RKSC = [torch.zeros(shape, dtype=dtype) for _ in layers]
        self.tail_RPD = [torch.zeros(slots, past, config.d_model, dtype=dtype) for _ in layers]

    def clear_tail(self, slot: int) -> None:
        """A fresh session has nothing before its first token."""
        for tail in self.tail_RPD:
            tail[slot].zero_()

    def feed(
        self, model: PolicyModel, slots: list[int], starts: list[int], new_ids: list[list[int]], width: int
    ) -> Tensor:
        """Appends ``new_ids`` (rows padded to ``width``) at ``starts``; returns the hidden state of each row's
        last new token, (B, D)."""
        counts = [len(ids) for ids in new_ids]
        ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids in new_ids])
        slots_B, start_B, count_B = torch.tensor(slots), torch.tensor(starts), torch.tensor(counts)
        # Padding may run past the cache's end for a nearly full row; a span of whole blocks keeps shapes few.
        span = min(self.span, -(-(max(s + width for s in starts)) // 64) * 64)
        reads = self._reads(starts) if width == 1 else None
        if reads:
            span = reads[-1][1]  # the longest row is in the last group
        caches = [
            LayerCache(k, v, slots_B, span, tail.index_select(0, slots_B) if self.past else None, reads)
            for k, v, tail in zip(self.k_RKSC, self.v_RKSC, self.tail_RPD, strict=True)
        ]
        x_BTD, conv_inputs = model.extend(ids_BT, start_B, caches)
        if self.past:
            # The last P inputs of each row, counted over (old tail + new inputs) so that short rows keep old ones.
            take_BP = (count_B[:, None] + torch.arange(self.past)).unsqueeze(-1)
            for tail, cache, inputs in zip(self.tail_RPD, caches, conv_inputs, strict=True):
                assert cache.tail_BPD is not None
                joined = torch.cat((cache.tail_BPD, inputs), dim=1)
                tail[slots_B] = joined.gather(1, take_BP.expand(-1, -1, joined.shape[2]))
        return x_BTD[torch.arange(len(slots)), count_B - 1]

    def _reads(self, starts: list[int]) -> list[tuple[Tensor, int]]:
        """Rows by cached length, in groups of spans of whole blocks; a small group joins the next longer one."""
        groups: list[tuple[list[int], int]] = []
        for row in sorted(range(len(starts)), key=lambda r: starts[r]):
            span = min(self.span, -(-(starts[row] + 1) // READ_BLOCK) * READ_BLOCK)
            if groups and (groups[-1][1] == span or len(groups[-1][0]) < READ_ROWS):
                groups[-1] = ([*groups[-1][0], row], span)
            else:
                groups.append(([row], span))
        return [(torch.tensor(rows), span) for rows, span in groups]

    def tails(self, slot: int) -> Tails:
        """A copy of a slot's convolution tails, kept with a shared prefix."""
        return Tails([tail[slot].clone() for tail in self.tail_RPD])

    def copy_prefix(self, source: int, target: int, length: int, tails: Tails) -> None:
        """Gives slot ``target`` the first ``length`` positions of slot ``source``."""
        for i, (k, v) in enumerate(zip(self.k_RKSC, self.v_RKSC, strict=True)):
            k[target, :, :length] = k[source, :, :length]
            v[target, :, :length] = v[source, :, :length]
            self.tail_RPD[i][target] = tails.per_layer_PD[i]
