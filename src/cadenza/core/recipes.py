"""Recipes: TOML files that compose with ``extends`` and are changed from the command line with ``--set``.

A recipe is a table of scalars plus an ordered array of ``[[stage]]`` tables, each with a ``name``. A recipe that
extends another changes the stages it names, key by key, and appends the ones that are new; ``like = "STAGE"`` in a
stage takes over the keys of another; ``order = [..]`` picks the stages to run and their order. This file knows nothing
of what a stage is: it only finds, composes and changes.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cadenza.core.config import nearest, unknown_key
from cadenza.core.errors import ConfigError

_BARE = re.compile(r"^[A-Za-z0-9_-]+$")


class _SingleRoles(dict[str, Any]):
    """Inputs that overrides have set one by one in a stage without inputs of its own: a stage that is ``like`` another
    keeps the other's besides."""


def load_recipe(name: str, folders: Sequence[Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Finds, composes and changes a recipe.

    Args:
        name: a name (``demo`` is ``demo.toml`` in one of ``folders``) or a path to a TOML file.
        folders: where named recipes are looked for, first match wins.
        overrides: ``"stage.key=value"`` or ``"key=value"`` texts, values in TOML syntax; a bare word is a string.

    Returns:
        The composed table: scalars, and ``stage``: list of tables in running order.

    Raises:
        ConfigError: unknown recipe, broken TOML, a circle of ``extends`` or ``like``, a malformed or unknown override.
    """
    path = find_recipe(name, folders)
    table = _compose(path, folders, ())
    table.setdefault("name", path.stem)
    table.setdefault("stage", [])
    for text in overrides:
        apply_override(table, text)
        _check_stages(table, f"--set {text}")
    return _ordered(_likened(table))


def find_recipe(name: str, folders: Sequence[Path]) -> Path:
    """The file of a recipe named or given by path. Raises ConfigError naming the nearest known recipe."""
    if _is_path(name):
        return _recipe_file(Path(name).expanduser(), name)
    for folder in folders:
        path = folder / f"{name}.toml"
        if path.is_file():
            return path
    near = nearest(name, recipe_names(folders))
    mend = f"did you mean {near!r}?" if near else "`cadenza train --list` shows the shipped ones"
    raise ConfigError(f"unknown recipe {name!r}", mend)


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name


def _recipe_file(path: Path, shown: Path | str) -> Path:
    if path.is_file():
        return path
    raise ConfigError(
        f"no recipe file {shown}", "check the path; `cadenza train --list` shows the shipped ones"
    )


def recipe_names(folders: Iterable[Path]) -> list[str]:
    """Names of every recipe in ``folders``, sorted."""
    return sorted({path.stem for folder in folders for path in folder.glob("*.toml")})


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file. Raises ConfigError with the line of a mistake."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep", "correct the file") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "check the path and its permissions"
        ) from None
    except ValueError as error:  # no TOML, no UTF-8, or a number with thousands of digits
        raise ConfigError(f"{path} is not TOML: {error}", "correct the file") from None


def _compose(path: Path, folders: Sequence[Path], seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        chain = " -> ".join(p.stem for p in (*seen, path))
        raise ConfigError(f"recipes extend each other in a circle: {chain}", "remove one extends line")
    table = read_toml(path)
    _check_stages(table, path)
    parent = table.pop("extends", None)
    if parent is None:
        return table
    if not isinstance(parent, str):
        raise ConfigError(f"extends in {path} is not a text", 'write extends = "NAME"')
    if _is_path(parent):  # of the folder of the recipe that says it, wherever the command is given
        beside = path.parent / Path(parent).expanduser()
        found = _recipe_file(beside, f"{beside}, which {path} extends")
    else:
        found = find_recipe(parent, [path.parent, *folders])
    if found.resolve() == path.resolve():  # a user's demo.toml may extend the shipped demo
        others = [f for f in folders if f.resolve() != path.parent.resolve()]
        if parent not in recipe_names(others):
            raise ConfigError(f"recipe {path} extends itself", "name another recipe in extends")
        found = find_recipe(parent, others)
    return merge_recipes(_compose(found, folders, (*seen, path.resolve())), table)


def _check_stages(table: Mapping[str, Any], path: Path | str) -> None:
    stages = table.get("stage", [])
    if not isinstance(stages, list) or not all(isinstance(s, dict) for s in stages):
        raise ConfigError(f"stage in {path} is not an array of tables", "write each stage under [[stage]]")
    names: set[str] = set()
    for number, stage in enumerate(stages, 1):
        name = stage.get("name")
        if not isinstance(name, str) or not _BARE.match(name):
            raise ConfigError(
                f"stage {number} in {path} has no usable name", "give it name = with letters, digits, - and _"
            )
        if name in names:
            raise ConfigError(f"two stages in {path} are named {name!r}", "rename one")
        names.add(name)


def merge_recipes(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """``child`` laid over ``parent``: tables key by key, stages by name, everything else replaced."""
    merged = merge_tables(
        {k: v for k, v in parent.items() if k != "stage"}, {k: v for k, v in child.items() if k != "stage"}
    )
    stages = [copy.deepcopy(stage) for stage in parent.get("stage", [])]
    places = {stage["name"]: number for number, stage in enumerate(stages)}
    for stage in child.get("stage", []):
        if stage["name"] in places:
            number = places[stage["name"]]
            stages[number] = merge_tables(stages[number], stage)
        else:
            places[stage["name"]] = len(stages)
            stages.append(copy.deepcopy(stage))
    merged["stage"] = stages
    return merged


def merge_tables(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """A new table: ``child``'s values over ``parent``'s, nested tables merged, lists replaced whole."""
    merged = copy.deepcopy(dict(parent))
    for key, value in child.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge_tables(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def apply_override(table: dict[str, Any], text: str) -> None:
    """Changes ``table`` by one ``--set`` text. The first part of the key is a stage's name or a scalar of the recipe.

    Raises:
        ConfigError: no ``=``, an empty part, a stage that does not exist, or a key below a plain value.
    """
    key, sign, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not sign or not all(parts):
        raise ConfigError(f"--set {text!r} is not KEY=VALUE", "write for example --set sft.epochs=2")
    target, of_stage = table, False
    if len(parts) > 1:
        stages = {stage["name"]: stage for stage in table.get("stage", [])}
        if parts[0] in stages:
            target, of_stage = stages[parts[0]], True
            parts = parts[1:]
        elif not isinstance(table.get(parts[0]), dict):
            raise unknown_key(key.strip(), parts[0], stages)
    for depth, part in enumerate(parts[:-1]):
        single = of_stage and depth == 0 and part == "inputs"
        target = target.setdefault(part, _SingleRoles() if single else {})
        if not isinstance(target, dict):
            above = ".".join(parts[: depth + 1])
            raise ConfigError(f"--set {key.strip()}: {above!r} is a value, not a table", "shorten the key")
    target[parts[-1]] = parse_value(value)


def parse_value(text: str) -> Any:
    """A TOML value; what is not TOML is a string, so that ``--set name=fast`` needs no quotes."""
    text = text.strip()
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # see ``read_toml``
        return text
    return parsed["value"] if list(parsed) == ["value"] else text


def _likened(table: dict[str, Any]) -> dict[str, Any]:
    """Lays every stage with ``like`` over the stage it names. After the overrides, so that changing a stage changes
    those that are like it; before ``order``, so that a stage may be like one that is not run."""
    stages = {stage["name"]: stage for stage in table["stage"]}
    table["stage"] = [_full_stage(stage, stages, ()) for stage in table["stage"]]
    return table


def _full_stage(
    stage: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]], seen: tuple[str, ...]
) -> dict[str, Any]:
    name, own = stage["name"], {key: value for key, value in stage.items() if key != "like"}
    if "like" not in stage:
        return own
    source = stage["like"]
    if not isinstance(source, str):
        raise ConfigError(f"key '{name}.like' = {source!r} is not a text", 'write like = "STAGE"')
    if source not in stages:
        raise unknown_key(f"{name}.like: {source}", source, stages)
    if source in (*seen, name):
        chain = " -> ".join((*seen, name, source))
        raise ConfigError(f"stages are like each other in a circle: {chain}", "remove one like line")
    full = merge_tables(_full_stage(stages[source], stages, (*seen, name)), own)
    inputs = own.get("inputs")
    # Inputs are one thing: a stage with other inputs does not want some of the first one's among them.
    if isinstance(inputs, Mapping) and not isinstance(inputs, _SingleRoles):
        return {**full, "inputs": dict(inputs)}
    return full


def _ordered(table: dict[str, Any]) -> dict[str, Any]:
    """Applies ``order`` (stage names to run) and removes it."""
    order = table.pop("order", None)
    if order is None:
        return table
    stages = {stage["name"]: stage for stage in table.get("stage", [])}
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise ConfigError("order is not a list of stage names", 'write order = ["tasks", "sft"]')
    for name in order:
        if name not in stages:
            raise unknown_key(f"order: {name}", str(name), stages)
    if len(set(order)) != len(order):
        raise ConfigError("order names a stage twice", "name each stage once")
    table["stage"] = [stages[name] for name in order]
    return table


def to_toml(table: Mapping[str, Any]) -> str:
    """TOML text of a composed recipe; reading it back gives the same table, without its None values."""
    lines = [
        f"{_key(k)} = {_value(v)}"
        for k, v in table.items()
        if not _is_table(v) and k != "stage" and v is not None
    ]
    for key, value in table.items():
        if _is_table(value):
            lines += _table_lines(_key(key), value)
    for stage in table.get("stage", []):
        lines += ["", "[[stage]]"]
        lines += [f"{_key(k)} = {_value(v)}" for k, v in stage.items() if not _is_table(v) and v is not None]
        for key, value in stage.items():
            if _is_table(value):
                lines += _table_lines(f"stage.{_key(key)}", value)
    return "\n".join(lines).lstrip("\n") + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _table_lines(header: str, table: Mapping[str, Any]) -> list[str]:
    lines = ["", f"[{header}]"]
    lines += [f"{_key(k)} = {_value(v)}" for k, v in table.items() if not _is_table(v) and v is not None]
    for key, value in table.items():
        if _is_table(value):
            lines += _table_lines(f"{header}.{_key(key)}", value)
    return lines


def _key(key: str) -> str:
    return key if _BARE.match(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{_key(str(k))} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
        )
    return str(value)


def _float(value: float) -> str:
    text = repr(value)
    return text if any(mark in text for mark in ".einf") else text + ".0"


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in escaped)
    return f'"{escaped}"'
