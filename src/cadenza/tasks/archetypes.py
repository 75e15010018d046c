"""The registry of function archetypes, and the composition of drafts across modules."""

from __future__ import annotations

import random
from collections.abc import Callable

from cadenza.tasks.archetypes_classes import CLASSES
from cadenza.tasks.archetypes_lists import LISTS
from cadenza.tasks.archetypes_numbers import NUMBERS
from cadenza.tasks.archetypes_tables import TABLES
from cadenza.tasks.archetypes_text import TEXT
from cadenza.tasks.draft import Call, Draft, Draw, spec_digest
from cadenza.tasks.words import Theme, plural

Archetype = Callable[[Draw], Draft]
ARCHETYPES: dict[str, Archetype] = {f.__name__: f for f in (*NUMBERS, *LISTS, *TEXT, *TABLES, *CLASSES)}
_NAMES = tuple(ARCHETYPES)


def make(archetype: str, rng: random.Random, theme: Theme) -> Draft:
    """One clean draft of the named archetype.

    Raises:
        KeyError: the archetype does not exist.
    """
    draft = ARCHETYPES[archetype](Draw(rng, theme))
    return _tagged(draft, archetype)


def _tagged(draft: Draft, archetype: str) -> Draft:
    return Draft(
        draft.name,
        draft.lines,
        draft.purpose,
        draft.call,
        archetype,
        draft.shape,
        draft.argument,
        draft.imports,
    )


def draw_in(
    owns: Callable[[int], bool], rng: random.Random, theme: Theme, archetypes: tuple[str, ...] = _NAMES
) -> Draft:
    """Draws drafts until one's spec digest belongs to the caller (see ``partition.py``)."""
    while True:
        draft = make(archetypes[int(rng.random() * len(archetypes))], rng, theme)
        if owns(spec_digest(draft.source)):
            return draft


def compose(rng: random.Random, theme: Theme, module: str, inner: Draft) -> Draft | None:
    """A function of another module that uses ``inner`` of ``module``; None if ``inner`` cannot be used so.

    ``int->int`` functions are summed or filtered over a list, ``ints->int`` ones are compared over two lists.
    """
    d = Draw(rng, theme)
    if inner.shape == "int->int":
        draft = _over_list(d, inner)
    elif inner.shape == "ints->int":
        draft = _over_two_lists(d, inner)
    else:
        return None
    return Draft(
        draft.name, draft.lines, draft.purpose, draft.call, "compose", imports=((module, inner.name),)
    )


def _over_list(d: Draw, inner: Draft) -> Draft:
    noun = d.thing()
    many, x = plural(noun), d.pick("x", "value", "n")
    k = d.number(1, 9)
    name = d.name("total plan overall", many)
    acc = d.pick("total", "result", "acc")
    assert inner.argument is not None
    argument = inner.argument
    body = [
        f"    {acc} = {k}",
        f"    for {x} in {many}:",
        f"        {acc} += {inner.name}({x})",
        f"    return {acc}",
    ]
    lines = (f"def {name}({many}):", f'    """{k} plus the sum of {inner.name} over the {many}."""', *body)

    def call(r: random.Random) -> Call:
        values = ", ".join(argument(r) for _ in range(r.randint(1, 3)))
        return Call((), f"{name}([{values}])")

    return Draft(name, lines, f"the sum over the {many}", call)


def _over_two_lists(d: Draw, inner: Draft) -> Draft:
    first, second = d.pick(("left", "right"), ("old", "new"), ("ours", "theirs"))
    name = d.name("gap lead change", d.thing())
    assert inner.argument is not None
    argument = inner.argument
    lines = (
        f"def {name}({first}, {second}):",
        f'    """{inner.name} of {second} minus {inner.name} of {first}."""',
        f"    before = {inner.name}({first})",
        f"    after = {inner.name}({second})",
        "    return after - before",
    )

    def call(r: random.Random) -> Call:
        return Call((), f"{name}({argument(r)}, {argument(r)})")

    return Draft(name, lines, f"the difference between {first} and {second}", call)
