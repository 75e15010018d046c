from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from cadenza.core.errors import CorruptArtifact, MissingArtifact
from cadenza.tokens import SPECIALS, Tokenizer

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@settings(deadline=None)
@given(text=unicode_text)
def test_no_character_is_lost_on_the_way_to_ids_and_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_strict(ids) == text


@settings(deadline=None)
@given(text=st.text(max_size=50), special=st.sampled_from(SPECIALS))
def test_text_cannot_forge_a_special_token(tokenizer, text, special):
    ids = tokenizer.encode(text + special + text)
    assert all(i >= len(SPECIALS) for i in ids)


def test_a_lone_surrogate_does_not_raise(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@settings(deadline=None)
@given(ids=st.lists(st.integers(-5, 5000), max_size=50))
def test_decoding_random_ids_never_raises(tokenizer, ids):
    assert isinstance(tokenizer.decode(ids), str)


def test_specials_have_the_first_sixteen_ids_and_decode_to_their_names(tokenizer):
    assert [tokenizer.id(s) for s in SPECIALS] == list(range(16))
    assert tokenizer.decode(range(16)) == "".join(SPECIALS)
    with pytest.raises(KeyError):
        tokenizer.id("return")


def pieces(tokenizer, text):
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


def test_a_line_number_has_the_same_ids_in_a_listing_and_in_a_call(tokenizer):
    assert pieces(tokenizer, "12|    return result") == ["1", "2", "|", "    ", "return ", "result"]
    assert pieces(tokenizer, "read_file a.py 12")[-2:] == ["1", "2"]


@settings(deadline=None)
@given(
    before=st.sampled_from(["", "(", " ", "\n", "    ", ", ", " = ", " in ", "|", "-", "[", "not ", "1 "]),
    after=st.sampled_from(["", ")", " ", "\n", ", ", " = ", ":", ".", "[", " in "]),
    name=st.sampled_from(["result", "values", "total", "zyxwv", "push"]),
)
def test_a_name_has_the_same_ids_wherever_it_stands(tokenizer, before, after, name):
    alone = tokenizer.encode(name)
    ids = tokenizer.encode(before + name + after)
    assert any(ids[i : i + len(alone)] == alone for i in range(len(ids)))


def test_protocol_words_are_whole_tokens_even_if_the_corpus_lacks_them(tokenizer):
    assert pieces(tokenizer, "list_dir") == ["list", "_dir"]
    assert pieces(tokenizer, "replace_def") == ["replace", "_def"]
    assert pieces(tokenizer, "run_tests") == ["run", "_tests"]


def test_training_twice_in_other_processes_gives_the_same_file(tmp_path):
    program = (
        "import sys; from cadenza.tokens import Tokenizer;"
        "Tokenizer.train(['def f(x):\\n    return x + 1\\n', 'aa bb ab ba cc dd'] * 9, 400).save(sys.argv[1])"
    )
    for name, threads, seed in (("a", "1", "1"), ("b", "2", "2")):
        env = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", program, str(tmp_path / name)], check=True, env=env, timeout=30)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


def test_a_saved_tokenizer_encodes_as_before(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    text = "def push(self):\n\treturn 12 <|end|>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.digest == tokenizer.digest
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and config["split_special_tokens"] is True
    bare = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bare.encode_special_tokens = True
    assert bare.encode(text).ids == tokenizer.encode(text)
    assert bare.decode(bare.encode("def push(self):\n").ids) == "def push(self):\n"


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(MissingArtifact):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptArtifact):
        Tokenizer.load(tmp_path)


def test_a_foreign_tokenizer_is_refused(tmp_path):
    from tokenizers import models

    HFTokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CorruptArtifact):
        Tokenizer.load(tmp_path)
