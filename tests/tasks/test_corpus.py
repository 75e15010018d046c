"""The pretraining corpus: disjoint from every split, free of the unseen families, and repairs that repair."""

from __future__ import annotations

import ast
import difflib
import random
import re
import textwrap
from itertools import islice

import pytest

from cadenza.harness.definitions import replace_definition
from cadenza.tasks.bugs import UNSEEN_FAMILIES
from cadenza.tasks.corpus import clean_modules, commit_documents, reading_documents
from cadenza.tasks.draft import spec_digest
from cadenza.tasks.families import Scope
from cadenza.tasks.partition import PARTITION, owner_of


def functions(source: str) -> list[str]:
    tree = ast.parse(source)
    nodes = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(n)]
    return [ast.get_source_segment(source, n) or "" for n in nodes]


def test_a_corpus_function_that_a_split_may_hold():
    for text in islice(clean_modules(3), 300):
        found = functions(re.sub(r"^\w+\.py\n", "", text))
        assert found
        for source in found:
            assert owner_of(spec_digest(source)) == "corpus"


def test_the_three_forms_of_clean_modules_all_appear():
    texts = list(islice(clean_modules(0), 100))
    assert any(re.match(r"\w+\.py\n", t) for t in texts)
    assert any("def test_" in t for t in texts)
    assert any(t.startswith(("def ", "class ")) and "def test_" not in t for t in texts)


def test_tests_of_the_corpus_that_fail():
    for text in islice((t for t in clean_modules(1) if "def test_" in t), 60):
        namespace: dict = {}
        exec(re.sub(r"^from \w+ import .*$", "", text, flags=re.M), namespace)
        for name in [n for n in namespace if n.startswith("test_")]:
            namespace[name]()


def listing_of(text: str) -> str:
    """The module or function of an exercise's first part, without its path and the message."""
    return "\n".join(text.split("\n", 1)[1].rstrip("\n").split("\n")[:-1]) + "\n"


def test_a_commit_document_whose_repair_does_not_repair():
    seen_attempts = 0
    for exercise in islice(commit_documents(2), 300):
        (role, given), *between, (last, answer) = exercise.parts
        assert (role, last) == ("given", "answer") and re.match(r"\w+\.py\n", given)
        buggy = listing_of(given)
        good = replace_definition(buggy.encode(), answer).decode()
        assert good != buggy
        matcher = difflib.SequenceMatcher(None, buggy.split("\n"), good.split("\n"), autojunk=False)
        changes = [op for op in matcher.get_opcodes() if op[0] != "equal"]
        assert len(changes) == 1 and changes[0][4] - changes[0][3] == 1  # one line mended or put back
        assert all(owner_of(spec_digest(f)) == "corpus" for f in functions(good))
        if between:
            (wrong_role, wrong), (again, _) = between
            assert (wrong_role, again) == ("wrong", "given")
            assert replace_definition(buggy.encode(), wrong).decode() != good
            seen_attempts += 1
    assert 30 < seen_attempts < 120


def test_an_attempt_in_the_corpus_errs_as_an_unseen_family_does():
    """A lost or changed initial value, or swapped arguments, beside what the listing has wrong."""
    for exercise in islice((e for e in commit_documents(4) if len(e.parts) > 2), 300):
        wrong, answer = exercise.parts[1][1], exercise.parts[-1][1]
        good = textwrap.dedent(answer.rstrip("\n"))
        scope = Scope(tuple(good.split("\n")), random.Random(0))
        written = textwrap.dedent(wrong)
        for line in scope.initial_lines:
            text = good.split("\n")[line]
            lost = text not in written.split("\n")
            assert not lost or text not in listing_of(exercise.parts[0][1]), (wrong, answer)


def test_a_reading_exercise_whose_answers_are_not_in_its_text():
    for exercise in islice(reading_documents(2), 200):
        (_, given), (_, answers) = exercise.parts
        names, repaired = answers.split(".py\n", 1)
        *called, path = names.split("\n")
        assert f"{path}.py\n" in given and all(re.search(rf"\b{name}\b", given) for name in called)
        assert repaired.split("\n")[0] in given and repaired not in given


def test_unseen_families_in_the_corpus():
    for family in UNSEEN_FAMILIES:
        with pytest.raises(ValueError, match=family):
            next(commit_documents(0, families=(family,)))
        with pytest.raises(ValueError, match=family):
            next(reading_documents(0, families=(family,)))
    with pytest.raises(ValueError, match="nonsense"):
        next(commit_documents(0, families=("nonsense",)))


def test_a_corpus_that_differs_between_two_runs():
    for source in (clean_modules, commit_documents, reading_documents):
        assert list(islice(source(7), 40)) == list(islice(source(7), 40))
        assert list(islice(source(7), 5)) != list(islice(source(8), 5))


def test_families_restrict_the_commits():
    lost = 0
    for exercise in islice(commit_documents(0, families=("dropped_statement",)), 60):
        buggy, answer = listing_of(exercise.parts[0][1]), exercise.parts[-1][1]
        good = replace_definition(buggy.encode(), answer).decode()
        lost += good.count("\n") == buggy.count("\n") + 1
    assert lost > 40


def test_buckets_cover_everything_once():
    buckets = [b for r in PARTITION.values() for b in r]
    assert sorted(buckets) == list(range(100))
