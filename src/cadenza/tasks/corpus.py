"""Endless text for pretraining the base model: clean modules, and repairs in a neutral form.

Everything is drawn from the bucket range that ``partition.py`` reserves for the corpus, so no function of it can appear
in any split. The repairs never use the unseen families, and no tool syntax: they teach what a repair is, not how an
agent asks for one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from cadenza.tasks.bugs import SEEN_FAMILIES, UNSEEN_FAMILIES, mutations
from cadenza.tasks.draft import Call, Draft, lit
from cadenza.tasks.families import Mutation, Scope, compiles
from cadenza.tasks.modules import Module, draw_module, numbered, source_of_tests
from cadenza.tasks.partition import owned_by

_OWNS = owned_by("corpus")
_TOKEN = re.compile(r'"[^"]*"|\w+|//=|[-+*/%<>=!]=|//|[-+*/%<>]')
_NOISE_SHARE = 0.15
_EXCERPT_SHARE = (
    0.7  # a function alone is a third of its module's text and has as much to say about the repair
)


def clean_modules(seed: int) -> Iterator[str]:
    """Endless clean modules: bare text, numbered as ``read_file`` shows them, or followed by their tests."""
    rng = random.Random(f"{seed}/clean")
    while True:
        module = draw_module(rng, _OWNS)
        form = rng.random()
        if form < 0.4:
            yield module.source
        elif form < 0.7:
            yield f"{module.path}\n{numbered(module.source)}\n"
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


def commit_documents(seed: int, families: tuple[str, ...] = SEEN_FAMILIES) -> Iterator[str]:
    """Endless repairs: path, numbered listing with one corruption, a one-line message, the repaired line ``N|text``.
    Mostly the listing is of the corrupted function alone, with its lines' numbers in the module.

    A lost line is repaired by the line before it followed by the lost one. Besides the families, a share of the
    corruptions is generic noise: a token replaced by another one of the same function.

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
        index, buggy = corrupted
        draft = module.drafts[index]
        line, text = repair_of(module.source, buggy)
        shown = numbered(buggy)
        if rng.random() < _EXCERPT_SHARE:
            start = module.start_of(index)
            end = start + len(buggy.split("\n")) - len(module.source.split("\n")) + len(draft.lines)
            shown = "\n".join(shown.split("\n")[start:end])
        yield f"{module.path}\n{shown}\n\n{_message(draft, module, rng)}\n{line}|{text}\n"


def _refuse_unseen(families: tuple[str, ...]) -> None:
    if wrong := [f for f in families if f in UNSEEN_FAMILIES or f not in SEEN_FAMILIES]:
        raise ValueError(f"not a family of the corpus: {', '.join(wrong)}")


def _corrupted(module: Module, families: tuple[str, ...], rng: random.Random) -> tuple[int, str] | None:
    """(the draft that was corrupted, the module's source with it), None when no corruption fits the draft drawn."""
    index = rng.randrange(len(module.drafts))
    lines = module.drafts[index].lines
    noisy = rng.random() < _NOISE_SHARE
    mutation = _noise(lines, rng) if noisy else draw_mutation(lines, families, rng)
    return None if mutation is None else (index, module.with_lines(index, mutation.apply(lines)))


def reading_documents(seed: int, families: tuple[str, ...] = SEEN_FAMILIES) -> Iterator[str]:
    """Endless reading exercises over one to four numbered modules of which one has a single corruption.

    A failing assertion or a name stands first, the modules follow, and after an empty line the answers, each copied
    from above: the name, the line that defines it with its path, the line that is wrong, the line repaired.
    No tool syntax; unseen families are left out as in :func:`commit_documents`.
    """
    _refuse_unseen(families)
    rng = random.Random(f"{seed}/reading")
    while True:
        modules = _distinct_modules(rng, rng.choice((1, 1, 2, 2, 3, 4)))
        at = rng.randrange(len(modules))
        module = modules[at]
        corrupted = _corrupted(module, families, rng)
        if corrupted is None:
            continue
        index, buggy = corrupted
        draft = module.drafts[index]
        line, text = repair_of(module.source, buggy)
        listings = []
        for k, m in enumerate(modules):
            source = buggy if k == at else m.source
            if k == at or rng.random() < 0.7:
                listings.append(f"{m.path}\n{numbered(source)}")
        wrong = buggy.split("\n")[line - 1]
        head = module.start_of(index) + 1
        answers = [
            draft.name,
            f"{module.path}:{head}|{buggy.split(chr(10))[head - 1]}",
            module.path,
            f"{line}|{wrong}",
        ]
        if rng.random() < 0.3:  # a second look-up, of any function shown
            other = rng.choice(module.drafts)
            answers.insert(1, other.name)
        answers.append(f"{line}|{text}")
        question = _failing(draft, rng) if rng.random() < 0.7 else f"{draft.purpose}: {draft.name}"
        yield "\n".join([question, *listings]) + "\n\n" + "\n".join(answers) + "\n"


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


def repair_of(good: str, buggy: str) -> tuple[int, str]:
    """The single edit that repairs a file: (line number from 1, new text, possibly of two lines).

    Replacing that line of ``buggy`` by the text gives ``good``. A lost line is put back after the line before it.

    Raises:
        ValueError: the files are equal, or differ in more than one changed or lost line.
    """
    a, b = good.split("\n"), buggy.split("\n")
    i = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if i is None:
        raise ValueError("the files do not differ in one line")
    if len(a) == len(b) and a[i + 1 :] == b[i + 1 :]:
        return i + 1, a[i]
    if len(a) == len(b) + 1 and a[i + 1 :] == b[i:] and i > 0:
        return i, a[i - 1] + "\n" + a[i]
    raise ValueError("the files do not differ in one line")


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
