"""Archetypes on strings."""

from __future__ import annotations

from cadenza.tasks.draft import ABOVE_BELOW, Draft, Draw, function, near, word, words
from cadenza.tasks.words import SEPARATORS, plural, spoken

_SEP_NAMES = {
    ",": "comma",
    ";": "semicolon",
    "-": "dash",
    "/": "slash",
    ":": "colon",
    "|": "bar",
    " ": "space",
    "+": "plus",
    ".": "dot",
    "_": "underscore",
    "=": "equals sign",
}


def _messy(r) -> str:
    """A few words in odd case with odd blanks."""
    text = r.choice((" ", " ", "-", "_", "  ")).join(
        r.choice((w, w.upper(), w.capitalize())) for w in words(r, 1, 3)
    )
    return r.choice(("", " ", "  ")) + text + r.choice(("", " ", "\t"))


def normalize(d: Draw) -> Draft:
    label = d.label()
    case, said = d.pick(("lower", "lower case"), ("upper", "upper case"), ("title", "title case"))
    old, new = d.pick((" ", "_"), (" ", "-"), ("-", " "), ("_", " "), ("-", "_"))
    name = d.name("clean normalize tidy", label)
    steps = d.pick(
        [
            f"{label} = {label}.strip()",
            f'{label} = {label}.replace("{old}", "{new}")',
            f"return {label}.{case}()",
        ],
        [f"{label} = {label}.strip().{case}()", f'return {label}.replace("{old}", "{new}")'],
    )
    doc = f"Strip {spoken(label)}, put it in {said}, turn each {_SEP_NAMES[old]} into a {_SEP_NAMES[new]}."
    return function(name, label, doc, steps, f"the cleaned {spoken(label)}", lambda r: (_messy(r),))


def join_texts(d: Draw) -> Draft:
    many = plural(d.label())
    x = d.pick("part", "x", "word", "text")
    sep = d.pick(*SEPARATORS)
    pre, post = d.pick(("[", "]"), ("(", ")"), ("<", ">"), ("{", "}"))
    wrapped = d.chance(0.5)
    case, said = d.pick(("lower", "lower case"), ("upper", "upper case"), ("strip", "stripped form"))
    name = d.name("join format show", many)
    body = [
        f"parts = [{x}.{case}() for {x} in {many}]",
        f'joined = "{sep}".join(parts)',
        f'return "{pre}" + joined + "{post}"' if wrapped else "return joined",
    ]
    doc = f"Join the {spoken(many)} in {said} by a {_SEP_NAMES[sep]}" + (
        f", inside {pre}{post}." if wrapped else "."
    )
    return function(
        name,
        many,
        doc,
        body,
        f"the joined {spoken(many)}",
        lambda r: ([r.choice((w, w.upper(), f" {w}")) for w in words(r)],),
    )


def parse_pairs(d: Draw) -> Draft:
    sep, eq = d.pick(",", ";", "&", " "), d.pick("=", ":")
    name = d.name("parse read load", d.pick("pairs", "options", "settings", "fields"))
    out = d.pick("out", "result", "found")
    numeric = d.chance(0.5)
    value = "int(value)" if numeric else "value.strip()"
    body = [
        f"{out} = {{}}",
        f'for part in text.split("{sep}"):',
        f'    if "{eq}" in part:',
        f'        key, value = part.split("{eq}", 1)',
        f"        {out}[key.strip()] = {value}",
        f"return {out}",
    ]
    doc = (
        f'Read key{eq}value parts split by "{sep}"; strip keys, '
        + ("make values integers" if numeric else "strip values")
        + "; skip others."
    )

    def arguments(r):
        parts = []
        for key in words(r, 1, 3):
            v = str(r.randint(0, 40)) if numeric else word(r)
            if sep != " ":
                v = r.choice(("", " ")) + v
                key = r.choice(("", " ")) + key
            parts.append(key if r.random() < 0.15 else f"{key}{eq}{v}")
        return (sep.join(parts),)

    return function(name, "text", doc, body, "the dictionary read from a text", arguments)


