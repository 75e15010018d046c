"""Mixture-of-experts feed-forward with a shared expert.

Each expert sees only its own tokens, in a batched product padded to the fullest expert. Padding is in steps of 64
tokens because CPU kernels are compiled per shape: an exact grouped product meets new shapes at every step and spends
more on compiling than on multiplying.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.model.config import ModelConfig
from cadenza.model.replay import LayerReplay

CAPACITY_STEP = 64


class MoE(nn.Module):
    """x_ND -> y_ND. N tokens, D model width, E experts, F hidden width, K experts per token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.k = config.experts_per_token
        self.n_experts = config.n_experts
        self.d_shared = config.d_shared
        d, f = config.d_model, config.d_expert
        self.gate = nn.Linear(d, config.n_experts, bias=False)
        self.w_in_EGD = nn.Parameter(torch.empty(config.n_experts, 2 * f, d))  # gate rows, then up rows
        self.w_out_EFD = nn.Parameter(torch.empty(config.n_experts, f, d))
        if config.d_shared:
            self.shared_in = nn.Linear(d, 2 * config.d_shared, bias=False)
            self.shared_out = nn.Linear(config.d_shared, d, bias=False)

    def route(self, x_ND: Tensor, replay: LayerReplay | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Router in fp32: (probabilities_NE, weights_NK summing to 1, experts_NK)."""
        return self.choose(F.linear(x_ND.float(), self.gate.weight.float()), replay)

    def choose(self, logits_NE: Tensor, replay: LayerReplay | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``route`` from the router's logits."""
        probs_NE = logits_NE.softmax(-1)
        top_NK, experts_NK = probs_NE.topk(self.k, dim=-1)
        if replay is not None:
            experts_NK = replay.pick(probs_NE.detach(), experts_NK)
            top_NK = probs_NE.gather(1, experts_NK)
        return probs_NE, top_NK / top_NK.sum(-1, keepdim=True), experts_NK

    def balance(self, probs_NE: Tensor, load_E: Tensor) -> Tensor:
        """E * sum_e(load_e * mean probability_e), 1.0 when even (Switch Transformer, equation 4, generalized to
        top-k). ``load_E``: shares of the assignments."""
        return self.n_experts * (load_E * probs_NE.mean(0)).sum()

    def forward(self, x_ND: Tensor, replay: LayerReplay | None = None) -> tuple[Tensor, Tensor]:
        """Returns (y_ND, balance)."""
        with torch.autocast("cpu", enabled=False):
            probs_NE, weights_NK, experts_NK = self.route(x_ND, replay)
        y_ND = self._grouped(x_ND, weights_NK, experts_NK)
        load_E = torch.bincount(experts_NK.flatten(), minlength=self.n_experts) / experts_NK.numel()
        if self.d_shared:
            gate, up = self.shared_in(x_ND).chunk(2, dim=-1)
            y_ND = y_ND + self.shared_out(F.silu(gate) * up)
        return y_ND, self.balance(probs_NE, load_E)

    def _grouped(self, x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor) -> Tensor:
        # Chosen here and not by autocast, which would cast the stacked weights once per product.
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_ND.dtype
        n, d = x_ND.shape
        expert_M = experts_NK.flatten()  # M = N * K assignments, token m // K
        order_M = expert_M.argsort(stable=True)
        load_E = torch.bincount(expert_M, minlength=self.n_experts)
        capacity = -(-int(load_E.max()) // CAPACITY_STEP) * CAPACITY_STEP
        first_E = load_E.cumsum(0) - load_E
        sorted_expert_M = expert_M[order_M]
        place_M = sorted_expert_M * capacity + torch.arange(n * self.k) - first_E[sorted_expert_M]
        x_SD = x_ND.new_zeros(self.n_experts * capacity, d, dtype=dtype)  # S = E * capacity places
        x_SD = x_SD.index_copy(0, place_M, x_ND.to(dtype).index_select(0, order_M // self.k))
        h_ECG = x_SD.view(self.n_experts, capacity, d) @ self.w_in_EGD.to(dtype).transpose(1, 2)
        gate_ECF, up_ECF = h_ECG.chunk(2, dim=-1)
        y_ECD = (F.silu(gate_ECF) * up_ECF) @ self.w_out_EFD.to(dtype)
        y_MD = y_ECD.view(-1, d).index_select(0, place_M)
        y_MD = y_MD * weights_NK.flatten()[order_M].unsqueeze(-1).to(dtype)
        return torch.zeros(n, d, dtype=dtype).index_add(0, order_M // self.k, y_MD)
