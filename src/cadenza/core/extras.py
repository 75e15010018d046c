"""Optional packages: what is missing, told as what to install."""

from __future__ import annotations

from cadenza.core.errors import ConfigError

TRAIN = ("torch", "numba", "llvmlite", "ray", "safetensors")  # what cadenza[train] brings

INSTALL = "in the checkout: make install, or pip install '.[train]'"


def missing_extra(error: BaseException, what: str) -> ConfigError | None:
    """The error for a user when ``what`` failed to import a package of an extra; None for any other error."""
    if isinstance(error, ModuleNotFoundError) and error.name in TRAIN:
        return ConfigError(
            f"{what} needs {error.name}, which is not installed",
            INSTALL,
        )
    return None
