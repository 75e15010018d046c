"""pytest in a fork of a warm interpreter: 45 ms of start-up are paid once, in the zygote.

``warm_up`` imports every module pytest uses, configures it and starts a session whose root is ``/work``. A test
run forks, collects and runs in that session. Results travel as JSON lines, one a test, so that a run that is
killed or kills itself still reports what it finished.

This relies on two private attributes of pytest (``Config._rootpath``, ``Session`` built before collection);
``warm_up`` proves them with a real run at start and refuses to serve if the result is wrong.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import unittest
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import Config, _prepareconfig
from _pytest.main import Session
from _pytest.reports import CollectReport, TestReport

from . import asserts, lean

ROOT = "/work"
OPTIONS = (
    "-c", "/dev/null", "--import-mode=prepend", "--assert=plain", "-s",
    *(f"-pno:{name}" for name in (
        "cacheprovider", "terminal", "faulthandler", "junitxml", "pastebin", "stepwise", "setuponly", "setupplan",
        "threadexception", "unraisableexception", "warnings", "doctest", "legacypath",
    )),
)  # fmt: skip
# The lean session leaves out what most test files never name and every test would pay for.
LEAN = (*(option for option in OPTIONS if option != "-s"), "-pno:capture", "-pno:logging", "-pno:subtests")
OWN = sys.prefix + "/"  # taken before a relocation: compiled code keeps the paths it was loaded from
MESSAGE_LIMIT = 4000  # characters of one failure's message
# Modules that a repository's file of the same name must not displace: the interpreter and pytest stand on them.
KEPT = frozenset(sys.builtin_module_names) | {
    "os",
    "sys",
    "site",
    "abc",
    "codecs",
    "io",
    "pytest",
    "py",
    "pluggy",
}


class Warm:
    """A configured pytest, ready to collect."""

    def __init__(self, config: Config, session: Session, reporter: Reporter) -> None:
        self.config = config
        self.session = session
        self.reporter = reporter


class Reporter:
    """The only plugin: turns reports into lines and avoids pytest's costly rendering of tracebacks."""

    def __init__(self) -> None:
        self._sink = -1
        self._outcomes: dict[str, str] = {}

    def attach(self, fd: int) -> None:
        """From now on lines go to this descriptor."""
        self._sink = fd

    def emit(self, line: dict[str, Any]) -> None:
        """Writes one JSON line."""
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self._sink, data) :]

    # Not tryfirst: unittest's hook, which puts the real exception in place, must come before.
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> TestReport | None:
        if call.excinfo is not None and call.excinfo.errisinstance(
            (pytest.skip.Exception, unittest.SkipTest)
        ):
            return None  # rare; pytest's own report knows the reason and where it was given
        outcome, crash, when = "passed", None, call.when
        assert when != "collect"
        if call.excinfo is not None:
            outcome, crash = "failed", _crash(call.excinfo)
        return TestReport(
            item.nodeid, item.location, {}, outcome, crash, when, (), call.duration, call.start, call.stop
        )  # fmt: skip

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        if report.when == "call" or not report.passed:
            name = "failed" if report.when == "call" else "error"
            line: dict[str, Any] = {
                "test": report.nodeid,
                "outcome": name if report.failed else report.outcome,
            }
            if report.failed:
                line["failure"] = _failure(report.longrepr)
            self.emit(line)

    def result(self, nodeid: str, outcome: str, excinfo: pytest.ExceptionInfo[BaseException] | None) -> None:
        """One result of the short way."""
        line: dict[str, Any] = {"test": nodeid, "outcome": outcome}
        if outcome in ("failed", "error") and excinfo is not None:
            line["failure"] = _failure(_crash(excinfo))
        self.emit(line)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, CollectReport, CollectReport]:
        report = yield
        excinfo = report.call.excinfo  # type: ignore[attr-defined]  # pytest drops it before pytest_collectreport
        if report.failed and excinfo is not None:
            report.crash = _crash(excinfo)  # type: ignore[attr-defined]
        return report

    def pytest_collectreport(self, report: CollectReport) -> None:
        if report.failed:
            crash = getattr(report, "crash", None) or str(report.longrepr)
            self.emit({"collection": report.nodeid, "failure": _failure(crash)})


class Crash(str):
    """The message of a failure that also knows where it happened."""

    path: str
    line: int
    source: str


def _crash(excinfo: pytest.ExceptionInfo[BaseException]) -> Crash:
    """Message as pytest's short summary has it; place: the last frame below /work that is not pytest's."""
    error = excinfo.value
    cause = error.__cause__ or error.__context__
    if type(error).__name__ == "CollectError" and cause is not None:
        error = cause  # pytest wraps import errors of a test module; the cause has the file and line
    text = "".join(_render(error))
    crash = Crash(text[:MESSAGE_LIMIT])
    crash.path, crash.line, crash.source = _place(error)
    return crash


