"""Archetypes: what the docstring says is what the code does, and the code is fit for a tiny model's eyes."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest

from cadenza.tasks.archetypes import ARCHETYPES, compose, make
from cadenza.tasks.draft import Draft, lit, spec_digest
from cadenza.tasks.words import THEMES, plural

SEEDS = 200


@cache
def drawn(archetype: str) -> list[Draft]:
    return [make(archetype, random.Random(f"{archetype}/{i}"), THEMES[i % len(THEMES)]) for i in range(SEEDS)]


def drafts(archetype: str, count: int = SEEDS):
    for seed, draft in enumerate(drawn(archetype)[:count]):
        yield draft, random.Random(seed)


def run(draft: Draft, rng: random.Random, calls: int) -> list[tuple[str, object]]:
    namespace: dict = {}
    exec(compile(draft.source, draft.name, "exec"), namespace)
    out = []
    for _ in range(calls):
        call = draft.call(rng)
        scope = dict(namespace)
        exec("\n".join(call.setup), scope)
        out.append((call.expression, eval(call.expression, scope)))
    return out


def test_there_are_at_least_36_archetypes():
    assert len(ARCHETYPES) >= 36


@pytest.mark.parametrize("archetype", ARCHETYPES)
def test_a_draft_that_crashes_or_returns_what_no_test_can_write_down(archetype):
    varied = 0
    for draft, rng in drafts(archetype):
        values = [value for _, value in run(draft, rng, 6)]
        for value in values:
            text = lit(value)
            assert ast.literal_eval(text) == value
        varied += len({lit(v) for v in values}) > 1
    assert varied > SEEDS * 0.8, "calls that all give one value cannot reveal a bug"


@pytest.mark.parametrize("archetype", ARCHETYPES)
def test_a_draft_that_is_long_or_spreads_a_statement_over_lines(archetype):
    for draft, _ in drafts(archetype):
        assert 3 <= len(draft.lines) <= 16
        assert max(map(len, draft.lines)) <= 94, draft.source
        for node in ast.walk(ast.parse(draft.source)):
            if isinstance(node, ast.stmt) and not hasattr(node, "body"):
                assert node.lineno == node.end_lineno
        assert draft.purpose and draft.name not in draft.purpose
        assert not re.search(r"\d", draft.purpose)


@pytest.mark.parametrize("archetype", ARCHETYPES)
def test_two_meanings_for_one_name_in_a_function(archetype):
    """A loop variable that is also the accumulator would make the correct code wrong by its own docstring."""
    for draft, _ in drafts(archetype):
        for f in (n for n in ast.walk(ast.parse(draft.source)) if isinstance(n, ast.FunctionDef)):
            parameters = [a.arg for a in f.args.args]
            assert len(set(parameters)) == len(parameters)
            loops = [n for n in ast.walk(f) if isinstance(n, (ast.For, ast.comprehension))]
            targets = [n.id for loop in loops for n in ast.walk(loop.target) if isinstance(n, ast.Name)]
            others = {
                t.id
                for n in ast.walk(f)
                if isinstance(n, (ast.Assign, ast.AugAssign))
                for t in (n.targets if isinstance(n, ast.Assign) else [n.target])
                if isinstance(t, ast.Name)
            }
            clash = set(targets) & (others | set(parameters))
            assert archetype == "occurrences" or not clash, draft.source  # x = x.lower() is the point there


def test_archetypes_that_memorizing_would_solve():
    for archetype in ARCHETYPES:
        specs = {spec_digest(draft.source) for draft, _ in drafts(archetype)}
        assert len(specs) >= 70, archetype


def test_a_module_name_that_hides_a_library():
    for theme in THEMES:
        for noun in theme.things + theme.amounts:
            assert noun.isidentifier()
            for name in (plural(noun), f"{noun}_rules", f"{noun}_tools", f"my_{plural(noun)}"):
                assert importlib.util.find_spec(name) is None, name


def _groups(pattern: str, doc: str) -> tuple[str, ...]:
    match = re.search(pattern, doc)
    assert match, doc
    return match.groups()


def _int(pattern: str, doc: str) -> list[int]:
    return [int(g) for g in _groups(pattern, doc)]


COMPARE: dict[str, Callable[[int, int], bool]] = {
    "above": lambda a, b: a > b,
    "of at least": lambda a, b: a >= b,
    "is at least": lambda a, b: a >= b,
    "below": lambda a, b: a < b,
    "of at most": lambda a, b: a <= b,
    "is at most": lambda a, b: a <= b,
    "is above": lambda a, b: a > b,
    "is below": lambda a, b: a < b,
}
CMP = r"(is above|is below|is at least|is at most|above|below|of at least|of at most) (\d+)"


def _test_of(doc: str) -> Callable[[int], bool]:
    match = re.search(CMP, doc)
    assert match, doc
    return lambda value: COMPARE[match[1]](value, int(match[2]))


def _filter_sum(doc, xs):
    start = re.match(r"(\d+) plus", doc)
    scale = re.search(r"each times (\d+)", doc)
    keep = _test_of(doc)
    return (int(start[1]) if start else 0) + sum(x * (int(scale[1]) if scale else 1) for x in xs if keep(x))


def _first_index(doc, xs):
    keep = _test_of(doc)
    return next((i + _int(r"from (\d)", doc)[0] for i, x in enumerate(xs) if keep(x)), -1)


def _streak(doc, xs):
    keep = _test_of(doc)
    return max(map(len, "".join("x" if keep(x) else " " for x in xs).split()), default=0)


def _running(doc, xs):
    start = _int(r"starting from (\d+)", doc)[0]
    sign = -1 if "subtracted" in doc else 1
    return [start + sign * sum(xs[: i + 1]) for i in range(len(xs))]


def _window(doc, xs):
    pick = {"largest": max, "smallest": min, "total": sum}[doc.split()[1]]
    n = _int(r"each (\d)", doc)[0]
    return [pick(xs[i : i + n]) for i in range(len(xs) - n + 1)]


def _cycle(doc, n):
    c, a, b = _int(r"divides by (\d+), or by (\d+) and not by (\d+)", doc)
    return n % c == 0 or (n % a == 0 and n % b != 0)


def _levels(doc, value):
    first, low, second, high, last = _groups(
        r"(\w+) (?:below|up to) (\d+), (\w+) (?:below|up to) (\d+), else (\w+)", doc
    )
    inside = (lambda a, b: a < b) if "below" in doc else (lambda a, b: a <= b)
    if inside(value, int(low)):
        return first.lower()
    return second if inside(value, int(high)) else last


def _tier(doc, value):
    base, per, limit = _int(r"is (\d+), plus (\d+) .* above (\d+)", doc)
    return base + per * max(value - limit, 0)


def _window_check(doc, n):
    low, left, high, right = _groups(r"between (\d+) \((\w+)\) and (\d+) \((\w+)\)", doc)
    return (n > int(low) or (n == int(low) and left == "included")) and (
        n < int(high) or (n == int(high) and right == "included")
    )


def _caesar(doc, text):
    k = _int(r"by (\d+) places", doc)[0] * (-1 if "back" in doc else 1)
    return "".join(chr((ord(c) - 97 + k) % 26 + 97) for c in text)


def _any_all(doc, xs):
    keep = _test_of(doc)
    return all(map(keep, xs)) if "each of" in doc else any(map(keep, xs))


def _depth(doc, text):
    opening, closing = (
        _groups(r"nesting of (.)(.) in", doc)
        if "Deepest" in doc
        else _groups(r"each (.) of the text has its (.) ", doc)
    )
    depths = [0]
    for c in text:
        depths.append(depths[-1] + (c == opening) - (c == closing))
    return max(depths) if "Deepest" in doc else min(depths) >= 0 and depths[-1] == 0


def _reorder(doc, stock):
    keep = _test_of(doc)
    target = _int(r"missing to (\d+)", doc)[0]
    return {k: target - v for k, v in stock.items() if keep(v)}


def _lookup(doc, t, key):
    default, word, k = _groups(r", (-?\d+) if missing, (\w+) (\d+)\.", doc)
    value = t.get(key, int(default))
    return {"plus": value + int(k), "minus": value - int(k), "times": value * int(k)}[word]


def _merge(doc, a, b):
    default = _int(r"count as (\d+)", doc)[0]
    sign = -1 if "subtract" in doc else 1
    return {**a, **{k: a.get(k, default) + sign * v for k, v in b.items()}}


def _share(doc, part, whole):
    scale, default = _groups(r"of (\d+) are .*; (-?\d+) if", doc)
    return part * int(scale) // whole if whole else int(default)


def _page(doc, xs, page):
    size, base = _int(r"page of (\d+); pages count from (\d)", doc)
    return xs[(page - base) * size :][:size]


def _clamp(doc, value):
    low, high = _int(r"range (\d+) to (\d+)", doc)
    return sorted((low, value, high))[1]


def _count(doc, xs):
    return len(list(filter(_test_of(doc), xs)))


def _discount(doc, value):
    percent = _int(r"Take (\d+) percent", doc)[0]
    return value - value * percent // 100 if _test_of(doc)(value) else value


def _choice(doc, value):
    plus, minus = _int(r"Add (\d+) if .* else subtract (\d+)", doc)
    return value + plus if _test_of(doc)(value) else value - minus


def _rises(doc, xs):
    k = _int(r"at least (\d+)", doc)[0]
    return sum((b - a) * (1 if "rise" in doc else -1) >= k for a, b in pairwise(xs))


def _range_sum(doc, a, b):
    multiple = re.search(r"multiples of (\d+)", doc)
    return (
        sum(n for n in range(a, b + 1) if n % int(multiple[1]) == 0)
        if multiple
        else sum(n * n for n in range(a, b + 1))
    )


def _truncate(doc, text):
    limit, mark = _groups(r"to (\d+) letters, (?:ending in|the last being) (\S+) if", doc)
    return text if len(text) <= int(limit) else text[: int(limit) - len(mark)] + mark


def _occurrences(doc, xs):
    step = re.search(r", (\d) for every", doc)
    xs = [x.lower() if "lower" in doc else x.strip() if "strip" in doc else x for x in xs]
    return {x: xs.count(x) * (int(step[1]) if step else 1) for x in xs}


# Reference implementations that read nothing but the docstring and the arguments.
REFERENCES = {
    "filter_sum": _filter_sum,
    "first_index": _first_index,
    "longest_streak": _streak,
    "running_total": _running,
    "moving_best": _window,
    "cycle_rule": _cycle,
    "levels": _levels,
    "tier_cost": _tier,
    "in_window": _window_check,
    "caesar": _caesar,
    "any_or_all": _any_all,
    "bracket_depth": _depth,
    "reorder": _reorder,
    "lookup": _lookup,
    "merge": _merge,
    "share": _share,
    "page_slice": _page,
    "clamp": _clamp,
    "count_matching": _count,
    "discount": _discount,
    "compare_choice": _choice,
    "count_rises": _rises,
    "range_sum": _range_sum,
    "truncate": _truncate,
    "occurrences": _occurrences,
}


@pytest.mark.parametrize("archetype", REFERENCES)
def test_a_docstring_that_is_not_the_specification(archetype):
    for draft, rng in drafts(archetype, 80):
        doc = draft.lines[1].strip().strip('"')
        for expression, value in run(draft, rng, 6):
            call = ast.parse(expression, mode="eval").body
            assert isinstance(call, ast.Call)
            arguments = [ast.literal_eval(a) for a in call.args]
            assert REFERENCES[archetype](doc, *arguments) == value, (
                f"{draft.source}\n{expression} gives {value}"
            )


def test_a_function_of_another_module_that_is_not_called():
    made = 0
    for seed in range(300):
        rng = random.Random(seed)
        inner = make(rng.choice(["clamp", "filter_sum", "tier_cost", "caesar"]), rng, THEMES[0])
        outer = compose(rng, THEMES[0], "prices", inner)
        if inner.shape is None:
            assert outer is None
            continue
        assert outer is not None and outer.imports == (("prices", inner.name),)
        namespace: dict = {}
        exec(inner.source + "\n" + outer.source, namespace)
        assert isinstance(eval(outer.call(rng).expression, namespace), int)
        made += 1
    assert made > 100
