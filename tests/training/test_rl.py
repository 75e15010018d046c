"""The RL step against its definition: advantages, what is left out, the gradient, the denominator, the weights."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples_made import VOCAB, policy, rollout, sample, segment, token_logp

from cadenza.core.errors import CadenzaError, TrainingDiverged
from cadenza.core.types import UNREAD
from cadenza.model.moe import MoE
from cadenza.training.config import RLStepConfig
from cadenza.training.rl import Batch, Sample, group_advantages, make_batch, pack, rl_step, thin

pytestmark = pytest.mark.needs_train
CONFIG = RLStepConfig(clip_norm=1e9, tokens_per_rollout=10.0)


class Recorder(torch.optim.Optimizer):
    """Keeps the gradient and changes nothing, so that steps can be compared."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.0})
        self.names = [n for n, _ in model.named_parameters()]

    def step(self, closure=None):  # type: ignore[override]
        ps = self.param_groups[0]["params"]
        self.grads = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in zip(self.names, ps, strict=True)
        }


def gradient(model, batch: Batch, config: RLStepConfig = CONFIG, **keys) -> dict[str, torch.Tensor]:
    recorder = Recorder(model)
    rl_step(model, recorder, batch, config, 0, bf16=False, **keys)
    return recorder.grads


def grads_of(model, loss: torch.Tensor, keep: bool = False) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=keep)
    return {
        n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)
    }


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=1e-3, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# advantages


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=10))
def test_failures_enter_the_baseline_or_advantages_do_not_sum_to_zero(rewards):
    group = [rollout(f"g/{i}", r, []) for i, r in enumerate(rewards)]
    advantages = group_advantages(group)
    assert [a is None for a in advantages] == [r is None for r in rewards]
    scored = [a for a in advantages if a is not None]
    assert all(math.isfinite(a) for a in scored) and abs(sum(scored)) < 1e-9
    present = [r for r in rewards if r is not None]
    if len(present) < 2:
        assert scored in ([], [0.0])


def test_a_group_without_spread_gives_nan_or_rounding_noise():
    group = [rollout(f"g/{i}", 0.1, []) for i in range(3)]  # 0.1 * 3 / 3 is not 0.1
    assert group_advantages(group) == [0.0, 0.0, 0.0]


def test_a_retry_or_a_second_segment_moves_the_baseline():
    model = policy()
    two = [segment(model, 1), segment(model, 2)]
    group = [rollout("g/0", 1.0, two), rollout("g/1", 0.0, []), rollout("g/1", 0.0, [])]
    assert group_advantages(group) == [0.5, -0.5, -0.5]
    assert {s.advantage for s in make_batch([group], False).samples} == {0.5}


# what is trained on


def test_a_broken_segment_is_trained_on_or_not_counted():
    model = policy()
    short, odd, nan, first = (segment(model, i) for i in range(4))
    short.logprob_S = short.logprob_S[:-1]
    odd.version_S = np.append(odd.version_S, 0).astype(np.int32)
    nan.logprob_S[0] = np.nan
    first.sampled_T[0] = True  # nothing predicts it
    first.logprob_S, first.version_S = np.append(first.logprob_S, -1.0), np.append(first.version_S, 0)
    whole = segment(model, 9)
    group = [rollout("g/0", 1.0, [short, odd, nan, first, whole]), rollout("g/1", 0.0, [])]
    batch = make_batch([group], False)
    assert batch.broken == 4 and [s.ids_T is whole.ids_T for s in batch.samples] == [True]
    metrics = rl_step(model, Recorder(model), batch, CONFIG, 0, bf16=False)
    assert metrics["broken_segments"] == 4.0


def test_overlong_rollouts_are_masked_unasked():
    model = policy()
    group = [
        rollout("g/0", 0.0, [segment(model, 1, finish="context")]),
        rollout("g/1", 1.0, [segment(model, 2)]),
    ]
    assert len(make_batch([group], False).samples) == 2
    masked = make_batch([group], True)
    assert (len(masked.samples), masked.masked_overlong, masked.rollouts) == (1, 1, 2)


def test_a_kl_term_spares_rollouts_of_groups_without_spread():
    model = policy()
    group = [rollout(f"g/{i}", 1.0, [segment(model, i)]) for i in range(2)]
    assert make_batch([group], False).samples == []
    assert len(make_batch([group], False, keep_zero=True).samples) == 2