def _render(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as broken:
        text = f"<unprintable: {type(broken).__name__}>"
    if isinstance(error, AssertionError):
        return text if text.startswith("assert ") else f"AssertionError: {text}".rstrip(": ")
    if isinstance(error, pytest.fail.Exception):
        return text
    return f"{name}: {text}".rstrip(": ")


def _place(error: BaseException) -> tuple[str, int, str]:
    if isinstance(error, SyntaxError) and error.filename:
        return _relative(error.filename), error.lineno or 0, (error.text or "").strip()
    path, line = "", 0
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if (name.startswith(ROOT + "/") and not name.startswith(OWN)) or not path:
            path, line = name, trace.tb_lineno
        trace = trace.tb_next
    return _relative(path), line, _source(path, line)


def _relative(path: str) -> str:
    return path[len(ROOT) + 1 :] if path.startswith(ROOT + "/") else path


def _source(path: str, line: int) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                if number == line:
                    return text.strip()
    except OSError:
        pass
    return ""


def _failure(crash: Any) -> dict[str, Any]:
    return {
        "message": str(crash),
        "path": getattr(crash, "path", ""),
        "line": getattr(crash, "line", 0),
        "source": getattr(crash, "source", ""),
    }


def _configure(root: str, options: tuple[str, ...]) -> Warm:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    reporter = Reporter()
    config = _prepareconfig([*options, "--noconftest", "--rootdir", os.getcwd()], plugins=[reporter])
    config._rootpath = Path(root)
    object.__setattr__(config.invocation_params, "dir", Path(root))
    config.known_args_namespace.confcutdir = root
    config.pluginmanager._confcutdir = Path(root)
    session = Session.from_config(config)
    session.exitstatus = pytest.ExitCode.OK
    config._do_configure()
    config.hook.pytest_sessionstart(session=session)
    return Warm(config, session, reporter)


def warm_up() -> tuple[Warm, Warm]:
    """Imports and configures pytest, proves the arrangement with throw-away runs; returns sessions for /work.

    Returns:
        The lean and the full session.

    Raises:
        RuntimeError: this version of pytest does not behave as the warm path needs.
    """
    folder = os.path.realpath(tempfile.mkdtemp(prefix="cadenza-warm-"))
    before = (os.getcwd(), list(sys.path))
    finder = asserts.install(folder)
    try:
        Path(folder, "warm_subject.py").write_text("def one():\n    return 1\n")
        Path(folder, "test_warm.py").write_text(
            "from warm_subject import one\ndef test_good():\n    assert one() == 1\n"
            "def test_bad():\n    assert [one()] == [2], 'x'\n"
        )
        os.chdir(folder)
        for options in (LEAN, OPTIONS):
            _prove(_configure(folder, options), folder, _run_lean if options is LEAN else _run_in)
        os.chdir("/")
        sys.path[:] = before[1]
        return _configure(ROOT, LEAN), _configure(ROOT, OPTIONS)
    finally:
        sys.meta_path.remove(finder)
        asserts.install(ROOT)
        shutil.rmtree(folder, ignore_errors=True)
        os.chdir(before[0])
        sys.path[:] = before[1]
        sys.path_importer_cache.clear()


def _prove(warm: Warm, folder: str, way: Callable[[Warm, str, list[str], int], int | None]) -> None:
    read, write = os.pipe()
    code = way(warm, folder, ["test_warm.py"], write)
    os.close(write)
    with open(read, "rb") as file:
        result = summarize(file.read(), code)
    outcomes = {"test_warm.py::test_good": "passed", "test_warm.py::test_bad": "failed"}
    if result["tests"] != outcomes or result["exit_code"] != 1:
        raise RuntimeError(f"pytest {pytest.__version__} does not work in a warm session: {result}")
    for name in ("warm_subject", "test_warm"):
        sys.modules.pop(name, None)


def run(sessions: tuple[Warm, Warm], args: list[str], conftest: bool, sink: int) -> None:
    """In the forked child: runs pytest on ``args`` below /work and ends the process.

    Plain paths and node ids take a warm session; options (anything that starts with ``-``) or ``conftest`` need a
    configuration of their own.
    """
    gc.set_threshold(10_000, 10, 10)
    gc.enable()  # the zygote's heap is frozen: only what the tests make is looked at
    os.chdir(ROOT)
    _make_way(ROOT)
    if conftest or any(arg.startswith("-") for arg in args):
        reporter = Reporter()
        reporter.attach(sink)
        sys.path.insert(0, ROOT)
        options = [option for option in OPTIONS if option != "-pno:terminal"]  # -q, -v, --tb are its options
        options += ["--rootdir", ROOT, *([] if conftest else ["--noconftest"])]
        code = int(pytest.main([*options, *args], plugins=[reporter]))
        reporter.emit({"exit": code})
    else:
        small, full = sessions
        code = _run_lean(small, ROOT, args, sink)
        if code is None:
            code = _run_in(full, ROOT, args, sink)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_lean(warm: Warm, root: str, args: list[str], sink: int) -> int | None:
    """As ``_run_in``, the short way; None when it cannot serve ``args`` and nothing has been run."""
    names = lean.plain_files(root, args)
    if names is None:
        return None
    warm.reporter.attach(sink)
    if root not in sys.path:
        sys.path.insert(0, root)

    def collect_and_run() -> bool:
        if not lean.collect(warm.session, root, names, args):
            return False
        if warm.session.testsfailed:
            raise Session.Interrupted("collection failed")
        lean.run_items(warm.session, warm.reporter.result)
        return True

    code = _guarded(warm, collect_and_run)
    if code is not None:
        warm.reporter.emit({"exit": code})
    return code


def _run_in(warm: Warm, root: str, args: list[str], sink: int) -> int:
    warm.reporter.attach(sink)
    if root not in sys.path:
        sys.path.insert(0, root)
    warm.config.args = list(args) or [root]
    code = _guarded(warm, lambda: _collect_and_run(warm))
    assert code is not None
    warm.reporter.emit({"exit": code})
    return code


def _collect_and_run(warm: Warm) -> bool:
    warm.config.hook.pytest_collection(session=warm.session)
    warm.config.hook.pytest_runtestloop(session=warm.session)
    return True


def _guarded(warm: Warm, work: Callable[[], bool]) -> int | None:
    """The frame of ``_pytest.main.wrap_session``: pytest's exit code for what ``work`` does; None if it declines."""
    session = warm.session
    try:
        if not work():
            return None
        if session.testsfailed:
            code = pytest.ExitCode.TESTS_FAILED
        elif session.testscollected == 0:
            code = pytest.ExitCode.NO_TESTS_COLLECTED
        else:
            code = pytest.ExitCode.OK
    except pytest.UsageError as error:
        print(*error.args, sep="\n", file=sys.stderr)
        code = pytest.ExitCode.USAGE_ERROR
    except Session.Failed:
        code = pytest.ExitCode.TESTS_FAILED
    except (KeyboardInterrupt, Session.Interrupted, pytest.exit.Exception):
        code = pytest.ExitCode.INTERRUPTED
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = pytest.ExitCode.INTERNAL_ERROR
    warm.config.hook.pytest_sessionfinish(session=session, exitstatus=code)
    return int(code)


def _make_way(root: str) -> None:
    """A repository's ``queue.py`` must win over the standard library's, although the latter is already imported."""
    with os.scandir(root) as entries:
        names = {entry.name.removesuffix(".py") for entry in entries}
    for name in names & sys.modules.keys():
        if name not in KEPT and not name.startswith("_"):
            del sys.modules[name]


def _is_failure(value: dict[Any, Any]) -> bool:
    return {k: type(v) for k, v in value.items()} == {
        "message": str, "path": str, "line": int, "source": str,
    }  # fmt: skip


def summarize(report: bytes, status: int | None) -> dict[str, Any]:
    """The lines of a run as one result. A run without a last line ended before pytest did; ``status`` says how.

    The code under test can write into the report, so lines of any other shape are passed over.
    """
    tests: dict[str, str] = {}
    failures: list[dict[str, Any]] = []
    code = None
    for text in report.split(b"\n"):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue  # the last line of a killed run may be cut
        if not isinstance(line, dict):
            continue
        name, outcome, failure = (
            line.get("test", line.get("collection")),
            line.get("outcome"),
            line.get("failure"),
        )
        if isinstance(name, str) and isinstance(outcome, str) and tests.get(name) not in ("failed", "error"):
            tests[name] = outcome
        if isinstance(name, str) and isinstance(failure, dict) and _is_failure(failure):
            failures.append({"nodeid": name} | failure)
        if type(line.get("exit")) is int:
            code = line["exit"]
    if code is None:
        code = -9 if status is None else status
        code = 70 if code == 0 else code  # the tests ended the process with 0: not a success
    return {"exit_code": code, "tests": tests, "failures": failures}
