"""Configuration: a typo is refused with the nearest key, and the digest changes exactly when a result could."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from cadenza.core.config import StrictConfig, canonical, config_digest, differences, operational, parse_config
from cadenza.core.errors import ConfigError


class Optimizer(StrictConfig):
    learning_rate: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    log_every: int = operational(10)


class Training(StrictConfig):
    steps: int = 100
    optimizer: Optimizer = Optimizer()
    extra: Optimizer | None = None


def test_a_table_with_one_key_that_resets_the_others_of_its_field_s_default():
    class Outer(StrictConfig):
        training: Training = Training(optimizer=Optimizer(learning_rate=0.5), steps=7)

    assert parse_config(Outer, {"training": {}}) == Outer()
    changed = parse_config(Outer, {"training": {"steps": 9}}).training
    assert (changed.steps, changed.optimizer) == (9, Optimizer(learning_rate=0.5))
    changed = parse_config(Outer, {"training": {"optimizer": {"log_every": 3}}}).training
    assert (changed.steps, changed.optimizer) == (7, Optimizer(learning_rate=0.5, log_every=3))
    with pytest.raises(ConfigError, match="training.optimizer.log_evry"):
        parse_config(Outer, {"training": {"optimizer": {"log_evry": 3}}})


def test_unknown_key_names_its_full_path_and_the_nearest_key():
    with pytest.raises(ConfigError) as failure:
        parse_config(Training, {"optimizer": {"learning_rat": 1.0}}, where="sft")
    assert str(failure.value) == "unknown key 'sft.optimizer.learning_rat'; did you mean 'learning_rate'?"


def test_unknown_key_inside_an_optional_table_knows_that_table_s_keys():
    with pytest.raises(ConfigError, match="did you mean 'betas'"):
        parse_config(Training, {"extra": {"beta": 1}})


def test_unknown_key_like_nothing_lists_what_there_is():
    with pytest.raises(ConfigError, match="known keys: extra, optimizer, steps"):
        parse_config(Training, {"zzz": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": "many"}, "key 'sft.steps' = 'many' cannot be used"),
        ({"optimizer": {"learning_rate": -1}}, "key 'sft.optimizer.learning_rate' = -1 cannot be used"),
        ({"optimizer": 3}, "key 'sft.optimizer' = 3 cannot be used"),
        ({"steps": True}, "key 'sft.steps' = True cannot be used: true and false are no numbers"),
        (
            {"optimizer": {"learning_rate": float("nan")}},
            "key 'sft.optimizer.learning_rate' = nan cannot be used",
        ),
    ],
)
def test_wrong_value_is_named_with_its_key(values, message):
    with pytest.raises(ConfigError) as failure:
        parse_config(Training, values, where="sft")
    assert failure.value.cause.startswith(message)
    assert failure.value.exit_code == 2


def test_missing_key_says_how_to_set_it():
    class Needs(StrictConfig):
        path: str

    with pytest.raises(ConfigError, match=r"key 'cpt.path' is missing; set it with --set cpt.path=VALUE"):
        parse_config(Needs, {}, where="cpt")


def test_digest_ignores_what_only_changes_how_a_stage_runs():
    plain, chatty = Training(), Training(optimizer=Optimizer(log_every=1))
    assert config_digest(plain) == config_digest(chatty)
    assert "log_every" not in canonical(plain)["optimizer"]


@given(
    st.integers(1, 10**6), st.floats(1e-9, 1e3), st.integers(1, 10**6), st.floats(1e-9, 1e3), st.booleans()
)
def test_digests_are_equal_exactly_when_the_values_are(steps, rate, other_steps, other_rate, same):
    first = Training(steps=steps, optimizer=Optimizer(learning_rate=rate))
    if same:
        other_steps, other_rate = steps, rate
    second = Training(steps=other_steps, optimizer=Optimizer(learning_rate=other_rate))
    assert (config_digest(first) == config_digest(second)) == (first == second)


def test_differences_name_the_changed_leaves_only():
    old = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert differences(old, {"a": {"b": 1, "c": 3}, "d": [2]}) == ["a.c: 2 -> 3", "d: [1] -> [2]"]
    assert differences(old, old) == []
