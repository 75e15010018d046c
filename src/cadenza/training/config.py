"""Configuration of the training algorithms. Importable without torch."""

from __future__ import annotations

from pydantic import Field

from cadenza.core.config import StrictConfig


class OptimizerConfig(StrictConfig):
    """Rates are peaks: linear warm-up, flat, then linear decay to ``final_lr_scale`` over ``decay_share``."""

    adam_lr: float = 3e-3
    muon_lr: float = 0.015
    weight_decay: float = 0.01
    warmup_steps: int = 20
    decay_share: float = 0.4
    final_lr_scale: float = 0.05
    clip_norm: float = 1.0
    balance_weight: float = 0.01  # of the router's load-balancing loss

    def scale(self, step: int, steps: int) -> float:
        """Learning-rate factor of ``step`` (0-based) among ``steps``."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = (steps - step) / max(1.0, self.decay_share * steps)
        return warm * max(self.final_lr_scale, min(1.0, left))


class MixtureConfig(StrictConfig):
    """Shares of a step's tokens; what they leave is reading exercises. ``answer_weight``: loss weight of the
    answers, which are a tenth of a document's text and all of its point; ``listing_weight``: of the listing before
    them."""

    tokens_per_step: int = 3072
    source_share: float = 0.05
    clean_share: float = 0.05
    commit_share: float = 0.6
    source_length: int = 1024
    answer_weight: float = 2.0
    listing_weight: float = 0.5


class SftDataConfig(StrictConfig):
    """``context_weight``: loss weight of tokens the expert did not write; tool output is Python source and test
    results, and predicting it a little teaches the small model to read them. ``mistake_weight``: of a turn the
    expert marked as a deliberate mistake (its recovery is what should be learned)."""

    context_weight: float = 0.1
    mistake_weight: float = 0.0
    validation_share: float = 0.1


class RLStepConfig(StrictConfig):
    """Keys of one optimizer step.

    The rate rises over ``warmup_steps`` and falls to ``final_lr_scale`` of itself over the last ``decay_share`` of the
    run, of its steps or its seconds, whichever are further gone.
    ``tokens_per_rollout``: Z / (rollouts of the step), the constant loss denominator per rollout, about the usual
    number of sampled tokens. ``importance_cap``: truncation of the off-policy weight. ``kl_beta``: weight of
    k1 = log pi - log ref in the advantage, detached. ``samples_per_group``: train at most so many of a group's
    rollouts, drawn evenly from its reward classes and weighted to keep the expected gradient (0: all).
    ``parity_limit``: mean k3 between engine and trainer at
    the same version above which the run stops (invariant 7), per dtype.
    """

    lr: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 3
    decay_share: float = Field(default=0.0, ge=0.0, le=1.0)
    final_lr_scale: float = Field(default=0.1, ge=0.0, le=1.0)
    clip_norm: float = 1.0
    tokens_per_rollout: float = 80.0
    tokens_per_microbatch: int = 4096
    importance_cap: float = 2.0
    kl_beta: float = 0.0
    mask_overlong: bool = False
    samples_per_group: int = 0
    parity_limit_bf16: float = 0.01
    parity_limit_fp32: float = 1e-4

    def lr_scale(self, step: int, progress: float) -> float:
        """Learning-rate factor of ``step`` (0-based) when ``progress`` (0..1) of the run is over."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if not self.decay_share:
            return warm
        left = (1.0 - progress) / self.decay_share
        return warm * max(self.final_lr_scale, min(1.0, left))
