from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.harness.tools.edit_line import replace_line
from cadenza.rollouts.gold_edits import enclosing_name, gold_edits
from cadenza.rollouts.mistakes import near_line, wrong_line

lines = st.lists(st.sampled_from(["a", "b", "    c", "return x", "d = 1", "e"]), min_size=1, max_size=8)


@given(old=lines, new=lines, final=st.booleans())
def test_the_edits_turn_the_buggy_file_into_the_fixed_one(old, new, final):
    end = "\n" if final else ""
    base = {"m.py": ("\n".join(old) + end).encode(), "other.py": b"x\n"}
    fixed = {**base, "m.py": ("\n".join(new) + end).encode()}
    data = base["m.py"]
    edits = gold_edits(base, fixed)
    assert set(edits) == ({"m.py"} if old != new else set())
    for edit in edits.get("m.py", []):
        data, _ = replace_line(data, edit.line, edit.body)
    assert data == fixed["m.py"]


def test_what_edit_line_cannot_say_is_refused():
    with pytest.raises(ValueError):
        gold_edits({"a.py": b"x\n"}, {"a.py": b"x\n", "b.py": b"y\n"})
    with pytest.raises(ValueError):
        gold_edits({"a.py": b"x\ny\n"}, {"a.py": b"\ny\n"})


def test_the_name_around_a_line_is_the_innermost():
    source = "x = 1\nclass A:\n    def f(self):\n        return 1\n\ndef g():\n    return 2\n"
    assert [enclosing_name(source, n) for n in (1, 2, 3, 4, 6, 7)] == [None, "A", "f", "f", "g", "g"]
    assert enclosing_name("def f(:", 1) is None


def test_a_slip_differs_from_the_right_and_the_buggy_line():
    for seed in range(50):
        wrong = wrong_line(
            "    return a + b * 2 < limit", "    return a - b * 2 < limit", random.Random(seed)
        )
        assert wrong is not None
        assert wrong not in ("    return a + b * 2 < limit", "    return a - b * 2 < limit")
    assert wrong_line("    pass", "    x", random.Random(0)) is None


def test_a_line_to_err_on_is_code_of_the_same_function_and_not_one_tried_before():
    source = 'x = 1\n\ndef f(a):\n    """Text."""\n    b = a\n\n    b += 1\n    return b\n\ndef g():\n    return 2\n'
    lines = range(1, 12)
    found = {near_line(source, 7, random.Random(seed), lines) for seed in range(40)}
    assert found == {(5, "    b = a"), (8, "    return b")}
    assert {near_line(source, 7, random.Random(seed), {7, 8, 11}) for seed in range(9)} == {
        (8, "    return b")
    }
    assert near_line(source, 11, random.Random(0), lines) is None
    assert near_line(source, 1, random.Random(0), lines) is None
    assert near_line("def f(:", 1, random.Random(0), lines) is None


def test_a_line_to_err_on_in_a_method_is_of_that_method_and_keeps_no_carriage_return():
    source = 'class A:\r\n    """Text."""\r\n\r\n    def f(self):\r\n        x = 1\r\n        return x\r\n'
    assert near_line(source, 6, random.Random(0), range(1, 9)) == (5, "        x = 1")
