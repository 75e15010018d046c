"""Archetypes on lists of numbers."""

from __future__ import annotations

from cadenza.tasks.draft import ABOVE_BELOW, IS_THAN, Draft, Draw, function, ints
from cadenza.tasks.words import plural, spoken


def _nouns(d: Draw) -> tuple[str, str, str]:
    """The list's name, the loop variable, the plural as words."""
    noun = d.amount()
    many = plural(noun)
    return many, d.element(noun), spoken(many)


def filter_sum(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    op, edge = d.compare(), d.number(2, 15)
    start = d.pick(0, 0, 0, d.number(1, 9))
    scale = d.pick(1, 1, d.number(2, 5))
    acc = d.pick("total", "result", "acc")
    term = x if scale == 1 else f"{x} * {scale}"
    name = d.name("sum total add", many)
    body = [
        f"{acc} = {start}",
        f"for {x} in {many}:",
        f"    if {x} {op} {edge}:",
        f"        {acc} += {term}",
        f"return {acc}",
    ]
    doc = (f"{start} plus the sum" if start else "Sum") + f" of the {said} {ABOVE_BELOW[op]} {edge}"
    doc += "." if scale == 1 else f", each times {scale}."
    return function(
        name, many, doc, body, f"the sum over the {said}", lambda r: (ints(r, edge),), "ints->int"
    )


def count_matching(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    op, edge = d.compare(), d.number(2, 15)
    name = d.name("count number_of tally", many)
    count = d.pick("count", "found", "hits")
    body = d.pick(
        [
            f"{count} = 0",
            f"for {x} in {many}:",
            f"    if {x} {op} {edge}:",
            f"        {count} += 1",
            f"return {count}",
        ],
        [f"matching = [{x} for {x} in {many} if {x} {op} {edge}]", "return len(matching)"],
    )
    doc = f"Count the {said} {ABOVE_BELOW[op]} {edge}."
    return function(name, many, doc, body, f"the number of {said}", lambda r: (ints(r, edge),), "ints->int")


def running_total(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    start = d.pick(0, d.number(1, 20))
    op, word = d.pick(("+", "sum"), ("+", "sum"), ("-", "balance"))
    name = d.name("running trace cumulate", many)
    acc, out = d.pick("total", "level_now", "acc"), d.pick("out", "result", "steps")
    body = [
        f"{acc} = {start}",
        f"{out} = []",
        f"for {x} in {many}:",
        f"    {acc} {op}= {x}",
        f"    {out}.append({acc})",
        f"return {out}",
    ]
    doc = f"Running {word} of the {said}, starting from {start}" + (
        "." if op == "+" else ", each subtracted."
    )
    return function(name, many, doc, body, f"the running {word} of the {said}", lambda r: (ints(r),))


def moving_best(d: Draw) -> Draft:
    many, _, said = _nouns(d)
    size = d.number(2, 4)
    pick, word = d.pick(("max", "largest"), ("min", "smallest"), ("sum", "total"))
    name = d.name("window moving rolling", many)
    out = d.pick("out", "result", "found")
    body = [
        f"{out} = []",
        f"for i in range(len({many}) - {size - 1}):",
        f"    part = {many}[i:i + {size}]",
        f"    {out}.append({pick}(part))",
        f"return {out}",
    ]
    doc = f"The {word} of each {size} neighbouring {said}."
    return function(
        name,
        many,
        doc,
        body,
        f"the {word} of neighbouring {said}",
        lambda r: (ints(r, least=size, most=size + 3),),
    )


def first_index(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    op, edge = d.compare(), d.number(3, 15)
    name = d.name("find first index_of", many)
    i = d.pick("i", "index", "place")
    start = d.pick(0, 0, 1)
    loop = f"for {i}, {x} in enumerate({many}):" if not start else f"for {i}, {x} in enumerate({many}, 1):"
    body = [loop, f"    if {x} {op} {edge}:", f"        return {i}", "return -1"]
    doc = f"Position, from {start}, of the first of the {said} {ABOVE_BELOW[op]} {edge}, or -1."
    return function(
        name,
        many,
        doc,
        body,
        f"the position of the first matching {said[:-1]}",
        lambda r: (ints(r, edge),),
        "ints->int",
    )


def unique_in_order(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    name = d.name("unique distinct dedupe", many)
    seen = d.pick("seen", "out", "result")
    first = d.chance(0.7)
    source = many if first else f"reversed({many})"
    body = [
        f"{seen} = []",
        f"for {x} in {source}:",
        f"    if {x} not in {seen}:",
        f"        {seen}.append({x})",
        f"return {seen}",
    ]
    doc = f"The {said} without repeats, " + ("first ones kept in order." if first else "read from the end.")
    return function(
        name,
        many,
        doc,
        body,
        f"the {said} without repeats",
        lambda r: ([r.randint(1, 4) for _ in range(r.randint(3, 6))],),
    )


def split_by(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    k = d.number(2, 5)
    op, edge = d.compare(), d.number(4, 14)
    yes, no = d.pick(("left", "right"), ("yes", "no"), ("first", "second"))
    modulo = d.chance(0.5)
    test = f"{x} % {k} == 0" if modulo else f"{x} {op} {edge}"
    said_test = f"that divide by {k}" if modulo else f"{ABOVE_BELOW[op]} {edge}"
    name = d.name("split divide part", many)
    body = [
        f"{yes}, {no} = [], []",
        f"for {x} in {many}:",
        f"    if {test}:",
        f"        {yes}.append({x})",
        "    else:",
        f"        {no}.append({x})",
        f"return {yes}, {no}",
    ]
    doc = f"Split off the {said} {said_test}; give them and the others."
    return function(
        name,
        many,
        doc,
        body,
        f"the two parts of the {said}",
        lambda r: (ints(r, k if modulo else edge, least=3),),
    )


def weighted_mean(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    default = d.pick(0, 0, -1)
    name = d.name("mean average weigh", many)
    total, weight = d.pick("total", "top"), d.pick("weight", "share", "w")
    body = [
        f"{total} = 0",
        f"for {x}, {weight} in zip({many}, parts):",
        f"    {total} += {x} * {weight}",
        "if sum(parts) == 0:",
        f"    return {default}",
        f"return {total} // sum(parts)",
    ]
    if x == weight:
        body = [line.replace(f"{x}, {weight}", f"x, {weight}").replace(f"{x} *", "x *") for line in body]
    doc = f"Mean of the {said} weighted by parts, rounded down; {default} if the parts sum to 0."

    def arguments(r):
        values = ints(r, least=2, most=4)
        return values, [r.choice((0, 1, 2, 3)) if r.random() < 0.8 else 0 for _ in values]

    return function(name, f"{many}, parts", doc, body, f"the weighted mean of the {said}", arguments)


def products(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    start = d.pick(1, 1, d.number(2, 5))
    last = d.chance(0.4)
    acc = d.pick("result", "product", "acc")
    name = d.name("multiply product times", many)
    if last:
        body = [f"{acc} = {start}", f"for {x} in {many}:", f"    {acc} *= {x}", f"return {acc}"]
        doc = f"Multiply {start} by all the {said}."
    else:
        body = [
            f"{acc} = {start}",
            "out = []",
            f"for {x} in {many}:",
            f"    {acc} *= {x}",
            f"    out.append({acc})",
            "return out",
        ]
        doc = f"All products on the way of multiplying {start} by the {said}."
    return function(
        name, many, doc, body, f"the product of the {said}", lambda r: (ints(r, low=1, high=6, most=4),)
    )


def page_slice(d: Draw) -> Draft:
    noun = d.thing()
    many = plural(noun)
    size = d.number(2, 5)
    base = d.pick(0, 1)
    page = d.pick("page", "number", "part_no")
    name = d.name("page slice chunk_of", many)
    start = f"{page} * {size}" if base == 0 else f"({page} - 1) * {size}"
    body = [f"start = {start}", f"end = start + {size}", f"return {many}[start:end]"]
    doc = f"The {spoken(many)} on a page of {size}; pages count from {base}."

    def arguments(r):
        return list(range(1, r.randint(size, 3 * size) + 1)), r.randint(base, base + 2)

    return function(name, f"{many}, {page}", doc, body, f"one page of the {spoken(many)}", arguments)


def differences(d: Draw) -> Draft:
    many, _, said = _nouns(d)
    absolute = d.chance(0.5)
    name = d.name("steps changes gaps", many)
    out = d.pick("out", "result", "diffs")
    change = f"{many}[i] - {many}[i - 1]"
    body = [
        f"{out} = []",
        f"for i in range(1, len({many})):",
        f"    {out}.append({f'abs({change})' if absolute else change})",
        f"return {out}",
    ]
    doc = f"The {'absolute ' if absolute else ''}change from each of the {said} to the next."
    return function(
        name, many, doc, body, f"the changes of the {said}", lambda r: (ints(r, least=3, high=30),)
    )


def filter_map(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    op, edge = d.compare(), d.number(2, 15)
    arith, k = d.pick(
        ("+", d.number(1, 9)), ("-", d.number(1, 9)), ("*", d.number(2, 5)), ("//", d.number(2, 4))
    )
    said_op = {"+": f"plus {k}", "-": f"minus {k}", "*": f"times {k}", "//": f"divided by {k}"}[arith]
    name = d.name("pick select map", many)
    body = d.pick(
        [f"kept = [{x} for {x} in {many} if {x} {op} {edge}]", f"return [{x} {arith} {k} for {x} in kept]"],
        [
            "out = []",
            f"for {x} in {many}:",
            f"    if {x} {op} {edge}:",
            f"        out.append({x} {arith} {k})",
            "return out",
        ],
    )
    doc = f"The {said} {ABOVE_BELOW[op]} {edge}, each {said_op}."
    return function(name, many, doc, body, f"the changed {said}", lambda r: (ints(r, edge, least=3),))


def chunks(d: Draw) -> Draft:
    noun = d.thing()
    many = plural(noun)
    size = d.number(2, 4)
    name = d.name("chunk group batch", many)
    out = d.pick("out", "groups", "result")
    body = [
        f"{out} = []",
        f"for i in range(0, len({many}), {size}):",
        f"    {out}.append({many}[i:i + {size}])",
        f"return {out}",
    ]
    doc = f"Cut the {spoken(many)} into groups of {size}; the last may be shorter."
    return function(
        name,
        many,
        doc,
        body,
        f"the groups of {spoken(many)}",
        lambda r: (list(range(1, r.randint(size, 3 * size) + 1)),),
    )


def rotate(d: Draw) -> Draft:
    many = plural(d.thing())
    left = d.chance(0.5)
    k = d.number(1, 3)
    name = d.name("rotate turn shift", many)
    cut = d.pick("cut", "k", "place")
    body = [
        f"if not {many}:",
        "    return []",
        f"{cut} = {k} % len({many})" if left else f"{cut} = len({many}) - {k} % len({many})",
        f"return {many}[{cut}:] + {many}[:{cut}]",
    ]
    doc = f"The {spoken(many)} moved {'left' if left else 'right'} by {k}, round the end."
    return function(
        name, many, doc, body, f"the rotated {spoken(many)}", lambda r: (list(range(1, r.randint(2, 6) + 1)),)
    )


def pair_sum(d: Draw) -> Draft:
    a, b = plural(d.amount()), d.pick("others", "factors", "partners")
    op, word = d.pick(("*", "product"), ("-", "difference"), ("+", "sum"))
    name = d.name("combine pair_up match", a)
    out = d.pick("out", "result", "pairs")
    x, y = d.pick(("a", "b"), ("x", "y"), ("left", "right"))
    body = [
        f"{out} = []",
        f"for {x}, {y} in zip({a}, {b}):",
        f"    {out}.append({x} {op} {y})",
        f"return {out}",
    ]
    doc = f"The {word} of each of the {spoken(a)} and its partner in {b}."

    def arguments(r):
        n = r.randint(2, 4)
        return [r.randint(1, 20) for _ in range(n)], [r.randint(1, 9) for _ in range(n)]

    return function(name, f"{a}, {b}", doc, body, f"the {word} of pairs of {spoken(a)}", arguments)


def count_rises(d: Draw) -> Draft:
    many, _, said = _nouns(d)
    k = d.number(1, 5)
    up = d.chance(0.6)
    name = d.name("count_rises jumps falls" if up else "count_drops falls dips", many)
    count = d.pick("count", "found", "tally")
    gap = f"{many}[i] - {many}[i - 1]" if up else f"{many}[i - 1] - {many}[i]"
    body = [
        f"{count} = 0",
        f"for i in range(1, len({many})):",
        f"    if {gap} >= {k}:",
        f"        {count} += 1",
        f"return {count}",
    ]
    doc = f"How often the {said} {'rise' if up else 'fall'} by at least {k} to the next."
    return function(
        name,
        many,
        doc,
        body,
        f"the number of {'rises' if up else 'falls'} of the {said}",
        lambda r: (ints(r, 5, 5 + k, 5 - k, least=3, high=12),),
        "ints->int",
    )


def trimmed(d: Draw) -> Draft:
    many, _, said = _nouns(d)
    k = d.number(1, 2)
    pick, word = d.pick(("sum", "sum"), ("max", "largest"), ("min", "smallest"), ("len", "number"))
    name = d.name("trim cut core", many)
    kept = d.pick("kept", "middle", "inner")
    body = [
        f"ordered = sorted({many})",
        f"{kept} = ordered[{k}:-{k}]",
        f"return {pick}({kept}, default=0)" if pick in ("max", "min") else f"return {pick}({kept})",
    ]
    doc = f"The {word} of the {said} without the {k} lowest and {k} highest."
    doc = doc[:-1] + "; 0 if none left." if pick in ("max", "min") else doc
    return function(
        name,
        many,
        doc,
        body,
        f"the {word} of the middle {said}",
        lambda r: (ints(r, least=2 * k, most=2 * k + 3),),
        "ints->int",
    )


def longest_streak(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    op, edge = d.compare(), d.number(3, 12)
    name = d.name("streak longest run_of", many)
    best, now = d.pick(("best", "now"), ("longest", "count"))
    body = [
        f"{best}, {now} = 0, 0",
        f"for {x} in {many}:",
        f"    {now} = {now} + 1 if {x} {op} {edge} else 0",
        f"    {best} = max({best}, {now})",
        f"return {best}",
    ]
    doc = f"Length of the longest run of {said} {ABOVE_BELOW[op]} {edge}."
    return function(
        name,
        many,
        doc,
        body,
        f"the longest run of {said}",
        lambda r: (ints(r, edge, least=3, most=6),),
        "ints->int",
    )


def top_items(d: Draw) -> Draft:
    many, _, said = _nouns(d)
    k = d.number(2, 4)
    high = d.chance(0.6)
    name = d.name("top best leading" if high else "bottom lowest least", many)
    body = [f"ordered = sorted({many}{', reverse=True' if high else ''})", f"return ordered[:{k}]"]
    doc = f"The {k} {'highest' if high else 'lowest'} of the {said}, {'highest' if high else 'lowest'} first."
    return function(
        name,
        many,
        doc,
        body,
        f"the {'highest' if high else 'lowest'} {said}",
        lambda r: (ints(r, least=k, most=k + 3),),
    )


def value_spread(d: Draw) -> Draft:
    many, _, said = _nouns(d)
    default = d.pick(0, 0, -1, 1)
    name = d.name("spread width_of extent", many)
    body = [
        f"if len({many}) < 2:",
        f"    return {default}",
        f"low = min({many})",
        f"high = max({many})",
        "return high - low",
    ]
    doc = f"Largest minus smallest of the {said}; {default} for fewer than 2."
    return function(
        name, many, doc, body, f"the spread of the {said}", lambda r: (ints(r, least=1, most=4),), "ints->int"
    )


def any_or_all(d: Draw) -> Draft:
    many, x, said = _nouns(d)
    op, edge = d.compare(), d.number(3, 15)
    every = d.chance(0.5)
    name = d.name("all every" if every else "any some", many + d.pick("_ok", "_fit", "_pass"))
    body = [
        f"for {x} in {many}:",
        f"    if {'not ' if every else ''}{x} {op} {edge}:",
        f"        return {not every}",
        f"return {every}",
    ]
    doc = f"True if {'each' if every else 'at least one'} of the {said} {IS_THAN[op]} {edge}."
    return function(
        name, many, doc, body, f"the check over the {said}", lambda r: (ints(r, edge, least=1, most=2),)
    )


LISTS = (
    filter_sum,
    count_matching,
    running_total,
    moving_best,
    first_index,
    unique_in_order,
    split_by,
    weighted_mean,
    products,
    page_slice,
    differences,
    filter_map,
    chunks,
    rotate,
    pair_sum,
    count_rises,
    trimmed,
    longest_streak,
    top_items,
    value_spread,
    any_or_all,
)
