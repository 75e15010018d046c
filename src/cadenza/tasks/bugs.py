"""All bug families in one place; importing this module registers them."""

from __future__ import annotations

from cadenza.tasks import families_operators, families_structure
from cadenza.tasks.families import FAMILIES, UNSEEN_FAMILIES, Mutation, mutations

ALL_FAMILIES: tuple[str, ...] = tuple(FAMILIES)
SEEN_FAMILIES: tuple[str, ...] = tuple(n for n in ALL_FAMILIES if n not in UNSEEN_FAMILIES)
DEMO_FAMILIES: tuple[str, ...] = (
    "comparison_boundary",
    "arithmetic_operator",
    "wrong_constant_value",
    "negated_condition",
    "wrong_variable",
    "wrong_method",
    "wrong_augmented_assign",
)

__all__ = [
    "ALL_FAMILIES",
    "DEMO_FAMILIES",
    "FAMILIES",
    "SEEN_FAMILIES",
    "UNSEEN_FAMILIES",
    "Mutation",
    "mutations",
]
_ = (families_operators, families_structure)
