"""The short way through pytest for plain test files in the root: its own nodes, fixtures and parameters, without
the path matching and the hooks around each phase that no plug-in of ours listens to.

A run of four tests costs half as much. Whatever it does not cover goes through pytest's own loop: files that name
a fixture or feature of ``NEEDS_FULL``, subdirectories, packages, conftest; and within a file the tests that carry
marks, are asynchronous, or belong to unittest classes.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.main import Session
from _pytest.runner import CallInfo, runtestprotocol

NEEDS_FULL = re.compile(
    rb"cap(sys|fd|log|tee)|subtests|__init__\.py|conftest|pytest_plugins|PYTEST_CURRENT_TEST"
)
_FILE = re.compile(r"(test_.*|.*_test)\.py")


def plain_files(root: str, args: list[str]) -> list[str] | None:
    """The test files that ``args`` (none: the whole root) stand for, or None when the short way cannot serve them."""
    if os.path.exists(f"{root}/__init__.py"):
        return None
    names = list(dict.fromkeys(arg.partition("::")[0] for arg in args))
    if not names:
        with os.scandir(root) as entries:
            found = {entry.name: entry.is_dir() for entry in entries}
        if any(is_dir and name != "__pycache__" for name, is_dir in found.items()):
            return None
        names = sorted(name for name in found if _FILE.fullmatch(name))
    for name in names:
        if "/" in name or not name.endswith(".py"):
            return None
        try:
            with open(f"{root}/{name}", "rb") as file:
                if NEEDS_FULL.search(file.read()):
                    return None
        except OSError:  # pytest's own way has the right words for it
            return None
    return names


def collect(session: Session, root: str, names: list[str], args: list[str]) -> bool:
    """Collects ``args`` of the files ``names`` into ``session.items``. False when an id of ``args`` matches nothing."""
    items = []
    for name in names:
        found = list(session.genitems(pytest.Module.from_parent(session, path=Path(root, name))))
        wanted = [arg for arg in args if arg.partition("::")[0] == name]
        if wanted and name not in wanted:
            for arg in wanted:
                if not any(_matches(item.nodeid, arg) for item in found) and not session.testsfailed:
                    return False
            found = [item for item in found if any(_matches(item.nodeid, arg) for arg in wanted)]
        items += found
    hook = session.config.hook
    hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
    session.items = items
    hook.pytest_collection_finish(session=session)
    session.testscollected = len(items)
    return True


def _matches(nodeid: str, arg: str) -> bool:
    return nodeid == arg or nodeid.startswith((arg + "::", arg + "["))


def run_items(session: Session, report: Callable[[str, str, Any], None]) -> None:
    """Runs ``session.items``. ``report(nodeid, "passed" | "failed" | "error", excinfo)`` is called once a result."""
    items = session.items
    for index, item in enumerate(items):
        following = items[index + 1] if index + 1 < len(items) else None
        if type(item) is not pytest.Function or _special(item):
            runtestprotocol(item, nextitem=following)
        else:
            _run_plain(session, item, following, report)


def _special(item: pytest.Function) -> bool:
    if "tmp_path" in item.fixturenames:  # its clean-up reads the reports of all phases
        return True
    for _ in item.iter_markers():
        return True
    return inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj)


def _run_plain(session: Session, item: pytest.Function, following: Any, report: Callable[..., None]) -> None:
    state = session._setupstate
    reraise = (pytest.exit.Exception, KeyboardInterrupt)
    call = CallInfo.from_call(lambda: state.setup(item), "setup", reraise)
    outcome = "error"
    if call.excinfo is None:
        call = CallInfo.from_call(item.runtest, "call", reraise)
        outcome = "failed"
    if call.excinfo is None:
        report(item.nodeid, "passed", None)
    else:
        _fail(session, item, outcome, call.excinfo, report)
    call = CallInfo.from_call(lambda: state.teardown_exact(following), "teardown", reraise)
    if call.excinfo is not None:
        _fail(session, item, "error", call.excinfo, report)
    item._request = False  # type: ignore[assignment]  # as pytest does: fixtures' values can go now
    item.funcargs = None  # type: ignore[assignment]


def _fail(
    session: Session, item: pytest.Item, outcome: str, excinfo: Any, report: Callable[..., None]
) -> None:
    if excinfo.errisinstance(pytest.skip.Exception) or excinfo.errisinstance(pytest.xfail.Exception):
        outcome = "skipped"
    else:
        session.testsfailed += 1
    report(item.nodeid, outcome, excinfo)
