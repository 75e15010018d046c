"""Archetypes on dictionaries and on rows of fields."""

from __future__ import annotations

from cadenza.tasks.draft import ABOVE_BELOW, IS_THAN, Draft, Draw, function, near, table, word, words
from cadenza.tasks.words import plural, spoken


def lookup(d: Draw) -> Draft:
    a, key = plural(d.amount()), d.label()
    default, k = d.pick(0, 0, 1, -1, 10), d.number(1, 5)
    op, said = d.pick(("+", f"plus {k}"), ("*", f"times {k + 1}"), ("-", f"minus {k}"))
    k = k + 1 if op == "*" else k
    name = d.name("lookup get fetch", a)
    value = d.pick("value", "found", "result")
    body = [f"{value} = {a}.get({key}, {default})", f"return {value} {op} {k}"]
    doc = f"The entry of {spoken(key)} in {spoken(a)}, {default} if missing, {said}."

    def arguments(r):
        t = table(r)
        return t, r.choice((*t, word(r)))

    return function(name, f"{a}, {key}", doc, body, f"the entry of a {spoken(key)}", arguments)


def group_by(d: Draw) -> Draft:
    many = plural(d.label())
    how, said = d.pick(("{x}[0]", "first letter"), ("len({x})", "length"), ("{x}[-1]", "last letter"))
    x = d.pick("x", "entry", "word", "text")
    name = d.name("group sort_in index", many)
    out = d.pick("groups", "out", "result")
    test = how.format(x=x)
    body = d.pick(
        [
            f"{out} = {{}}",
            f"for {x} in {many}:",
            f"    key = {test}",
            f"    {out}.setdefault(key, []).append({x})",
            f"return {out}",
        ],
        [
            f"{out} = {{}}",
            f"for {x} in {many}:",
            f"    key = {test}",
            f"    if key not in {out}:",
            f"        {out}[key] = []",
            f"    {out}[key].append({x})",
            f"return {out}",
        ],
    )
    doc = f"Group the {spoken(many)} by their {said}."
    return function(
        name,
        many,
        doc,
        body,
        f"the groups of {spoken(many)}",
        lambda r: (
            ["".join(r.choice("abc") for _ in range(r.randint(1, 3))) for _ in range(r.randint(2, 4))],
        ),
    )


def merge(d: Draw) -> Draft:
    a, b = d.pick(("first", "second"), ("old", "new"), ("left", "right"), ("stock", "delivery"))
    op = d.pick("+", "-")
    default = d.pick(0, 0, 0, 1, 10)
    name = d.name("merge combine join", plural(d.amount()))
    out = d.pick("out", "result", "merged")
    body = [
        f"{out} = dict({a})",
        f"for key, value in {b}.items():",
        f"    {out}[key] = {out}.get(key, {default}) {op} value",
        f"return {out}",
    ]
    doc = f"Copy {a} and add the values of {b}" if op == "+" else f"Copy {a} and subtract the values of {b}"
    doc += f"; missing keys count as {default}."

    def arguments(r):
        t = table(r)
        u = {key: r.randint(1, 9) for key in r.sample(list(t), 1) + words(r, 1, 1)}
        return t, u

    return function(name, f"{a}, {b}", doc, body, "the merged table", arguments)


def invert(d: Draw) -> Draft:
    a = plural(d.label())
    name = d.name("invert flip reverse", a)
    out = d.pick("out", "result", "flipped")
    first = d.chance(0.5)
    body = [f"{out} = {{}}", f"for key, value in {a}.items():"]
    body += (
        [f"    if value not in {out}:", f"        {out}[value] = key"]
        if first
        else [f"    {out}[value] = key"]
    )
    body += [f"return {out}"]
    doc = f"Turn the {spoken(a)} round, from value to key; the {'first' if first else 'last'} key wins."
    return function(
        name,
        a,
        doc,
        body,
        f"the {spoken(a)} turned round",
        lambda r: ({w: r.choice(("x", "y", "z")) for w in words(r, 2, 4)},),
    )


