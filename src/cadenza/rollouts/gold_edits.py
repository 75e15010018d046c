"""The gold patch as calls of replace_def: which definitions are written anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cadenza.harness.definitions import Definition, DefinitionRefused, definitions, replace_definition


@dataclass(frozen=True, slots=True)
class DefEdit:
    """The definition ``name``, at line ``line`` (from 1) of the file before any edit: ``old`` becomes ``new``."""

    path: str
    name: str
    line: int
    old: str
    new: str


def gold_edits(base: Mapping[str, bytes], fixed: Mapping[str, bytes]) -> dict[str, list[DefEdit]]:
    """Edits by file that turn ``base`` into ``fixed``, each as small as a definition can be, in the order of the file.

    Raises ValueError for what replace_def cannot do: files created, deleted or renamed, and changes outside any
    function or class.
    """
    edits: dict[str, list[DefEdit]] = {}
    if base.keys() != fixed.keys():
        raise ValueError(f"the patch adds or removes files: {sorted(base.keys() ^ fixed.keys())}")
    for path in sorted(base):
        if base[path] != fixed[path]:
            edits[path] = _file_edits(path, base[path], fixed[path])
    return edits


def _file_edits(path: str, old: bytes, new: bytes) -> list[DefEdit]:
    """Tries every definition of the fixed file, the shortest first: once its methods are mended a class is as well."""
    try:
        before, after = _source(old), _source(new)
        known = definitions(before)
        wanted = sorted(definitions(after), key=lambda d: d.last - d.first)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: replace_def needs Python that parses") from error
    edits, data = [], old
    for definition in wanted:
        text = definition.text(after)
        was = _counterpart(definition, known)
        if was is None or was.text(before) == text:
            continue
        try:
            written = replace_definition(data, text)
        except DefinitionRefused:  # several of the name: the class around it is written anew
            continue
        if written != data:
            edits = [e for e in edits if not was.first <= e.line <= was.last]  # it holds them too
            edits.append(DefEdit(path, definition.name, was.first, was.text(before), text))
            data = written
    if data != new:
        raise ValueError(f"{path}: the patch changes more than functions and classes")
    return sorted(edits, key=lambda edit: edit.line)


def _source(data: bytes) -> str:
    return data.decode("utf-8").replace("\r\n", "\n")


def _counterpart(definition: Definition, known: list[Definition]) -> Definition | None:
    place = (definition.within, definition.name, definition.is_class)
    same = [d for d in known if (d.within, d.name, d.is_class) == place]
    return same[0] if len(same) == 1 else None
