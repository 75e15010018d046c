"""Word lists of the generated repositories: a theme gives a module one consistent domain.

Every noun takes a plain ``s`` in the plural, so that a singular and its plural share their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Theme:
    """One domain: countable things, numeric attributes of them, and text attributes."""

    name: str
    things: tuple[str, ...]
    amounts: tuple[str, ...]
    labels: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _theme(name: str, things: str, amounts: str, labels: str) -> Theme:
    return Theme(name, _words(things), _words(amounts), _words(labels))


THEMES: tuple[Theme, ...] = (
    _theme("shop", "order item basket parcel coupon cart product", "price cost charge fee", "name brand tag"),
    _theme(
        "bank", "account payment loan deposit invoice transfer", "amount rate fee debt", "owner label code"
    ),
    _theme("school", "pupil lesson exam course grade teacher", "score mark point age", "name subject title"),
    _theme("farm", "cow field barn crop tractor hen", "weight harvest age load", "name breed tag"),
    _theme("travel", "trip flight hotel ticket route bus", "distance fare delay speed", "city name code"),
    _theme("music", "song album band concert track chord", "length tempo volume rank", "title artist genre"),
    _theme("sport", "team match player goal race league", "score speed point rank", "name club nick"),
    _theme("library", "book shelf loan reader page author", "length age fine year", "title author_name code"),
    _theme("kitchen", "recipe meal cup plate cake oven", "weight heat portion time", "name taste label"),
    _theme(
        "weather", "storm cloud sensor station reading alarm", "level heat wind depth", "place name state"
    ),
    _theme(
        "garage", "car wheel engine part van truck", "speed mileage weight power", "model plate_text color"
    ),
    _theme("game", "hero enemy_unit card quest coin monster", "power level health gold", "name kind title"),
    _theme("hospital", "patient nurse doctor bed visit ward", "dose age pulse weight", "name reason status"),
    _theme("office", "task meeting desk report badge client", "hour budget load bonus", "name topic room"),
    _theme("garden", "plant tree seed pot rose pond", "height depth width age", "name color soil"),
    _theme("network", "packet host server link router node", "size delay port load", "address name zone"),
    _theme(
        "factory", "machine robot bolt crate worker line", "speed weight output defect", "code name status"
    ),
    _theme("museum", "statue ticket visitor guide hall tour", "age value height width", "title artist room"),
)

ADJECTIVES = _words(
    "net base daily final local total extra early late main new old open safe next last raw full"
)

SEPARATORS: tuple[str, ...] = (",", ";", "-", "/", ":", "|", " ", "+", ".")
LEVEL_WORDS: tuple[tuple[str, str, str], ...] = (
    ("low", "mid", "high"),
    ("small", "medium", "large"),
    ("cold", "warm", "hot"),
    ("slow", "normal", "fast"),
    ("poor", "fair", "good"),
    ("light", "medium", "heavy"),
    ("bronze", "silver", "gold"),
    ("green", "yellow", "red"),
    ("minor", "major", "severe"),
    ("short", "average", "long"),
)
SAMPLE_WORDS = _words(
    "ant bee cat dog elk fox gnu hen owl pig rat yak ash bay elm fir oak red tan blue pink gold iron salt "
    "rice milk bean corn plum pear lime kiwi sun moon star rain snow wind hill lake"
)


def plural(noun: str) -> str:
    """``price`` -> ``prices``. Nouns in the lists are chosen so that this holds, bar ``ss``/``x``/``ch`` (+es)."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun == "shelf":
        return "shelves"
    return noun + "s"


def spoken(identifier: str) -> str:
    """An identifier as words of a sentence: ``enemy_unit`` -> ``enemy unit``."""
    return identifier.replace("_", " ")
