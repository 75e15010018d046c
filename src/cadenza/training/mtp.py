"""Multi-token prediction heads, trained by self-distillation: each matches the trunk's own distribution.

Composer 2 (arXiv:2603.24477, section 3.1): heads from scratch, on a trunk cut from the middle of continued pretraining,
matching the exact distribution of the main head at each position; in the last phases they are trained jointly.

The loss of head k at position t is KL(p || q), with p what the trunk says after ids[: t + k + 1], detached, and q what
the head says, which has seen the trunk's state at t and the tokens up to t + k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cadenza.model.transformer import PolicyModel
from cadenza.training.lm import Loss, Rows, next_token_loss


def divergence(model: PolicyModel, x_BTD: Tensor, rows: Rows, every: int = 1) -> Tensor:
    """Sum over weighted targets of KL(trunk || head), nats, mean over heads. ``x_BTD``: the trunk's states.

    ``every``: estimates the sum from one in so many targets, which ones follows from the rows. Each costs the whole
    vocabulary once a head, most of what heads cost a small trunk.
    """
    b, at = rows.weight_BT[:, 2:].nonzero(as_tuple=True)
    first = int(rows.ids_BT.sum()) % every if len(b) > every else 0
    b, at = b[first::every], at[first::every] + 2  # ids[b, at] is what is guessed
    with torch.no_grad():
        trunk_NV = model.logits(x_BTD[b, at - 1]).float().log_softmax(-1)
    total = x_BTD.new_zeros((), dtype=torch.float32)
    for k in range(1, len(model.mtp) + 1):
        far = at > k
        row, start = b[far], at[far] - k - 1
        state_ND = x_BTD[row, start]
        for i, head in enumerate(list(model.mtp)[:k], 1):
            state_ND = head(state_ND, model.embed_tokens(rows.ids_BT[row, start + i]))
        head_NV = model.logits(state_ND).float().log_softmax(-1)
        kl_N = (trunk_NV[far].exp() * (trunk_NV[far] - head_NV)).sum(-1)
        total = total + (kl_N * rows.weight_BT[row, at[far]]).sum()
    return total * every / len(model.mtp)


def frozen_trunk_loss(model: PolicyModel, rows: Rows, bf16: bool) -> Loss:
    """For ``train`` while only the heads learn."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        with torch.no_grad():
            x_BTD, balance = model.hidden(rows.ids_BT)
        kl = divergence(model, x_BTD, rows)
    return Loss(kl, float(kl.detach()), balance)


class JointLoss:
    """For ``train`` while trunk and heads learn together: next-token loss plus ``weight`` times the divergence,
    estimated from one in ``every`` targets. The heads' gradient reaches the trunk, which learns to look ahead."""

    def __init__(self, weight: float, every: int = 4) -> None:
        self.weight, self.every = weight, every

    def __call__(self, model: PolicyModel, rows: Rows, bf16: bool) -> Loss:
        states: list[Tensor] = []
        loss = next_token_loss(model, rows, bf16, states)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            kl = divergence(model, states[0], rows, self.every)
        return Loss(loss.total + self.weight * kl, loss.shown, loss.balance)


@torch.no_grad()
def agreement(model: PolicyModel, batches: list[Rows], bf16: bool) -> list[float]:
    """Per head, the share of weighted targets at which its likeliest token is the trunk's: what greedy speculative
    decoding would accept of that head's guesses if those before it held."""
    agreed, counted = torch.zeros(2, len(model.mtp))
    for rows in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            x_BTD, _ = model.hidden(rows.ids_BT)
            for k, state_BTD in enumerate(model.ahead(x_BTD, rows.ids_BT), 1):
                b, t = rows.weight_BT[:, k + 1 :].nonzero(as_tuple=True)
                same_N = model.logits(x_BTD[b, t + k]).argmax(-1) == model.logits(state_BTD[b, t]).argmax(-1)
                agreed[k - 1] += same_N.sum()
                counted[k - 1] += len(same_N)
    return (agreed / counted.clamp(min=1)).tolist()
