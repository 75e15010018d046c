"""From a recipe to a plan: every stage's class, checked configuration, inputs and digest, before anything runs."""

from __future__ import annotations

import importlib
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from cadenza.core.config import StrictConfig, canonical, digest_of, nearest, parse_config, unknown_key
from cadenza.core.errors import CadenzaError, ConfigError, MissingArtifact
from cadenza.core.extras import missing_extra
from cadenza.core.recipes import load_recipe, to_toml
from cadenza.pipelines.stages import Stage

# Keys of a [[stage]] table that belong to the runner; a Config's field of the same name keeps its default.
RESERVED = ("name", "kind", "inputs", "seed")
# Of a seed: what SQLite's INTEGER and torch's generators take, 64 bits with a sign.
LEAST_SEED, MOST_SEED = -(2**63), 2**63 - 1


class Recipe(StrictConfig):
    """The top level of a recipe.

    Attributes:
        name: of the run, and of its folder under ``runs/`` unless ``--run-dir`` says another.
        description: one line on what the recipe is for.
        seed: of everything random in the run.
        needs_memory_gb, needs_disk_gb: refuse to start with less of it free (GB of 1e9 bytes).
        stage: the stages in the order they run.
    """

    name: str
    description: str = ""
    seed: int = Field(default=0, ge=LEAST_SEED, le=MOST_SEED)
    needs_memory_gb: float = Field(default=0.0, ge=0)
    needs_disk_gb: float = Field(default=0.0, ge=0)
    stage: list[dict[str, Any]] = []

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not name or name.startswith(".") or "/" in name or not name.isprintable() or len(name) > 100:
            raise ValueError("it names a folder: 1 to 100 printable characters, no '/', no '.' at its start")
        return name


@dataclass(frozen=True)
class PlannedStage:
    """One resolved stage. ``inputs``: role -> name of an earlier stage, or a path made elsewhere.

    ``reads``: digest of what it reads besides inputs, or "". ``digest`` identifies what it will make: its kind,
    version, seed, configuration, what it reads, and the digests of its inputs.
    """

    name: str
    kind: str
    stage: type[Stage[Any]]
    config: StrictConfig
    inputs: dict[str, str | Path]
    seed: int
    reads: str
    digest: str

    @property
    def settings(self) -> dict[str, Any]:
        """What the digest was made from, readable, for showing what changed."""
        inputs = {role: str(source) for role, source in self.inputs.items()}
        about = {"kind": self.kind, "version": self.stage.version, "seed": self.seed, "inputs": inputs}
        return canonical(self.config) | about | ({"reads": self.reads} if self.reads else {})


