from __future__ import annotations

import pytest

from cadenza.tokens import CompactRenderer, Tokenizer

CORPUS = [
    "def total(values, start=0):\n    result = start\n    for value in values:\n        result += value\n    return result\n",
    "1|def push(self, item):\n2|    self.items.append(item)\nerror: usage: no such file\n",
] * 50


@pytest.fixture(scope="session")
def renderer() -> CompactRenderer:
    return CompactRenderer(Tokenizer.train(CORPUS, 512))
