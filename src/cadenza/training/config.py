"""Configuration of the training algorithms. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cadenza.core.config import StrictConfig


class OptimizerConfig(StrictConfig):
    """Muon for the matrices, AdamW for everything else. Rates are peaks: linear warm-up, flat, then linear decay.

    ``adam_lr``: learning rate of AdamW; ``muon_lr``: learning rate of Muon (0: AdamW alone). ``weight_decay``:
    decoupled, of both. ``warmup_steps``: steps over which the rates rise; ``decay_share``: last share of the steps,
    over which they fall; ``final_lr_scale``: factor on the rates at the end. ``clip_norm``: most the norm of the
    gradient may be. ``balance_weight``: of the router's load-balancing loss.
    """

    adam_lr: float = Field(default=3e-3, ge=0)
    muon_lr: float = Field(default=0.015, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup_steps: int = Field(default=20, ge=0)
    decay_share: float = Field(default=0.4, ge=0, le=1)
    final_lr_scale: float = Field(default=0.05, ge=0, le=1)
    clip_norm: float = Field(default=1.0, gt=0)
    balance_weight: float = Field(default=0.01, ge=0)

    def scale(self, step: int, steps: int) -> float:
        """Learning-rate factor of ``step`` (0-based) among ``steps``."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = (steps - step) / max(1.0, self.decay_share * steps)
        return warm * max(self.final_lr_scale, min(1.0, left))


class MixtureConfig(StrictConfig):
    """Shares of a step's tokens; what they leave is reading exercises.

    ``tokens_per_step``: of one optimizer step. ``source_share``: Python source. ``clean_share``: generated modules
    without a bug. ``commit_share``: repairs, a listing and a message and then the function written anew.
    ``source_length``: tokens of a row of source, and the most of any other text. ``answer_weight``: loss weight of the
    answers, which are all of an exercise's point; ``listing_weight``: of what they are given.
    """

    tokens_per_step: int = Field(default=3072, gt=0)
    source_share: float = Field(default=0.05, ge=0, le=1)
    clean_share: float = Field(default=0.05, ge=0, le=1)
    commit_share: float = Field(default=0.5, ge=0, le=1)
    source_length: int = Field(default=1024, gt=0)
    answer_weight: float = Field(default=2.0, ge=0)
    listing_weight: float = Field(default=0.5, ge=0)


class SftDataConfig(StrictConfig):
    """``context_weight``: loss weight of tokens the expert did not write; tool output is Python source and test
    results, and predicting it a little teaches the small model to read them. ``mistake_weight``: of a turn the expert
    marked as a deliberate mistake (its recovery is what should be learned). ``validation_share``: of the tasks (0..1),
    held out to watch the loss."""

    context_weight: float = Field(default=0.1, ge=0)
    mistake_weight: float = Field(default=0.0, ge=0)
    validation_share: float = Field(default=0.1, gt=0, le=1)


class RLStepConfig(StrictConfig):
    """Keys of one optimizer step.

    ``lr``: learning rate of AdamW, at its peak; ``betas``: of AdamW; ``weight_decay``: decoupled. ``warmup_steps``:
    steps over which the rate rises. ``decay_share``: last share of the run over which it falls, of its steps or its
    seconds, whichever are further gone; ``final_lr_scale``: factor on the rate at the end. ``clip_norm``: most the norm
    of the gradient may be. ``tokens_per_microbatch``: most of one pass, padding included. ``mask_overlong``: leaves out
    rollouts that were cut (context, turn or number of turns). ``tokens_per_rollout``: Z / (rollouts of the step), the
    constant loss denominator per rollout, about the usual number of sampled tokens. ``importance_cap``: truncation of
    the off-policy weight. ``kl_beta``: weight of k1 = log pi - log ref in the advantage, detached.
    ``samples_per_group``: train at most so many of a group's rollouts, drawn evenly from its reward classes and
    weighted to keep the expected gradient (0: all). ``router_replay``: tokens go to the experts that the engine sent
    them to: all of its choices (pure), or those that the trainer finds plausible (filtered). ``replay_keep``: with
    ``filtered`` an expert is kept whose probability is at least this share of the least that the trainer would pick.
    ``parity_limit``: mean k3 between engine and trainer at the same version above which the run stops (invariant 7),
    per dtype.
    """

    lr: float = Field(default=2e-4, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=3, ge=0)
    decay_share: float = Field(default=0.0, ge=0.0, le=1.0)
    final_lr_scale: float = Field(default=0.1, ge=0, le=1)
    clip_norm: float = Field(default=1.0, gt=0)
    tokens_per_rollout: float = Field(default=160.0, gt=0)
    tokens_per_microbatch: int = Field(default=4096, gt=0)
    importance_cap: float = Field(default=2.0, gt=0)
    kl_beta: float = Field(default=0.0, ge=0)
    mask_overlong: bool = False
    router_replay: Literal["off", "pure", "filtered"] = "off"
    replay_keep: float = Field(default=0.5, gt=0)
    samples_per_group: int = Field(default=0, ge=0)
    parity_limit_bf16: float = Field(default=0.01, gt=0)
    parity_limit_fp32: float = Field(default=1e-4, gt=0)

    def lr_scale(self, step: int, progress: float) -> float:
        """Learning-rate factor of ``step`` (0-based) when ``progress`` (0..1) of the run is over."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if not self.decay_share:
            return warm
        left = (1.0 - progress) / self.decay_share
        return warm * max(self.final_lr_scale, min(1.0, left))
