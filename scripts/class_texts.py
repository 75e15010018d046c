"""What a configuration class says about its keys, read from where its author wrote it.

Three places, the first that speaks of a key wins: an entry of a docstring's ``Attributes:`` or a sentence that begins
with the key in double backticks and a colon; a comment behind the field; any other clause that names the key in double
backticks. A class takes over what the classes it derives from say.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence

from pydantic import BaseModel

SECTION = re.compile(r"^([A-Z][\w ()]*):\n((?:[ \t]+.*(?:\n|$)|\n(?=[ \t]))+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", re.MULTILINE)
COMMENT = re.compile(r"^    (\w+): [^#\n]*?  # (?!noqa|type:)(.+)$", re.MULTILINE)
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`(])")
DEFINED = re.compile(r"^((?:``\w+``(?:, | and )?)+): (.+)$")
NAMED = re.compile(r"``(\w+)``")


def texts_of(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """The prose of the class without what belongs to single keys, and a text for each key that has one."""
    defined: dict[str, str] = {}
    comments: dict[str, str] = {}
    mentioned: dict[str, str] = {}
    prose = ""
    for cls in reversed(_classes(model)):
        prose, sections = _without_sections(_doc(cls))
        for names, text in ENTRY.findall(sections):
            defined |= dict.fromkeys(names.split(", "), " ".join(text.split()))
        comments |= dict(COMMENT.findall(inspect.getsource(cls)))
        prose = _take_sentences(prose, list(model.model_fields), defined, mentioned)
    found = mentioned | comments | defined
    return prose, {key: found[key] for key in model.model_fields if key in found}


def _classes(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The class and those it derives from that have keys of their own."""
    return [cls for cls in model.__mro__ if issubclass(cls, BaseModel) and inspect.get_annotations(cls)]


def _doc(cls: type[BaseModel]) -> str:
    return inspect.cleandoc(cls.__doc__ or "") if cls is not BaseModel else ""


def _without_sections(doc: str) -> tuple[str, str]:
    """The prose, and the body of ``Attributes:``; other sections (``Raises:``) are for readers of the code."""
    attributes = "".join(body for title, body in SECTION.findall(doc + "\n") if title == "Attributes")
    return SECTION.sub("", doc + "\n").strip(), attributes


def _take_sentences(
    prose: str, keys: Sequence[str], defined: dict[str, str], mentioned: dict[str, str]
) -> str:
    """Files every sentence under the keys it is about; returns what remains, in paragraphs."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", prose):
        kept = []
        for sentence in _sentences(" ".join(paragraph.split())):
            match = DEFINED.match(sentence)
            about = [key for name in NAMED.findall(match[1]) for key in _keys(name, keys)] if match else []
            if match and about:
                defined |= dict.fromkeys(about, match[2])
            else:
                kept.append(sentence)
            for clause in re.split(r"; ", sentence):
                for name in NAMED.findall(clause):
                    if name in keys and name not in about:
                        mentioned[name] = clause
        if kept:
            paragraphs.append(" ".join(kept))
    return "\n\n".join(paragraphs)


def _sentences(text: str) -> Iterator[str]:
    """Sentences; one that defines several keys (```` ``a``: x; ``b``: y. ````) is taken apart."""
    for sentence in SENTENCE.split(text):
        yield from re.split(r"; (?=``\w+``: )", sentence)


def _keys(name: str, keys: Sequence[str]) -> list[str]:
    """The key of this name, or those that begin with it: ``limit`` for ``limit_bf16`` and ``limit_fp32``."""
    return [name] if name in keys else [key for key in keys if key.startswith(f"{name}_")]
