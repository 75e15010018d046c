"""Tests of this room need the train extra; without it there is nothing to collect."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # world_made

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
