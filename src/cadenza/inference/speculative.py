"""Speculative decoding with the model's own MTP heads: guesses, and how many of them hold.

The i-th token of a request is drawn with the i-th of its uniform numbers, with or without guesses (see ``sampling``). A
guess is drawn from a head's distribution with the very number that the true token will be drawn with, so that equal
distributions give equal tokens at any temperature, and it holds when the true draw gives the same token. What is
sampled is therefore what plain decoding samples, token for token, as far as the two ways of computing the logits
agree. (Leviathan et al. 2023 accept more by drawing anew from what the guess leaves; the outcome then depends on the
guesses.)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cadenza.core.errors import ConfigError
from cadenza.inference.sampling import sample
from cadenza.model.transformer import PolicyModel


class Drafter:
    """Guesses with the heads of ``model``, used in place. Owned by the engine, called from its thread only."""

    def __init__(self, model: PolicyModel, tokens: int) -> None:
        """Raises ConfigError when the model has fewer heads than ``tokens``."""
        if tokens > len(model.mtp):
            raise ConfigError(
                f"engine.draft_tokens is {tokens}, and the model has {len(model.mtp)} multi-token prediction heads",
                "lower it, or train more heads",
            )
        self.model, self.tokens = model, tokens

    def guess(
        self, states_BD: Tensor, last: list[int], temperature: list[float], uniforms: list[np.ndarray]
    ) -> list[list[int]]:
        """The tokens after ``last`` of each row, as many as it has numbers left to be drawn with.

        Args:
            states_BD: the trunk's states that ``last`` was drawn from.
        """
        most = min(self.tokens, max(map(len, uniforms)))
        padded_BK = torch.zeros(len(last), most)
        for b, numbers in enumerate(uniforms):
            padded_BK[b, : len(numbers)] = torch.from_numpy(numbers[:most])
        temperature_B = torch.tensor(temperature)
        token_B = torch.tensor(last)
        found: list[list[int]] = [[] for _ in last]
        for k in range(most):
            states_BD = self.model.mtp[k](states_BD, self.model.embed_tokens(token_B))
            token_B, _ = sample(self.model.logits(states_BD), temperature_B, padded_BK[:, k])
            for b, token in enumerate(token_B.tolist()):
                if k < len(uniforms[b]):
                    found[b].append(token)
        return found


def held(guessed: list[int], drawn: list[int]) -> int:
    """How many of the draws count: one more than the guesses before the first that was wrong."""
    for i, token in enumerate(guessed):
        if token != drawn[i]:
            return i + 1
    return len(guessed) + 1
