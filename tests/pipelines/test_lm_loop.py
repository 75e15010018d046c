"""Next-token training of a stage: what an interruption or a full disk leaves is what the next attempt goes on from."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cadenza.core.errors import CorruptCheckpoint, ResourceExhausted
from cadenza.core.progress import Progress

pytestmark = pytest.mark.needs_train


@pytest.fixture
def attempt(tmp_path):
    """Makes the ``LMRun`` of one attempt on a tiny model, saving after every step."""
    import torch

    from cadenza.model.config import ModelConfig
    from cadenza.model.transformer import PolicyModel
    from cadenza.pipelines.lm_loop import LMRun
    from cadenza.training.config import OptimizerConfig
    from cadenza.training.lm import microbatches

    def make(resumed: bool, d_model: int = 32) -> LMRun:
        torch.manual_seed(0)
        config = ModelConfig(
            vocab_size=64, d_model=d_model, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, n_experts=2,
            experts_per_token=1, d_expert=16, d_shared=16,
        )  # fmt: skip
        model = PolicyModel(config)
        model.initialize(0)
        context: Any = SimpleNamespace(name="sft", out=tmp_path, resumed=resumed, progress=Progress())
        row = (np.arange(40, dtype=np.uint16), np.ones(40, np.float32))
        return LMRun(
            context, model, OptimizerConfig(), lambda _: microbatches([row], 64), 4,
            threads=1, save_every_s=0.0,
        )  # fmt: skip

    return make


def interrupt_at(step: int):
    def evaluate(now: int) -> dict[str, float]:
        if now == step:
            raise KeyboardInterrupt
        return {}

    return evaluate


def test_a_resumed_training_counts_its_tokens_from_zero(attempt):
    with pytest.raises(KeyboardInterrupt):
        attempt(resumed=False).run(1, interrupt_at(3))
    again = attempt(resumed=True)
    assert (again.state.step, again.tokens) == (2, 2 * 64)
    again.run(1, lambda _: {})
    assert (again.state.step, again.tokens) == (4, 4 * 64)


def test_a_full_disk_is_a_defect(attempt):
    run = attempt(resumed=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(ResourceExhausted, match="no space"):
            run.run(1, lambda _: {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_of_another_model_is_a_stack_trace(attempt):
    with pytest.raises(KeyboardInterrupt):
        attempt(resumed=False).run(1, interrupt_at(3))
    with pytest.raises(CorruptCheckpoint, match="not one of this model.*--restart-from STAGE"):
        attempt(resumed=True, d_model=64)
