"""Copies measured figures from docs/results/*.jsonl into the texts that quote them.

A text quotes a figure between two markers, and this script writes what stands between them::

    <!-- figure:rl_gain_points -->12.3 points (95% interval 9.1 to 15.4)<!-- /figure -->

``<!-- figures -->`` ... ``<!-- /figures -->`` is filled with a table of all. ``--check`` changes nothing and fails
when a text is not what the results say.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ONE = re.compile(r"(<!-- figure:([\w-]+) -->)(.*?)(<!-- /figure -->)", re.DOTALL)
ALL = re.compile(r"(<!-- figures -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
ABSENT = "not measured yet"


def read_figures(folder: Path) -> dict[str, dict[str, Any]]:
    """The last line of each figure, by name. A line that is no figure stops with its place."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            record = json.loads(line)
            if not {"figure", "value", "unit"} <= set(record):
                sys.exit(f"error: line {number} of {path} is not a figure; write figure, value and unit")
            found[record["figure"]] = record
    return found


def shown(record: dict[str, Any] | None) -> str:
    """A figure as text, with its interval, its peer, and on how many it rests."""
    if record is None:
        return ABSENT
    text = f"{_number(record['value'])} {record['unit']}".strip()
    notes = []
    if record.get("interval"):
        low, high = record["interval"]
        notes.append(f"95% interval {_number(low)} to {_number(high)}")
    if record.get("peer"):
        notes.append(f"{record['peer']}: {_number(record['peer_value'])}")
    if record.get("n"):
        notes.append(f"n = {record['n']}")
    if record.get("seeds"):
        notes.append(f"{len(record['seeds'])} seeds" if len(record["seeds"]) > 1 else "1 seed")
    return f"{text} ({', '.join(notes)})" if notes else text


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(figures: dict[str, dict[str, Any]]) -> str:
    """A Markdown table of all figures, by name."""
    if not figures:
        return f"\n{ABSENT.capitalize()}.\n\n"
    rows = []
    for name, record in sorted(figures.items()):
        commit = str(record.get("commit", ""))[:12]
        rows.append(f"| `{name}` | {shown(record)} | `{commit}` | `{record.get('command', '')}` |")
    return "\n| figure | value | commit | command |\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n"


def filled(text: str, figures: dict[str, dict[str, Any]]) -> str:
    """``text`` with everything between markers written anew."""
    text = ONE.sub(lambda m: m[1] + shown(figures.get(m[2])) + m[4], text)
    return ALL.sub(lambda m: m[1] + table(figures) + m[3], text)


def main() -> None:
    figures = read_figures(ROOT / "docs" / "results")
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if "_build" in path.parts:
            continue
        old = path.read_text(encoding="utf-8")
        new = filled(old, figures)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale and "--check" in sys.argv:
        sys.exit(f"error: figures in {', '.join(stale)} differ from docs/results; run make format")


if __name__ == "__main__":
    main()
