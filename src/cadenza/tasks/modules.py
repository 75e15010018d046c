"""Clean modules: one to four drafts of one theme in a short file, and the text forms they are shown in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cadenza.tasks.archetypes import ARCHETYPES, compose, draw_in
from cadenza.tasks.draft import Call, Draft, lit, spec_digest
from cadenza.tasks.words import THEMES, Theme, plural

MAX_LINES = 28  # of a file: a few functions, so that a repository of them is read within the demo's context
_ALL = tuple(ARCHETYPES)


@dataclass(frozen=True, slots=True)
class Module:
    """A file of drafts. ``name`` is the import name."""

    name: str
    theme: Theme
    drafts: tuple[Draft, ...]

    @property
    def path(self) -> str:
        """Where the module lies in its repository."""
        return f"{self.name}.py"

    @property
    def import_lines(self) -> tuple[str, ...]:
        """Imports of what its functions call in other modules."""
        pairs = dict.fromkeys(pair for d in self.drafts for pair in d.imports)
        return tuple(f"from {module} import {name}" for module, name in pairs)

    @property
    def lines(self) -> tuple[str, ...]:
        """Imports and functions, with an empty line between."""
        out: list[str] = list(self.import_lines)
        for draft in self.drafts:
            out.extend(("", *draft.lines) if out else draft.lines)
        return tuple(out)

    @property
    def source(self) -> str:
        """The file's text, with a final newline."""
        return "\n".join(self.lines) + "\n"

    def start_of(self, index: int) -> int:
        """The line (from 0) where draft ``index`` begins."""
        line = len(self.import_lines) + (1 if self.import_lines else 0)
        for draft in self.drafts[:index]:
            line += len(draft.lines) + 1
        return line

    def with_lines(self, index: int, lines: Sequence[str]) -> str:
        """The module's source with other lines for draft ``index``."""
        start = self.start_of(index)
        everything = list(self.lines)
        everything[start : start + len(self.drafts[index].lines)] = lines
        return "\n".join(everything) + "\n"


def draw_module(
    rng: random.Random,
    owns: Callable[[int], bool],
    theme: Theme | None = None,
    taken: frozenset[str] = frozenset(),
    count: int | None = None,
    first: Draft | None = None,
    using: tuple[str, Draft] | None = None,
) -> Module:
    """A clean module of 1-4 drafts and at most ``MAX_LINES`` lines, all of whose specs satisfy ``owns``.

    Args:
        taken: module and function names already used in the repository.
        first: a draft that must be in it.
        using: (module, draft) of another module; a function that calls that draft is added if it can be.
    """
    theme = theme or rng.choice(THEMES)
    count = count or rng.choice((1, 1, 2, 2, 2, 3, 3, 4))
    drafts = [first] if first else []
    if using:
        for _ in range(60):
            composed = compose(rng, theme, *using)
            if composed and composed.name not in taken and owns(spec_digest(composed.source)):
                drafts.append(composed)
                break
    names = {d.name for d in drafts} | set(taken)
    room = MAX_LINES - sum(len(d.lines) + 1 for d in drafts) - (2 if using else 0)
    for _ in range(4 * count):
        if len(drafts) >= count:
            break
        draft = draw_in(owns, rng, theme, _ALL)
        if draft.name not in names and len(draft.lines) <= room:
            names.add(draft.name)
            drafts.append(draft)
            room -= len(draft.lines) + 1
    rng.shuffle(drafts)
    return Module(_module_name(rng, theme, names), theme, tuple(drafts))


def _module_name(rng: random.Random, theme: Theme, taken: set[str]) -> str:
    while True:
        noun = rng.choice(theme.things + theme.amounts)
        name = rng.choice(
            (plural(noun), plural(noun), f"{noun}_rules", f"{noun}_tools", f"my_{plural(noun)}")
        )
        if name not in taken:
            return name


def source_of_tests(module: str, cases: Sequence[tuple[str, Call, object]], prefix: str = "test") -> str:
    """A test file: one assert per test function.

    Args:
        cases: (name of the function or class under test, call, value the correct code returned).
    """
    imported = ", ".join(dict.fromkeys(name for name, _, _ in cases))
    out = [f"from {module} import {imported}"]
    for test_name, (_, call, value) in zip(names_of_tests(cases, prefix), cases, strict=True):
        out += [
            "",
            f"def {test_name}():",
            *(f"    {line}" for line in call.setup),
            f"    assert {call.expression} == {lit(value)}",
        ]
    return "\n".join(out) + "\n"


def names_of_tests(cases: Sequence[tuple[str, Call, object]], prefix: str = "test") -> list[str]:
    """``test_total``, ``test_total_2``, ...: the test functions that ``source_of_tests`` writes, in order."""
    seen: dict[str, int] = {}
    names = []
    for name, _, _ in cases:
        stem = f"{prefix}_{name.lower()}"
        seen[stem] = seen.get(stem, 0) + 1
        names.append(stem if seen[stem] == 1 else f"{stem}_{seen[stem]}")
    return names
