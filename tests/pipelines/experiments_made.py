"""Programs of ``experiments/`` as modules: they are no package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "experiments"


@contextmanager
def experiment(name: str) -> Iterator[ModuleType]:
    """The program ``experiments/NAME.py``, importable under its name while the block runs (dataclasses ask for it)."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(FOLDER))  # as when it is run
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(FOLDER))
        del sys.modules[name]
