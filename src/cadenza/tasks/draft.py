"""What an archetype makes: one clean function or class, and a way to draw calls of it.

An archetype is a function ``Draw -> Draft``. It draws names, constants and operators, writes source in which every
statement is on one line, a one-line docstring that says exactly what the code does, constants included, and a
generator of calls whose inputs lie near the constants. Expected values are never written by hand: the tests
of a task hold what the correct code really returned.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from cadenza.tasks.words import ADJECTIVES, SAMPLE_WORDS, Theme

# Comparison operators and the words that mean exactly that.
ABOVE_BELOW = {">": "above", ">=": "of at least", "<": "below", "<=": "of at most"}
IS_THAN = {">": "is above", ">=": "is at least", "<": "is below", "<=": "is at most"}


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a draft: statements to run first, then an expression whose value is observed."""

    setup: tuple[str, ...]
    expression: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A clean function or class.

    ``lines``: the source, no trailing blank line. ``purpose``: a noun phrase for a sentence, without the name.
    ``call``: draws one call. ``shape``: ``int->int`` or ``ints->int`` where another module may use the function,
    ``argument``: then draws one argument for it (source text).
    """

    name: str
    lines: tuple[str, ...]
    purpose: str
    call: Callable[[random.Random], Call]
    archetype: str = ""
    shape: str | None = None
    argument: Callable[[random.Random], str] | None = None
    imports: tuple[tuple[str, str], ...] = ()  # (module, function) pairs this draft needs

    @property
    def source(self) -> str:
        """The function as Python source."""
        return "\n".join(self.lines)


class Draw:
    """The random choices of one draft, in one theme."""

    def __init__(self, rng: random.Random, theme: Theme) -> None:
        self.rng = rng
        self.theme = theme

    def pick(self, *options):
        """One of the options, each as likely."""
        return options[int(self.rng.random() * len(options))]

    def chance(self, p: float) -> bool:
        """True with probability ``p``."""
        return self.rng.random() < p

    def number(self, low: int, high: int) -> int:
        """An integer of [low, high]."""
        return low + int(self.rng.random() * (high - low + 1))

    def thing(self) -> str:
        """A countable thing of the theme."""
        return self.pick(*self.theme.things)

    def amount(self) -> str:
        """A numeric attribute in the theme."""
        return self.pick(*self.theme.amounts)

    def label(self) -> str:
        """A text attribute in the theme."""
        return self.pick(*self.theme.labels)

    def compare(self) -> str:
        """An order comparison."""
        return self.pick(">", ">=", "<", "<=")

    def element(self, noun: str) -> str:
        """A loop variable for a list called by the noun's plural."""
        return self.pick(noun, noun, noun[0] if noun[0] not in "lo" else "v", "x", "value")

    def name(self, verbs: str, noun: str) -> str:
        """A function name: one of the verbs (space separated), maybe an adjective, the noun."""
        verb = self.pick(*verbs.split())
        adjective = self.pick(*ADJECTIVES) + "_" if self.chance(0.45) else ""
        return f"{verb}_{adjective}{noun}"


def lit(value: object) -> str:
    """Source text of a plain value, strings in double quotes as the generated code writes them."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=True)
    if isinstance(value, list):
        return "[" + ", ".join(lit(v) for v in value) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(lit(v) for v in value) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{lit(k)}: {lit(v)}" for k, v in value.items()) + "}"
    return repr(value)


def function(
    name: str,
    parameters: str,
    doc: str,
    body: list[str],
    purpose: str,
    arguments: Callable[[random.Random], tuple],
    shape: str | None = None,
) -> Draft:
    """A function draft. ``body``: lines indented relative to the function's body. ``arguments``: draws values."""
    lines = [f"def {name}({parameters}):", f'    """{doc}"""', *("    " + line for line in body)]

    def call(rng: random.Random) -> Call:
        return Call((), f"{name}({', '.join(lit(v) for v in arguments(rng))})")

    argument = (lambda rng: lit(arguments(rng)[0])) if shape else None
    return Draft(name, tuple(lines), purpose, call, shape=shape, argument=argument)


def near(rng: random.Random, *centres: int, low: int = 0, high: int = 30) -> int:
    """An integer close to one of the centres half of the time: boundary bugs show only there."""
    if centres and rng.random() < 0.6:
        return centres[int(rng.random() * len(centres))] + (0, 0, 1, -1)[int(rng.random() * 4)]
    return rng.randint(low, high)


def ints(
    rng: random.Random, *centres: int, low: int = 0, high: int = 20, least: int = 2, most: int = 5
) -> list[int]:
    """A short list of integers, close to the centres."""
    return [near(rng, *centres, low=low, high=high) for _ in range(rng.randint(least, most))]


def words(rng: random.Random, least: int = 2, most: int = 4) -> list[str]:
    """A short list of distinct lower-case words."""
    return rng.sample(SAMPLE_WORDS, rng.randint(least, most))


def word(rng: random.Random) -> str:
    """A lower-case word."""
    return SAMPLE_WORDS[int(rng.random() * len(SAMPLE_WORDS))]


def table(rng: random.Random, *centres: int, least: int = 2, most: int = 3, high: int = 20) -> dict[str, int]:
    """A small dictionary from words to integers."""
    return {key: near(rng, *centres, high=high) for key in words(rng, least, most)}


_DEF = re.compile(r'^\s*(def|class) |^\s*"""')


def spec_of(source: str) -> str:
    """The part of a function's source that says what it must do: definition lines and docstrings.

    A bug never touches these lines, so a function and all its mutants have the same spec.
    """
    return "\n".join(line.strip() for line in source.splitlines() if _DEF.match(line))


def spec_digest(source: str) -> int:
    """A 64-bit hash of the spec; names, constants of the docstring and parameters included."""
    return int.from_bytes(hashlib.blake2b(spec_of(source).encode(), digest_size=8).digest(), "big")
