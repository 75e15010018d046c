"""Warm test runs: exact ids and outcomes, whatever the tests do to their process."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from cadenza.sandbox import SandboxSpec

pytestmark = pytest.mark.needs_namespaces

VARIETY = """
import unittest
import pytest

def test_plain(): assert 1 + 1 == 2
def test_wrong(): assert [1, 2] == [1, 3], "lists differ"
def test_raises(): {}["missing"]
class TestGroup:
    def setup_method(self): self.x = 3
    def test_in_class(self): assert self.x == 3
    def test_fails_in_class(self): assert not self.x
class TestOld(unittest.TestCase):
    def test_old_good(self): self.assertEqual(1, 1)
    def test_old_bad(self): self.assertEqual(1, 2)
    @unittest.skip("later")
    def test_old_skipped(self): pass
@pytest.mark.parametrize("text", ["a b", "x[0]", " trailing ", "d::e", "\\u00e9", ""])
def test_texts(text): assert text != "x[0]"
@pytest.mark.parametrize("n", [1, 1])
def test_same(n): assert n
@pytest.fixture
def number(): return 7
@pytest.fixture
def broken(): raise RuntimeError("no fixture")
@pytest.fixture
def bad_end():
    yield 1
    raise RuntimeError("no end")
def test_fixture(number): assert number == 7
def test_error(broken): pass
def test_end(bad_end): pass
def test_skip(): pytest.skip("not now")
@pytest.mark.skipif(True, reason="never")
def test_skipif(): assert False
@pytest.mark.xfail
def test_xfail(): assert False
@pytest.mark.xfail(strict=True)
def test_strict(): pass
@pytest.mark.xfail
def test_xpass(): pass
def test_xfail_call(): pytest.xfail("known")
def test_fail_call(): pytest.fail("on purpose")
def test_tmp(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)
async def test_async(): pass
"""


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def tests_in(backend, run, tmp_path):
    """Runs pytest in a sandbox with the given files."""

    def go(files, args=(), **more):
        async def scenario():
            sandbox = await backend.create(SandboxSpec(layers=(root,)))
            try:
                return await sandbox.pytest(list(args), **more)
            finally:
                await sandbox.destroy()

        root = write(tmp_path / "tree", files)
        return run(scenario())

    return go


@pytest.fixture(scope="module")
def plain_outcomes(tmp_path_factory):
    """Outcomes of VARIETY by name, from a separate, ordinary pytest process."""
    root = write(tmp_path_factory.mktemp("plain") / "tree", {"test_variety.py": VARIETY})
    report = root.parent / "report.xml"
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        f"--junitxml={report}",
    ]
    subprocess.run(
        [*argv, f"--rootdir={root}"],
        cwd=root,
        capture_output=True,
        env={"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = next((k for k in ("error", "failure", "skipped") if k in kinds), "passed")
        outcomes[case.get("name")] = "failed" if outcome == "failure" else outcome
    return outcomes


@pytest.mark.parametrize(
    "args", [["test_variety.py"], [], ["--tb=no"]], ids=["short way", "all", "with an option"]
)
def test_outcomes_equal_those_of_an_ordinary_pytest_process(tests_in, plain_outcomes, args):
    result = tests_in({"test_variety.py": VARIETY}, args)
    got = {}
    for nodeid, outcome in result.tests.items():
        assert nodeid.startswith("test_variety.py::")
        got[
            nodeid.removeprefix("test_variety.py::").split("::", 1)[-1] if "Test" in nodeid else nodeid[17:]
        ] = outcome
    assert got == plain_outcomes and len(got) > 25
    assert result.exit_code == 1


def test_failure_tells_both_sides_and_where(tests_in):
    files = {"shop.py": "def total(xs):\n    return sum(xs) + 1\n"}
    files["test_shop.py"] = "from shop import total\n\ndef test_total():\n    assert total([3, 4]) == 7\n"
    (failure,) = tests_in(files).failures
    assert failure.message == "assert 8 == 7\n +  where 8 = total([3, 4])"
    assert (failure.nodeid, failure.path, failure.line) == ("test_shop.py::test_total", "test_shop.py", 4)
    assert failure.source == "assert total([3, 4]) == 7"


def test_error_inside_the_code_under_test_points_there(tests_in):
    files = {
        "deep.py": "def f(d):\n    return d['k']\n",
        "test_deep.py": "from deep import f\ndef test_f(): f({})\n",
    }
    (failure,) = tests_in(files).failures
    assert (failure.message, failure.path, failure.line) == ("KeyError: 'k'", "deep.py", 2)


def test_syntax_error_in_an_imported_module_leaves_every_test_missing(tests_in):
    files = {"bad.py": "def f(:\n", "test_bad.py": "import bad\ndef test_a(): pass\ndef test_b(): pass\n"}
    files["test_good.py"] = "def test_c(): pass\n"
    result = tests_in(files)
    assert result.tests == {} and result.exit_code == 2
    (failure,) = result.failures
    assert failure.nodeid == "test_bad.py" and failure.message.startswith("SyntaxError")
    assert (failure.path, failure.line) == ("bad.py", 1)


def test_import_error_names_the_module(tests_in):
    (failure,) = tests_in({"test_x.py": "import nowhere\ndef test_a(): pass\n"}).failures
    assert failure.message == "ModuleNotFoundError: No module named 'nowhere'"
    assert (failure.path, failure.line) == ("test_x.py", 1)


def test_missing_file_and_unknown_id_are_usage_errors_and_no_success(tests_in):
    files = {"test_x.py": "def test_a(): pass\n"}
    assert tests_in(files, ["test_nope.py"]).exit_code == 4
    assert tests_in(files, ["test_x.py::test_nope"]).exit_code == 4
    assert tests_in({"plain.py": ""}, ["plain.py"]).exit_code == 5


def test_selected_ids_run_alone(tests_in):
    files = {
        "test_x.py": "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_a(n): pass\ndef test_ab(): pass\n"
    }
    assert set(tests_in(files, ["test_x.py::test_a"]).tests) == {
        "test_x.py::test_a[1]",
        "test_x.py::test_a[2]",
    }
    assert set(tests_in(files, ["test_x.py::test_a[2]"]).tests) == {"test_x.py::test_a[2]"}


def test_endless_test_is_killed_and_what_had_finished_is_reported(tests_in):
    files = {"test_x.py": "def test_a(): pass\ndef test_b():\n    while True: pass\ndef test_c(): pass\n"}
    result = tests_in(files, timeout_s=0.6)
    assert result.timed_out and result.tests == {"test_x.py::test_a": "passed"} and result.exit_code != 0


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 11)", "sys.exit(0)", "os.abort()"])
def test_ending_the_process_is_never_a_success(tests_in, end):
    result = tests_in(
        {"test_x.py": f"import os, sys\ndef test_a(): pass\ndef test_b(): {end}\ndef test_c(): pass\n"}
    )
    assert result.exit_code != 0
    assert result.tests.get("test_x.py::test_b") != "passed"


def test_conftest_and_ini_files_of_the_repository_are_not_read(tests_in):
    files = {
        "conftest.py": "import os\ndef pytest_sessionfinish():\n    os._exit(0)\n"
        "def pytest_runtest_makereport(item, call): raise SystemExit(0)\n",
        "pytest.ini": "[pytest]\naddopts = --collect-only\n",
        "setup.cfg": "[tool:pytest]\naddopts = -k nothing\n",
        "test_x.py": "def test_a(): assert 1 == 2\n",
    }
    assert tests_in(files).tests == {"test_x.py::test_a": "failed"}


def test_conftest_is_read_when_asked_for(tests_in):
    files = {"conftest.py": "import pytest\n@pytest.fixture\ndef seven(): return 7\n"}
    files["test_x.py"] = "def test_a(seven): assert seven == 7\n"
    assert tests_in(files).tests == {"test_x.py::test_a": "error"}
    assert tests_in(files, conftest=True).tests == {"test_x.py::test_a": "passed"}


def test_runs_do_not_see_each_other_or_write_bytecode(sandbox, run):
    run(sandbox.pytest())
    run(sandbox.write("shop.py", b"def total(xs):\n    return sum(xs)\n"))
    assert set(run(sandbox.pytest()).tests.values()) == {"passed"}
    run(sandbox.write("shop.py", b"def total(xs):\n    return None\n"))
    assert set(run(sandbox.pytest()).tests.values()) == {"failed"}
    assert not [name for name in run(sandbox.list()) if "pycache" in name or name.endswith(".pyc")]


def test_repository_module_named_like_one_of_the_library_wins(tests_in):
    files = dict.fromkeys(("queue.py", "agent.py", "frames.py", "statistics.py", "shutil.py"), "VALUE = 5\n")
    checks = [
        f"import {name[:-3]}\ndef test_{name[:-3]}(): assert {name[:-3]}.VALUE == 5\n" for name in files
    ]
    result = tests_in(files | {"test_x.py": "".join(checks)})
    assert set(result.tests.values()) == {"passed"} and len(result.tests) == 5


def test_subdirectories_packages_and_capture_fixtures_work(tests_in):
    files = {
        "lib/__init__.py": "",
        "lib/core.py": "def f(): print('out')\n",
        "tests/test_core.py": "from lib.core import f\n"
        "def test_f(capsys):\n    f()\n    assert capsys.readouterr().out == 'out\\n'\n",
        "test_log.py": "import logging\n"
        "def test_log(caplog):\n    logging.warning('w')\n    assert 'w' in caplog.text\n",
    }
    result = tests_in(files)
    assert result.tests == {"tests/test_core.py::test_f": "passed", "test_log.py::test_log": "passed"}, result


def test_printed_output_is_returned_bounded(tests_in):
    files = {
        "test_x.py": "def test_a():\n"
        "    print('start')\n    for i in range(200000): print('x' * 50)\n    print('end')\n"
    }
    result = tests_in(files)
    assert result.tests == {"test_x.py::test_a": "passed"}
    assert (
        result.output.startswith("start\n")
        and result.output.endswith("end\n")
        and "bytes elided" in result.output
    )


def test_process_left_behind_by_a_test_is_dead_when_the_run_returns(sandbox, run):
    code = b"import subprocess\ndef test_a(): subprocess.Popen(['setsid', 'sleep', '55'])\n"
    run(sandbox.write("test_shop.py", code))
    result = run(sandbox.pytest(timeout_s=10))
    assert result.tests == {"test_shop.py::test_a": "passed"} and not result.timed_out
    assert (
        run(sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'slee[p]'"])).stdout
        == b"0\n"
    )


def test_threads_and_forks_of_tests_do_not_double_the_report(tests_in):
    text = (
        "import os, threading\n"
        "def test_a():\n    t = threading.Thread(target=print); t.start(); t.join()\n"
        "def test_b():\n    pid = os.fork()\n    if pid == 0: os._exit(3)\n    assert os.waitpid(pid, 0)[1] == 768\n"
    )
    assert tests_in({"test_x.py": text}).tests == {
        "test_x.py::test_a": "passed",
        "test_x.py::test_b": "passed",
    }


def test_memory_limit_fails_the_test_and_not_the_sandbox(sandbox, run):
    run(sandbox.write("test_shop.py", b"def test_a(): bytearray(3 << 30)\n"))
    (failure,) = run(sandbox.pytest()).failures
    assert failure.message.startswith("MemoryError")
    assert run(sandbox.exec(["echo", "ok"])).stdout == b"ok\n"