@given(
    lengths=st.lists(st.integers(2, 200), min_size=1, max_size=12), budget=st.sampled_from([64, 256, 4096])
)
def test_packing_loses_or_repeats_a_sampled_token(lengths, budget):
    model_free = []
    for i, length in enumerate(lengths):
        ids = np.full(length, i, np.int32)
        sampled = np.arange(length) % 2 == 1
        count = int(sampled.sum())
        model_free.append(
            Sample(
                ids, sampled, np.full(count, -float(i), np.float32), np.full(count, i), float(i), 1.0 + i % 2
            )
        )
    packed = pack(model_free, budget)
    tokens = sorted(
        (int(t), float(b), float(a))
        for p in packed
        for t, b, a in zip(p.target_N, p.behaviour_N, p.advantage_N, strict=True)
    )
    assert tokens == sorted((i, -float(i), float(i)) for i, n in enumerate(lengths) for _ in range(n // 2))
    for p in packed:
        assert torch.equal(p.ids_BT.flatten()[p.at_N + 1], p.target_N), (
            "a target is not at the position it is predicted for"
        )
        assert p.ids_BT.shape[0] == 1 or p.ids_BT.numel() <= budget
        assert {1.0 + int(t) % 2 for t in p.target_N} == {p.temperature}


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=16), st.integers(1, 8))
def test_thinning_a_group_moves_its_sum_or_keeps_too_many(rewards, most):
    advantages = [
        a or 0.0 for a in group_advantages([rollout(f"g/{i}", r, []) for i, r in enumerate(rewards)])
    ]
    weights = thin(advantages, most, "g")
    assert sum(w * a for w, a in zip(weights, advantages, strict=True)) == pytest.approx(0.0, abs=1e-9)
    kept = {a for w, a in zip(weights, advantages, strict=True) if w}
    assert kept == {a for a in advantages if a}, "a class of rewards is gone"
    assert sum(w > 0 for w in weights) <= max(most, len(kept))
    assert weights == thin(advantages, most, "g")


# the gradient


def naive(model, parts, rollouts, config, reference=None) -> torch.Tensor:
    """Token by token: -(1/Z) sum min(pi/mu, cap) * (A - beta * (log pi - log ref)) * log pi."""
    total = torch.zeros(())
    for s, advantage in parts:
        temperature = s.sampling["temperature"]
        logp = token_logp(model, s.ids_T.tolist(), temperature)
        ref = token_logp(reference, s.ids_T.tolist(), temperature).detach() if reference else None
        for i, position in enumerate(np.flatnonzero(s.sampled_T)):
            lp = logp[position - 1]
            weight = min(math.exp(float(lp.detach()) - float(s.logprob_S[i])), config.importance_cap)
            a = advantage
            if ref is not None:
                a -= config.kl_beta * (float(lp.detach()) - float(ref[position - 1]))
            total = total - weight * a * lp
    return total / (rollouts * config.tokens_per_rollout)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_gradient_differs_from_the_objective_written_token_by_token(beta):
    model, reference = policy(0), policy(1)
    parts = [
        (segment(model, 1, length=20, noise=0.6), 0.7),
        (segment(model, 2, length=150, noise=0.6), -0.2),
        (segment(model, 3, length=33, temperature=0.6, noise=0.6), -0.5),
    ]
    config = CONFIG.model_copy(update={"kl_beta": beta, "importance_cap": 1.5, "tokens_per_microbatch": 256})
    batch = Batch([sample(s, a) for s, a in parts], rollouts=5)
    got = gradient(model, batch, config, reference=reference if beta else None)
    assert_same(got, grads_of(model, naive(model, parts, 5, config, reference if beta else None)))


def test_more_tokens_of_one_rollout_rescale_the_gradient_of_another():
    model = policy()
    a, long, b = segment(model, 1), segment(model, 2, length=200), segment(model, 3)
    alone = gradient(model, Batch([sample(b, -0.5)], 2))
    for other in (a, long):
        both = gradient(model, Batch([sample(other, 0.5), sample(b, -0.5)], 2))
        rest = gradient(model, Batch([sample(other, 0.5)], 2))
        assert_same({n: both[n] - rest[n] for n in both}, alone)


def test_a_stale_token_weighs_more_than_the_cap():
    model = policy()
    s = segment(model, 1)
    fresh = gradient(model, Batch([sample(s, 1.0)], 1))
    s.logprob_S = s.logprob_S - 5.0  # the trainer finds every token 148 times as likely as the engine did
    recorder = Recorder(model)
    metrics = rl_step(model, recorder, Batch([sample(s, 1.0)], 1), CONFIG, 0, bf16=False)
    assert_same(recorder.grads, {n: 2.0 * g for n, g in fresh.items()}, 1e-4)
    assert metrics["importance_weight"] == pytest.approx(2.0) and metrics["importance_capped"] == 1.0


