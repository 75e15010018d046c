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


@pytest.mark.parametrize(
    ("data", "text", "expected"),
    [
        ("@(\n    dec\n)\ndef f():\n    pass\n", "@new\ndef f():\n    pass", "@new\ndef f():\n    pass\n"),
        ("\x0cdef f():\n    pass\n", "def f():\n    return 2", "\x0cdef f():\n    return 2\n"),
        ("\ufeffdef f():\n    pass\n", "def f():\n    return 2", "\ufeffdef f():\n    return 2\n"),
        (
            "def f():\n    pass\n    # why\n# of g\n",
            "def f():\n    x\n    # why",
            "def f():\n    x\n    # why\n# of g\n",
        ),
        (
            "def f():\n    pass\n    # 1\n    # 2\n",
            "def f():\n    x\n    def g():\n        pass",
            "def f():\n    x\n    def g():\n        pass\n",
        ),
        ("# of f\ndef f():\n    pass\n", "# of f\ndef f():\n    x\n", "# of f\ndef f():\n    x\n"),
        ("x\r\ndef f(): pass", "def f():\n    pass", "x\r\ndef f():\r\n    pass"),
        ("def f(): pass\n", "\r\n\r\ndef f():\r\n    pass\r\n", "def f():\n    pass\n"),
        (
            "class A:\n    def f(self):\n        pass\n",
            'def f(self):\n    return """a\nb\n    c"""',
            'class A:\n    def f(self):\n        return """a\nb\n    c"""\n',
        ),
        (
            "class A:\n    @property\n    def s(self): pass\n    @s.setter\n    def s(self, v): pass\n",
            "    @s.setter\n    def s(self, v): x",
            "class A:\n    @property\n    def s(self): pass\n    @s.setter\n    def s(self, v): x\n",
        ),
    ],
)
def test_a_byte_beside_the_definition_changes(data, text, expected):
    assert replace_definition(data.encode(), text).decode() == expected


@pytest.mark.parametrize(
    ("data", "text", "why"),
    [
        ("def f():\n    pass\n", "    def f():\n        x\nelse:\n    import os", "invalid syntax"),
        ("if a:\n    def f():\n        pass\n", "    def f():\n        x\nelse:\n    y", "invalid syntax"),
        ("def f():\n    pass\n", "def f():\n    x = 1\r    return x", "carriage returns"),
        ("def f():\n    pass # a\rx = 1\n", "def f():\n    x", "does not parse"),
        ("def f():\n    pass\n", "def f():\n    return " + "(" * 300, "nested parentheses"),
        (
            "def f():\n    pass\n",
            "def f():\n    return " + "-" * 9000 + "1",
            "too deep",
        ),
        ("def f():\n    pass\n", 'def f():\n    return "\0"', "null"),
        ("def f():\n    return 'a\udcff'\n", "def f():\n    return 'b\ufffd'", "bytes that are no text"),
        ("x = 1\n", "", "not one def"),
        ("", "def f(): pass", "no def f"),
    ],
)
def test_a_text_that_is_no_definition_or_a_file_that_would_not_parse_is_written(data, text, why):
    with pytest.raises(DefinitionRefused, match=why):
        replace_definition(data.encode("utf-8", "surrogateescape"), text)


names = st.sampled_from(["f", "g", "h"])
lines = st.sampled_from(
    ["pass", "@g", "def f(): pass", "else:", "x = 1", '"""', "# note", "\x0c", "\r", "return (1,", "2)"]
)
indents = st.sampled_from(["", "    ", "\t", "        "])


@given(
    order=st.permutations(["f", "g", "h"]),
    crlf=st.booleans(),
    name=names,
    above=st.sampled_from(["", "@dec\n", "# c\n", "\n"]),
    indent=indents,
    body=st.lists(st.tuples(indents, lines).map("".join), max_size=4),
)
def test_any_text_replaces_one_definition_or_is_refused(order, crlf, name, above, indent, body):
    blocks = {n: f"x = 1\ndef {n}():\n    return {n!r}\n" for n in order}
    source = "\n".join(blocks.values())
    text = f"{indent}{above}{indent}def {name}():\n" + "\n".join(f"{indent}{line}" for line in body)
    before, after = source.split(blocks[name].removeprefix("x = 1\n"))
    data, prefix, suffix = (
        (s.replace("\n", "\r\n") if crlf else s).encode() for s in (source, before, after)
    )
    try:
        result = replace_definition(data, text)
    except DefinitionRefused:
        return
    assert result.startswith(prefix) and result.endswith(suffix)
    found = definitions(result.decode().replace("\r\n", "\n"))
    assert [d.name for d in found if not d.within] == order
