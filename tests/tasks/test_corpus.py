"""The pretraining corpus: disjoint from every split, free of the unseen families, and repairs that repair."""

from __future__ import annotations

import ast
import re
from itertools import islice

import pytest

from cadenza.tasks.bugs import UNSEEN_FAMILIES
from cadenza.tasks.corpus import clean_modules, commit_documents, reading_documents, repair_of
from cadenza.tasks.draft import spec_digest
from cadenza.tasks.partition import PARTITION, owner_of


def plain(text: str) -> str:
    """The module of a document, numbers taken off."""
    lines = [m[2] for m in re.finditer(r"^(\d+)\|(.*)$", text, re.M)]
    return "\n".join(lines) + "\n" if lines else text


def functions(source: str) -> list[str]:
    tree = ast.parse(source)
    nodes = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(n)]
    return [ast.get_source_segment(source, n) or "" for n in nodes]


def test_a_corpus_function_that_a_split_may_hold():
    for text in islice(clean_modules(3), 300):
        found = functions(plain(text))
        assert found
        for source in found:
            assert owner_of(spec_digest(source)) == "corpus"


def test_the_three_forms_of_clean_modules_all_appear():
    texts = list(islice(clean_modules(0), 100))
    assert any(re.search(r"^1\|", t, re.M) for t in texts)
    assert any("def test_" in t for t in texts)
    assert any(t.startswith(("def ", "class ")) and "def test_" not in t for t in texts)


def test_tests_of_the_corpus_that_fail():
    for text in islice((t for t in clean_modules(1) if "def test_" in t), 60):
        namespace: dict = {}
        exec(re.sub(r"^from \w+ import .*$", "", text, flags=re.M), namespace)
        for name in [n for n in namespace if n.startswith("test_")]:
            namespace[name]()


def test_a_commit_document_whose_repair_does_not_repair():
    for text in islice(commit_documents(2), 300):
        head, listing_and_rest = text.split("\n", 1)
        assert re.fullmatch(r"\w+\.py", head)
        listing, rest = listing_and_rest.split("\n\n", 1)
        assert "\n" in rest and "\n\n" not in rest
        line, new = rest.split("\n", 1)[1].rstrip("\n").split("|", 1)
        first = int(listing.split("|", 1)[0])  # an excerpt keeps its lines' numbers in the module
        buggy = plain(listing).rstrip("\n").split("\n")
        at = int(line) - first
        good = "\n".join([*buggy[:at], new, *buggy[at + 1 :]])
        assert good != "\n".join(buggy)
        assert "\n".join(f"{first + i}|{text}" for i, text in enumerate(buggy)) == listing
        assert [owner_of(spec_digest(f)) for f in functions(good + "\n")]


def test_a_reading_exercise_whose_answers_are_not_in_its_text():
    for text in islice(reading_documents(2), 200):
        shown, answers = text.split("\n\n", 1)
        *copied, repair = answers.rstrip("\n").rsplit("\n", 1) if "|" in answers else (answers, "")
        lines = copied[0].split("\n")
        wrong = next(line for line in reversed(lines) if re.match(r"\d+\|", line))
        assert wrong in shown.split("\n")
        assert lines[0] in shown
        assert repair != wrong


def test_unseen_families_in_the_corpus():
    for family in UNSEEN_FAMILIES:
        with pytest.raises(ValueError, match=family):
            next(commit_documents(0, families=(family,)))
        with pytest.raises(ValueError, match=family):
            next(reading_documents(0, families=(family,)))
    with pytest.raises(ValueError, match="nonsense"):
        next(commit_documents(0, families=("nonsense",)))


def test_a_corpus_that_differs_between_two_runs():
    for source in (clean_modules, commit_documents):
        assert list(islice(source(7), 40)) == list(islice(source(7), 40))
        assert list(islice(source(7), 5)) != list(islice(source(8), 5))


def test_families_restrict_the_commits():
    texts = list(islice(commit_documents(0, families=("dropped_statement",)), 60))
    assert sum("\n" in t.split("\n\n", 1)[1].rstrip("\n").split("\n", 1)[1] for t in texts) > 40


def test_buckets_cover_everything_once():
    buckets = [b for r in PARTITION.values() for b in r]
    assert sorted(buckets) == list(range(100))


@pytest.mark.parametrize(
    "good, buggy, expected",
    [
        ("a\nb\nc\n", "a\nx\nc\n", (2, "b")),
        ("a\nb\nc\n", "a\nc\n", (1, "a\nb")),
        ("a\nb\n", "a\n", (1, "a\nb")),
    ],
)
def test_repair_of_one_line(good, buggy, expected):
    assert repair_of(good, buggy) == expected


@pytest.mark.parametrize("good, buggy", [("a\n", "a\n"), ("a\nb\n", "x\ny\n"), ("a\nb\nc\n", "a\n")])
def test_repairs_of_several_lines_are_refused(good, buggy):
    with pytest.raises(ValueError):
        repair_of(good, buggy)