def occurrences(d: Draw) -> Draft:
    many = plural(d.label())
    x = d.pick("x", "word", "entry", "key")
    step = d.pick(1, 1, 2, 5)
    case = d.pick("", ".lower()", ".strip()")
    name = d.name("count tally frequency", many)
    out = d.pick("counts", "out", "result")
    body = [
        f"{out} = {{}}",
        f"for {x} in {many}:",
        f"    {x} = {x}{case}" if case else None,
        f"    {out}[{x}] = {out}.get({x}, 0) + {step}",
        f"return {out}",
    ]
    body = [line for line in body if line]
    said = {"": "", ".lower()": " in lower case", ".strip()": " after stripping"}[case]
    doc = f"Count each of the {spoken(many)}{said}" + ("." if step == 1 else f", {step} for every one.")

    def arguments(r):
        pool = r.sample(("ant", "bee", "cat"), 2)
        return (
            [
                r.choice((w, w, w.upper() if "lower" in case else f" {w}" if case else w))
                for w in (r.choice(pool) for _ in range(r.randint(2, 5)))
            ],
        )

    return function(name, many, doc, body, f"the counts of the {spoken(many)}", arguments)


def filter_table(d: Draw) -> Draft:
    a = plural(d.amount())
    op, edge = d.compare(), d.number(3, 15)
    as_list = d.chance(0.5)
    name = d.name("keep select choose", a)
    if as_list:
        body = [f"names = [key for key, value in {a}.items() if value {op} {edge}]", "return sorted(names)"]
        doc = f"The sorted keys whose value in {spoken(a)} {IS_THAN[op]} {edge}."
    else:
        body = [
            "out = {}",
            f"for key, value in {a}.items():",
            f"    if value {op} {edge}:",
            "        out[key] = value",
            "return out",
        ]
        doc = f"The part of {spoken(a)} with values {ABOVE_BELOW[op]} {edge}."
    return function(
        name, a, doc, body, f"the chosen part of the {spoken(a)}", lambda r: (table(r, edge, most=4),)
    )


def total_field(d: Draw) -> Draft:
    thing, a = d.thing(), d.amount()
    many = plural(thing)
    x = d.pick("row", "x", "entry", "record")
    b = d.pick("count", "number", "quantity", "units")
    op = d.pick("*", "*", "+", "-")
    said = {"*": "times", "+": "plus", "-": "minus"}[op]
    acc = d.pick("total", "result", "acc")
    start = d.pick(0, 0, d.number(1, 9))
    name = d.name("total sum worth", many)
    body = [
        f"{acc} = {start}",
        f"for {x} in {many}:",
        f'    {acc} += {x}["{a}"] {op} {x}["{b}"]',
        f"return {acc}",
    ]
    doc = f"{f'{start} plus the sum' if start else 'Sum'} of {spoken(a)} {said} {b} over the {spoken(many)}."
    return function(
        name,
        many,
        doc,
        body,
        f"the sum over the {spoken(many)}",
        lambda r: ([{a: r.randint(1, 20), b: r.randint(1, 6)} for _ in range(r.randint(1, 2))],),
    )


def pick_field(d: Draw) -> Draft:
    thing, label, a = d.thing(), d.label(), d.amount()
    many = plural(thing)
    x = d.pick("row", "x", "entry", "record")
    op, edge = d.compare(), d.number(3, 15)
    name = d.name(f"{plural(label)}_of find_{plural(label)} list_{plural(label)}", many)
    body = [
        "out = []",
        f"for {x} in {many}:",
        f'    if {x}["{a}"] {op} {edge}:',
        f'        out.append({x}["{label}"])',
        "return out",
    ]
    doc = f"The {spoken(label)} of each of the {spoken(many)} with {spoken(a)} {ABOVE_BELOW[op]} {edge}."
    return function(
        name,
        many,
        doc,
        body,
        f"the list of each {spoken(label)}",
        lambda r: ([{label: w, a: near(r, edge, high=20)} for w in words(r, 2, 2)],),
    )


def reorder(d: Draw) -> Draft:
    many = d.pick("stock", "store", "levels", "supplies")
    limit = d.number(3, 9)
    target = limit + d.number(3, 12)
    op = d.pick("<", "<=")
    name = d.name("reorder refill missing", many)
    out = d.pick("needed", "out", "result")
    body = [
        f"{out} = {{}}",
        f"for key, count in {many}.items():",
        f"    if count {op} {limit}:",
        f"        {out}[key] = {target} - count",
        f"return {out}",
    ]
    doc = f"For each entry {ABOVE_BELOW[op]} {limit} in {many}, how many are missing to {target}."
    return function(
        name, many, doc, body, "what must be reordered", lambda r: (table(r, limit, limit, most=4),)
    )


