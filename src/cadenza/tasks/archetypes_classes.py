"""Archetypes of small classes with two or three methods."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from cadenza.tasks.draft import Call, Draft, Draw, lit, near, word, words
from cadenza.tasks.words import spoken


def _class_name(d: Draw, *kinds: str) -> str:
    return "".join(part.capitalize() for part in d.thing().split("_")) + d.pick(*kinds)


def _draft(
    name: str, lines: list[str], purpose: str, call: Callable[[Random, str], Call], variable: str
) -> Draft:
    return Draft(name, tuple(lines), purpose, lambda r: call(r, variable))


def counter(d: Draw) -> Draft:
    name = _class_name(d, "Counter", "Meter", "Clock", "Tally")
    start, step, limit = d.pick(0, 0, d.number(1, 9)), d.number(1, 4), d.number(10, 25)
    value = d.pick("value", "count", "total")
    up, down = d.pick(("add", "back"), ("up", "down"), ("push", "undo"), ("tick", "untick"))
    lines = [
        f"class {name}:",
        f'    """Counts from {start}; {up} goes up by {step} times n, at most to {limit}."""',
        "",
        "    def __init__(self):",
        f"        self.{value} = {start}",
        "",
        f"    def {up}(self, n):",
        f"        self.{value} = min(self.{value} + n * {step}, {limit})",
        "",
        f"    def {down}(self, n):",
        f'        """Go down by n, but not below {start}."""',
        f"        self.{value} = max(self.{value} - n, {start})",
    ]

    def call(r: Random, v: str) -> Call:
        steps = [f"{v}.{up}({near(r, (limit - start) // step, high=8)})"]
        steps += [f"{v}.{r.choice((up, down))}({r.randint(1, 6)})" for _ in range(r.randint(0, 2))]
        return Call((f"{v} = {name}()", *steps), f"{v}.{value}")

    return _draft(name, lines, f"the {value} after some steps", call, d.pick("c", "meter", "box"))


def account(d: Draw) -> Draft:
    name = _class_name(d, "Account", "Purse", "Budget", "Wallet")
    fee, limit = d.number(1, 4), d.pick(0, 0, d.number(1, 5) * 10)
    money = d.pick("balance", "amount", "money")
    put, take = d.pick(("deposit", "withdraw"), ("put", "take"), ("pay_in", "pay_out"))
    floor = f"-{limit}" if limit else "0"
    lines = [
        f"class {name}:",
        f'    """Holds money; {take} costs a fee of {fee} and may not go below {floor}."""',
        "",
        f"    def __init__(self, {money}):",
        f"        self.{money} = {money}",
        "",
        f"    def {put}(self, n):",
        f"        self.{money} += n",
        "",
        f"    def {take}(self, n):",
        f"        cost = n + {fee}",
        f"        if self.{money} - cost < {floor}:",
        "            return False",
        f"        self.{money} -= cost",
        "        return True",
    ]

    def call(r: Random, v: str) -> Call:
        start = r.randint(5, 40)
        setup = [f"{v} = {name}({start})"]
        if r.random() < 0.4:
            more = r.randint(1, 9)
            setup.append(f"{v}.{put}({more})")
            start += more
        last = f"{v}.{take}({max(near(r, start + limit - fee, low=1, high=start), 1)})"
        if r.random() < 0.5:
            return Call(tuple(setup), last)
        return Call((*setup, last), f"{v}.{money}")

    return _draft(name, lines, f"the {money} after paying in and out", call, d.pick("a", "acc", "box"))


def queue(d: Draw) -> Draft:
    name = _class_name(d, "Queue", "Line", "Stack", "List")
    first = d.chance(0.6)
    limit = d.number(2, 4)
    items = d.pick("items", "waiting", "entries")
    add, take = d.pick(("add", "take"), ("push", "pop"), ("join", "leave"))
    side = "0" if first else "-1"
    lines = [
        f"class {name}:",
        f'    """Keeps up to {limit} entries; {take} gives the {"oldest" if first else "newest"} or None."""',
        "",
        "    def __init__(self):",
        f"        self.{items} = []",
        "",
        f"    def {add}(self, x):",
        f"        if len(self.{items}) < {limit}:",
        f"            self.{items}.append(x)",
        "",
        f"    def {take}(self):",
        f"        if not self.{items}:",
        "            return None",
        f"        return self.{items}.pop({side})",
    ]

    def call(r: Random, v: str) -> Call:
        setup = [f"{v} = {name}()"]
        for _ in range(r.randint(1, 4)):
            setup.append(f"{v}.{add}({r.randint(1, 30)})")
        for _ in range(r.choice((0, 0, 1, 2))):
            setup.append(f"{v}.{take}()")
        return Call(tuple(setup), r.choice((f"{v}.{take}()", f"{v}.{items}")))

    return _draft(name, lines, "what comes out of the queue", call, d.pick("q", "box", "line"))


def cache(d: Draw) -> Draft:
    name = _class_name(d, "Cache", "Memory", "Store")
    size = d.number(1, 3)
    default = d.pick("None", "0", "-1", '"none"')
    data = d.pick("data", "items", "slots")
    lines = [
        f"class {name}:",
        f'    """Remembers the last {size} keys; get gives {default.strip(chr(34))} for others."""',
        "",
        "    def __init__(self):",
        f"        self.{data} = {{}}",
        "",
        "    def put(self, key, value):",
        f"        self.{data}.pop(key, None)",
        f"        self.{data}[key] = value",
        f"        if len(self.{data}) > {size}:",
        f"            first = list(self.{data})[0]",
        f"            del self.{data}[first]",
        "",
        "    def get(self, key):",
        f"        return self.{data}.get(key, {default})",
    ]

    def call(r: Random, v: str) -> Call:
        pool = words(r, 2, 3)
        setup = [f"{v} = {name}()"]
        for _ in range(r.randint(1, size + 2)):
            setup.append(f"{v}.put({lit(r.choice(pool))}, {r.randint(1, 30)})")
        return Call(tuple(setup), r.choice((f"{v}.get({lit(r.choice(pool))})", f"{v}.{data}")))

    return _draft(name, lines, "what is remembered", call, d.pick("c", "box", "store"))


def board(d: Draw) -> Draft:
    name = _class_name(d, "Board", "Table", "Scores", "Book")
    start = d.pick(0, 0, d.number(1, 10))
    op, said = d.pick(("+", "adds to"), ("-", "takes from"))
    marks = d.pick("scores", "marks", "sums")
    lines = [
        f"class {name}:",
        f'    """Keeps numbers by key; record {said} the number, which starts at {start}."""',
        "",
        "    def __init__(self):",
        f"        self.{marks} = {{}}",
        "",
        "    def record(self, key, n):",
        f"        old = self.{marks}.get(key, {start})",
        f"        self.{marks}[key] = old {op} n",
        "",
        "    def leaders(self, edge):",
        '        """The sorted keys with a number of at least edge."""',
        f"        return sorted(key for key, n in self.{marks}.items() if n >= edge)",
    ]

    def call(r: Random, v: str) -> Call:
        pool = words(r, 2, 2)
        setup = [f"{v} = {name}()"]
        numbers = []
        for _ in range(r.randint(1, 3)):
            numbers.append(r.randint(1, 9))
            setup.append(f"{v}.record({lit(r.choice(pool))}, {numbers[-1]})")
        edge = near(r, start + numbers[0] if op == "+" else start - numbers[0], low=-5, high=15)
        return Call(tuple(setup), r.choice((f"{v}.leaders({edge})", f"{v}.{marks}")))

    return _draft(name, lines, "the numbers on the board", call, d.pick("b", "board", "t"))


def sensor(d: Draw) -> Draft:
    a = d.amount()
    name = _class_name(d, "Sensor", "Guard", "Watch", "Monitor")
    op, said = d.pick((">", "above"), (">=", "of at least"), ("<", "below"), ("<=", "of at most"))
    edge, need = d.number(5, 20), d.number(1, 3)
    lines = [
        f"class {name}:",
        f'    """Alarm after {need} values of {spoken(a)} {said} {edge} in a row."""',
        "",
        "    def __init__(self):",
        "        self.hits = 0",
        "",
        f"    def see(self, {a}):",
        f"        if {a} {op} {edge}:",
        "            self.hits += 1",
        "        else:",
        "            self.hits = 0",
        "",
        "    def alarm(self):",
        f"        return self.hits >= {need}",
    ]

    def call(r: Random, v: str) -> Call:
        setup = [f"{v} = {name}()"]
        good = edge + (2 if ">" in op else -2)
        for _ in range(r.randint(1, need + 1)):
            setup.append(f"{v}.see({r.choice((good, edge, good, near(r, edge)))})".replace(" )", ")"))
        return Call(tuple(setup), r.choice((f"{v}.alarm()", f"{v}.alarm()", f"{v}.hits")))

    return _draft(name, lines, "the alarm after some values", call, d.pick("s", "guard", "w"))


def catalog(d: Draw) -> Draft:
    name = _class_name(d, "Catalog", "Index", "Register", "Names")
    case, said = d.pick(("lower", "lower"), ("upper", "upper"))
    entries = d.pick("entries", "names", "known")
    lines = [
        f"class {name}:",
        f'    """Sorted entries without repeats, stripped and in {said} case."""',
        "",
        "    def __init__(self):",
        f"        self.{entries} = []",
        "",
        "    def add(self, text):",
        f"        text = text.strip().{case}()",
        f"        if text not in self.{entries}:",
        f"            self.{entries}.append(text)",
        f"            self.{entries}.sort()",
        "",
        "    def find(self, start):",
        '        """The entries that begin with start."""',
        f"        return [x for x in self.{entries} if x.startswith(start)]",
    ]

    def call(r: Random, v: str) -> Call:
        setup = [f"{v} = {name}()"]
        pool = words(r, 2, 3)
        for w in pool:
            setup.append(f"{v}.add({lit(r.choice((w, w.upper(), f' {w}')))})")
        if r.random() < 0.4:
            setup.append(f"{v}.add({lit(pool[0].capitalize())})")
        start = getattr(r.choice((pool[0], word(r))), case)()[:1]
        return Call(tuple(setup), r.choice((f"{v}.{entries}", f"{v}.find({lit(start)})")))

    return _draft(name, lines, "the entries of the catalog", call, d.pick("c", "book", "k"))


def machine_state(d: Draw) -> Draft:
    name = _class_name(d, "State", "Switch", "Door", "Lock")
    off, on = d.pick(("closed", "open"), ("off", "on"), ("idle", "busy"), ("free", "taken"))
    limit = d.number(2, 5)
    lines = [
        f"class {name}:",
        f'    """Starts {off}; toggle switches between {off} and {on}; worn after {limit} toggles."""',
        "",
        "    def __init__(self):",
        f'        self.state = "{off}"',
        "        self.toggles = 0",
        "",
        "    def toggle(self):",
        "        self.toggles += 1",
        f'        self.state = "{on}" if self.state == "{off}" else "{off}"',
        "        return self.state",
        "",
        "    def worn(self):",
        f"        return self.toggles >= {limit}",
    ]

    def call(r: Random, v: str) -> Call:
        count = max(near(r, limit, low=0, high=limit + 1), 0)
        setup = [f"{v} = {name}()", *[f"{v}.toggle()" for _ in range(count)]]
        return Call(tuple(setup), r.choice((f"{v}.worn()", f"{v}.toggle()", f"{v}.state", f"{v}.toggles")))

    return _draft(name, lines, "the state after some toggles", call, d.pick("s", "door", "m"))


CLASSES = (counter, account, queue, cache, board, sensor, catalog, machine_state)
