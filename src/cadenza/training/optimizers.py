"""Muon for matrices, AdamW for the rest.

Muon (Jordan et al. 2024) orthogonalizes the momentum of each matrix by a Newton-Schulz iteration. Experts are
matrices of their own: a (E, F, D) parameter is treated as E matrices (Composer 2.5 does the same, per expert).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients of the reference implementation


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """(..., R, C) -> nearest semi-orthogonal matrices, approximately; bf16 products."""
    a, b, c = NEWTON_SCHULZ
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        xx = x @ x.transpose(-1, -2)
        x = a * x + (b * xx + c * xx @ xx) @ x
    return (x.transpose(-1, -2) if tall else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized; the update has the root-mean-square of a matrix with spectral norm 1.

    Matrices of one shape (the layers' query projections, say) are orthogonalized in one batch: on CPUs a hundred
    small iterations cost more than their arithmetic. Parameters in ``transposed`` are stored (in, out), not (out, in).
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        transposed: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._transposed = {id(p) for p in transposed}

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            same: dict[tuple[bool, torch.Size], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    same[id(p) in self._transposed, p.shape].append(p)
            for (transposed, shape), members in same.items():
                updates = orthogonalize(torch.stack([self._momentum(p, group["momentum"]) for p in members]))
                fan_out, fan_in = shape[-2:][::-1] if transposed else shape[-2:]
                scale = max(1.0, fan_out / fan_in) ** 0.5
                for p, update in zip(members, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, p: Tensor, momentum: float) -> Tensor:
        """Nesterov's: the gradient plus the momentum that already holds it."""
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        assert p.grad is not None
        return p.grad.add(state["momentum"].mul_(momentum).add_(p.grad), alpha=momentum)


class Optimizers:
    """The pair used for pretraining and SFT, or AdamW alone (``muon_lr = 0``), stepped and saved as one."""

    def __init__(self, model: nn.Module, adam_lr: float, muon_lr: float, weight_decay: float) -> None:
        matrices, rest = [], []
        for name, p in model.named_parameters():
            is_matrix = p.dim() >= 2 and not name.startswith(("embed_tokens", "lm_head"))
            is_matrix = is_matrix and not name.endswith(("weight_DP", "gate.weight"))
            (matrices if is_matrix and muon_lr > 0 else rest).append(p)
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)
        ]
        if matrices:
            transposed = [p for name, p in model.named_parameters() if name.endswith("w_out_EFD")]
            self.parts.append(Muon(matrices, lr=muon_lr, weight_decay=weight_decay, transposed=transposed))
        self.base_lrs = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, lr_scale: float) -> None:
        """One update at ``lr_scale`` times the configured rates; clears the gradients."""
        for part, base in zip(self.parts, self.base_lrs, strict=True):
            for group, lr in zip(part.param_groups, base, strict=True):
                group["lr"] = lr * lr_scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
