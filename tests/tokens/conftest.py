from __future__ import annotations

import pytest

from cadenza.tokens import CompactRenderer, Tokenizer

CORPUS = [
    """def total(values, start=0):
    result = start
    for value in values:
        result += value
    return result
""",
    """class Stack:
    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
""",
] * 50


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(CORPUS, 512)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> CompactRenderer:
    return CompactRenderer(tokenizer)
