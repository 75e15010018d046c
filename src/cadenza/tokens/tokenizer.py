"""Byte-level BPE: text becomes ids exactly once, here.

Pre-tokens are cut so that a small model can copy. An identifier has the same ids wherever it stands (no space is ever
glued to it), digits stand alone (a number has the same ids in ``7|`` and in ``read_file a.py 7``), ``|``, brackets
and every newline stand alone, and a run of two or more spaces, which is what indentation is, is one pre-token.
Spaces are not wasted for it: operators, commas and a fixed list of glue words take them along. On Python source
this costs as many tokens as the usual "space belongs to the next word" (2.48 against 2.53 characters a token at 1024).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from cadenza.core.errors import CorruptArtifact, MissingArtifact

SPECIALS: tuple[str, ...] = (
    "<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|think|>", "<|call|>", "<|output|>", "<|final|>", "<|end|>",
    *(f"<|reserved_{i}|>" for i in range(7)),
)  # fmt: skip

# Words of the agent protocol. They may be rare in a code corpus and the model writes them in every turn, so training
# counts them as frequent: each of their pre-tokens becomes one token.
PROTOCOL_WORDS: tuple[str, ...] = (
    "list_dir", "read_file", "grep", "replace_def", "run_tests", "finish", "passed", "failed", "error", "assert", "got",
    "ok", "py", "test",
)  # fmt: skip
_PROTOCOL_REPEATS = 20_000
_MAX_TOKEN_CHARS = 16  # keeps rulers ("-----") and deep indentation from eating merges

# Words that are never names: they take the spaces around them along.
_GLUE = (
    "and|as|but|by|def|elif|else|for|from|if|import|in|is|it|must|not|of|or|raise|return|should|than|that|the|to|"
    "when|while|with|yield"
)
_PATTERN = "|".join(
    (
        r"\n",
        r" {2,}",
        r"\t+",
        r"[0-9]",
        r"\|",
        rf" ?(?:{_GLUE})(?![\p{{L}}0-9_]) ?",
        r"_*\p{L}+",
        r"[()\[\]{}.]",
        r"[,:] ?",
        r"[\"']+",
        r" ?[^\s\p{L}0-9|_()\[\]{},:.\"']+ ?",
        r"_+",
        r"\s",
    )
)


class Tokenizer:
    """Text to ids and back. Specials have the ids 0..15 in the order of ``SPECIALS``."""

    def __init__(self, backend: HFTokenizer) -> None:
        for index, name in enumerate(SPECIALS):
            if backend.token_to_id(name) != index:
                raise CorruptArtifact(
                    f"tokenizer has no {name} with id {index}",
                    "train it again with `cadenza train demo-base`",
                )
        # Text that spells a special token is text: a repository cannot forge a turn.
        backend.encode_special_tokens = True
        self._backend = backend
        self._bytes_of = _token_bytes(backend)
        #: First 16 hex digits of the SHA-256 of the serialized tokenizer.
        self.digest: str = hashlib.sha256(backend.to_str().encode()).hexdigest()[:16]

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int = 1024, *, words: Iterable[str] = PROTOCOL_WORDS
    ) -> Tokenizer:
        """Learns the merges; the same texts give the same file, on any machine.

        Args:
            texts: documents; 10 MB take about ten seconds.
            vocab_size: at least 272 (16 specials and 256 bytes); less is returned when the texts hold too few pairs.
            words: protocol words whose pre-tokens must become single tokens.
        """
        if vocab_size < len(SPECIALS) + 256:
            raise ValueError(f"vocab_size must be at least {len(SPECIALS) + 256}, got {vocab_size}")
        backend = HFTokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            max_token_length=_MAX_TOKEN_CHARS,
            show_progress=False,
        )
        backend.train_from_iterator(_with_words(texts, words), trainer)
        return cls(backend)

    def save(self, directory: Path | str) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json`` as Hugging Face's AutoTokenizer reads them."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "additional_special_tokens": [s for s in SPECIALS if s not in ("<|bos|>", "<|end|>", "<|pad|>")],
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
            "model_max_length": 1_000_000,
        }
        (directory / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Reads what ``save`` wrote. Raises MissingArtifact or CorruptArtifact."""
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise MissingArtifact(
                f"no tokenizer at {path}", "name a model directory that holds tokenizer.json"
            )
        try:
            backend = HFTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CorruptArtifact(
                f"{path} is not a tokenizer ({error})", "copy or train the model again"
            ) from error
        return cls(backend)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; never a special token. A lone surrogate, which no UTF-8 file can hold, becomes U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``: specials as their names, undecodable bytes and ids out of range as U+FFFD."""
        return b"".join(self._piece(i) for i in ids).decode("utf-8", "replace")

    def decode_strict(self, ids: Iterable[int]) -> str:
        """Text of ids that must be whole UTF-8 without specials; raises ValueError otherwise."""
        pieces = []
        for i in ids:
            if i < len(SPECIALS) or i >= len(self._bytes_of):
                raise ValueError(f"id {i} is not text")
            pieces.append(self._bytes_of[i])
        return b"".join(pieces).decode("utf-8")  # UnicodeDecodeError is a ValueError

    def _piece(self, i: int) -> bytes:
        return self._bytes_of[i] if 0 <= i < len(self._bytes_of) else b"\xef\xbf\xbd"

    def id(self, special: str) -> int:
        """Id of a special token by name; KeyError for anything else."""
        if special not in SPECIALS:
            raise KeyError(special)
        return SPECIALS.index(special)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return len(self._bytes_of)


def _with_words(texts: Iterable[str], words: Iterable[str]) -> Iterator[str]:
    yield from texts
    block = "\n".join(words) + "\n"
    for _ in range(_PROTOCOL_REPEATS // 100):
        yield block * 100


def _token_bytes(backend: HFTokenizer) -> list[bytes]:
    """The bytes of every id. Byte-level BPE writes each byte as one printable character; this is the way back."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(b): b for b in printable}
    for offset, b in enumerate(b for b in range(256) if b not in printable):
        byte_of[chr(256 + offset)] = b
    table: list[bytes] = []
    for i in range(backend.get_vocab_size(with_added_tokens=True)):
        token = backend.id_to_token(i)
        if token is None:
            raise CorruptArtifact(f"tokenizer has no token with id {i}", "copy or train the model again")
        table.append(token.encode() if i < len(SPECIALS) else bytes(byte_of[c] for c in token))
    return table
