"""The sampler. Every random number is a function of the request's seed alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uniforms(seed: int, count: int) -> np.ndarray:
    """``count`` numbers in [0, 1) for one request, the i-th for its i-th sampled token (Philox, counter-based)."""
    return np.random.Generator(np.random.Philox(key=seed & (2**64 - 1))).random(count)


def sample(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """(ids_B, logprob_B): inverse-CDF sampling at each row's temperature, fp32.

    The log-probability is that of the distribution sampled from; for greedy rows, of the temperature-1 one.
    """
    greedy_B = temperature_B <= 0
    scale_B1 = torch.where(greedy_B, 1.0, temperature_B).reciprocal().unsqueeze(1)
    logp_BV = (logits_BV.float() * scale_B1).log_softmax(-1)
    cdf_BV = logp_BV.exp().cumsum(-1)
    # A double just below 1 rounds to 1.0 in fp32 and would draw the last id, whatever its probability.
    below_one_B = uniform_B.float().clamp(max=1.0 - 2.0**-24)
    threshold_B1 = (below_one_B * cdf_BV[:, -1]).unsqueeze(1)
    drawn_B = (cdf_BV <= threshold_B1).sum(-1).clamp_(max=logits_BV.shape[1] - 1)
    ids_B = torch.where(greedy_B, logp_BV.argmax(-1), drawn_B)
    return ids_B, logp_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1)
