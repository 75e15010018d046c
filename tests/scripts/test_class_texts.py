"""The page of keys says what each is: a text must never land beside another key, or be lost."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from cadenza.core.config import StrictConfig

PATH = Path(__file__).parents[2] / "scripts" / "class_texts.py"


@pytest.fixture(scope="module")
def class_texts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("class_texts", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Kiln(StrictConfig):
    """How a kiln is fired.

    ``heat``: degrees, at the peak. ``soak_s``: how long it stays there; ``cones``: how many are set. Cooling begins
    when ``vent`` opens; nothing else is moved.

    Attributes:
        glaze: its recipe,
            by name.
        left, right: which door.

    Raises (from validation):
        ValueError: too hot.
    """

    heat: float = 1.0
    soak_s: float = 1.0
    cones: int = 3
    vent: bool = True
    glaze: str = "none"
    left: bool = True
    right: bool = True
    shelf: int = 2
    rack: int = 2  # of the upper kind, # included


class Small(Kiln):
    """A kiln for tests. ``limit``: where it stops, per fuel."""

    limit_gas: float = 1.0
    limit_wood: float = 1.0


def test_every_way_of_saying_what_a_key_is_finds_its_key(class_texts):
    prose, texts = class_texts.texts_of(Kiln)
    assert texts == {
        "heat": "degrees, at the peak.",
        "soak_s": "how long it stays there",
        "cones": "how many are set.",
        "vent": "Cooling begins when ``vent`` opens",
        "glaze": "its recipe, by name.",
        "left": "which door.",
        "right": "which door.",
        "rack": "of the upper kind, # included",
    }
    assert prose == "How a kiln is fired.\n\nCooling begins when ``vent`` opens; nothing else is moved."


def test_a_derived_class_keeps_the_texts_of_its_base_and_a_common_beginning_names_several_keys(class_texts):
    prose, texts = class_texts.texts_of(Small)
    assert prose == "A kiln for tests."
    assert texts["limit_gas"] == texts["limit_wood"] == "where it stops, per fuel."
    assert texts["glaze"] == "its recipe, by name." and "shelf" not in texts
