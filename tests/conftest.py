"""Capabilities: what this machine can do, which tests need it, and no silent skip in continuous integration.

A test marked ``needs_X`` is skipped where the machine cannot do X. With ``CI=true`` any skip is a failure (but for
``needs_gpu``), so that a green run means that everything ran. The report at the end says what was there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from cadenza.tokens import CompactRenderer, Tokenizer

# The load of a machine varies: an example has no deadline of its own, and the number of examples is bounded.
settings.register_profile("cadenza", deadline=None, max_examples=50)
settings.load_profile("cadenza")

CI = os.environ.get("CI", "").lower() == "true"
SKIP_ALLOWED = {"gpu"}  # nothing here requires one
ROOT = Path(__file__).parent.parent


CORPUS = [
    """def total(values, start=0):
    result = start
    for value in values:
        result += value
    return result
""",
    """class Stack:
    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
""",
    """1|def push(self, item):
2|    self.items.append(item)
error: usage: no such file
""",
] * 50


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A small tokenizer, enough to render what the tests say."""
    return Tokenizer.train(CORPUS, 512)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> CompactRenderer:
    return CompactRenderer(tokenizer)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a few random weights and no tokenizer. Needs torch."""
    import torch

    from cadenza.model.config import ModelConfig
    from cadenza.model.hf import save_model
    from cadenza.model.transformer import PolicyModel

    config = ModelConfig(
        vocab_size=32, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, n_experts=2, experts_per_token=1,
        d_expert=8, d_shared=8,
    )  # fmt: skip
    model = PolicyModel(config)
    for parameter in model.parameters():  # its memory is as it was found, and may hold no numbers
        torch.nn.init.normal_(parameter, std=0.02)
    folder = tmp_path_factory.mktemp("model")
    save_model(model, folder, bos_token_id=0, eos_token_id=1)
    return folder


@cache
def missing(capability: str) -> str | None:
    """Why the machine lacks a capability, or None when it has it. Each is tried for real, once."""
    return _PROBES[capability]()


def _namespaces() -> str | None:
    from cadenza.sandbox import LocalBackend

    found = LocalBackend.probe()
    return None if found.available else f"{found.reason}; {found.mend}"


def _train() -> str | None:
    absent = [
        name
        for name in ("torch", "numba", "llvmlite", "ray", "safetensors")
        if importlib.util.find_spec(name) is None
    ]
    return f"{', '.join(absent)} not installed; pip install -e '.[train]'" if absent else None


def _network() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
            "-d",
            folder,
        ]
        done = subprocess.run([*command, "iniconfig"], capture_output=True, timeout=120, check=False)
    return None if done.returncode == 0 else "pip reaches no package index"


def _root() -> str | None:
    if os.geteuid() != 0:
        return "not root"
    return None if shutil.which("mount") else "no mount command"


def _gpu() -> str | None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"],
        capture_output=True,
        timeout=120,
        check=False,
    )
    return None if done.returncode == 0 else "no accelerator"


def _browser() -> str | None:
    path = _chromium()
    if path is None:
        return "Chromium is not installed; bash scripts/system-deps.sh test"
    # Ubuntu's chromium-browser may be a script that only tells to install the snap.
    done = subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False)
    return None if done.returncode == 0 else f"{path} does not start"


def _chromium() -> str | None:
    """Debian's name, Ubuntu's, Google's."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


_PROBES = {
    "namespaces": _namespaces,
    "train": _train,
    "browser": _browser,
    "network": _network,
    "root": _root,
    "gpu": _gpu,
}
_NEEDED: Counter[str] = Counter()


def _needs(item: pytest.Item) -> list[str]:
    return [name for name in _PROBES if item.get_closest_marker(f"needs_{name}")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        _NEEDED.update(_needs(item))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for capability in _needs(item):
        reason = missing(capability)
        if reason is not None:
            pytest.skip(f"needs {capability}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if CI and skipped and not SKIP_ALLOWED & set(_needs(item)):
        report.outcome = "failed"
        report.longrepr = f"skipped with CI=true, where everything must run: {report.longrepr}"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of a worker: what the tests need, for the summary of the process that started it, which collects none."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["needed"] = dict(_NEEDED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Every worker has collected all tests: their counts are the same."""
    del error
    _NEEDED.update(Counter(getattr(node, "workeroutput", {}).get("needed", {})) - _NEEDED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _NEEDED:
        return
    terminalreporter.section("capabilities")
    for capability, count in sorted(_NEEDED.items()):
        reason = missing(capability)
        terminalreporter.line(
            f"{capability:<11} {count:>4} tests   {'yes' if reason is None else 'NO: ' + reason}"
        )


@pytest.fixture
def chromium() -> str:
    """The browser's path; for tests marked ``needs_browser``."""
    path = _chromium()
    assert path is not None
    return path


@pytest.fixture
def command_environment() -> dict[str, str]:
    """The environment of a ``cadenza`` process under test: this source tree, and the stages that tests define."""
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "pipelines")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CADENZA_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
