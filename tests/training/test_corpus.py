"""Pretraining documents: split by content, whatever lies where; unreadable things on the way are no obstacle."""

from __future__ import annotations

import numpy as np
import pytest

from cadenza.core.errors import MissingArtifact
from cadenza.tokens import Tokenizer
from cadenza.training.corpus import python_documents, stream_rows, token_stream

pytestmark = pytest.mark.needs_train
TEXTS = [f"value_{i} = {i}\n" for i in range(120)]


def test_a_document_is_trained_on_and_held_out_or_the_order_depends_on_paths(tmp_path):
    for i, text in enumerate(TEXTS):
        for name in (f"one/{i}.py", f"two/deep/{len(TEXTS) - i}.py", f"copy/{i}.py"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    one = [list(python_documents([tmp_path / "one"], held_out=h)) for h in (False, True)]
    two = [list(python_documents([tmp_path / n for n in ("two", "copy")], held_out=h)) for h in (False, True)]
    assert one == two
    train, held = one
    assert sorted(train + held) == sorted(TEXTS) and train and held


def test_something_that_only_looks_like_a_file_stops_the_run(tmp_path):
    (tmp_path / "package.py").mkdir()
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "inside.py").write_text("secret = 1\n")
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    (tmp_path / "large.py").write_text("x = 1\n" * 20_000)
    (tmp_path / "good.py").write_text("x = 1\n")
    found = [t for h in (False, True) for t in python_documents([tmp_path], held_out=h)]
    assert found == ["x = 1\n"]


def test_no_source_at_all_is_an_empty_corpus(tmp_path):
    with pytest.raises(MissingArtifact):
        list(python_documents([tmp_path], held_out=False))


def test_a_stream_loses_document_ends_or_overruns_its_limit():
    tokenizer = Tokenizer.train(TEXTS, 300)
    stream = token_stream(TEXTS[:3], tokenizer, 10_000)
    bos, end = tokenizer.id("<|bos|>"), tokenizer.id("<|end|>")
    assert (stream == bos).sum() == (stream == end).sum() == 3
    assert token_stream(TEXTS, tokenizer, 17).tolist() == token_stream(TEXTS, tokenizer, 10_000)[:17].tolist()
    assert len(token_stream([], tokenizer, 5)) == 0


def test_windows_skip_a_part_of_the_stream():
    stream = np.arange(40, dtype=np.uint16)
    rows = stream_rows(stream, 0, 5, 10)
    assert np.concatenate([ids for ids, _ in rows]).tolist() == [*range(40), *range(10)]
