"""A task before it is screened: modules, planted mutations, and the calls that may become tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from cadenza.tasks.archetypes import draw_in
from cadenza.tasks.draft import Call, Draft, spec_digest
from cadenza.tasks.families import Mutation, mutations
from cadenza.tasks.modules import MAX_LINES, Module, draw_module
from cadenza.tasks.partition import owned_by
from cadenza.tasks.screen import Probe
from cadenza.tasks.words import THEMES

_CALLS_PER_TARGET = 20
_CALLS_PER_OTHER = 5
_FAMILY_TRIES = 40


@dataclass(frozen=True, slots=True)
class Bug:
    """A mutation of draft ``draft`` in module ``module`` (indices into the plan)."""

    module: int
    draft: int
    mutation: Mutation


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call of one draft, by indices."""

    module: int
    draft: int
    call: Call


@dataclass(frozen=True, slots=True)
class Plan:
    """Modules in import order, bugs, and candidate calls. ``tested``: modules that get visible tests."""

    modules: tuple[Module, ...]
    bugs: tuple[Bug, ...]
    calls: tuple[PlannedCall, ...]
    tested: frozenset[int]

    def sources(self, bugs: tuple[Bug, ...]) -> dict[str, str]:
        """Module name -> source with these bugs planted."""
        out = {m.name: m.source for m in self.modules}
        for i, module in enumerate(self.modules):
            here = sorted((b for b in bugs if b.module == i), key=lambda b: -b.draft)
            if here:
                lines = list(module.lines)
                for bug in here:  # from the last draft up, so that earlier line numbers stay valid
                    start = module.start_of(bug.draft)
                    old = module.drafts[bug.draft].lines
                    lines[start : start + len(old)] = bug.mutation.apply(old)
                out[module.name] = "\n".join(lines) + "\n"
        return out

    def probe(self) -> Probe:
        """The correct version, the version with all bugs, then one version per bug with only that one."""
        versions = [self.bugs] if len(self.bugs) == 1 else [self.bugs, *((b,) for b in self.bugs)]
        used = self._needed()

        def pick(sources: dict[str, str]):
            return tuple((name, text) for i, (name, text) in enumerate(sources.items()) if i in used)

        return Probe(
            pick(self.sources(())),
            tuple(pick(self.sources(v)) for v in versions),
            tuple((self.modules[c.module].name, c.call) for c in self.calls),
        )

    def _needed(self) -> set[int]:
        """Modules that the calls need: those called, and those they import from."""
        names = {m.name: i for i, m in enumerate(self.modules)}
        used = {c.module for c in self.calls}
        for i in list(used):
            used |= {names[module] for d in self.modules[i].drafts for module, _ in d.imports}
        return used


def draw_plan(
    rng: random.Random,
    split: str,
    families: tuple[str, ...],
    modules: int,
    apart: bool,
    most_lines: int = MAX_LINES,
) -> Plan | None:
    """One candidate; None if the drawn functions offer no site.

    Args:
        split: owner of every spec in the repository (``partition.py``).
        families: one per bug.
        modules: number of files without tests, at least ``len(families)`` if ``apart``.
        apart: every bug in a file of its own; otherwise two into two functions of one file.
        most_lines: of a file.
    """
    owns = owned_by(split)
    theme = rng.choice(THEMES)
    targets = [_target(rng, owns, theme, family) for family in families]
    if any(t is None for t in targets):
        return None
    built = _repository(rng, owns, theme, [t for t in targets if t], modules, apart, most_lines)
    if built is None:
        return None
    repository, bugs = built
    buggy = {b.module for b in bugs}
    tested = frozenset(i for i in range(len(repository)) if i in buggy or rng.random() < 0.4)
    calls = _calls(rng, repository, bugs, tested)
    return Plan(repository, bugs, calls, tested)


def _target(
    rng: random.Random, owns: Callable[[int], bool], theme, family: str
) -> tuple[Draft, Mutation] | None:
    for _ in range(_FAMILY_TRIES):
        draft = draw_in(owns, rng, theme)
        if found := mutations(draft.lines, (family,), rng):
            return draft, rng.choice(found)
    return None


def _repository(
    rng, owns, theme, targets, count, apart, most_lines
) -> tuple[tuple[Module, ...], tuple[Bug, ...]] | None:
    """Modules around the targets, shuffled; imported modules stay before their users."""
    taken: set[str] = {t[0].name for t in targets}
    if len(taken) < len(targets):
        return None
    groups = [[t] for t in targets] if apart or len(targets) == 1 else [targets]
    modules: list[Module] = []
    for group in groups:
        module = _around(rng, owns, theme, [t[0] for t in group], taken)
        if module is None or len(module.lines) > most_lines:
            return None
        modules.append(module)
    usable = [(m.name, d) for m in modules for d in m.drafts if d.shape]
    while len(modules) < count:
        using = rng.choice(usable) if usable and rng.random() < 0.35 else None
        other = theme if using or rng.random() < 0.5 else None
        module = draw_module(rng, owns, other, frozenset(taken), using=using)
        if not module.drafts:
            return None
        if len(module.lines) > most_lines:
            continue
        modules.append(module)
        taken |= {module.name, *(d.name for d in module.drafts)}
    bugs = []
    for draft, mutation in targets:
        where = next((i, m.drafts.index(draft)) for i, m in enumerate(modules) if draft in m.drafts)
        bugs.append(Bug(*where, mutation))
    return tuple(modules), tuple(bugs)


def _around(rng, owns, theme, drafts: list[Draft], taken: set[str]) -> Module | None:
    """A module that holds the drafts, and maybe others."""
    if len(drafts) == 1:
        module = draw_module(rng, owns, theme, frozenset(taken - {drafts[0].name}), first=drafts[0])
    else:
        module = draw_module(rng, owns, theme, frozenset(taken), count=1, first=drafts[0])
        both = list(drafts)
        rng.shuffle(both)
        module = Module(module.name, theme, tuple(both))
    if len(module.lines) > MAX_LINES:
        return None
    taken |= {module.name, *(d.name for d in module.drafts)}
    return module


def _calls(rng, modules, bugs, tested) -> tuple[PlannedCall, ...]:
    targets = {(b.module, b.draft) for b in bugs}
    buggy = {b.module for b in bugs}
    out: list[PlannedCall] = []
    for i, module in enumerate(modules):
        if i not in buggy and i not in tested:
            continue
        for j, draft in enumerate(module.drafts):
            seen = set()
            for _ in range(_CALLS_PER_TARGET if (i, j) in targets else _CALLS_PER_OTHER):
                call = draft.call(rng)
                if call not in seen:
                    seen.add(call)
                    out.append(PlannedCall(i, j, call))
    return tuple(out)


def spec_digests(plan: Plan) -> list[int]:
    """The spec digest of every function in the repository."""
    return [spec_digest(d.source) for m in plan.modules for d in m.drafts]
