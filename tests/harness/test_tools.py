from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadenza.harness import demo_tools
from cadenza.harness.tools import ERROR_KINDS
from cadenza.harness.tools.failure_line import failure_line
from cadenza.sandbox.spec import ExecResult, Failure, PytestResult
from cadenza.tokens import Call

NO_BLOCK = "error: expected an indented block after function definition on line 1"
DEF = "def f(x):\n    return 1"


def use(sandbox, name, args="", body=None):
    return asyncio.run(demo_tools().run(Call(name, args, body), sandbox))


def test_every_error_has_a_kind_of_the_taxonomy_and_says_what_to_write(make_sandbox):
    files = {
        "a.py": DEF.encode(),
        "bin": b"\0\1",
        "bad.py": b"def f(:\n",
        "two.py": f"{DEF}\n\n{DEF}".encode(),
    }
    sandbox = make_sandbox(files)
    for name, args, body, kind, text in (
        ("nothing", "", None, "unknown_tool", "error: no tool nothing"),
        ("read_file", "", None, "invalid_arguments", "error: usage: read_file PATH [FIRST_LINE]"),
        ("read_file", "b.py", None, "not_found", "error: no such file"),
        ("read_file", "a.py 9", None, "not_found", "error: a.py has 2 lines"),
        ("read_file", "a.py x", None, "invalid_arguments", "error: usage: read_file PATH [FIRST_LINE]"),
        ("read_file", "/etc/passwd", None, "refused", "error: refused"),
        ("read_file", "bin", None, "refused", "error: bin is binary"),
        ("read_file", "a.py", "more", "invalid_arguments", "error: usage: read_file PATH [FIRST_LINE]"),
        ("list_dir", "x", None, "invalid_arguments", "error: usage: list_dir"),
        ("run_tests", "x", None, "invalid_arguments", "error: usage: run_tests"),
        ("finish", "x", None, "invalid_arguments", "error: usage: finish"),
        ("grep", "", None, "invalid_arguments", "error: usage: grep PATTERN"),
        ("replace_def", "a.py", None, "invalid_arguments", None),
        ("replace_def", "", DEF, "invalid_arguments", None),
        ("replace_def", "a.py", "x = 2", "invalid_arguments", "error: not one def or class"),
        (
            "replace_def",
            "a.py",
            "def f():\n    return 1\n\nx = 2",
            "invalid_arguments",
            "error: not one def or class",
        ),
        (
            "replace_def",
            "a.py",
            "def f():\n    return (1",
            "invalid_arguments",
            "error: '(' was never closed, line 2",
        ),
        ("replace_def", "a.py", "    def f():\n    return 1", "invalid_arguments", NO_BLOCK),
        ("replace_def", "a.py", "def g():\n    return 1", "not_found", "error: no def g"),
        ("replace_def", "a.py", "class f:\n    x = 1", "not_found", "error: no class f"),
        ("replace_def", "b.py", DEF, "not_found", "error: no such file"),
        ("replace_def", "bad.py", DEF, "invalid_arguments", "error: the file does not parse"),
        ("replace_def", "two.py", DEF, "invalid_arguments", "error: 2 are called f"),
        ("replace_def", "../a.py", DEF, "refused", "error: refused"),
        ("replace_def", "a.py", DEF, "no_effect", "error: unchanged"),
    ):
        result = use(sandbox, name, args, body)
        assert result.error_kind == kind and kind in ERROR_KINDS, (name, args, result)
        assert result.text.startswith("error: ") and (text is None or result.text == text)
        assert not result.ends
    assert sandbox.files == files


def test_an_unforeseen_error_is_typed_and_not_raised(make_sandbox):
    class Full(make_sandbox):
        async def write(self, path, data):
            raise OSError(28, "No space left on device")

        async def list(self, path="."):
            raise RuntimeError("secret detail of the host")

    sandbox = Full({"a.py": DEF.encode()})
    result = use(sandbox, "replace_def", "a.py", DEF.replace("1", "2"))
    assert (result.error_kind, result.text) == ("unexpected_environment", "error: No space left on device")
    result = use(sandbox, "list_dir")
    assert (result.error_kind, result.text) == ("unexpected_environment", "error: RuntimeError")


def test_list_dir_leaves_out_what_python_writes_and_is_one_line(make_sandbox):
    files = {"a.py": b"", "__pycache__/a.pyc": b"", ".pytest_cache/x": b"", "b/c.py": b""}
    assert use(make_sandbox(files), "list_dir").text == "a.py b/c.py"
    many = {f"f{n:02}.py": b"" for n in range(50)}
    text = use(make_sandbox(many), "list_dir").text
    assert text.endswith("f39.py +10 more") and "\n" not in text
    assert use(make_sandbox({}), "list_dir").text == "empty"


def test_read_file_survives_bytes_that_are_no_text(make_sandbox):
    sandbox = make_sandbox({"a.py": b"x\r\n\xf0\n\nlast", "e": b""})
    assert use(sandbox, "read_file", "a.py").text == "x\n\ufffd\n\nlast"
    assert use(sandbox, "read_file", "./a.py 4").text == "last"
    assert use(sandbox, "read_file", "e").text == "empty"


