"""Archetypes on single numbers: limits, rates, rounding, classes, small loops."""

from __future__ import annotations

from cadenza.tasks.draft import IS_THAN, Draft, Draw, function, near
from cadenza.tasks.words import LEVEL_WORDS, spoken


def clamp(d: Draw) -> Draft:
    a = d.amount()
    low = d.number(1, 9)
    high = low + d.number(5, 30)
    name = d.name("clamp limit bound fit", a)
    body = d.pick(
        [f"{a} = max({a}, {low})", f"return min({a}, {high})"],
        [f"if {a} < {low}:", f"    return {low}", f"if {a} > {high}:", f"    return {high}", f"return {a}"],
    )
    doc = f"Limit {spoken(a)} to the range {low} to {high}."
    return function(
        name,
        a,
        doc,
        body,
        f"the limited {spoken(a)}",
        lambda r: (near(r, low - 2, high + 2, low=-5, high=45),),
        "int->int",
    )


def discount(d: Draw) -> Draft:
    a = d.amount()
    percent = d.pick(5, 10, 15, 20, 25, 30, 40)
    edge = d.number(3, 9) * 10
    op = d.pick(">", ">=")
    name = d.name("discount reduce lower", a)
    body = [f"if {a} {op} {edge}:", f"    {a} -= {a} * {percent} // 100", f"return {a}"]
    doc = f"Take {percent} percent off if {spoken(a)} {IS_THAN[op]} {edge}."
    return function(
        name,
        a,
        doc,
        body,
        f"the {spoken(a)} after the discount",
        lambda r: (near(r, edge, edge, low=10, high=150),),
        "int->int",
    )


def tax_and_fee(d: Draw) -> Draft:
    a = d.amount()
    percent = d.pick(5, 8, 10, 12, 20)
    fee = d.number(2, 9)
    name = d.name("tax charge bill", a)
    tax = d.pick("tax", "extra", "part")
    body = [f"{tax} = {a} * {percent} // 100", f"return {a} + {tax} + {fee}"]
    doc = f"Add {percent} percent and a fee of {fee} to {spoken(a)}."
    return function(
        name,
        a,
        doc,
        body,
        f"the {spoken(a)} with tax and fee",
        lambda r: (r.randint(1, 30) * 10,),
        "int->int",
    )


def levels(d: Draw) -> Draft:
    a = d.amount()
    low_word, mid_word, high_word = d.pick(*LEVEL_WORDS)
    low = d.number(3, 20)
    high = low + d.number(5, 30)
    op = d.pick("<", "<=")
    word_of = {"<": "below", "<=": "up to"}[op]
    name = d.name("classify label rank grade", a)
    body = [
        f"if {a} {op} {low}:",
        f'    return "{low_word}"',
        f"if {a} {op} {high}:",
        f'    return "{mid_word}"',
        f'return "{high_word}"',
    ]
    doc = f"{low_word} {word_of} {low}, {mid_word} {word_of} {high}, else {high_word}."
    return function(
        name,
        a,
        doc.capitalize(),
        body,
        f"the class of the {spoken(a)}",
        lambda r: (near(r, low, high, low=0, high=60),),
    )


def cycle_rule(d: Draw) -> Draft:
    n = d.pick("year", "day", "week", "turn", "round", "number")
    a = d.number(3, 6)
    b = a * d.number(3, 5)
    c = b * d.number(2, 4)
    name = d.name("is has", d.pick("leap", "bonus", "special", "service", "market", "long") + "_" + n)
    body = [f"if {n} % {c} == 0:", "    return True", f"return {n} % {a} == 0 and {n} % {b} != 0"]
    doc = f"True if {n} divides by {c}, or by {a} and not by {b}."
    return function(
        name,
        n,
        doc,
        body,
        f"the check of the {n}",
        lambda r: (
            r.choice((r.randint(1, 9) * a, r.randint(1, 6) * b, r.randint(1, 3) * c, r.randint(1, 90))),
        ),
    )


def interpolate(d: Draw) -> Draft:
    a = d.amount()
    steps = d.pick(4, 5, 8, 10, 20)
    name = d.name("blend slide shift", a)
    first, last = d.pick(("start", "end"), ("low", "high"), ("old", "new"))
    body = [f"change = {last} - {first}", f"return {first} + change * step // {steps}"]
    doc = f"Move {spoken(a)} from {first} to {last} in {steps} steps; give the value at step."
    return function(
        name,
        f"{first}, {last}, step",
        doc,
        body,
        f"the {spoken(a)} between two values",
        lambda r: (r.randint(0, 20), r.randint(10, 60), r.randint(0, steps)),
    )


