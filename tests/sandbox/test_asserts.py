"""Rewritten assertions behave as Python's own, and their text has the values."""

from __future__ import annotations

import ast
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.sandbox.guest import asserts

names = st.sampled_from(["a", "b", "c"])
leaf = names | st.integers(-3, 3).map(str) | st.sampled_from(["[]", "'x'", "None", "[a]", "f(b)"])
compare = st.tuples(leaf, st.sampled_from(["==", "!=", "<", "in", "not in", ">="]), leaf).map(" ".join)
expression = st.recursive(
    leaf | compare,
    lambda inner: st.one_of(
        inner.map("not ({})".format),
        st.tuples(inner, st.sampled_from(["and", "or", "+", "=="]), inner).map(
            lambda t: f"({t[0]}) {t[1]} ({t[2]})"
        ),
        st.tuples(inner, inner).map(lambda t: f"({t[0]}) if ({t[1]}) else 0"),
    ),
    max_leaves=3,
)


def outcome(source, rewrite):
    """What executing ``source`` does: the calls it makes, and the kind of its exception."""
    calls = []

    def f(value):
        calls.append(repr(value))
        return value

    tree = ast.parse(source)
    with warnings.catch_warnings(action="ignore"):  # of comparisons that make no sense
        code = compile(asserts.transform(tree) if rewrite else tree, "<case>", "exec")
    scope = {"f": f, "a": 1, "b": [2], "c": "x", "@explain": asserts.explain}
    try:
        exec(code, scope)
    except Exception as error:
        return calls, type(error)
    return calls, None


@given(expression, st.booleans(), st.sampled_from(["", ", f('message')"]))
def test_rewritten_assertion_evaluates_the_same_things_in_the_same_order(text, nested, message):
    source = f"assert {text}{message}"
    if nested:
        lines = ["def t():", " for _ in [0]:", "  try:", f"   {source}", "  finally:", "   f(0)", "t()"]
        source = "\n".join(lines)
    assert outcome(source, rewrite=True) == outcome(source, rewrite=False)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("assert x == 7", "assert 8 == 7"),
        ("assert x == 7, 'hint'", "hint\nassert 8 == 7"),
        ("assert not x", "assert not 8"),
        ("assert None", "assert None"),
        ("assert x in []", "assert 8 in []"),
        ("assert x is None", "assert 8 is None"),
    ],
)
def test_message_has_both_values(source, text):
    with pytest.raises(AssertionError) as caught:
        exec(
            compile(asserts.transform(ast.parse(source)), "<case>", "exec"),
            {"x": 8, "@explain": asserts.explain},
        )
    assert str(caught.value) == text


def test_value_that_cannot_be_shown_does_not_hide_the_failure():
    class Bad:
        def __repr__(self):
            raise ValueError

    assert asserts.value_text(Bad()) == "<unprintable Bad: ValueError>"
    assert len(asserts.value_text("x" * 9999)) <= 240
