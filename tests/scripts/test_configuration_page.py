"""The page of keys: a reader must find what each key is, and the default that really holds."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from cadenza.core.config import StrictConfig

FOLDER = Path(__file__).parents[2] / "scripts"
ROW = re.compile(r"^\| `([^`]+)` \|.*\| ([^|]*) \|$", re.MULTILINE)


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("configuration_page", FOLDER / "configuration_page.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rates(StrictConfig):
    """``peak``: where they begin to fall. ``end``: where they end."""

    peak: float = 1.0
    end: float = 0.1


class Oven(StrictConfig):
    """``rates``: of heating."""

    rates: Rates = Rates(peak=2.5)


def test_a_key_has_no_word_on_what_it_is(script):
    rows = ROW.findall(script.page())
    assert len(rows) > 300
    assert [key for key, text in rows if not text.strip()] == []


def test_a_default_is_shown_that_the_class_around_it_replaces(script):
    text = "".join(script.section(Oven))
    assert "| `rates.peak` | float | `2.5` | where they begin to fall |" in text
    assert "| `rates.end` | float | `0.1` | where they end |" in text