def digit_sum(d: Draw) -> Draft:
    n = d.pick("number", "code", "value", d.amount())
    op, word, start = d.pick(("+", "sum", 0), ("+", "sum", 0), ("*", "product", 1))
    acc = d.pick("total", "result", "acc")
    name = d.name(f"digit_{word} {word}_digits", n)
    body = [
        f"{acc} = {start}",
        f"while {n} > 0:",
        f"    {acc} {op}= {n} % 10",
        f"    {n} //= 10",
        f"return {acc}",
    ]
    doc = f"Give the {word} of the digits of {spoken(n)}."
    return function(
        name, n, doc, body, f"the {word} of the digits", lambda r: (r.randint(11, 9999),), "int->int"
    )


def count_steps(d: Draw) -> Draft:
    a = d.amount()
    k = d.number(2, 5)
    edge = d.number(2, 9)
    name = d.name("steps count_steps rounds", a)
    count = d.pick("count", "steps", "times")
    body = [
        f"{count} = 0",
        f"while {a} > {edge}:",
        f"    {a} //= {k}",
        f"    {count} += 1",
        f"return {count}",
    ]
    doc = f"How often {spoken(a)} must be divided by {k} until it is at most {edge}."
    return function(
        name,
        a,
        doc,
        body,
        "the number of divisions",
        lambda r: (near(r, edge, edge * k, low=1, high=900),),
        "int->int",
    )


def split_time(d: Draw) -> Draft:
    unit, per = d.pick(("seconds", 60), ("minutes", 60), ("hours", 24), ("days", 7), ("months", 12))
    big = {"seconds": "minutes", "minutes": "hours", "hours": "days", "days": "weeks", "months": "years"}[
        unit
    ]
    name = d.name("split", f"{unit}")
    whole, rest = big, d.pick("rest", "left")
    if d.chance(0.5):
        body = [f"{whole}, {rest} = divmod({unit}, {per})", f"return {whole}, {rest}"]
    else:
        body = [f"{whole} = {unit} // {per}", f"{rest} = {unit} % {per}", f"return {whole}, {rest}"]
    return function(
        name,
        unit,
        f"Split {unit} into full {big} and {rest}.",
        body,
        f"the {big} and the rest",
        lambda r: (near(r, per, 2 * per, low=0, high=5 * per),),
    )


def points(d: Draw) -> Draft:
    good, even, bad = d.pick(
        ("wins", "draws", "losses"), ("hits", "saves", "misses"), ("gold", "silver", "faults")
    )
    a, b, c = d.number(3, 6), d.number(1, 2), d.number(1, 3)
    name = d.name("points score rate", d.thing())
    acc = d.pick("total", "points", "result")
    body = [f"{acc} = {a} * {good} + {b} * {even}", f"{acc} -= {c} * {bad}", f"return max({acc}, 0)"]
    doc = f"Score {a} per {good}, {b} per {even}, minus {c} per {bad}, never below 0."
    return function(
        name,
        f"{good}, {even}, {bad}",
        doc,
        body,
        f"the points for {good} and {even}",
        lambda r: (r.randint(0, 8), r.randint(0, 8), r.randint(0, 5)),
    )


def tier_cost(d: Draw) -> Draft:
    a = d.amount()
    base, limit, per = d.number(3, 12), d.number(5, 20), d.number(2, 5)
    name = d.name("cost_of ship price_for", a)
    cost = d.pick("cost", "result", "due")
    body = [
        f"{cost} = {base}",
        f"if {a} > {limit}:",
        f"    {cost} += ({a} - {limit}) * {per}",
        f"return {cost}",
    ]
    doc = f"Cost is {base}, plus {per} for each unit of {spoken(a)} above {limit}."
    return function(
        name,
        a,
        doc,
        body,
        f"the cost for the {spoken(a)}",
        lambda r: (near(r, limit, low=0, high=50),),
        "int->int",
    )


def close_to(d: Draw) -> Draft:
    a = d.amount()
    k = d.number(2, 9)
    op, word = d.pick(("<=", "at most"), ("<", "less than"))
    name = d.name("same close similar", a)
    left, right = d.pick(("first", "second"), ("left", "right"), ("old", "new"))
    body = [f"gap = abs({left} - {right})", f"return gap {op} {k}"]
    doc = f"True if {left} and {right} {spoken(a)} differ by {word} {k}."

    def arguments(r):
        x = r.randint(1, 40)
        return x, x + r.choice((-1, 1)) * near(r, k, high=2 * k)

    return function(
        name, f"{left}, {right}", doc, body, f"the check that two values of {spoken(a)} are close", arguments
    )