def caesar(d: Draw) -> Draft:
    label = d.label()
    k = d.number(1, 9)
    back = d.chance(0.3)
    c = d.pick("c", "char", "letter")
    name = d.name("encode shift hide" if not back else "decode unshift reveal", label)
    out = d.pick("out", "result", "coded")
    body = [
        f'{out} = ""',
        f"for {c} in {label}:",
        f"    place = (ord({c}) - 97 {'-' if back else '+'} {k}) % 26",
        f"    {out} += chr(place + 97)",
        f"return {out}",
    ]
    doc = f"Move each letter of {spoken(label)} {'back' if back else 'forward'} by {k} places, from z to a."
    doc = doc.replace("from z to a", "from a to z" if back else "from z to a")
    return function(
        name, label, doc, body, f"the coded {spoken(label)}", lambda r: (word(r) + r.choice(("", "z")),)
    )


def run_length(d: Draw) -> Draft:
    label = d.label()
    name = d.name("runs pack squeeze", label)
    out = d.pick("out", "runs", "result")
    body = [
        f"{out} = []",
        f"for c in {label}:",
        f"    if {out} and {out}[-1][0] == c:",
        f"        {out}[-1][1] += 1",
        "    else:",
        f"        {out}.append([c, 1])",
        f"return {out}",
    ]
    doc = f"The runs of {spoken(label)} as [letter, length] lists."
    return function(
        name,
        label,
        doc,
        body,
        f"the runs of the {spoken(label)}",
        lambda r: ("".join(r.choice("ab") * r.randint(1, 3) for _ in range(r.randint(1, 4))),),
    )


def bracket_depth(d: Draw) -> Draft:
    opening, closing = d.pick(("(", ")"), ("[", "]"), ("{", "}"), ("<", ">"))
    deepest = d.chance(0.6)
    name = d.name("depth nesting measure", d.pick("text", "line", "formula", "code"))
    depth, best = d.pick(("depth", "best"), ("level", "deepest"), ("now", "top"))
    if deepest:
        body = [
            f"{depth}, {best} = 0, 0",
            "for c in text:",
            f'    if c == "{opening}":',
            f"        {depth} += 1",
            f'    elif c == "{closing}":',
            f"        {depth} -= 1",
            f"    {best} = max({best}, {depth})",
            f"return {best}",
        ]
        doc = f"Deepest nesting of {opening}{closing} in the text."
    else:
        body = [
            f"{depth} = 0",
            "for c in text:",
            f'    if c == "{opening}":',
            f"        {depth} += 1",
            f'    elif c == "{closing}":',
            f"        {depth} -= 1",
            f"        if {depth} < 0:",
            "            return False",
            f"return {depth} == 0",
        ]
        doc = f"True if each {opening} of the text has its {closing} after it and none is left."

    def arguments(r):
        text = ""
        for _ in range(r.randint(2, 6)):
            text += r.choice((opening, closing, opening, "a", opening + closing))
        return (text + closing * max(0, text.count(opening) - text.count(closing) - (r.random() < 0.2)),)

    return function(name, "text", doc, body, "the nesting of the brackets", arguments)


def initials(d: Draw) -> Draft:
    label = d.label()
    sep = d.pick("", ".", "-")
    case, said = d.pick(("upper", "upper"), ("lower", "lower"))
    first, place = d.pick((0, "first"), (0, "first"), (-1, "last"))
    x = d.pick("part", "w", "piece")
    name = d.name("initials short abbreviate", label)
    body = [
        f"parts = {label}.split()",
        f"letters = [{x}[{first}].{case}() for {x} in parts]",
        f'return "{sep}".join(letters)',
    ]
    doc = f"The {place} letters of the words of {spoken(label)} in {said} case" + (
        f", joined by a {_SEP_NAMES[sep]}." if sep else "."
    )
    return function(
        name,
        label,
        doc,
        body,
        f"the letters of the {spoken(label)}",
        lambda r: (" ".join(r.choice((w, w.capitalize())) for w in words(r, 1, 3)),),
    )


