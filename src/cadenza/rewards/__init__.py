"""Rewards: outcome and length."""

from cadenza.rewards.outcome import LengthPenalty, RewardConfig, reward

__all__ = ["LengthPenalty", "RewardConfig", "reward"]