# KL: why k1 is in the advantage and not a loss (Composer 2, section 4.1; reference page section 13, tests 1 and 2)


def test_k3_has_the_smaller_variance_where_policies_have_diverged():
    """Composer 2, figure 4, with unit-variance Gaussians a distance mu apart: KL = mu^2 / 2."""
    x = np.random.default_rng(0).standard_normal(400_000)
    variance = {}
    for mu in (0.5, 2.0):
        log_r = -(mu * (x + mu) - mu**2 / 2)  # log p/q at samples of q = N(mu, 1), p = N(0, 1)
        variance[mu] = (np.var(-log_r), np.var(np.exp(log_r) - 1 - log_r))
        assert np.var(-log_r) == pytest.approx(mu**2, rel=0.02)  # 2 KL
    assert variance[0.5][0] > variance[0.5][1] and variance[2.0][0] < variance[2.0][1]


def test_k1_as_a_loss_would_have_a_gradient_in_expectation():
    model = policy()
    prompt = [1, 2, 3]
    logp_V = model.logits(model.hidden(torch.tensor([prompt]))[0])[0, -1].log_softmax(-1)
    k1_loss = (logp_V.exp().detach() * logp_V).sum()  # E_v~pi [log pi - log ref]; ref has no gradient
    assert max(float(g.abs().max()) for g in grads_of(model, k1_loss).values()) < 1e-6
    reference_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    logp_V = model.logits(model.hidden(torch.tensor([prompt]))[0])[0, -1].log_softmax(-1)
    in_reward = (logp_V.exp().detach() * (logp_V.detach() - reference_V) * logp_V).sum()
    kl = (logp_V.exp() * (logp_V - reference_V)).sum()
    wanted = grads_of(model, kl, keep=True)
    assert_same(grads_of(model, in_reward), wanted)


def test_k1_in_the_advantage_is_not_k2_as_a_loss():
    model, reference = policy(0), policy(1)
    s = segment(model, 5)
    config = CONFIG.model_copy(update={"kl_beta": 1.0})
    got = gradient(model, Batch([sample(s, 0.0)], 1), config, reference=reference)
    at = np.flatnonzero(s.sampled_T) - 1
    ids = s.ids_T.tolist()
    k2 = 0.5 * (token_logp(model, ids)[at] - token_logp(reference, ids).detach()[at]) ** 2
    assert_same(got, grads_of(model, k2.sum() / 10.0))


# metrics and guards


def test_tokens_over_keys_of_older_weights_count_as_numeric_disagreement():
    model = policy()
    same, mixed = segment(model, 1, version=3), segment(model, 2, version=3, noise=1.0)
    mixed.version_S[0] = 2
    batch = Batch([sample(same, 1.0), sample(mixed, -1.0)], 2)
    metrics = rl_step(model, Recorder(model), batch, CONFIG, 3, bf16=False)
    assert metrics["parity_tokens"] == len(same.logprob_S)
    assert metrics["k3"] < 1e-6 < metrics["drift_k3"]
    assert metrics["trained_tokens"] == len(same.logprob_S) + len(mixed.logprob_S)


def test_a_gradient_that_is_not_finite_is_stepped_on():
    model = policy()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with pytest.raises(TrainingDiverged, match=r"gradient.*lower STAGE\.step\.lr"):
        rl_step(model, optimizer, Batch([sample(segment(model, 1), math.inf)], 1), CONFIG, 0, bf16=False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_warm_up_is_skipped_or_never_ends():
    model = policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.9)
    config = CONFIG.model_copy(update={"lr": 1e-6, "warmup_steps": 4})
    seen = []
    for version in range(6):
        rl_step(model, optimizer, Batch([sample(segment(model, 1), 1.0)], 1), config, version, bf16=False)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.25e-6, 0.5e-6, 0.75e-6, 1e-6, 1e-6, 1e-6])


def test_the_rate_of_rl_is_not_full_in_the_middle_or_not_small_at_the_end():
    config = RLStepConfig(warmup_steps=4, decay_share=0.4, final_lr_scale=0.1)
    assert config.lr_scale(0, 0.0) == 0.25 and config.lr_scale(9, 0.5) == 1.0
    assert config.lr_scale(9, 0.8) == pytest.approx(0.5) and config.lr_scale(9, 1.0) == 0.1
    assert RLStepConfig(warmup_steps=0).lr_scale(0, 1.0) == 1.0


