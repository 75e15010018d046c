from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.harness.definitions import replace_definition
from cadenza.rollouts.gold_edits import gold_edits
from cadenza.rollouts.mistakes import wrong_definition, wrong_line

bodies = st.sampled_from(["a", "b", "return 1", "x = (1,\n        2)", "def inner():\n        return 2"])
functions = st.tuples(bodies, bodies, bodies, bodies)


def file_of(functions, end):
    f, g, method, other = functions
    g, method = (text.replace("\n", "\n    ") for text in (g, method))
    source = f"import os\n\ndef f():\n    {f}\n\nclass A:\n    def g(self):\n        {g}\n"
    source += f"\n    def h(self):\n        {method}\n\ndef g():\n    {other}"
    return (source + ("\n" if end else "")).encode()


@given(old=functions, new=functions, final=st.booleans(), crlf=st.booleans())
def test_the_edits_turn_the_buggy_file_into_the_fixed_one(old, new, final, crlf):
    def written(functions):
        data = file_of(functions, final)
        return data.replace(b"\n", b"\r\n") if crlf else data

    base = {"m.py": written(old), "other.py": b"x\n"}
    fixed = {**base, "m.py": written(new)}
    edits = gold_edits(base, fixed)
    assert set(edits) == ({"m.py"} if old != new else set())
    data = base["m.py"]
    for edit in edits.get("m.py", []):
        assert edit.old.encode() in base["m.py"].replace(b"\r", b"")
        data = replace_definition(data, edit.new)
    assert data == fixed["m.py"]
    changed = sum(a != b for a, b in zip(old, new, strict=True))
    assert len(edits.get("m.py", [])) == changed


def test_a_definition_is_written_twice_because_what_it_lies_in_is_written_too():
    source = "class A:\n    x = 1\n\n    def f(self):\n        return 1\n"
    (edit,) = gold_edits({"m.py": source.encode()}, {"m.py": source.replace("1", "2").encode()})["m.py"]
    assert edit.name == "A"


def test_methods_of_one_name_are_edited_through_their_class():
    source = "class A:\n    def f(self):\n        return 1\n\nclass B:\n    def f(self):\n        return 1\n"
    fixed = source[:-2] + "2\n"
    (edit,) = gold_edits({"m.py": source.encode()}, {"m.py": fixed.encode()})["m.py"]
    assert (edit.name, edit.line) == ("B", 5) and edit.new.startswith("class B:\n    def f")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"x = 1\n", b"x = 2\n"),
        (b"def f():\n    pass\n", b"def g():\n    pass\n"),
        (b"def f(:\n", b"def f():\n    pass\n"),
        (b"@a\ndef f():\n    pass\n", b"@b\ndef f():\n    pass\n"),
    ],
)
def test_what_replace_def_cannot_say_is_refused(before, after):
    with pytest.raises(ValueError, match="a.py"):
        gold_edits({"a.py": before}, {"a.py": after})
    with pytest.raises(ValueError, match="b.py"):
        gold_edits({"a.py": b"x\n"}, {"a.py": b"x\n", "b.py": b"y\n"})


def test_a_slip_differs_from_the_right_and_the_buggy_line():
    for seed in range(50):
        wrong = wrong_line(
            "    return a + b * 2 < limit", "    return a - b * 2 < limit", random.Random(seed)
        )
        assert wrong is not None
        assert wrong not in ("    return a + b * 2 < limit", "    return a - b * 2 < limit")
    assert wrong_line("    pass", "    x", random.Random(0)) is None


OLD = 'def f(a, b):\n    """Sum of 2."""\n    c = a * b\n    if c > 3:\n        c += 1\n    return c'
NEW = OLD.replace("a * b", "a + b")


def test_a_mistake_in_a_header_or_a_docstring_of_several_lines():
    old = (
        'class A:\n    def f(\n        self, n=1,\n    ):\n        """Up to 3,\n        True."""\n'
        "        a = n + 1\n        return a"
    )
    for seed in range(30):
        text = wrong_definition(old, old.replace("return a", "return a * 2"), random.Random(seed), True)
        assert text is not None and text.split("\n")[:6] == old.split("\n")[:6]


def test_a_mistake_that_repairs_or_touches_what_the_function_is_said_to_do():
    for elsewhere in (False, True):
        found = {wrong_definition(OLD, NEW, random.Random(seed), elsewhere) for seed in range(60)}
        assert found and not found & {None, OLD, NEW}
        for text in found:
            assert text is not None
            lines = text.split("\n")
            assert lines[:2] == OLD.split("\n")[:2]
            assert (lines[2] == "    c = a * b") == elsewhere
            assert sum(a != b for a, b in zip(lines, OLD.split("\n"), strict=True)) == 1
    assert wrong_definition("def f():\n    pass", "def f():\n    x", random.Random(0), False) is None
