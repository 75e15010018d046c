"""What a stage is: a configuration, the inputs it reads, and ``run``, which fills a folder and returns figures.

A stage lives wherever its work lives and is named in a recipe by import path::

    [[stage]]
    name = "sft"
    kind = "cadenza.pipelines.sft_stage:Sft"
    learning_rate = 1e-3

The module that holds it must import without torch, so that ``--dry-run`` answers in a second: keep ``Config`` in a
light module and import what is heavy inside ``run``.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from cadenza.core.config import StrictConfig
from cadenza.core.errors import ConfigError

if TYPE_CHECKING:  # a plan needs none of these, and a dry run is quicker without SQLAlchemy
    from cadenza.core.progress import Progress
    from cadenza.core.rundb import RunDatabase
    from cadenza.core.telemetry import Telemetry

Settings = TypeVar("Settings", bound=StrictConfig)
Figures = dict[str, Any]  # JSON-ready: what a stage reports, kept in its manifest and in the run database


class Stage(ABC, Generic[Settings]):
    """One step of a recipe.

    Class attributes:
        Config: the keys its table in a recipe may have.
        inputs: roles it reads. A role is filled by the earlier stage of that name unless the recipe's
            ``inputs = { role = "stage" }`` says another stage, or a path to an artifact made elsewhere.
        optional_inputs: roles it reads when the recipe fills them; a recipe may map more roles only if
            ``open_inputs`` is true (for example an evaluation of any number of policies).
        copies: files of its artifact that it also puts into the run's folder; they go when the artifact is thrown away,
            and the runner brings back those that are gone when every stage is finished.
        packages: what must be installed for ``run``; looked for before the first stage of a recipe runs.
        version: raise it when the same configuration would now make something else; finished work becomes stale.
        resumable: ``context.out`` keeps what an interrupted run left in it; otherwise it is always empty at start.
    """

    Config: ClassVar[type[StrictConfig]] = StrictConfig
    inputs: ClassVar[tuple[str, ...]] = ()
    optional_inputs: ClassVar[tuple[str, ...]] = ()
    open_inputs: ClassVar[bool] = False
    copies: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    resumable: ClassVar[bool] = False

    def __init__(self, config: Settings) -> None:
        self.config = config

    @classmethod
    def reads(cls, config: Settings) -> str:
        """Digest of what it reads besides its inputs, a file of the package for example; "" for nothing. Part of what
        identifies its work: another base in a newer package makes an older run's copy stale."""
        return ""

    @abstractmethod
    def run(self, context: StageContext) -> Figures:
        """Does the work: reads ``context.input(role)``, writes files into ``context.out``, returns figures.

        May raise any CadenzaError; KeyboardInterrupt must pass, and finds the stage resumable at any moment.
        """


def seed_of(seed: int, label: str) -> int:
    """A seed of 32 bits for one use, the same in every run with the same seed of the stage and label."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{label}".encode()).digest()[:4], "big")


@dataclass(frozen=True)
class StageContext:
    """Everything a stage is given.

    Attributes:
        name: the stage's name in the recipe.
        run_dir: the run's folder, for reading; a stage writes only into ``out``.
        out: the folder that becomes the artifact when ``run`` returns.
        resumed: ``out`` holds what an interrupted attempt with the same configuration left.
        run_id, rl_run: keys of this run and of this stage's RL run in the run database.
        seed: the recipe's seed, or the stage's own ``seed`` where the recipe gives one.
        database, telemetry, progress, logger: owned by the runner, which closes them.
    """

    name: str
    run_dir: Path
    out: Path
    resumed: bool
    run_id: str
    rl_run: str
    seed: int
    database: RunDatabase
    telemetry: Telemetry
    progress: Progress
    logger: logging.Logger
    artifacts: Mapping[str, Path]

    def input(self, role: str) -> Path:
        """The artifact folder that fills a role. Raises ConfigError when the recipe fills it with nothing."""
        if role not in self.artifacts:
            raise ConfigError(
                f"stage {self.name!r} has no input {role!r}",
                f'add inputs = {{ {role} = "NAME" }} to it in the recipe',
            )
        return self.artifacts[role]

    def seed_for(self, label: str) -> int:
        """A seed of 32 bits for one use, the same in every run with the same recipe seed and label."""
        return seed_of(self.seed, label)
