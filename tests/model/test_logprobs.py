"""Chunked log-probabilities against the plain definition, with gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.model.logprobs import CHUNK, token_logprobs

pytestmark = pytest.mark.needs_train


def plain(x, w, target, temperature):
    logp = (x @ w.T / temperature).log_softmax(-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@settings(max_examples=15)
@given(
    n=st.sampled_from([1, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    seed=st.integers(0, 1000),
)
def test_chunked_values_or_gradients_differ_from_plain_log_softmax(n, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=generator, requires_grad=True)
    w = torch.randn(33, 12, generator=generator, requires_grad=True)
    target = torch.randint(33, (n,), generator=generator)
    pull = torch.randn(n, generator=generator)
    logp, entropy = token_logprobs(x, w, target, temperature)
    wanted, wanted_entropy = plain(x, w, target, temperature)
    torch.testing.assert_close(logp, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad((logp * pull).sum(), (x, w))
    want = torch.autograd.grad((wanted * pull).sum(), (x, w))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_no_tokens_break_the_product():
    x = torch.zeros(0, 4, requires_grad=True)
    logp, entropy = token_logprobs(x, torch.randn(5, 4), torch.zeros(0, dtype=torch.int64))
    assert logp.shape == entropy.shape == (0,)


def test_autocast_returns_low_precision_or_loses_the_weight_gradient():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 12, generator=generator, requires_grad=True)
    w = torch.randn(33, 12, generator=generator, requires_grad=True)
    target = torch.randint(33, (9,), generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = token_logprobs(x, w, target)
    assert logp.dtype == torch.float32
    logp.sum().backward()
    assert x.grad is not None and w.grad is not None and w.grad.dtype == torch.float32
    torch.testing.assert_close(logp, plain(x, w, target, 1.0)[0], rtol=0.1, atol=0.1)
