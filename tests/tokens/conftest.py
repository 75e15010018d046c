from __future__ import annotations

import pytest

from cadenza.tokens import CompactRenderer, Tokenizer

CORPUS = [
    "def total(values, start=0):\n    result = start\n    for value in values:\n        result += value\n    return result\n",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n",
] * 50


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(CORPUS, 512)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> CompactRenderer:
    return CompactRenderer(tokenizer)
