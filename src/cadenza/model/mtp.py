"""Multi-token prediction: heads that guess the tokens after the next one, for speculative decoding.

Head k makes, of what the trunk (or head k - 1) thinks at position t and of the token at t + k, a state whose logits
guess the token at t + k + 1 (DeepSeek-V3, arXiv:2412.19437, section 2.2, with a feed-forward in the place of the
module's transformer block: it needs no cache of its own, and the trunk's state has attended already). The output
matrix is the trunk's.

Letters as in ``transformer``; N positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.model.config import ModelConfig
from cadenza.model.norm import RMSNorm


class MTPHead(nn.Module):
    """One more token ahead."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, f, eps = config.d_model, config.d_mtp, config.norm_eps
        self.token_norm = RMSNorm(d, eps)
        self.join = nn.Linear(2 * d, d, bias=False)
        self.ffn_norm = RMSNorm(d, eps)
        self.ffn_in = nn.Linear(d, 2 * f, bias=False)
        self.ffn_out = nn.Linear(f, d, bias=False)
        self.norm = RMSNorm(d, eps)

    def forward(self, x_ND: Tensor, token_ND: Tensor) -> Tensor:
        """``x_ND``: normalized states of the trunk or of the head before. ``token_ND``: embeddings of the tokens that
        follow. Returns normalized states."""
        y_ND = x_ND + self.join(torch.cat((x_ND, self.token_norm(token_ND)), -1))
        gate, up = self.ffn_in(self.ffn_norm(y_ND)).chunk(2, dim=-1)
        return self.norm(y_ND + self.ffn_out(F.silu(gate) * up))
