"""Puts this folder on the path so that its tests can share hand-built values."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_browser: draws a page with headless Chromium")
