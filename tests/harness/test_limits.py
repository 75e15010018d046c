"""The limits that travel with a model."""

from __future__ import annotations

import json

import pytest

from cadenza.core.errors import CorruptArtifact
from cadenza.harness import Limits, limits_of, save_limits
from cadenza.harness.windows import WindowConfig


def test_a_model_is_used_under_other_limits_than_it_was_trained_under(tmp_path):
    assert limits_of(tmp_path) is None
    limits = Limits(max_turns=32, windows=WindowConfig(mode="summary", trigger=704, most=3))
    save_limits(limits, tmp_path)
    assert limits_of(tmp_path) == limits != Limits()


@pytest.mark.parametrize("text", ["{", "[]", '{"max_turns": 0}', '{"turns": 3}'])
def test_limits_that_cannot_be_used_are_passed_over(tmp_path, text):
    (tmp_path / "agent.json").write_text(text)
    with pytest.raises(CorruptArtifact, match="agent.json"):
        limits_of(tmp_path)


def test_a_model_from_before_calls_were_refused_gets_another_harness(tmp_path):
    save_limits(Limits(max_turns=7), tmp_path)
    assert limits_of(tmp_path) == Limits(max_turns=7)
    body = json.loads((tmp_path / "agent.json").read_text())
    del body["format"], body["refuse_repeats"], body["max_run_tokens"]
    (tmp_path / "agent.json").write_text(json.dumps(body))
    assert limits_of(tmp_path) == Limits(max_turns=7, refuse_repeats=False)
    (tmp_path / "agent.json").write_text(json.dumps({**body, "format": 3}))
    with pytest.raises(CorruptArtifact, match="format is 3"):
        limits_of(tmp_path)
