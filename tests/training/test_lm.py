"""Next-token training: padding weighs nothing, microbatches lose nothing, a step is the same however it is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples_made import VOCAB, policy, token_logp

from cadenza.core.errors import TrainingDiverged
from cadenza.training.config import OptimizerConfig
from cadenza.training.lm import LoopState, mean_nll, microbatches, pad_rows, train, weighted_nll
from cadenza.training.optimizers import Optimizers

pytestmark = pytest.mark.needs_train


def made(lengths, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, VOCAB, n).astype(np.uint16), rng.choice([0.0, 0.1, 1.0], n).astype(np.float32))
        for n in lengths
    ]


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=30), budget=st.sampled_from([64, 512, 4096])
)
def test_a_microbatch_loses_weight_or_is_over_its_budget(lengths, budget):
    sequences = made(lengths)
    out = microbatches(sequences, budget)
    assert sum(len(r.ids_BT) for r in out) == len(lengths)
    wanted = sum(float(w.sum()) for _, w in sequences)
    assert sum(float(r.weight_BT.sum()) for r in out) == pytest.approx(wanted, rel=1e-4)
    for r in out:
        assert r.ids_BT.shape[1] % 64 == 0
        assert len(r.ids_BT) == 1 or r.ids_BT.numel() <= budget


def test_padding_or_the_first_token_is_scored():
    model = policy()
    sequences = made([5, 20, 64])
    nll, weight, _ = weighted_nll(model, pad_rows(sequences), bf16=False)
    wanted = sum(
        float(-(token_logp(model, ids.tolist()).detach().numpy() * w[1:]).sum()) for ids, w in sequences
    )
    assert float(nll.detach()) == pytest.approx(wanted, rel=1e-4)
    assert weight == pytest.approx(sum(float(w[1:].sum()) for _, w in sequences), rel=1e-5)


def trained(steps: int, stop_after: int | None = None, budget: int = 4096):
    model = policy()
    config = OptimizerConfig(warmup_steps=1, balance_weight=0.0)
    optimizers = Optimizers(model, 1e-3, 0.01, 0.0)
    state = LoopState()
    seen = []

    def batches(step: int):
        return microbatches(made([30, 40, 64], seed=step), budget)

    def go():
        loop = train(
            model, optimizers, config, batches, steps, state, bf16=False, on_step=lambda s, v: seen.append(v)
        )
        for step in loop:
            if step == stop_after:
                break

    go()
    if stop_after is not None:
        go()
    assert state.step == steps
    return model, seen


def test_a_loop_continued_at_its_step_sees_other_data():
    whole, _ = trained(4)
    broken, _ = trained(4, stop_after=2)
    assert all(torch.equal(v, broken.state_dict()[k]) for k, v in whole.state_dict().items())


def test_smaller_microbatches_make_another_step():
    _, seen_a = trained(1)
    _, seen_b = trained(1, budget=64)
    assert seen_a[0]["nll"] == pytest.approx(seen_b[0]["nll"], rel=1e-4)
    assert seen_a[0]["grad_norm"] == pytest.approx(seen_b[0]["grad_norm"], rel=1e-3)


def test_a_step_without_any_weight_divides_by_zero():
    model = policy()
    rows = [pad_rows([(np.ones(5, np.uint16), np.zeros(5, np.float32))])]
    optimizers = Optimizers(model, 1e-3, 0.0, 0.0)
    config = OptimizerConfig()
    list(
        train(model, optimizers, config, lambda _: rows, 1, LoopState(), bf16=False, on_step=lambda *_: None)
    )
    assert mean_nll(model, rows, bf16=False) == 0.0


class Scales(Optimizers):
    """Remembers the rates it was given."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.seen: list[float] = []

    def step(self, scale: float) -> None:
        self.seen.append(scale)
        super().step(scale)


def test_a_run_that_goes_on_near_its_deadline_has_the_full_rate_again():
    model = policy()
    optimizers = Scales(model, 1e-3, 0.01, 0.0)
    config = OptimizerConfig(warmup_steps=1, decay_share=0.4, final_lr_scale=0.0)
    loop = train(
        model, optimizers, config, lambda step: microbatches(made([30], step), 4096), 100, LoopState(step=10),
        bf16=False, on_step=lambda *_: None, deadline_s=1e6, used_s=0.9e6,
    )  # fmt: skip
    assert next(loop) == 11
    assert optimizers.seen == pytest.approx([0.25], abs=0.03)  # a tenth of the steps is left, of the last 40


def test_a_run_that_has_used_its_time_goes_on_for_as_long_again():
    model = policy()
    loop = train(
        model, Optimizers(model, 1e-3, 0.01, 0.0), OptimizerConfig(), lambda step: [], 100, LoopState(step=10),
        bf16=False, on_step=lambda *_: None, deadline_s=50.0, used_s=50.0,
    )  # fmt: skip
    assert list(loop) == []


def test_a_rate_that_is_too_high_is_a_stack_trace():
    model = policy()
    with torch.no_grad():
        model.embed_tokens.weight.fill_(float("inf"))
    loop = train(
        model, Optimizers(model, 1e-3, 0.01, 0.0), OptimizerConfig(), lambda step: microbatches(made([30]), 4096),
        1, LoopState(), bf16=False, on_step=lambda *_: None,
    )  # fmt: skip
    with pytest.raises(TrainingDiverged, match="lower STAGE.optimizer.adam_lr"):
        next(loop)
