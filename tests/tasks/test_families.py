"""Bug families: enough sites, one line each, the specification untouched, and the unseen ones really unseen."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

import pytest

from cadenza.tasks.archetypes import ARCHETYPES, make
from cadenza.tasks.bugs import ALL_FAMILIES, DEMO_FAMILIES, SEEN_FAMILIES, UNSEEN_FAMILIES, mutations
from cadenza.tasks.draft import spec_of
from cadenza.tasks.families import Mutation, Scope, compiles
from cadenza.tasks.words import THEMES


@cache
def sample() -> list[tuple]:
    out = []
    for archetype in ARCHETYPES:
        for seed in range(6):
            rng = random.Random(f"{archetype}/{seed}")
            draft = make(archetype, rng, rng.choice(THEMES))
            out.append((draft, mutations(draft.lines, ALL_FAMILIES, rng)))
    return out


def test_there_are_enough_families_and_two_are_unseen():
    assert len(ALL_FAMILIES) >= 16 and len(UNSEEN_FAMILIES) == 2
    assert set(DEMO_FAMILIES) < set(SEEN_FAMILIES) == set(ALL_FAMILIES) - set(UNSEEN_FAMILIES)
    assert 6 <= len(DEMO_FAMILIES) <= 8


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_family_with_too_few_sites(family):
    where = {draft.archetype for draft, found in sample() for m in found if m.family == family}
    assert len(where) >= 6


def test_mutations_that_change_the_specification_or_do_not_compile():
    for draft, found in sample():
        for m in found:
            lines = m.apply(draft.lines)
            assert spec_of("\n".join(lines)) == spec_of(draft.source)
            assert compiles(lines) and lines != draft.lines
            assert len(draft.lines) - len(lines) == (m.text is None)
            assert (m.text is None) == (m.family == "dropped_statement")


def test_one_text_in_two_families():
    for draft, found in sample():
        keys = [(m.line, m.text) for m in found]
        assert len(set(keys)) == len(keys), draft.source


def test_a_seen_family_that_gives_a_wrong_initial_value():
    for draft, found in sample():
        initial = Scope(draft.lines, random.Random(0)).initial_lines
        for m in found:
            assert (m.line in initial) == (m.family == "wrong_initial_value"), (m, draft.source)


def test_mutations_that_depend_on_anything_but_the_random_generator():
    draft = make("parse_pairs", random.Random(1), THEMES[0])
    first, second = (mutations(draft.lines, ALL_FAMILIES, random.Random(5)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "family, line, expected",
    [
        ("comparison_boundary", "    if a < b:", "    if a <= b:"),
        ("swapped_operands", "    c = a - b", "    c = b - a"),
        ("swapped_arguments", "    c = a.get(b, 0)", "    c = a.get(0, b)"),
        ("negated_condition", "    if not a:", "    if a:"),
        ("missing_call", "    c = a.strip()", "    c = a"),
        ("wrong_method", "    c = max(a)", "    c = min(a)"),
        ("wrong_key_or_default", "    c = a.get(b, 0)", "    c = a.get(b, 1)"),
        ("wrong_augmented_assign", "    a += b", "    a -= b"),
        ("wrong_index_or_slice", "    c = a[1:b]", "    c = a[1:b + 1]"),
    ],
)
def test_an_operator_that_spoils_the_rest_of_the_line(family, line, expected):
    tail = ["        return 1", "    return 2"] if line.endswith(":") else ["    return c"]
    lines = ("def f(a, b):", line, *tail)
    texts = [m.text for m in mutations(lines, (family,), random.Random(0))]
    assert expected in texts


def test_a_dropped_line_takes_no_other_with_it():
    assert Mutation("dropped_statement", 1, None).apply(("a", "b", "c")) == ("a", "c")


def test_a_family_that_the_reference_does_not_name():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "tasks.md").read_text()
    rows = re.findall(r"^\| `(\w+)`( \(unseen\))? \|", page, re.M)
    table = {name: bool(unseen) for name, unseen in rows}
    assert {name: name in UNSEEN_FAMILIES for name in ALL_FAMILIES}.items() <= table.items()
