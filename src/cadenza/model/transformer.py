"""The policy network over whole sequences: what is trained, and what the engine's cached forward is held to.

Letters: B rows, T positions, D model width, H query heads, K key-value heads, G = H / K, C head width,
L layers, V vocabulary, N = B * T flattened tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.model import fused
from cadenza.model.config import ModelConfig
from cadenza.model.moe import MoE
from cadenza.model.mtp import MTPHead
from cadenza.model.norm import RMSNorm
from cadenza.model.replay import LayerReplay, Replay


def rotary_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, each (positions, C / 2), for rotary position embedding (Su et al. 2021).

    ``max_positions`` rounded up to whole blocks of 64, because rows are padded to those.
    """
    inverse = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    positions = -(-config.max_positions // 64) * 64
    angles = torch.arange(positions).float()[:, None] * inverse
    return angles.cos(), angles.sin()


def rotate(x_BTHC: Tensor, cos_BTC: Tensor, sin_BTC: Tensor) -> Tensor:
    """Rotates the two halves of each head (the Hugging Face convention)."""
    first, second = x_BTHC.float().chunk(2, dim=-1)
    cos, sin = cos_BTC.unsqueeze(2), sin_BTC.unsqueeze(2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BTHC.dtype)


class ShortConv(nn.Module):
    """Causal depthwise convolution over positions; lets a head see "the token before" and so helps copying."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.weight_DP = nn.Parameter(torch.zeros(width, taps - 1))  # tap 0 is the identity

    def forward(self, x_BTD: Tensor) -> Tensor:
        past = self.weight_DP.shape[1]
        padded = F.pad(x_BTD, (0, 0, past, 0))
        out = x_BTD
        for i in range(past):  # tap i + 1 looks i + 1 positions back
            start = past - 1 - i
            out = out + padded[:, start : start + x_BTD.shape[1]] * self.weight_DP[:, i].to(x_BTD.dtype)
        return out


class Attention(nn.Module):
    """Grouped-query attention with QK norm and rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.h, self.kv, self.c = config.n_heads, config.n_kv_heads, config.head_dim
        d = config.d_model
        self.q_proj = nn.Linear(d, self.h * self.c, bias=False)
        self.k_proj = nn.Linear(d, self.kv * self.c, bias=False)
        self.v_proj = nn.Linear(d, self.kv * self.c, bias=False)
        self.o_proj = nn.Linear(self.h * self.c, d, bias=False)
        self.q_norm = RMSNorm(self.c, config.norm_eps)
        self.k_norm = RMSNorm(self.c, config.norm_eps)

    def project(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q_BTHC and k_BTKC normalized and rotated, v_BTKC."""
        b, t, _ = x_BTD.shape
        q = self.q_norm(self.q_proj(x_BTD).view(b, t, self.h, self.c))
        k = self.k_norm(self.k_proj(x_BTD).view(b, t, self.kv, self.c))
        v = self.v_proj(x_BTD).view(b, t, self.kv, self.c)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Whole sequences, causal."""
        b, t, _ = x_BTD.shape
        group = self.h // self.kv
        q, k, v = (z.transpose(1, 2) for z in self.project(x_BTD, cos, sin))
        # Heads that share keys are stacked as rows of one product: (B, K, G * T, C) x (B, K, C, T).
        q = q.reshape(b, self.kv, group * t, self.c) * self.c**-0.5
        scores = q @ k.transpose(-1, -2)
        future = torch.full((t, t), -torch.inf, dtype=scores.dtype).triu(1).repeat(group, 1)
        y = (scores + future).softmax(-1) @ v
        y = y.view(b, self.h, t, self.c)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    """Pre-norm block: [short convolution] -> attention -> mixture of experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.short_conv = ShortConv(config.d_model, config.short_conv) if config.short_conv else None
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MoE(config)

    def forward(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, replay: LayerReplay | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns (x_BTD, balance). cos and sin: (1, T, C / 2)."""
        if x_BTD.device.type == "cpu" and x_BTD.dtype == torch.float32:
            return fused.block_forward(self, x_BTD, cos[0], sin[0], replay)
        return self.composed(x_BTD, cos, sin, replay)

    def composed(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, replay: LayerReplay | None = None
    ) -> tuple[Tensor, Tensor]:
        """The definition, as tensor operations: what tests hold the fused one to."""
        mixed = self.input_layernorm(x_BTD)
        if self.short_conv is not None:
            mixed = self.short_conv(mixed)
        x_BTD = x_BTD + self.self_attn(mixed, cos, sin)
        b, t, d = x_BTD.shape
        y_ND, balance = self.mlp(self.post_attention_layernorm(x_BTD).view(b * t, d), replay)
        return x_BTD + y_ND.view(b, t, d), balance


class PolicyModel(nn.Module):
    """ids -> hidden states -> logits. ``hidden`` and ``logits`` are apart so that callers pay for the
    vocabulary product only where a loss or a sample needs it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.lm_head = (
            None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )
        self.mtp = nn.ModuleList(MTPHead(config) for _ in range(config.mtp_heads))
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialize(self, seed: int) -> None:
        """Normal(0.02) weights, residual outputs scaled by 1/sqrt(2L), norms one, convolution off."""
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / math.sqrt(2 * self.config.n_layers)
        for name, p in self.named_parameters():
            if name.endswith("weight_DP"):
                nn.init.zeros_(p)
            elif p.dim() < 2:
                nn.init.ones_(p)
            else:
                into_residual = name.endswith(
                    ("o_proj.weight", "w_out_EFD", "shared_out.weight", "ffn_out.weight")
                )
                nn.init.normal_(p, 0.0, residual if into_residual else 0.02, generator=generator)

    def hidden(self, ids_BT: Tensor, replay: Replay | None = None) -> tuple[Tensor, Tensor]:
        """Whole sequences from position 0: (x_BTD after the last norm, mean balance over layers). ``replay``: experts
        to use, of the B * T tokens. Raises ValueError for rows longer than ``max_positions`` rounded up to 64."""
        t = ids_BT.shape[1]
        if t > len(self.cos):
            raise ValueError(f"rows of {t} tokens exceed the model's {len(self.cos)} positions")
        cos, sin = self.cos[:t].unsqueeze(0), self.sin[:t].unsqueeze(0)
        x = self.embed_tokens(ids_BT)
        total = x.new_zeros((), dtype=torch.float32)
        for i, layer in enumerate(self.layers):
            x, balance = layer(x, cos, sin, None if replay is None else replay.of_layer(i))
            total = total + balance
        return self.norm(x), total / len(self.layers)

    def ahead(self, x_BTD: Tensor, ids_BT: Tensor) -> list[Tensor]:
        """What each MTP head makes of ``hidden``'s states: head k's (B, T - k, D), whose logits at index t guess
        ``ids[t + k + 1]``."""
        states = []
        for k, head in enumerate(self.mtp, 1):
            x_BTD = head(
                x_BTD[:, :-1] if k > 1 else x_BTD[:, : ids_BT.shape[1] - 1], self.embed_tokens(ids_BT[:, k:])
            )
            states.append(x_BTD)
        return states

    def logits(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(x, weight)