def test_a_step_without_a_token_reports_means_of_zero():
    model = policy()
    metrics = rl_step(model, Recorder(model), Batch([], 2), CONFIG, 3, bf16=False)
    assert metrics["trained_tokens"] == 0.0
    assert not {"entropy", "k3", "drift_k3", "staleness_mean", "importance_weight"} & set(metrics)


# router replay


def routed(model, seed: int, routes_of=None):
    """A segment with the routes that ``routes_of`` (the model itself by default) takes."""
    made = segment(model, seed)
    found: list[torch.Tensor] = []
    original = MoE.choose

    def choose(self, logits_NE, given=None):
        out = original(self, logits_NE, given)
        found.append(out[2])
        return out

    MoE.choose = choose  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            (routes_of or model).hidden(torch.tensor([made.ids_T.tolist()]))
    finally:
        MoE.choose = original  # type: ignore[method-assign]
    made.routes_TLK = torch.stack(found, 1).numpy().astype(np.uint8)
    made.routes_TLK[-1] = UNREAD
    return made


@pytest.mark.parametrize("mode", ["pure", "filtered"])
def test_replay_of_the_own_routes_changes_the_step(mode):
    model = policy()
    batch = Batch([sample(routed(model, i), 1.0 - 2.0 * (i % 2)) for i in range(4)], 4)
    plain = gradient(model, batch)
    assert_same(plain, gradient(model, batch, CONFIG.model_copy(update={"router_replay": mode})))


def test_how_far_the_routers_disagree_is_not_told_where_routes_are_replayed():
    model, other = policy(), policy(5)
    batches = {
        name: Batch([sample(routed(model, 1, by), 1.0)], 1) for name, by in (("own", model), ("other", other))
    }
    told = {}
    for name, mode in (("own", "filtered"), ("other", "pure"), ("other", "off")):
        config = CONFIG.model_copy(update={"router_replay": mode})
        told[name, mode] = rl_step(policy(), Recorder(policy()), batches[name], config, 0, bf16=False)
    assert told["own", "filtered"]["routes_differ"] == told["own", "filtered"]["routes_refused"] == 0
    assert told["other", "pure"]["routes_differ"] > 0.1 and told["other", "pure"]["routes_refused"] == 0
    assert "routes_differ" not in told["other", "off"]


def test_replayed_routes_are_those_of_another_sample_or_of_padding():
    """Rows of several lengths in one microbatch, each with the routes of a model that routes otherwise."""
    model, other = policy(), policy(5)
    config = CONFIG.model_copy(update={"router_replay": "pure"})
    segments = [routed(model, i, other) for i in range(3)]
    for i, s in enumerate(segments[1:], 1):
        cut = len(s.ids_T) - 2 * i
        keep = int(s.sampled_T[:cut].sum())
        segments[i] = dataclasses.replace(
            s, ids_T=s.ids_T[:cut], sampled_T=s.sampled_T[:cut], token_kind_T=s.token_kind_T[:cut],
            logprob_S=s.logprob_S[:keep], version_S=s.version_S[:keep], routes_TLK=s.routes_TLK[:cut],  # pyright: ignore[reportOptionalSubscript]
        )  # fmt: skip
    samples = [sample(s, 1.0) for s in segments]
    together = gradient(model, Batch(samples, 3), config)
    apart = [gradient(model, Batch([one], 3), config) for one in samples]
    assert_same(together, {n: sum(g[n] for g in apart) for n in together})  # type: ignore[arg-type]


@pytest.mark.parametrize("spoil", ["none", "short", "unread"])
def test_a_token_without_routes_is_trained_with_replay(spoil):
    model = policy()
    made = routed(model, 1)
    if spoil == "none":
        made.routes_TLK = None
    elif spoil == "short":
        made.routes_TLK = made.routes_TLK[:3]  # pyright: ignore[reportOptionalSubscript]
    else:
        made.routes_TLK[int(np.flatnonzero(made.sampled_T)[-1]) - 1] = UNREAD  # pyright: ignore[reportOptionalSubscript]
    config = CONFIG.model_copy(update={"router_replay": "filtered"})
    with pytest.raises(CadenzaError, match="no routes for some token that is trained or read by one"):
        gradient(model, Batch([sample(made, 1.0)], 1), config)
    gradient(model, Batch([sample(made, 1.0)], 1), CONFIG)
