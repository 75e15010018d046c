from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from cadenza.sandbox.errors import PathRefused
from cadenza.sandbox.spec import ExecResult, PytestResult
from cadenza.tokens import Action, CompactRenderer, Sampled, Sampling


class DictSandbox:
    """Files in a dictionary, for properties that need thousands of runs. Real sandboxes are tested elsewhere."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = dict(files)
        self.commands: list[list[str]] = []

    async def exec(self, argv: list[str], **_: Any) -> ExecResult:
        self.commands.append(argv)
        return ExecResult(1, b"", b"", False, False, 0.0)

    async def read(self, path: str) -> bytes:
        if path.startswith("/") or ".." in path.split("/"):
            raise PathRefused(path)
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.files[path]

    async def write(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def list(self, path: str = ".") -> list[str]:
        return sorted(self.files)

    async def pytest(self, args: Iterable[str], **_: Any) -> PytestResult:
        return PytestResult(0, {"test_a.py::test_a": "passed"}, [], "", False, 0.0)


class Replay:
    """A session that answers with prepared turns: actions, id lists or whole ``Sampled``; then ``finish`` for ever."""

    def __init__(self, renderer: CompactRenderer, turns: Iterable[Action | list[int] | Sampled]) -> None:
        self.renderer = renderer
        self.turns = list(turns)
        self.context: list[int] = []
        self.contexts: list[list[int]] = []  # those before
        self.budgets: list[int] = []
        self.closed = False

    async def sample(self, new_ids: list[int], sampling: Sampling) -> Sampled:
        self.budgets.append(sampling.max_tokens)
        self.context += new_ids
        turn = (
            self.turns.pop(0)
            if self.turns
            else [self.renderer.tokenizer.id("<|final|>"), self.renderer.end_id]
        )
        if isinstance(turn, Sampled):
            self.context += turn.ids
            return turn
        ids = turn if isinstance(turn, list) else self.renderer.render_action(turn)
        finish = "length" if len(ids) > sampling.max_tokens else "stop"
        ids = ids[: sampling.max_tokens]
        self.context += ids
        return Sampled(ids, [-0.5] * len(ids), [3] * len(ids), finish, weights={3: "w3"})

    def renew(self) -> None:
        self.contexts.append(self.context)
        self.context = []

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def make_sandbox() -> type[DictSandbox]:
    return DictSandbox


@pytest.fixture
def replay(renderer: CompactRenderer):
    """Makes a session from turns."""
    return lambda *turns: Replay(renderer, turns)
