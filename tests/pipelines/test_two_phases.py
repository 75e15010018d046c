"""Bulk and long-context pretraining with heads between them: what one stage leaves is what the next one takes."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza.core.errors import MissingArtifact
from cadenza.pipelines import make_plan, run_plan

pytestmark = pytest.mark.needs_train
TEXT = {
    "source_tokens": 4000, "source_documents": 8, "held_out_tokens": 2048, "tokens_per_step": 512,
    "tokens_per_microbatch": 512, "replay_share": 0.0, "threads": 1, "evaluate_every": 2,
}  # fmt: skip
BASE: dict[str, Any] = {
    "name": "base", "kind": "cadenza.pipelines.base_stage:PretrainBase", "steps": 1, "vocab_size": 320, "threads": 1,
    "source_tokens": 4000, "source_documents": 8, "tokenizer_source_documents": 4, "tokenizer_generated_documents": 40,
    "model": {
        "d_model": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "n_experts": 2,
        "experts_per_token": 1, "d_expert": 16, "d_shared": 16, "max_positions": 512,
    },
    "mixture": {"tokens_per_step": 512, "source_length": 256},
}  # fmt: skip
CPT: dict[str, Any] = {
    **TEXT, "name": "cpt", "kind": "cadenza.pipelines.cpt_stage:Cpt", "steps": 4, "keep_middle": 0.5, "row_length": 128,
}  # fmt: skip
MTP: dict[str, Any] = {
    **TEXT, "name": "mtp", "kind": "cadenza.pipelines.mtp_stage:Mtp", "inputs": {"model": "cpt"}, "steps": 3,
    "heads": 2, "width": 16, "row_length": 128,
}  # fmt: skip
LONG: dict[str, Any] = {
    **TEXT, "name": "long", "kind": "cadenza.pipelines.cpt_stage:Cpt", "inputs": {"base": "cpt", "heads": "mtp"},
    "steps": 2, "row_length": 1024, "stretch": 2.0, "tokens_per_step": 1024, "tokens_per_microbatch": 1024,
}  # fmt: skip


def weights(directory) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def trunk(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: t for name, t in tensors.items() if ".mtp." not in name and "mtp." not in name}


def test_heads_are_lost_moved_or_trained_on_another_trunk(tmp_path):
    from cadenza.model.hf import load_model

    outcome = run_plan(make_plan({"name": "r", "stage": [BASE, CPT, MTP, LONG]}), tmp_path / "run")
    folder = outcome.run_dir
    middle, end = weights(folder / "cpt" / "middle"), weights(folder / "cpt")
    assert any(not middle[n].equal(end[n]) for n in end)
    with_heads = weights(folder / "mtp")
    assert all(t.equal(middle[n]) for n, t in trunk(with_heads).items())  # the trunk stood still
    long = load_model(folder / "long")
    assert long.config.mtp_heads == 2 and long.config.max_positions == 1024
    assert long.config.rope_theta > load_model(folder / "cpt").config.rope_theta
    figures = {stage.name: stage.figures for stage in outcome.stages}
    assert 0.0 <= figures["mtp"]["agreement_2"] <= 1.0
    for when in ("before", "after", "unstretched"):
        assert all(figures["long"][f"perplexity_{when}_quarter{i}"] > 1.0 for i in (1, 2, 3, 4))
    assert not (folder / "long" / "before.json").exists() and not (folder / "long" / "middle").exists()


def test_a_trunk_without_a_middle_is_a_stack_trace(tmp_path):
    plan = make_plan({"name": "r", "stage": [BASE, {**CPT, "keep_middle": 0.0}, MTP]})
    with pytest.raises(MissingArtifact, match="has no weights from the middle") as failure:
        run_plan(plan, tmp_path / "run")
    assert failure.value.mend == "set its keep_middle above 0, or mtp.middle to false"
    run_plan(
        make_plan({"name": "r", "stage": [BASE, {**CPT, "keep_middle": 0.0}, {**MTP, "middle": False}]}),
        tmp_path / "run",
        restart_from="mtp",
    )
