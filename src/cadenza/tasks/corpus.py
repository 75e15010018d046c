"""Endless text for pretraining the base model: clean modules, and repairs in a neutral form.

Everything is drawn from the bucket range that ``partition.py`` reserves for the corpus, so no function of it can appear
in any split. The repairs never use the unseen families, and no tool syntax: they teach what a repair is, not how an
agent asks for one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from cadenza.harness.definitions import definitions, innermost
from cadenza.tasks.bugs import SEEN_FAMILIES, UNSEEN_FAMILIES, mutations
from cadenza.tasks.draft import Call, Draft, lit
from cadenza.tasks.families import Mutation, Scope, compiles
from cadenza.tasks.modules import Module, draw_module, source_of_tests
from cadenza.tasks.partition import owned_by

_OWNS = owned_by("corpus")
_TOKEN = re.compile(r'"[^"]*"|\w+|//=|[-+*/%<>=!]=|//|[-+*/%<>]')
_NOISE_SHARE = 0.15
# A function alone is a third of its module's text and has as much to say about the repair.
_EXCERPT_SHARE = 0.5
_ATTEMPT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Exercise:
    """A document in parts, each with its role: ``given`` (what there is to read), ``wrong`` (an attempt that failed,
    which nobody should learn to write), ``answer``."""

    parts: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The whole document."""
        return "".join(text for _, text in self.parts)


def clean_modules(seed: int) -> Iterator[str]:
    """Endless clean modules: bare text, under their path, or followed by their tests."""
    rng = random.Random(f"{seed}/clean")
    while True:
        module = draw_module(rng, _OWNS)
        form = rng.random()
        if form < 0.4:
            yield module.source
        elif form < 0.7:
            yield f"{module.path}\n{module.source}"
        else:
            yield module.source + "\n" + _tests(module, rng)


def _tests(module: Module, rng: random.Random) -> str:
    cases = []
    for draft in module.drafts:
        for _ in range(rng.choice((1, 1, 2))):
            call = draft.call(rng)
            cases.append((draft.name, call, _value(draft, call)))
    return source_of_tests(module.name, cases)


def _value(draft: Draft, call: Call) -> object:
    """What the (correct, generated) draft returns; corpus modules import nothing."""
    namespace: dict[str, object] = {}
    exec(compile(draft.source, draft.name, "exec"), namespace)
    for line in call.setup:
        exec(line, namespace)
    return eval(call.expression, namespace)


def commit_documents(seed: int, families: tuple[str, ...] = SEEN_FAMILIES) -> Iterator[Exercise]:
    """Endless repairs: path, a listing with one corruption, a one-line message, the function (or method) repaired.

    Half of the listings are of the corrupted function alone. In a share of the documents a wrong attempt and another
    message stand before the answer. Besides the families, a share of the corruptions is generic noise: a token replaced
    by another one of the same function.

    Raises:
        ValueError: a family is unseen by design, or does not exist.
    """
    _refuse_unseen(families)
    rng = random.Random(f"{seed}/commits")
    while True:
        module = draw_module(rng, _OWNS)
        corrupted = _corrupted(module, families, rng)
        if corrupted is None:
            continue
        draft = module.drafts[corrupted.index]
        shown = module.with_lines(corrupted.index, corrupted.bad)
        if rng.random() < _EXCERPT_SHARE:
            shown = "\n".join(corrupted.bad) + "\n"
        parts = [("given", f"{module.path}\n{shown}\n{_message(draft, module, rng)}\n")]
        if rng.random() < _ATTEMPT_SHARE and (attempt := _attempt(corrupted, families, rng)):
            parts += [("wrong", f"{attempt}\n"), ("given", f"{_message(draft, module, rng)}\n")]
        yield Exercise((*parts, ("answer", f"{corrupted.repaired}\n")))


def _refuse_unseen(families: tuple[str, ...]) -> None:
    if wrong := [f for f in families if f in UNSEEN_FAMILIES or f not in SEEN_FAMILIES]:
        raise ValueError(f"not a family of the corpus: {', '.join(wrong)}")


@dataclass(frozen=True, slots=True)
class _Corrupted:
    """Draft ``index`` of a module, its lines ``good`` and, corrupted at ``line`` (from 0), ``bad``; ``written`` and
    ``repaired``: the function or method around the corruption as it is and as it should be."""

    index: int
    line: int
    good: tuple[str, ...]
    bad: tuple[str, ...]
    written: str
    repaired: str


def _corrupted(module: Module, families: tuple[str, ...], rng: random.Random) -> _Corrupted | None:
    """One draft corrupted; None when no corruption fits the draft drawn, or no one definition can repair it."""
    index = rng.randrange(len(module.drafts))
    good = module.drafts[index].lines
    mutation = _mutation(good, families, rng)
    if mutation is None:
        return None
    bad = mutation.apply(good)
    around = innermost("\n".join(good), mutation.line + 1)
    if around is None:
        return None
    alike = [d for d in definitions(module.source) if (d.name, d.is_class) == (around.name, around.is_class)]
    if len(alike) > 1:  # methods of two classes: which one is meant does not show in its text
        return None
    written = bad[around.first - 1 : around.last - len(good) + len(bad)]
    return _Corrupted(index, mutation.line, good, bad, "\n".join(written), around.text("\n".join(good)))


