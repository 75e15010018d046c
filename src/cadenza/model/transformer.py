"""The policy network: one definition for the trainer and the engine.

Letters: B rows, T positions, D model width, H query heads, K key-value heads, G = H / K, C head width,
L layers, S cached positions, V vocabulary, N = B * T flattened tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.model.config import ModelConfig
from cadenza.model.moe import MoE


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


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


@dataclass
class LayerCache:
    """One layer's view of the key-value cache for the rows of a call.

    ``k_RKSC``, ``v_RKSC``: keys (rotated) and values of every cache slot R; ``slots_B`` picks the slots of this
    call's rows; ``span``: how many cached positions to read, at least every row's start + T.
    ``tail_BPD``: the last P = taps - 1 inputs of the short convolution before the call's first token.
    ``reads``: for decoding, (row numbers, span) of groups of rows that are read together.
    """

    k_RKSC: Tensor
    v_RKSC: Tensor
    slots_B: Tensor
    span: int
    tail_BPD: Tensor | None
    reads: list[tuple[Tensor, int]] | None = None

    def write(self, position_BT: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> None:
        # A nearly full row padded to the width of a long one would run past the cache. Its padding may land on
        # the last position: nothing sees that one before its own token is written there.
        position_BT = position_BT.clamp(max=self.k_RKSC.shape[2] - 1)
        slot_B1 = self.slots_B[:, None]
        self.k_RKSC[slot_B1, :, position_BT] = k_BTKC
        self.v_RKSC[slot_B1, :, position_BT] = v_BTKC

    def attend(self, q_BKMC: Tensor, bias_B1MS: Tensor) -> Tensor:
        """Attention of M stacked queries per key-value head over this call's rows, (B, K, M, C).

        Decoding reads the whole cache for a few queries. Rows are read in ``reads``, groups of similar length, so
        that a short row does not pay for the longest; and the scores are made keys first, since a product with
        many rows and few columns is what CPU kernels do well (half the time of the fused kernel at M = 2).
        """
        if self.reads is None:
            k = self.k_RKSC[:, :, : self.span].index_select(0, self.slots_B)
            v = self.v_RKSC[:, :, : self.span].index_select(0, self.slots_B)
            return F.scaled_dot_product_attention(q_BKMC, k, v, attn_mask=bias_B1MS)
        y_BKMC = torch.empty_like(q_BKMC)
        for rows, span in self.reads:
            slots = self.slots_B[rows]
            q = q_BKMC[rows] * q_BKMC.shape[-1] ** -0.5
            k = self.k_RKSC[:, :, :span].index_select(0, slots)
            v = self.v_RKSC[:, :, :span].index_select(0, slots)
            scores = (k @ q.transpose(-1, -2)).transpose(-1, -2).float() + bias_B1MS[rows, :, :, :span]
            y_BKMC[rows] = scores.softmax(-1).to(v.dtype) @ v
        return y_BKMC


class ShortConv(nn.Module):
    """Causal depthwise convolution over positions; lets a head see "the token before" and so helps copying."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.weight_DP = nn.Parameter(torch.zeros(width, taps - 1))  # tap 0 is the identity

    def forward(self, x_BTD: Tensor, tail_BPD: Tensor | None) -> Tensor:
        past = self.weight_DP.shape[1]
        if tail_BPD is None:
            tail_BPD = x_BTD.new_zeros(x_BTD.shape[0], past, x_BTD.shape[2])
        padded = torch.cat((tail_BPD.to(x_BTD.dtype), x_BTD), dim=1)
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
        """Whole sequences, causal.

        Written out rather than fused: on CPUs two batched products in the working dtype are about twice as fast
        as the fused kernel forward and backward at these lengths (T <= 1024).
        """
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

    def extend(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, start_B: Tensor) -> Tensor:
        """T new positions per row after ``start_B`` cached ones; writes their keys and values into the cache.

        Rows may be padded at their end: positions past a row's real length are overwritten by its next call and
        masked until then, because a query at position p sees only cached positions <= p.
        """
        b, t, _ = x_BTD.shape
        q, k, v = self.project(x_BTD, cos, sin)
        position_BT = start_B[:, None] + torch.arange(t)
        cache.write(position_BT, k, v)
        group = self.h // self.kv
        # Queries of one key-value head are stacked as rows of one product, so keys need not be repeated.
        q = q.view(b, t, self.kv, group, self.c).permute(0, 2, 3, 1, 4).reshape(b, self.kv, group * t, self.c)
        unseen = torch.arange(cache.span) > position_BT[:, :, None]  # (B, T, S)
        bias = torch.zeros(unseen.shape, dtype=q.dtype).masked_fill_(unseen, -torch.inf)
        bias = bias[:, None, None].expand(b, 1, group, t, -1).reshape(b, 1, group * t, -1)
        y = cache.attend(q, bias)
        y = y.view(b, self.kv, group, t, self.c).permute(0, 3, 1, 2, 4).reshape(b, t, -1)
        return self.o_proj(y)


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
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None, start_B: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (x_BTD, balance, conv input_BTD); the last feeds the cache's tail."""
        normed = self.input_layernorm(x_BTD)
        mixed = normed
        if self.short_conv is not None:
            mixed = self.short_conv(normed, cache.tail_BPD if cache is not None else None)
        if cache is None:
            attended = self.self_attn(mixed, cos, sin)
        else:
            assert start_B is not None
            attended = self.self_attn.extend(mixed, cos, sin, cache, start_B)
        x_BTD = x_BTD + attended
        b, t, d = x_BTD.shape
        y_ND, balance = self.mlp(self.post_attention_layernorm(x_BTD).view(b * t, d))
        return x_BTD + y_ND.view(b, t, d), balance, normed


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
                into_residual = name.endswith(("o_proj.weight", "w_out_EFD", "shared_out.weight"))
                nn.init.normal_(p, 0.0, residual if into_residual else 0.02, generator=generator)

    def hidden(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Whole sequences from position 0: (x_BTD after the last norm, mean balance over layers)."""
        t = ids_BT.shape[1]
        cos, sin = self.cos[:t].unsqueeze(0), self.sin[:t].unsqueeze(0)
        x = self.embed_tokens(ids_BT)
        total = x.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            x, balance, _ = layer(x, cos, sin, None, None)
            total = total + balance
        return self.norm(x), total / len(self.layers)

    def extend(
        self, ids_BT: Tensor, start_B: Tensor, caches: list[LayerCache]
    ) -> tuple[Tensor, list[Tensor]]:
        """T new tokens per row on top of cached ones. Returns (x_BTD after the last norm, per layer the
        convolution's input_BTD, from which the caller keeps each row's last ``short_conv - 1`` positions)."""
        position = (start_B[:, None] + torch.arange(ids_BT.shape[1])).clamp_(
            max=self.config.max_positions - 1
        )
        cos, sin = self.cos[position], self.sin[position]
        x = self.embed_tokens(ids_BT)
        conv_inputs = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, _, conv_input = layer(x, cos, sin, cache, start_B)
            conv_inputs.append(conv_input)
        return self.norm(x), conv_inputs

    def logits(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(x, weight)
