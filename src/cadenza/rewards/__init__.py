"""Rewards: outcome, length and behaviours."""

from cadenza.rewards.outcome import LengthPenalty, RewardConfig, reward, summary_of

__all__ = ["LengthPenalty", "RewardConfig", "reward", "summary_of"]
