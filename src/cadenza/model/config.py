"""Shape of the policy network."""

from __future__ import annotations

from pydantic import model_validator

from cadenza.core.config import StrictConfig


class ModelConfig(StrictConfig):
    """Decoder-only mixture-of-experts transformer.

    With ``short_conv = 0`` and ``d_shared = 0`` a block is exactly Qwen3-MoE's (QK norm, normalized top-k router
    weights), so such checkpoints can be read and written. The defaults are the demo's 3.4 M parameters.

    ``vocab_size``: tokens. ``d_model``: width of the residual stream. ``n_layers``: blocks. ``n_heads``: heads of
    queries; ``n_kv_heads``: of keys and values, which groups of query heads share. ``head_dim``: width of a head.
    ``n_experts``: experts a layer. ``experts_per_token``: how many of them the router picks. ``d_expert``: hidden width
    of an expert. ``rope_theta``: base of the rotary embedding. ``max_positions``: longest sequence, tokens.
    ``norm_eps``: added to the mean square in RMSNorm. ``tie_embeddings``: the embedding is also the output matrix.
    """

    vocab_size: int = 1024
    d_model: int = 192
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    n_experts: int = 8
    experts_per_token: int = 2
    d_expert: int = 128
    d_shared: int = 128  # hidden width of the expert every token uses; 0 for none
    mtp_heads: int = 0  # tokens guessed beyond the next one, see ``mtp``
    d_mtp: int = 256  # hidden width of such a head
    short_conv: int = 2  # taps of the causal depthwise convolution before QKV; 0 for none
    rope_theta: float = 10_000.0
    max_positions: int = 2048
    norm_eps: float = 1e-6
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.n_heads % self.n_kv_heads:
            raise ValueError("n_heads must be a multiple of n_kv_heads")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even for rotary embedding")
        if not 0 < self.experts_per_token <= self.n_experts:
            raise ValueError("experts_per_token must lie between 1 and n_experts")
        if self.mtp_heads < 0 or self.d_mtp < 1:
            raise ValueError("mtp_heads is at least 0 and d_mtp at least 1")
        if self.short_conv < 0 or self.short_conv == 1:
            raise ValueError("short_conv is 0 (off) or at least 2 taps")
        return self
