"""Writes docs/reference/configuration.md from the configuration classes of every stage of the shipped recipes.

``--check`` changes nothing and fails when the page is not what the code says.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from class_texts import texts_of
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from cadenza.core.recipes import recipe_names
from cadenza.pipelines.plan import RESERVED, Recipe, plan_recipe, recipe_folders
from cadenza.pipelines.stages import Stage

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "configuration.md"
UNITS = {"_s": "seconds", "_gb": "GB"}  # by the end of a key's name
HEAD = """# Configuration

<!-- Written by scripts/configuration_page.py; edit the classes it names. -->

A recipe is a TOML file: a few keys of its own and one `[[stage]]` table a stage. Every key below can be set in a
recipe or with `--set`, for example `--set rl.max_steps=100`; `NAME` stands for a name of yours, and a list (`[]`) is
set whole. An unknown key is refused. Keys marked *operational* change how a stage runs but not what it makes:
changing them never makes finished work stale.

Any `[[stage]]` may also have `kind` (an import path, `package.module:Class`), `inputs` (a table: role = stage, or a
path with a `/`), `seed`, and `like` (another stage, whose keys it takes over before its own). `extends = "NAME"` at
the top takes over another recipe, and `order = [...]` picks stages from it.
"""


def main() -> None:
    text = page()
    if "--check" in sys.argv:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"error: {PAGE.name} is not what the configuration classes say; run make format")
        return
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")


def page() -> str:
    """The whole page."""
    parts = [HEAD, "\n## The recipe itself\n", *section(Recipe)]
    folders = recipe_folders()[-1:]  # the shipped ones only: the page must not depend on where it is written
    kinds: dict[str, tuple[str, type[Stage[Any]]]] = {}
    for name in recipe_names(folders):
        for planned in plan_recipe(str(folders[0] / f"{name}.toml")).stages:
            kinds.setdefault(planned.kind, (planned.name, planned.stage))
    for kind, (name, stage) in kinds.items():
        parts.append(f'\n## `{name}`\n\n`kind = "{kind}"`\n')
        if stage.__doc__:
            parts.append(f"\n{_plain(inspect.cleandoc(stage.__doc__))}\n")
        roles = [*stage.inputs, *(f"{role} (optional)" for role in stage.optional_inputs)]
        if roles:
            parts.append(
                f"\nInputs: {', '.join(roles)}{', and any other role' if stage.open_inputs else ''}.\n"
            )
        parts += section(stage.Config, hidden=RESERVED)
    return "".join(parts)


def section(
    model: type[BaseModel], prefix: str = "", hidden: tuple[str, ...] = (), owner: BaseModel | None = None
) -> list[str]:
    """The table of a class, then those of the classes nested in it. ``owner``: the instance that holds the defaults,
    where the class around it sets others than this class does."""
    parts: list[str] = []
    doc, texts = texts_of(model)
    if doc:
        parts.append(f"\n{_plain(doc)}\n")
    rows, nested = [], []
    for name, field in model.model_fields.items():
        if name in hidden:
            continue
        inner = _model_in(field.annotation)
        value = getattr(owner, name) if owner else field.get_default(call_default_factory=True)
        if inner is not None:
            nested.append((f"{prefix}{name}{_many(field.annotation)}", inner, value))
        notes = _notes(name, field, texts.get(name, ""))
        default = _default(value) if inner is None else "see below"
        rows.append(f"| `{prefix}{name}` | {_type(field.annotation)} | {default} | {_cell(notes)} |")
    if rows:
        parts.append("\n| key | type | default | what it is |\n|---|---|---|---|\n" + "\n".join(rows) + "\n")
    for name, inner, value in nested:
        parts.append(f"\n**`{name}`**\n")
        parts += section(inner, f"{name}.", owner=value if isinstance(value, inner) else None)
    return parts


def _notes(name: str, field: Any, text: str) -> str:
    """What is known of a key: its text, its unit where the text does not say it, and whether it is operational."""
    parts = [_plain(field.description or text).rstrip(".")]
    for suffix, unit in UNITS.items():
        if name.endswith(suffix) and unit not in parts[0]:
            parts.append(unit)
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra.get("operational"):
        parts.append("operational")
    return "; ".join(filter(None, parts))


def _many(annotation: Any) -> str:
    """What stands between the key of a table of tables, or of a list of them, and the keys of one."""
    origin = typing.get_origin(annotation)
    return ".NAME" if origin is dict else "[]" if origin in (list, tuple) else ""


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    found = (_model_in(argument) for argument in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)


def _type(annotation: Any) -> str:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation.__name__
    if typing.get_origin(annotation) is typing.Union:
        return " \\| ".join(_type(argument) for argument in typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Annotated:
        return _type(typing.get_args(annotation)[0])
    return _cell(re.sub(r"\b(?:typing|pathlib|collections\.abc|cadenza(?:\.\w+)+)\.", "", str(annotation)))


def _default(value: Any) -> str:
    return "required" if value is PydanticUndefined else f"`{_cell(repr(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _plain(doc: str) -> str:
    """A docstring as Markdown: double backticks become single ones."""
    return doc.replace("``", "`")


if __name__ == "__main__":
    main()