def best_key(d: Draw) -> Draft:
    a = plural(d.amount())
    op, said = d.pick((">", "largest"), ("<", "smallest"))
    name = d.name("best winner top" if op == ">" else "worst last_of lowest", a)
    best = d.pick("best", "found", "choice")
    body = [
        f"{best} = None",
        f"for key, value in {a}.items():",
        f"    if {best} is None or value {op} {a}[{best}]:",
        f"        {best} = key",
        f"return {best}",
    ]
    doc = f"The key with the {said} value in {spoken(a)}, the first of equals, None if empty."
    return function(
        name,
        a,
        doc,
        body,
        f"the key with the {said} of the {spoken(a)}",
        lambda r: ({w: r.randint(1, 6) for w in words(r, 2, 4)} if r.random() < 0.9 else {},),
    )


def take_out(d: Draw) -> Draft:
    store, order = d.pick(("stock", "order"), ("store", "wanted"), ("supply", "need"), ("have", "use"))
    name = d.name("take use_up remove", plural(d.thing()))
    out = d.pick("left", "rest", "out")
    floor = d.pick(0, 0, 1)
    body = [
        f"{out} = dict({store})",
        f"for key, count in {order}.items():",
        f"    if key in {out}:",
        f"        {out}[key] = max({out}[key] - count, {floor})",
        f"return {out}",
    ]
    doc = f"Take {order} out of {store}, not below {floor}; ignore unknown keys."

    def arguments(r):
        t = table(r)
        return t, {key: r.randint(1, 15) for key in (*r.sample(list(t), 1), *words(r, 1, 1))}

    return function(name, f"{store}, {order}", doc, body, f"what is left of the {store}", arguments)


def sort_table(d: Draw) -> Draft:
    a = plural(d.amount())
    high = d.chance(0.5)
    k = d.number(2, 3)
    name = d.name("rank order podium", a)
    body = [f"keys = sorted({a}, key={a}.get{', reverse=True' if high else ''})", f"return keys[:{k}]"]
    doc = f"The {k} keys with the {'largest' if high else 'smallest'} values in {spoken(a)}, in that order."
    return function(
        name,
        a,
        doc,
        body,
        f"the order of the {spoken(a)}",
        lambda r: (dict(zip(words(r, k + 1, k + 2), r.sample(range(1, 30), k + 2), strict=False)),),
    )


def nested_get(d: Draw) -> Draft:
    outer, inner = d.pick(("user", "address"), ("config", "limits"), ("order", "client"), ("page", "meta"))
    key = d.pick("size", "name", "code", "mode", "zone")
    default = d.pick(0, 1, 5, -1) if key in ("size", "code") else d.pick("none", "other", "basic")
    shown = f'"{default}"' if isinstance(default, str) else str(default)
    name = d.name(f"{key}_of get_{key} read_{key}", outer)
    body = [
        f'{inner} = {outer}.get("{inner}", {{}})',
        f'if "{key}" not in {inner}:',
        f"    return {shown}",
        f'return {inner}["{key}"]',
    ]
    doc = f"The {key} in the {inner} of {outer}, {default} if there is none."

    def arguments(r):
        value = r.randint(2, 40) if key in ("size", "code") else word(r)
        return (r.choice(({inner: {key: value}}, {inner: {key: value}}, {inner: {}}, {}, {key: value})),)

    return function(name, outer, doc, body, f"the {key} of a {outer}", arguments)


def add_entry(d: Draw) -> Draft:
    many, key = plural(d.thing()), d.label()
    a = d.amount()
    limit = d.number(5, 25)
    op, said = d.pick((">", "above"), (">=", "of at least"))
    name = d.name("add put register", d.thing())
    body = [
        f"if {key} in {many} or {a} {op} {limit}:",
        "    return False",
        f"{many}[{key}] = {a}",
        "return True",
    ]
    doc = f"Store {spoken(a)} under {spoken(key)} and say True; False if known or {said} {limit}."

    def arguments(r):
        t = table(r, least=1, most=2)
        return t, r.choice((word(r), word(r), *t)), near(r, limit, high=30)

    return function(
        name, f"{many}, {key}, {a}", doc, body, f"whether the {spoken(key)} was stored", arguments
    )


TABLES = (
    lookup,
    group_by,
    merge,
    invert,
    occurrences,
    filter_table,
    total_field,
    pick_field,
    reorder,
    best_key,
    take_out,
    sort_table,
    nested_get,
    add_entry,
)
