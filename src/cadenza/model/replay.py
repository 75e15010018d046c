"""Router replay: the trainer sends tokens to the experts that the engine sent them to.

Where two computations of the same weights differ in the last bits, a router may pick another expert, and the token's
log-probability jumps. With the engine's choice replayed it does not; gradients still reach the router, through the
weights it gives to the experts that were chosen. Choices that the trainer itself finds implausible are not replayed
(Composer 2, arXiv:2603.24477, section 6: a plausibility filter whose rule is not published; this one is ours): an
expert is kept if its probability is at least ``keep`` times the smallest that the trainer would have picked, and what
is missing is filled from the trainer's own picks.

Letters: N tokens, L layers, E experts, K of them per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cadenza.core.types import UNREAD


@dataclass
class ReplayCounts:
    """Pairs of a token and a layer. ``read``: with a record; ``differ``: of these, with other experts in the record
    than the router would pick; ``refused``: with an expert in the record that was not plausible."""

    read: float | Tensor = 0.0
    differ: float | Tensor = 0.0
    refused: float | Tensor = 0.0

    def shares(self) -> dict[str, float]:
        """``routes_differ`` and ``routes_refused`` of those that were read; empty without any."""
        if not (read := float(self.read)):
            return {}
        return {"routes_differ": float(self.differ) / read, "routes_refused": float(self.refused) / read}


@dataclass(frozen=True)
class Replay:
    """``routes_NLK``: int64, UNREAD in all K where the engine did not read the token. ``keep``: 0 replays all."""

    routes_NLK: Tensor
    keep: float
    counts: ReplayCounts = field(default_factory=ReplayCounts)

    def of_layer(self, layer: int) -> LayerReplay:
        return LayerReplay(self.routes_NLK[:, layer], self.keep, self.counts)


@dataclass(frozen=True)
class LayerReplay:
    """What ``MoE.choose`` of one layer takes."""

    routes_NK: Tensor
    keep: float
    counts: ReplayCounts

    @torch.no_grad()
    def pick(self, probs_NE: Tensor, own_NK: Tensor) -> Tensor:
        """The experts to use: (N, K). ``own_NK``: what the router would pick, most probable first."""
        read_N1 = self.routes_NK[:, :1] != UNREAD
        routes_NK = self.routes_NK.where(read_N1, own_NK)
        least_N1 = probs_NE.gather(1, own_NK[:, -1:])
        kept_NK = (probs_NE.gather(1, routes_NK) >= self.keep * least_N1) | ~read_N1
        self.counts.read += read_N1.sum()
        self.counts.differ += (routes_NK.sort(-1).values != own_NK.sort(-1).values).any(-1).sum()
        self.counts.refused += (~kept_NK).any(-1).sum()
        # Kept ones first, then the router's own by probability, none twice: both added to a number above all of them.
        rank_NE = probs_NE.clone()
        rank_NE.scatter_add_(1, routes_NK, 2.0 * kept_NK.to(probs_NE.dtype))
        return rank_NE.topk(own_NK.shape[1], dim=-1).indices
