"""Causality, and that the cached path computes the same function as the whole-sequence one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.model.config import ModelConfig
from cadenza.model.transformer import PolicyModel

pytestmark = pytest.mark.needs_train
VOCAB = 50


def tiny(seed: int, **changes) -> PolicyModel:
    config = ModelConfig(
        vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, n_experts=4,
        d_expert=16, d_shared=16, max_positions=256,
    ).model_copy(update=changes)  # fmt: skip
    model = PolicyModel(config)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if (
                p.dim() >= 2
            ):  # initialize leaves the convolution at zero, and everything too small to tell apart
                p.copy_(torch.randn(p.shape, generator=generator) * (0.5 if "conv" in name else 0.15))
    return model


@settings(max_examples=15)
@given(seed=st.integers(0, 100), taps=st.sampled_from([0, 2, 4]), cut=st.integers(1, 39), tied=st.booleans())
def test_a_later_token_changes_an_earlier_output(seed, taps, cut, tied):
    model = tiny(seed, short_conv=taps, tie_embeddings=tied)
    ids = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(seed))
    other = ids.clone()
    other[:, cut:] = (other[:, cut:] + 7) % VOCAB
    with torch.no_grad():
        a, b = model.hidden(ids)[0], model.hidden(other)[0]
    torch.testing.assert_close(a[:, :cut], b[:, :cut], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(a[:, cut:], b[:, cut:], atol=1e-3)


def test_the_convolution_starts_as_anything_but_the_identity():
    with_conv = tiny(0, short_conv=3)
    without = tiny(0, short_conv=0)
    state = {k: v for k, v in with_conv.state_dict().items() if "short_conv" not in k}
    without.load_state_dict(state)
    with torch.no_grad():
        for layer in with_conv.layers:
            layer.short_conv.weight_DP.zero_()  # type: ignore[union-attr]
        ids = torch.arange(20)[None]
        torch.testing.assert_close(with_conv.hidden(ids)[0], without.hidden(ids)[0])


def test_a_row_padded_past_max_positions_breaks_training_or_a_longer_one_is_computed():
    model = tiny(0, max_positions=100)
    with torch.no_grad():
        x, _ = model.hidden(torch.zeros(1, 128, dtype=torch.int64))  # 90 tokens padded to 128
        assert x.shape == (1, 128, 32)
        with pytest.raises(ValueError, match="exceed the model's 128 positions"):
            model.hidden(torch.zeros(2, 256, dtype=torch.int64))


def test_a_shape_that_cannot_be_built_is_accepted():
    for bad in (
        {"n_heads": 3, "n_kv_heads": 2},
        {"head_dim": 7},
        {"experts_per_token": 9},
        {"short_conv": 1},
    ):
        with pytest.raises(ValueError):
            ModelConfig.model_validate(bad)