def _mutation(lines: tuple[str, ...], families: tuple[str, ...], rng: random.Random) -> Mutation | None:
    return _noise(lines, rng) if rng.random() < _NOISE_SHARE else draw_mutation(lines, families, rng)


def _attempt(corrupted: _Corrupted, families: tuple[str, ...], rng: random.Random) -> str | None:
    """The same function written anew and wrong: as it was, or with some other corruption; None if none was found."""
    if rng.random() < 0.3:
        return corrupted.written
    both = len(corrupted.good) == len(corrupted.bad) and rng.random() < 0.5
    lines = corrupted.bad if both else corrupted.good
    mutation = _mutation(lines, families, rng)
    # What two corruptions make of one line, or of one that gives an initial value, may be of an unseen family.
    initial = Scope(corrupted.good, rng).initial_lines
    if mutation is None or (both and mutation.line in {corrupted.line, *initial}):
        return None
    text = "\n".join(mutation.apply(lines))
    header = corrupted.repaired.split("\n", 1)[0]
    attempt = next((d.text(text) for d in definitions(text) if d.text(text).split("\n")[0] == header), None)
    return None if attempt in (corrupted.repaired, corrupted.written) else attempt


def reading_documents(seed: int, families: tuple[str, ...] = SEEN_FAMILIES) -> Iterator[Exercise]:
    """Endless reading exercises over one to three modules of which one has a single corruption.

    A failing assertion or a name stands first, the modules follow, then the answers: the name, the path it is found at,
    the whole function (or method) repaired.
    No tool syntax; unseen families are left out as in :func:`commit_documents`.
    """
    _refuse_unseen(families)
    rng = random.Random(f"{seed}/reading")
    while True:
        modules = _distinct_modules(rng, rng.choice((1, 1, 1, 2, 2, 3)))
        at = rng.randrange(len(modules))
        module = modules[at]
        corrupted = _corrupted(module, families, rng)
        if corrupted is None:
            continue
        draft = module.drafts[corrupted.index]
        buggy = module.with_lines(corrupted.index, corrupted.bad)
        listings = [f"{m.path}\n{buggy if k == at else m.source}" for k, m in enumerate(modules)]
        answers = [draft.name, module.path, corrupted.repaired]
        if rng.random() < 0.3:  # a second look-up, of any function shown
            answers.insert(1, rng.choice(module.drafts).name)
        question = _failing(draft, rng) if rng.random() < 0.7 else f"{draft.purpose}: {draft.name}"
        given = "\n".join([question, *listings]) + "\n"
        yield Exercise((("given", given), ("answer", "\n".join(answers) + "\n")))


def _distinct_modules(rng: random.Random, count: int) -> list[Module]:
    modules: dict[str, Module] = {}
    while len(modules) < count:
        module = draw_module(rng, _OWNS)
        modules.setdefault(module.path, module)
    return list(modules.values())


def _failing(draft: Draft, rng: random.Random) -> str:
    """One or two failing assertions as a test run shows them; what they got is the value of another call."""
    lines = []
    for number in range(rng.choice((1, 1, 2))):
        call, other = draft.call(rng), draft.call(rng)
        suffix = f"_{number + 1}" if number else ""
        value, got = lit(_value(draft, call)), lit(_value(draft, other))
        lines.append(f"test_{draft.name.lower()}{suffix}: assert {call.expression} == {value}, got {got}")
    return "\n".join(lines)


def draw_mutation(lines: tuple[str, ...], families: tuple[str, ...], rng: random.Random) -> Mutation | None:
    """One mutation, families equally likely; None if no family of a few drawn ones has a site here."""
    order = list(families)
    rng.shuffle(order)
    for name in order[:6]:
        if found := mutations(lines, (name,), rng):
            return rng.choice(found)
    return None


def _noise(lines: tuple[str, ...], rng: random.Random) -> Mutation | None:
    """A token of a body line replaced by another token of the function; lines with initial values are left alone."""
    scope = Scope(lines, rng)
    body = [
        i
        for i, line in enumerate(lines)
        if line.strip() and not line.strip().startswith(("def ", "class ", '"""'))
    ]
    pool = [t for i in body for t in _TOKEN.findall(lines[i])]
    for _ in range(8):
        i = rng.choice(body)
        if i in scope.initial_lines:
            continue
        spot = rng.choice(list(_TOKEN.finditer(lines[i])))
        text = lines[i][: spot.start()] + rng.choice(pool) + lines[i][spot.end() :]
        mutation = Mutation("noise", i, text)
        if text != lines[i] and compiles(mutation.apply(lines)):
            return mutation
    return None


def _message(draft: Draft, module: Module, rng: random.Random) -> str:
    name = draft.name
    if rng.random() < 0.4:
        call = draft.call(rng)
        told = "; ".join((*call.setup, call.expression))
        value = lit(_value(draft, call))
        return rng.choice(
            (f"{told} must be {value}", f"{told} should give {value}", f"make {told} give {value}")
        )
    return rng.choice(
        (
            f"Fix {name}",
            f"{name} is wrong",
            f"Correct {draft.purpose}",
            f"Repair {name} in {module.path}",
            f"{draft.purpose} is not right",
            f"{name} must do what it says",
            f"Bug in {module.path}",
        )
    )
