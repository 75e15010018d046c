"""Tests of this room need torch; without the train extra there is nothing to collect."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    torch.set_num_threads(1)

sys.path.insert(0, str(Path(__file__).parent))  # samples_made