class ExecSandbox:
    """Answers one command."""

    def __init__(self, rc, stdout=b"", timed_out=False):
        self.result = ExecResult(rc, stdout, b"", False, timed_out, 0.0)

    async def exec(self, argv, **keywords):
        self.argv, self.keywords = argv, keywords
        return self.result


def test_case_11_grep_always_names_a_path_and_guards_the_pattern():
    sandbox = ExecSandbox(0, b"./b.py:12:    y = total(x)\n./a.py:3:def total(x):\r\n")
    result = use(sandbox, "grep", "-v total(")
    assert result.text == "a.py:3|def total(x):\nb.py:12|    y = total(x)"
    assert sandbox.argv[-4:] == ["-e", "-v total(", "--", "."] and not sandbox.keywords.get("stdin")
    assert use(ExecSandbox(1), "grep", "x").text == "no match"
    assert use(ExecSandbox(1), "grep", "x").error_kind is None
    assert use(ExecSandbox(2), "grep", "[").error_kind == "invalid_arguments"
    assert use(ExecSandbox(-9, timed_out=True), "grep", "x").error_kind == "timeout"
    many = b"".join(b"./a.py:%d:x\n" % n for n in range(1, 10))
    assert use(ExecSandbox(0, many), "grep", "x").text.split("\n")[-2:] == ["a.py:6|x", "+3 more"]


def result_of(tests, failures=(), timed_out=False, code=1):
    class PytestSandbox:
        async def pytest(self, args, **_):
            return PytestResult(code, tests, list(failures), "", timed_out, 0.0)

    return use(PytestSandbox(), "run_tests")


def test_run_tests_is_one_line_a_failure_and_at_most_two():
    failures = [
        Failure(
            f"test_a.py::test_{n}",
            f"assert 5 == 6\n +  where 5 = total([{n}])",
            "test_a.py",
            3,
            f"assert total([{n}]) == 6",
        )
        for n in range(3)
    ]
    result = result_of({f.nodeid: "failed" for f in failures} | {"test_a.py::ok": "passed"}, failures)
    assert (
        result.text == "test_0: assert total([0]) == 6, got 5\ntest_1: assert total([1]) == 6, got 5\n+1 more"
    )
    assert result.error_kind is None
    assert result_of({"t::a": "passed", "t::b": "skipped"}, code=0).text == "ok: 1 passed"
    assert result_of({}, code=5).text == "no tests ran"
    for code in (70, -9, 3):  # the code under test ended the process: its passed tests are no success
        assert result_of({"t::a": "passed"}, code=code).error_kind == "unexpected_environment"
    assert result_of({}, timed_out=True).error_kind == "timeout"
    broken = Failure("test_a.py", "SyntaxError: invalid syntax", "a.py", 7, "def f(:")
    assert result_of({}, [broken]).text == "test_a.py: SyntaxError: invalid syntax at a.py:7"


@pytest.mark.parametrize(
    ("message", "source", "line"),
    [
        (
            "assert [1, 2] == [1, 3]\n  \n  At index 1 diff: 2 != 3",
            "assert f([1], k=2) == [1, 3]",
            "assert f([1], k=2) == [1, 3], got [1, 2]",
        ),
        ("assert False\n +  where False = ok(3)", "assert ok(3)", "assert ok(3), got False"),
        ("assert not 5\n +  where 5 = f(3)", "assert not f(3)", "assert not f(3), got 5"),
        ("AssertionError: assert 'a == b' == 'c'", "assert f() == 'c'", "assert f() == 'c', got 'a == b'"),
        (
            "AssertionError: bad total\nassert 5 == 6",
            'assert t(1) == 6, "bad total"',
            'assert t(1) == 6, "bad total", got 5',
        ),
        ("assert 3 in [1, 2]\n +  where [1, 2] = f(1)", "assert 3 in f(1)", "assert 3 in f(1), got [1, 2]"),
        ("assert 5 == 6\n +  where 5 = t(1)", "assert t(", "assert t(1) == 6, got 5"),
        ("assert 5 == 6", "", "assert 5 == 6"),
        (
            "IndexError: list index out of range",
            "return x[5]",
            "IndexError: list index out of range at a.py:7",
        ),
        ("SyntaxError: unmatched ')' (a.py, line 7)", "f())", "SyntaxError: unmatched ')' at a.py:7"),
        ("DID NOT RAISE ValueError", "with raises(ValueError):", "DID NOT RAISE ValueError"),
        ("assert <S object> == 3", "assert s == 3", "assert s == 3, got <S object>"),
        (f"assert '{'x' * 80}' == ''", "assert f() == ''", f"assert f() == '', got '{'x' * 56}..."),
    ],
)
def test_a_failure_names_call_and_value_on_one_line(message, source, line):
    assert failure_line(message, source, "a.py:7") == line


@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    message=st.text(max_size=80) | st.text(max_size=40).map(lambda s: "assert " + s),
    source=st.text(max_size=60)
    | st.sampled_from(
        ["assert f(1) == 2", "assert not x", "assert a in b", "assert (((", "assert a < b < c"]
    ),
)
def test_no_failure_message_breaks_the_line(message, source):
    text = failure_line(message, source, None)
    assert "\n" not in text and len(text) < 300