def truncate(d: Draw) -> Draft:
    label = d.label()
    limit = d.number(4, 9)
    mark = d.pick("..", "...", "~", "+", "*")
    name = d.name("shorten truncate crop", label)
    body = [
        f"if len({label}) <= {limit}:",
        f"    return {label}",
        f'return {label}[:{limit - len(mark)}] + "{mark}"',
    ]
    doc = f"Cut {spoken(label)} to {limit} letters, the last being {mark} if it was longer."
    if len(mark) > 1:
        doc = f"Cut {spoken(label)} to {limit} letters, ending in {mark} if it was longer."

    def arguments(r):
        length = near(r, limit, low=1, high=limit + 6)
        return ("".join(r.choice("abcdeikmorst") for _ in range(length)),)

    return function(name, label, doc, body, f"the short {spoken(label)}", arguments)


def count_letters(d: Draw) -> Draft:
    label = d.label()
    letters = d.pick("aeiou", "aeo", "xyz", "rst", "nml", "abc")
    positive = d.chance(0.75)
    c = d.pick("c", "char", "letter")
    name = d.name("count number_of tally", "letters_of_" + label if d.chance(0.4) else label + "_letters")
    count = d.pick("count", "found", "total")
    body = [
        f"{count} = 0",
        f"for {c} in {label}.lower():",
        f'    if {c} {"in" if positive else "not in"} "{letters}":',
        f"        {count} += 1",
        f"return {count}",
    ]
    doc = f"How many letters of {spoken(label)}, in any case, are {'among' if positive else 'not among'} {letters}."
    return function(
        name,
        label,
        doc,
        body,
        f"the number of letters in the {spoken(label)}",
        lambda r: (r.choice((word(r) + word(r), word(r).upper() + word(r), word(r))),),
    )


def code_of(d: Draw) -> Draft:
    label = d.label()
    n = d.pick("number", "index", "serial", "no")
    width = d.number(3, 5)
    sep = d.pick("-", "/", ":", "_", ".")
    cut = d.number(2, 3)
    name = d.name("code key make", d.thing() + "_id")
    body = [
        f"head = {label}[:{cut}].upper()",
        f'tail = str({n}).rjust({width}, "0")',
        f'return head + "{sep}" + tail',
    ]
    doc = (
        f"First {cut} letters of {spoken(label)} in capitals, "
        f"{_SEP_NAMES[sep]}, {n} 0-filled to {width} digits."
    )
    return function(
        name,
        f"{label}, {n}",
        doc,
        body,
        f"the code of a {spoken(label)} and a number",
        lambda r: (word(r), r.choice((r.randint(1, 9), r.randint(10, 999)))),
    )


def prefix_filter(d: Draw) -> Draft:
    many = plural(d.label())
    x = d.pick("x", "text", "word", "entry")
    mark = d.pick("a", "b", "s", "re", "pr", "co", "#", "_")
    method, said = d.pick(("startswith", "starting with"), ("endswith", "ending in"))
    keep = d.chance(0.6)
    name = d.name("keep select filter" if keep else "drop without skip", many)
    body = [
        f'found = [{x} for {x} in {many} if {"" if keep else "not "}{x}.{method}("{mark}")]',
        "return sorted(found)",
    ]
    doc = f"The {spoken(many)} {'' if keep else 'not '}{said} {mark}, sorted."

    def arguments(r):
        out = []
        for w in words(r, 2, 4):
            out.append(r.choice((mark + w, w + mark, mark + w, w + mark, w)))
        return (out,)

    return function(name, many, doc, body, f"the sorted choice of {spoken(many)}", arguments)


def same_backwards(d: Draw) -> Draft:
    label = d.label()
    skip = d.pick(" ", "-", ".")
    name = d.name("is_mirror reads_same is_palindrome", label)
    body = [f'text = {label}.lower().replace("{skip}", "")', "return text == text[::-1]"]
    doc = f"True if {spoken(label)} reads the same backwards, ignoring case and each {_SEP_NAMES[skip]}."

    def arguments(r):
        w = "".join(r.choice("abc") for _ in range(r.randint(1, 3)))
        text = w + r.choice(("", skip, "x")) + w[::-1] + r.choice(("", "bc", "b", skip))
        return (r.choice((text, text.upper(), text.capitalize())),)

    return function(name, label, doc, body, f"the check of the {spoken(label)}", arguments)


