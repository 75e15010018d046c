from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.harness.definitions import DefinitionRefused, definitions, innermost, replace_definition

SOURCE = """\
import os

def first(a):
    return a

class Shelf:
    \"\"\"Names.\"\"\"

    def __init__(self):
        self.names = []

    @property
    def size(self):
        def first(x):
            return x
        return len(self.names)

def last(
    a,
    b,
):
    return a + b
"""


def test_what_is_found_and_where():
    found = {(d.within, d.name): (d.first, d.last, d.decorated, d.indent) for d in definitions(SOURCE)}
    assert found == {
        ((), "first"): (3, 4, 3, ""),
        ((), "Shelf"): (6, 16, 6, ""),
        (("Shelf",), "__init__"): (9, 10, 9, "    "),
        (("Shelf",), "size"): (13, 16, 12, "    "),
        (("Shelf", "size"), "first"): (14, 15, 14, "        "),
        ((), "last"): (18, 22, 18, ""),
    }
    names = [d.name if (d := innermost(SOURCE, n)) else None for n in (1, 3, 6, 10, 12, 15, 16, 19)]
    assert names == [None, "first", "Shelf", "__init__", "size", "first", "size", "last"]
    assert innermost("def f(:", 1) is None


@pytest.mark.parametrize(
    ("text", "gone", "there"),
    [
        ("def first(a):\n    return -a", "def first(a):\n    return a\n", "def first(a):\n    return -a\n"),
        (
            "        def first(x):\n            return -x\n",
            "        def first(x):\n            return x\n",
            "        def first(x):\n            return -x\n",
        ),
        (
            "def size(self):\n    return 0",
            None,
            "    @property\n    def size(self):\n        return 0\n\ndef last(",
        ),
        (
            "    @cached\n    def size(self):\n        return 0",
            "@property",
            "= []\n\n    @cached\n    def size(self):\n        return 0\n\n",
        ),
        (
            "\n\nclass Shelf:\n    size = 0\n\n",
            "def __init__",
            "return a\n\nclass Shelf:\n    size = 0\n\ndef last(",
        ),
        ("def last(a, b):\n    return b", "    a,\n", "def last(a, b):\n    return b\n"),
    ],
)
def test_the_named_definition_alone_is_replaced(text, gone, there):
    after = replace_definition(SOURCE.encode(), text).decode()
    assert there in after and (gone is None or gone not in after)
    definitions(after)


def test_an_ambiguous_or_missing_name_is_refused_and_says_so():
    source = b"class A:\n    def f(self):\n        pass\n\nclass B:\n    def f(self):\n        pass\n"
    with pytest.raises(DefinitionRefused, match="2 are called f"):
        replace_definition(source, "    def f(self):\n        return 1")
    for text in ("def g():\n    pass", "class f:\n    pass"):
        with pytest.raises(DefinitionRefused) as refused:
            replace_definition(source, text)
        assert refused.value.missing


def test_a_file_loses_its_line_endings_or_bytes():
    source = b"# \xff\r\ndef f():\r\n    return 1\r\n\r\nx = 'a\x0cb'"
    after = replace_definition(source, "def f():\n    y = 1\n    return y")
    assert after == b"# \xff\r\ndef f():\r\n    y = 1\r\n    return y\r\n\r\nx = 'a\x0cb'"
    assert (
        replace_definition(b"def f():\r\n    return 1", "def f():\n    return 2")
        == b"def f():\r\n    return 2"
    )


names = st.sampled_from(["f", "g", "h"])


@given(order=st.lists(names, min_size=1, max_size=3, unique=True), name=names, text=st.text(max_size=30))
def test_any_text_replaces_one_definition_or_is_refused(order, name, text):
    blocks = {n: f"def {n}():\n    return {n!r}\n" for n in order}
    source = "\n".join(blocks.values()).encode()
    body = f"def {name}():\n    {text}"
    try:
        after = replace_definition(source, body)
    except DefinitionRefused:
        return
    definitions(after.decode())
    for other in set(order) - {name}:
        assert blocks[other].encode() in after
