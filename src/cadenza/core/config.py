"""Base of every configuration object, and turning plain tables into it with errors a person can act on.

Unknown keys are refused with the nearest known one, values are immutable, and a configuration has a digest, so
that a typo fails in one second and not after a run, and a finished stage knows whether it is still what was asked.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cadenza.core.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


class StrictConfig(BaseModel):
    """A pydantic model that rejects keys it does not know, so that a typo fails in one second and not after a run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """``count = true`` would be read as 1."""
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and field.annotation in (int, float):
            raise ValueError("true and false are no numbers")
        return value

    @model_validator(mode="before")
    @classmethod
    def _keys_left_out_keep_this_fields_default(cls, values: Any) -> Any:
        """``step = {router_replay = "pure"}`` keeps the rate of a stage whose default is ``Step(lr=1e-4)``; the class's
        own default is another."""
        if not isinstance(values, Mapping):
            return values
        filled = dict(values)
        for name, field in cls.model_fields.items():
            given = values.get(name)
            if isinstance(given, Mapping) and type(field.default) is field.annotation:
                filled[name] = _over(field.default, given)
        return filled


def _over(default: StrictConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    """The table, with the values that ``default`` was given for the keys it leaves out, tables in it alike."""
    merged = {**{name: getattr(default, name) for name in default.model_fields_set}, **table}
    for name in default.model_fields_set:
        inner, given = getattr(default, name), table.get(name)
        if isinstance(given, Mapping) and type(inner) is type(default).model_fields[name].annotation:
            merged[name] = _over(inner, given)
    return merged


def operational(default: Any, **kwargs: Any) -> Any:
    """A field that changes how a stage runs but not what it makes (threads, deadlines, intervals of logging).

    It is left out of ``config_digest``: changing it never makes finished work stale.
    """
    return Field(default, json_schema_extra={"operational": True}, **kwargs)


def parse_config(model: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """Validates a plain table.

    Args:
        model: the configuration class.
        values: what a TOML file and ``--set`` say.
        where: dotted prefix of the table, for messages: ``"sft"`` gives ``sft.lr``.

    Raises:
        ConfigError: names the first wrong key in full, its reason, and the nearest known key if it is unknown.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = [str(part) for part in first["loc"]]
        name = ".".join(([where] if where else []) + path)
        if first["type"] == "extra_forbidden":
            raise unknown_key(name, path[-1], fields_at(model, path[:-1])) from None
        if first["type"] == "missing":
            raise ConfigError(
                f"key {name!r} is missing", f"set it with --set {name}=VALUE or in the recipe"
            ) from None
        shown = _short(first.get("input"))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"key {name!r} = {shown} cannot be used: {reason}{more}", "correct the value"
        ) from None


def unknown_key(name: str, last: str, known: Iterable[str]) -> ConfigError:
    """The error for key ``name`` whose last part is not among ``known``."""
    known = sorted(known)
    near = nearest(last, known)
    mend = f"did you mean {near!r}?" if near else "known keys: " + (", ".join(known) or "none")
    return ConfigError(f"unknown key {name!r}", mend)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like ``word``, or None when nothing is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def fields_at(model: type[BaseModel], path: Iterable[str]) -> list[str]:
    """Field names of the model nested in ``model`` at ``path``; list indices in the path are passed over."""
    current: type[BaseModel] | None = model
    for part in path:
        if current is None:
            return []
        if part in current.model_fields:
            current = _nested_model(current.model_fields[part].annotation)
    return list(current.model_fields) if current is not None else []


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    """The model inside ``X``, ``X | None``, ``list[X]``, ``dict[str, X]``."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    for argument in typing.get_args(annotation):
        found = _nested_model(argument)
        if found is not None:
            return found
    return None


def canonical(config: BaseModel) -> dict[str, Any]:
    """The values that decide a result: every field except the operational ones, defaults included, JSON-ready."""
    values = config.model_dump(mode="json")
    return _without_operational(config, values)


def _without_operational(config: BaseModel, values: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("operational"):
            continue
        value = getattr(config, name)
        kept[name] = (
            _without_operational(value, values[name]) if isinstance(value, BaseModel) else values[name]
        )
    return kept


def digest_of(value: Any) -> str:
    """sha256 (64 hex digits) of the canonical JSON of a JSON-ready value: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def config_digest(config: BaseModel) -> str:
    """The identity of a configuration: equal exactly when every value that decides a result is equal."""
    return digest_of(canonical(config))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Readable list of changed leaves, ``key: old -> new``, in key order."""
    found: list[str] = []
    for key in sorted({*old, *new}):
        name = f"{prefix}{key}"
        left, right = old.get(key), new.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, f"{name}.")
        elif left != right:
            found.append(f"{name}: {_short(left)} -> {_short(right)}")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