@dataclass(frozen=True)
class Plan:
    """A resolved recipe."""

    name: str
    description: str
    seed: int
    stages: tuple[PlannedStage, ...]
    needs_memory_gb: float = 0.0
    needs_disk_gb: float = 0.0

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default filled in, as a table that ``load_recipe`` would read back."""
        stages = []
        for planned in self.stages:
            table: dict[str, Any] = {"name": planned.name, "kind": planned.kind}
            if planned.seed != self.seed:
                table["seed"] = planned.seed
            if planned.inputs:
                table["inputs"] = {role: str(source) for role, source in planned.inputs.items()}
            values = planned.config.model_dump(mode="json")
            stages.append(table | {key: value for key, value in values.items() if key not in RESERVED})
        return {
            "name": self.name,
            "description": self.description,
            "seed": self.seed,
            "needs_memory_gb": self.needs_memory_gb,
            "needs_disk_gb": self.needs_disk_gb,
            "stage": stages,
        }

    def toml(self) -> str:
        return to_toml(self.resolved())

    def dependents(self, name: str) -> list[str]:
        """``name`` and every stage that reads it, directly or not, in order."""
        found = [name]
        for planned in self.stages:
            if planned.name not in found and any(source in found for source in planned.inputs.values()):
                found.append(planned.name)
        return found

    def stage_named(self, name: str) -> PlannedStage:
        for planned in self.stages:
            if planned.name == name:
                return planned
        names = [planned.name for planned in self.stages]
        near = nearest(name, names)
        mend = f"did you mean {near!r}?" if near else "its stages: " + ", ".join(names)
        raise ConfigError(f"recipe {self.name!r} has no stage {name!r}", mend)

    def require_inputs(self) -> None:
        """Looks whether the inputs that are paths are there. Raises MissingArtifact naming the first that is not."""
        for planned in self.stages:
            for role, source in planned.inputs.items():
                if isinstance(source, Path):
                    require_input(planned.name, role, source)


def require_input(stage: str, role: str, source: Path) -> Path:
    """The absolute path of an input that was made elsewhere. Raises MissingArtifact."""
    path = source.expanduser().absolute()
    if not path.exists():
        raise MissingArtifact(
            f"input {role!r} of stage {stage!r} is not at {source}", "check the path in the recipe"
        )
    return path


def recipe_folders() -> list[Path]:
    """Where named recipes are looked for: ``recipes/`` of the working folder, then those shipped in the package."""
    return [Path("recipes"), Path(str(resources.files("cadenza.pipelines") / "recipes"))]


def plan_recipe(name: str, overrides: Sequence[str] = ()) -> Plan:
    """Loads, composes, changes and checks a recipe. Needs no torch and under a second.

    Raises:
        ConfigError: anything wrong with it, named by its full key.
    """
    return make_plan(load_recipe(name, recipe_folders(), overrides))


def make_plan(table: Mapping[str, Any]) -> Plan:
    """Checks a composed recipe table and resolves its stages. Raises ConfigError."""
    recipe = parse_config(Recipe, table)
    stages: list[PlannedStage] = []
    for entry in recipe.stage:
        stages.append(_plan_stage(entry, recipe.seed, stages))
    return Plan(
        recipe.name,
        recipe.description,
        recipe.seed,
        tuple(stages),
        needs_memory_gb=recipe.needs_memory_gb,
        needs_disk_gb=recipe.needs_disk_gb,
    )


def _plan_stage(entry: dict[str, Any], seed: int, earlier: Sequence[PlannedStage]) -> PlannedStage:
    name = entry["name"]
    kind = entry.get("kind")
    if not isinstance(kind, str):
        raise ConfigError(
            f"key '{name}.kind' is missing", 'set it to an import path, kind = "package.module:Class"'
        )
    stage = import_stage(kind, name)
    values = {key: value for key, value in entry.items() if key not in RESERVED}
    config = parse_config(stage.Config, values, where=name)
    stage_seed = entry.get("seed", seed)
    if not isinstance(stage_seed, int) or isinstance(stage_seed, bool):
        raise ConfigError(f"key '{name}.seed' = {stage_seed!r} is not a whole number", "correct the value")
    if not LEAST_SEED <= stage_seed <= MOST_SEED:
        raise ConfigError(
            f"key '{name}.seed' = {stage_seed} cannot be used: it is not from {LEAST_SEED} to {MOST_SEED}",
            "correct the value",
        )
    inputs = _resolve_inputs(name, stage, entry.get("inputs", {}), earlier)
    digests = {planned.name: planned.digest for planned in earlier}
    identity = {
        "kind": kind,
        "version": stage.version,
        "seed": stage_seed,
        "config": canonical(config),
        "inputs": {role: str(s) if isinstance(s, Path) else digests[s] for role, s in inputs.items()},
    }
    reads = stage.reads(config)
    if reads:
        identity["reads"] = reads
    return PlannedStage(name, kind, stage, config, inputs, stage_seed, reads, digest_of(identity))


def import_stage(kind: str, name: str) -> type[Stage[Any]]:
    """The class at ``package.module:Class``.

    Raises:
        ConfigError: it cannot be had, named by its stage; for a module of the user's that fails, with file and line.
    """
    module_name, sign, class_name = kind.partition(":")
    if not sign or not class_name or not module_name or module_name.startswith("."):
        raise ConfigError(
            f"key '{name}.kind' = {kind!r} is not an import path", 'write "package.module:Class"'
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"stage {name!r}") or ConfigError(
            f"kind {kind!r} of stage {name!r} cannot be imported: {error}",
            "check the path and that it is installed",
        ) from None
    except CadenzaError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit: a script that ends by sys.exit()
        if module_name.partition(".")[0] == "cadenza":
            raise  # one of ours that fails is a defect of ours
        raise _failing_import(module_name, name, error) from None
    found = getattr(module, class_name, None)
    if found is None:
        raise unknown_key(f"{name}.kind: {kind}", class_name, _stage_names(module))
    if not (isinstance(found, type) and issubclass(found, Stage)):
        raise ConfigError(
            f"kind {kind!r} of stage {name!r} is no stage", "derive it from cadenza.pipelines.Stage"
        )
    return found


def _failing_import(module: str, stage: str, error: BaseException) -> ConfigError:
    """The error for a user whose own module cannot be executed: where it fails, and how."""
    broken = isinstance(error, SyntaxError)
    place = (error.filename, error.lineno) if broken and error.filename else _place(error)
    where = f" at {place[0]}, line {place[1]}" if place is not None else ""
    text = " ".join(str(error.msg if broken else error).split())  # one line, whatever the module raises
    return ConfigError(
        f"module {module!r} of stage {stage!r} fails when it is imported{where}: {type(error).__name__}"
        + (f": {text}" if text else ""),
        "correct the module, or name another in kind",
    )


def _place(error: BaseException) -> tuple[str, int] | None:
    """The file and line where an import failed: the innermost that is neither of the importer nor of an installed
    package, so that a wrong call of numpy is shown where the user wrote it."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<frozen ") and frame.f_code.co_filename != __file__
    ]
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = [place for place in frames if not place[0].startswith(installed)]
    return next(reversed(own or frames), None)


def _stage_names(module: Any) -> list[str]:
    return [
        n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Stage) and v is not Stage
    ]


def _resolve_inputs(
    name: str, stage: type[Stage[Any]], given: Any, earlier: Sequence[PlannedStage]
) -> dict[str, str | Path]:
    if not isinstance(given, Mapping) or not all(isinstance(v, str) for v in given.values()):
        raise ConfigError(f"key '{name}.inputs' is not a table of texts", 'write inputs = { role = "stage" }')
    names = [planned.name for planned in earlier]
    roles = (*stage.inputs, *stage.optional_inputs)
    for role in given:
        if role not in roles and not stage.open_inputs:
            raise unknown_key(f"{name}.inputs.{role}", role, roles)
    resolved: dict[str, str | Path] = {}
    for role in dict.fromkeys((*stage.inputs, *stage.optional_inputs, *given)):
        source = given.get(role, role)
        if "/" in source:
            resolved[role] = Path(source)
        elif source in names:
            resolved[role] = source
        elif role in stage.inputs or role in given:
            raise ConfigError(
                f"input {role!r} of stage {name!r} is {source!r}, which is no earlier stage",
                f'set {name}.inputs.{role} to one of: {", ".join(names) or "none"}, or to a path with "/"',
            )
    return resolved