def round_up(d: Draw) -> Draft:
    a = d.amount()
    k = d.pick(3, 4, 5, 6, 8, 10, 12, 25)
    up = d.chance(0.5)
    name = d.name("round step align", a)
    body = (
        [f"count = ({a} + {k - 1}) // {k}", f"return count * {k}"]
        if up
        else [f"rest = {a} % {k}", f"return {a} - rest"]
    )
    doc = f"Round {spoken(a)} {'up' if up else 'down'} to a multiple of {k}."
    return function(
        name,
        a,
        doc,
        body,
        f"the rounded {spoken(a)}",
        lambda r: (near(r, k, 2 * k, 3 * k, low=0, high=60),),
        "int->int",
    )


def in_window(d: Draw) -> Draft:
    n = d.pick("hour", "day", "week", "minute", d.amount())
    low = d.number(2, 12)
    high = low + d.number(3, 15)
    left, right = d.pick(("<=", "<"), ("<=", "<="), ("<", "<"))
    name = d.name("is_open allows accepts covers", n)
    word = {"<=": "included", "<": "excluded"}
    body = d.pick(
        [f"return {low} {left} {n} and {n} {right} {high}"],
        [
            f"after = {n} {'>=' if left == '<=' else '>'} {low}",
            f"before = {n} {right} {high}",
            "return after and before",
        ],
    )
    doc = f"True if {spoken(n)} is between {low} ({word[left]}) and {high} ({word[right]})."
    return function(
        name, n, doc, body, f"the check of the {spoken(n)}", lambda r: (near(r, low, high, low=0, high=30),)
    )


def growth(d: Draw) -> Draft:
    a = d.amount()
    k, plus = d.number(2, 4), d.number(1, 9)
    times = d.pick("years", "rounds", "days", "turns")
    one = times[:-1]
    name = d.name("grow raise project", a)
    body = [f"for {d.pick('_', one, 'i')} in range({times}):", f"    {a} = {a} * {k} + {plus}", f"return {a}"]
    doc = f"Multiply {spoken(a)} by {k} and add {plus}, once for each of the {times}."
    return function(
        name,
        f"{a}, {times}",
        doc,
        body,
        f"the {spoken(a)} after some {times}",
        lambda r: (r.randint(1, 9), r.randint(0, 3)),
    )


def range_sum(d: Draw) -> Draft:
    first, last = d.pick(("start", "stop"), ("first", "last"), ("low", "high"))
    k = d.number(2, 6)
    i = d.pick("i", "n", "k", "step")
    k_name = d.pick("total", "result", "acc")
    power = d.chance(0.4)
    what, term = ("squares", f"{i} * {i}") if power else (f"multiples of {k}", i)
    name = d.name("sum add total", d.pick("range", "span", "series", "numbers"))
    body = [f"{k_name} = 0", f"for {i} in range({first}, {last} + 1):"]
    body += (
        [f"    {k_name} += {term}"] if power else [f"    if {i} % {k} == 0:", f"        {k_name} += {term}"]
    )
    body += [f"return {k_name}"]
    doc = f"Sum of the {what} from {first} to {last}, both included."

    def arguments(r):
        low = r.choice((r.randint(1, 9), k, 2 * k))
        return low, low + r.choice((k, 2 * k, r.randint(0, 8)))

    return function(
        name,
        f"{first}, {last}",
        doc,
        body,
        f"the sum of the {'squares' if power else 'multiples'}",
        arguments,
    )


def compare_choice(d: Draw) -> Draft:
    a = d.amount()
    op = d.compare()
    edge, plus, minus = d.number(5, 25), d.number(2, 9), d.number(2, 9)
    name = d.name("adjust tune correct", a)
    body = [f"if {a} {op} {edge}:", f"    return {a} + {plus}", f"return {a} - {minus}"]
    doc = f"Add {plus} if {spoken(a)} {IS_THAN[op]} {edge}, else subtract {minus}."
    return function(
        name, a, doc, body, f"the adjusted {spoken(a)}", lambda r: (near(r, edge, edge, high=40),), "int->int"
    )


def share(d: Draw) -> Draft:
    part, whole = d.pick(("part", "whole"), ("done", "total"), ("used", "size"), ("won", "played"))
    scale = d.pick(100, 10, 1000)
    default = d.pick(0, 0, 1, -1)
    name = d.name("share percent portion", d.thing())
    body = [f"if {whole} == 0:", f"    return {default}", f"return {part} * {scale} // {whole}"]
    doc = f"How many of {scale} are {part} out of {whole}; {default} if {whole} is 0."
    return function(
        name,
        f"{part}, {whole}",
        doc,
        body,
        f"the share of {part}",
        lambda r: (r.randint(0, 20), r.choice((0, r.randint(1, 30), r.randint(1, 30)))),
    )


NUMBERS = (
    clamp,
    discount,
    tax_and_fee,
    levels,
    cycle_rule,
    interpolate,
    digit_sum,
    count_steps,
    split_time,
    points,
    tier_cost,
    close_to,
    round_up,
    in_window,
    growth,
    range_sum,
    compare_choice,
    share,
)
