"""Puts this folder on the path so that its tests can share hand-built values."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
