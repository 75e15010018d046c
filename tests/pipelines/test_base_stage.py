"""Pretraining of a base in one stage and on from there in another."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza.core.errors import ConfigError
from cadenza.pipelines import make_plan, run_plan

pytestmark = pytest.mark.needs_train
FIRST: dict[str, Any] = {
    "name": "base", "kind": "cadenza.pipelines.base_stage:PretrainBase", "steps": 2, "vocab_size": 320, "threads": 1,
    "source_tokens": 4000, "source_documents": 8, "tokenizer_source_documents": 4, "tokenizer_generated_documents": 40,
    "model": {
        "d_model": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "n_experts": 2,
        "experts_per_token": 1, "d_expert": 16, "d_shared": 16,
    },
    "mixture": {"tokens_per_step": 1024},
}  # fmt: skip
MORE: dict[str, Any] = {
    **{k: v for k, v in FIRST.items() if k != "model" and not k.startswith(("vocab", "tokenizer"))},
    "name": "longer", "inputs": {"model": "base"},
}  # fmt: skip


def test_a_second_stage_begins_from_nothing_or_with_another_tokenizer(tmp_path):
    run_plan(make_plan({"name": "r", "stage": [FIRST, MORE]}), tmp_path / "run")
    first, more = (tmp_path / "run" / name for name in ("base", "longer"))
    assert (first / "tokenizer.json").read_bytes() == (more / "tokenizer.json").read_bytes()
    assert (first / "config.json").read_bytes() == (more / "config.json").read_bytes()
    before, after = weights(first), weights(more)
    assert before.keys() == after.keys()
    table = "model.embed_tokens.weight"
    moved = float((before[table] - after[table]).float().norm() / before[table].float().norm())
    assert 0 < moved < 0.5  # another draw would lie at about 1.4


def weights(directory) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(("key", "value"), [("model", {"d_model": 64}), ("vocab_size", 512)])
def test_a_shape_or_tokenizer_that_the_given_model_does_not_have_is_passed_over(tmp_path, key, value):
    plan = make_plan({"name": "r", "stage": [FIRST, {**MORE, key: value}]})
    with pytest.raises(ConfigError, match="cannot change its shape or tokenizer") as refused:
        run_plan(plan, tmp_path / "run")
    assert f"longer.{key}" in refused.value.mend
