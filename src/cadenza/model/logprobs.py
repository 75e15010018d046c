"""Log-probabilities of given tokens without ever holding the whole logits matrix.

The vocabulary product is done chunk by chunk and done again in the backward pass: the (N, V) matrix and its
gradient never leave the cache, which on CPUs is worth more than the second product costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = 64  # tokens are padded to a multiple: CPU kernels are compiled per shape
CHUNK = 512  # tokens; 512 x 1024 fp32 logits are 2 MB, about one core's share of the last-level cache


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, inverse_temperature: float):
        logp_N = torch.empty(x_ND.shape[0])
        entropy_N = torch.empty(x_ND.shape[0])
        for i in range(0, x_ND.shape[0], CHUNK):
            z = (x_ND[i : i + CHUNK] @ weight_VD.T).float() * inverse_temperature
            logp = z.log_softmax(-1)
            logp_N[i : i + CHUNK] = logp.gather(1, target_N[i : i + CHUNK, None]).squeeze(1)
            entropy_N[i : i + CHUNK] = -(logp.exp() * logp).sum(-1)
        ctx.save_for_backward(x_ND, weight_VD, target_N)
        ctx.inverse_temperature = inverse_temperature
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx, grad_N: Tensor, _entropy):  # type: ignore[override]
        x_ND, weight_VD, target_N = ctx.saved_tensors
        dx_ND = torch.empty_like(x_ND)
        dw_VD = torch.zeros(weight_VD.shape, dtype=torch.float32)
        for i in range(0, x_ND.shape[0], CHUNK):
            x, target = x_ND[i : i + CHUNK], target_N[i : i + CHUNK, None]
            z = (x @ weight_VD.T).float() * ctx.inverse_temperature
            scale = (grad_N[i : i + CHUNK, None] * ctx.inverse_temperature).float()
            dz = z.softmax(-1).neg_().mul_(scale).scatter_add_(1, target, scale).to(x.dtype)
            dx_ND[i : i + CHUNK] = dz @ weight_VD
            dw_VD += dz.T @ x
        return dx_ND, dw_VD.to(weight_VD.dtype), None, None


def token_logprobs(
    x_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log p(target | x) at ``temperature`` and the entropy of that distribution, both fp32 of shape (N,).

    The log-probabilities carry gradients to ``x_ND`` and ``weight_VD``; the entropies do not. Under CPU autocast
    the products run in its dtype.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x_ND, weight_VD = x_ND.to(dtype), weight_VD.to(dtype)
    n = x_ND.shape[0]
    padding = -n % PADDING
    x_ND = torch.nn.functional.pad(x_ND, (0, 0, 0, padding))
    target_N = torch.nn.functional.pad(target_N, (0, padding))
    with torch.autocast("cpu", enabled=False):
        logp_N, entropy_N = _TokenLogprobs.apply(x_ND, weight_VD, target_N, 1.0 / temperature)  # type: ignore[misc]
    return logp_N[:n], entropy_N[:n]
