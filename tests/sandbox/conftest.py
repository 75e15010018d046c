"""One backend for all tests of this room, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from cadenza.sandbox import LocalBackend, Sandbox, SandboxSpec

T = TypeVar("T")


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def run(loop: asyncio.Runner) -> Callable[[Awaitable[Any]], Any]:
    """Runs one awaitable to its end, at most a minute."""

    async def bounded(work: Awaitable[T]) -> T:
        async with asyncio.timeout(60):
            return await work

    return lambda work: loop.run(bounded(work))


@pytest.fixture(scope="session")
def backend(run: Any) -> Iterator[LocalBackend]:
    local = LocalBackend()
    run(local.start())
    yield local
    run(local.aclose())


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A layer: one module, its tests, a package and a link."""
    root = tmp_path / "repo"
    (root / "pkg" / "deep").mkdir(parents=True)
    (root / "shop.py").write_text("def total(xs):\n    return sum(xs) + 1\n")
    (root / "test_shop.py").write_text(
        "from shop import total\n\n\ndef test_total():\n    assert total([3, 4]) == 7\n\n\n"
        "def test_type():\n    assert isinstance(total([]), int)\n"
    )
    (root / "pkg" / "__init__.py").write_text("")
    (root / "pkg" / "one.py").write_text("ONE = 1\n")
    (root / "pkg" / "deep" / "two.py").write_text("TWO = 2\n")
    (root / "link").symlink_to("shop.py")
    return root


@pytest.fixture
def sandbox(backend: LocalBackend, repo: Path, run: Any) -> Iterator[Sandbox]:
    made = run(backend.create(SandboxSpec(layers=(repo,), ttl_s=120)))
    yield made
    run(made.destroy())
