"""Optional packages: what is missing, told as what to install."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from cadenza.core.errors import ConfigError

TRAIN = ("torch", "numba", "llvmlite", "ray", "safetensors")  # what cadenza[train] brings

INSTALL = "in the checkout: make install, or pip install '.[train]'"


def missing_extra(error: BaseException, what: str) -> ConfigError | None:
    """The error for a user when ``what`` failed to import a package of an extra; None for any other error."""
    if isinstance(error, ModuleNotFoundError) and error.name in TRAIN:
        return _absent(error.name, what)
    return None


def require_packages(packages: Iterable[str], what: str) -> None:
    """Looks for packages without importing them. Raises ConfigError naming the first that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise _absent(package, what)


def _absent(package: str, what: str) -> ConfigError:
    return ConfigError(f"{what} needs {package}, which is not installed", INSTALL)