def word_lengths(d: Draw) -> Draft:
    label = d.label()
    op, edge = d.compare(), d.number(2, 4)
    w = d.pick("w", "part", "piece")
    kind = d.pick("len", "word")
    name = d.name("measure lengths scan" if kind == "len" else "words pick_words long_words", label)
    result = f"len({w})" if kind == "len" else f"{w}.upper()"
    body = [
        "out = []",
        f"for {w} in {label}.split():",
        f"    if len({w}) {op} {edge}:",
        f"        out.append({result})",
        "return out",
    ]
    said = "Lengths of the words" if kind == "len" else "The words"
    doc = f"{said} of {spoken(label)} with a length {ABOVE_BELOW[op]} {edge}" + (
        "." if kind == "len" else ", in upper case."
    )
    return function(
        name,
        label,
        doc,
        body,
        f"the words of the {spoken(label)}",
        lambda r: (" ".join("abcdefg"[: r.randint(1, 6)] for _ in range(r.randint(2, 4))),),
    )


def longest_text(d: Draw) -> Draft:
    many = plural(d.label())
    x = d.pick("x", "text", "entry", "word")
    op, said = d.pick((">", "longest"), ("<", "shortest"))
    name = d.name("longest pick_long widest" if op == ">" else "shortest pick_short least", many)
    default = d.pick("", "none", "-")
    best = d.pick("best", "found", "choice")
    body = [
        f"if not {many}:",
        f'    return "{default}"',
        f"{best} = {many}[0]",
        f"for {x} in {many}[1:]:",
        f"    if len({x}) {op} len({best}):",
        f"        {best} = {x}",
        f"return {best}",
    ]
    shown = default or "an empty text"
    doc = f"The {said} of the {spoken(many)}, the first of equals; {shown} if none."
    return function(
        name,
        many,
        doc,
        body,
        f"the {said} of the {spoken(many)}",
        lambda r: (
            [
                "".join(r.choice("abcdrst") for _ in range(r.randint(1, 4)))
                for _ in range(r.choice((0, 2, 3, 3, 4)))
            ],
        ),
    )


def between_marks(d: Draw) -> Draft:
    opening, closing = d.pick(("[", "]"), ("(", ")"), ("<", ">"), ("{", "}"), ("<", ";"), (":", "."))
    name = d.name("inside extract between", d.pick("text", "line", "tag", d.label()))
    default = d.pick("", "none", "?")
    body = [
        f'start = text.find("{opening}")',
        f'end = text.find("{closing}", start + 1)',
        "if start == -1 or end == -1:",
        f'    return "{default}"',
        "return text[start + 1:end]",
    ]
    doc = f"The text between the first {opening} and the next {closing}; {default or 'an empty text'} without them."

    def arguments(r):
        a, b, c = word(r), word(r), word(r)
        return (
            r.choice(
                (
                    f"{a}{opening}{b}{closing}{c}",
                    f"{a}{opening}{b}",
                    f"{a}{closing}{b}",
                    f"{a}{closing}{b}{opening}{c}{closing}",
                    f"{opening}{a}{closing}",
                )
            ),
        )

    return function(name, "text", doc, body, "the text between two marks", arguments)


def fill_line(d: Draw) -> Draft:
    a, b = d.label(), d.amount()
    width = d.number(8, 14)
    fill = d.pick(".", "-", "_", "*")
    name = d.name("line row format", d.thing())
    body = [f"right = str({b})", f'left = {a}.ljust({width} - len(right), "{fill}")', "return left + right"]
    doc = f"A line of {width} characters: {spoken(a)}, filled with {fill}, then {spoken(b)}."
    return function(
        name,
        f"{a}, {b}",
        doc,
        body,
        f"the line for a {spoken(a)}",
        lambda r: (word(r), r.choice((r.randint(0, 9), r.randint(10, 999)))),
    )


TEXT = (
    normalize,
    join_texts,
    parse_pairs,
    caesar,
    run_length,
    bracket_depth,
    initials,
    truncate,
    count_letters,
    code_of,
    prefix_filter,
    same_backwards,
    word_lengths,
    longest_text,
    between_marks,
    fill_line,
)
