"""Screening: mutants that loop, eat memory or leave the interpreter cost their own verdict and no other."""

from __future__ import annotations

import time

from cadenza.tasks.draft import Call
from cadenza.tasks.screen import ENDLESS, Observation, Probe, Screened, screen


def probe(good: str, *bad: str, calls: tuple[str, ...] = ("f(3)",)) -> Probe:
    return Probe((("m", good),), tuple((("m", b),) for b in bad), tuple(("m", Call((), c)) for c in calls))


def only(results: list[Screened | None]) -> list[Observation]:
    assert len(results) == 1 and results[0] is not None
    assert all(c is not None for c in results[0].calls)
    return [c for c in results[0].calls if c is not None]


def test_what_passes_and_what_fails_is_told_apart():
    calls = only(
        screen(
            [
                probe(
                    "def f(x):\n    return x + 1\n",
                    "def f(x):\n    return max(x, 1) + 1\n",
                    calls=("f(3)", "f(0)"),
                )
            ]
        )
    )
    assert [c.value for c in calls] == [4, 1]
    assert [c.actual for c in calls] == [(None,), ("gives 2",)]


def test_an_error_is_named():
    calls = only(screen([probe("def f(x):\n    return x\n", "def f(x):\n    return y\n", "x = 1 / 0\n")]))
    assert calls[0].actual == ("raises NameError", "raises ZeroDivisionError")


def test_a_mutant_that_never_ends():
    begun = time.monotonic()
    loop = "def f(x):\n    while x:\n        pass\n    return x\n"
    results = screen(
        [probe("def f(x):\n    return x\n", loop, calls=("f(3)", "f(4)")), probe("def f(x):\n    return 1\n")]
    )
    assert all(c.actual == (ENDLESS,) for c in only(results[:1]))
    assert only(results[1:])[0].value == 1
    assert time.monotonic() - begun < 20


def test_a_mutant_that_ends_the_process_takes_no_other_probe_with_it():
    exits = "def f(x):\n    import os\n    os._exit(0)\n"
    good = "def f(x):\n    return x\n"
    results = screen([probe(good, good), probe(good, exits), probe(good, good)])
    assert results[0] and results[1] is None and results[2]


def test_a_mutant_that_eats_memory():
    eats = "def f(x):\n    return len(bytearray(10 ** 10))\n"
    assert only(screen([probe("def f(x):\n    return x\n", eats)]))[0].actual == ("raises MemoryError",)


def test_a_value_that_no_test_can_write_down():
    good = "def f(x):\n    return object()\n"
    (result,) = screen([probe(good, good)])
    assert result is not None and result.calls == (None,)


def test_an_imported_module_with_a_bug_shows_in_its_user():
    good = (("low", "def g(x):\n    return x\n"), ("m", "from low import g\n\ndef f(x):\n    return g(x)\n"))
    bad = (("low", "def g(x):\n    return -x\n"), good[1])
    calls = only(screen([Probe(good, (bad,), (("m", Call((), "f(3)")),))]))
    assert calls[0].actual == ("gives -3",)
