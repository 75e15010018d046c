"""Issue texts in ambiguity levels, from behaviour alone: what a user sees, never what the diff says.

0 names the function and gives a call with what it does and should do; 1 says by its purpose what comes out wrong; 2 is
one vague sentence that names at most the module or the domain. ``reports_text`` is a list of several bugs
with more examples: long to read, while what is left to do of it is short to remember.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

LISTED = 3  # the level of an issue that says nothing itself and points to a list that says all
REPORTS = "reports.md"  # the file of a repository that lists what users have reported


@dataclass(frozen=True, slots=True)
class Symptom:
    """One failing behaviour. ``actual`` is in words: ``gives 3``, ``raises TypeError``."""

    name: str
    purpose: str
    call: str
    expected: str
    actual: str
    module: str
    theme: str


_PRECISE = (
    "{name} is wrong: {call} {actual} but should give {expected}.",
    "{call} {actual}. It should give {expected}.",
    "{call} {actual}, I expected {expected}. Please fix {name}.",
    "Bug in {name}: {call} {actual} and not {expected}.",
    "The result of {name} is not right. {call} {actual} where {expected} is correct.",
    "Expected {expected} from {call}, but it {actual}.",
    "Please look at {name}. {call} {actual}; right would be {expected}.",
    "Since the last change {call} {actual} instead of {expected}.",
)
_SYMPTOM = (
    "{purpose} is wrong in some cases.",
    "{purpose} does not come out right.",
    "We get a wrong result for {purpose}.",
    "Users say that {purpose} is not what they expect.",
    "Something is off with {purpose}. Please fix it.",
    "Please check {purpose}: the numbers we see are not right.",
    "Our report shows a mistake in {purpose}.",
    "Can you repair {purpose}? It is not correct.",
)
_VAGUE = (
    "Something in the {theme} code is broken.",
    "The tests fail since yesterday, please have a look.",
    "Please make {module} work again.",
    "There is a bug somewhere in {module}.",
    "Our {theme} program gives wrong results.",
    "A customer of the {theme} complains about wrong results.",
    "Find and fix the bug, the tests are red.",
    "{module} does not do what it says.",
)
_ALSO = ("Also: ", "And: ", "Then: ", "Second: ")
_TWO = ("Two things are wrong. ", "Two bugs. ", "I found two problems. ", "")


_TOO = (
    "{call} {actual} as well, not {expected}.",
    "Also {call} {actual} where {expected} is right.",
    "And {call} {actual}, which should be {expected}.",
    "The same with {call}: it {actual} and not {expected}.",
)
_POINTERS = (
    "Please work through {file} and fix what is wrong.",
    "{file} has what our users report. Fix all bugs in it.",
    "Read {file} and mend every bug that it reports.",
    "Users have sent reports, see {file}. Please fix them all.",
    "Fix the bugs of {file}. The tests do not cover them.",
)


def reports_text(reports: list[tuple[Symptom, Symptom]], rng: random.Random) -> str:
    """One line a report, in a random order: the file and the function it is about, and two calls that show the bug.
    Ends with a newline."""
    lines = []
    for first, second in reports:
        too = rng.choice(_TOO).format(call=second.call, actual=second.actual, expected=second.expected)
        lines.append(f"- {first.module}, {first.name}: {_one(first, 0, rng)} {too}")
    rng.shuffle(lines)
    return "\n".join(lines) + "\n"


def pointer_text(rng: random.Random) -> str:
    """The issue of a task whose reports stand in ``REPORTS``, without a trailing newline."""
    return rng.choice(_POINTERS).format(file=REPORTS)


def issue_text(symptoms: list[Symptom], level: int, rng: random.Random) -> str:
    """The issue in 10-40 words or so, without a trailing newline.

    Raises:
        ValueError: the level is not 0, 1 or 2, or there is no symptom.
    """
    if level not in (0, 1, 2) or not symptoms:
        raise ValueError(f"no issue of level {level} with {len(symptoms)} symptoms")
    if level == 2:
        symptom = rng.choice(symptoms)
        return rng.choice(_VAGUE).format(theme=symptom.theme, module=symptom.module)
    texts = [_one(s, level, rng) for s in symptoms]
    if len(texts) == 1:
        return texts[0]
    return rng.choice(_TWO) + texts[0] + " " + rng.choice(_ALSO) + " ".join(texts[1:])


def _one(symptom: Symptom, level: int, rng: random.Random) -> str:
    form = rng.choice(_PRECISE if level == 0 else _SYMPTOM)
    text = form.format(
        name=symptom.name,
        purpose=symptom.purpose,
        call=symptom.call,
        expected=symptom.expected,
        actual=symptom.actual,
    )
    return text if level == 0 else text[0].upper() + text[1:]


def leaks(text: str, level: int, names: list[str], purposes: list[str]) -> list[str]:
    """What the text says beyond its level.

    Level 1 must not contain a function or class name or a digit; level 2 neither, nor any purpose.
    """
    if level == 0:
        return []
    found = [n for n in names if re.search(rf"\b{re.escape(n)}\b", text)]
    found += re.findall(r"\d+", text)
    if level == 2:
        found += [p for p in purposes if p.lower() in text.lower()]
    return found
