"""Unified git diffs: made from a base tree and changes, applied byte for byte or refused.

Format: ``a/`` and ``b/`` prefixes, LF between lines of the patch, exactly one final newline, ``\\ No newline at end of
file`` kept (https://git-scm.com/docs/diff-format). No fuzz, no offset: GNU patch "succeeds with fuzz" on input that
git calls corrupt, and then the graded tree is not the one the agent left.
"""

from __future__ import annotations

import difflib
import re

NO_NEWLINE = "\\ No newline at end of file"
_CACHES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}


class PatchRefused(ValueError):
    """The patch is malformed, does not match the base byte for byte, or reaches outside the tree."""


def make_patch(base: dict[str, bytes], changes: dict[str, bytes | None]) -> str:
    """The git diff from ``base`` to ``base`` with ``changes``; an empty string if nothing differs.

    Args:
        base: path -> content of the recorded base tree.
        changes: path -> new content, or None for a deleted file. Caches that running leaves behind are ignored.

    Raises:
        PatchRefused: a changed file is binary (NUL or not UTF-8), or a path reaches outside the tree.
    """
    parts = []
    for path in sorted(changes):
        if _is_cache(path):
            continue
        _check_path(path)
        old, new = base.get(path), changes[path]
        if old != new:
            parts.append(_file_diff(path, old, new))
    return "".join(parts)


def _is_cache(path: str) -> bool:
    return path.endswith(".pyc") or not _CACHES.isdisjoint(path.split("/"))


def _check_path(path: str) -> None:
    pieces = path.split("/")
    if not path or path.startswith("/") or "\0" in path or any(p in ("", ".", "..", ".git") for p in pieces):
        raise PatchRefused(f"path {path!r} is not inside the tree")


def _text(path: str, data: bytes) -> str:
    if b"\0" in data:
        raise PatchRefused(f"{path} is binary")
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise PatchRefused(f"{path} is not UTF-8") from e


def _lines(text: str) -> list[str]:
    """Lines with their ``\\n``; other line separators are part of a line."""
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _file_diff(path: str, old: bytes | None, new: bytes | None) -> str:
    a, b = _quoted("a/" + path), _quoted("b/" + path)
    out = [f"diff --git {a} {b}\n"]
    if old is None:
        out.append("new file mode 100644\n")
    if new is None:
        out.append("deleted file mode 100644\n")
    before = _lines(_text(path, old or b""))
    after = _lines(_text(path, new or b""))
    if before == after:  # an empty file comes or goes
        return "".join(out)
    tab = "\t" if " " in path else ""
    out.append(f"--- {a if old is not None else '/dev/null'}{tab if old is not None else ''}\n")
    out.append(f"+++ {b if new is not None else '/dev/null'}{tab if new is not None else ''}\n")
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(3):
        out.append(_hunk(group, before, after))
    return "".join(out)


def _hunk(group: list, before: list[str], after: list[str]) -> str:
    a_from, a_to, b_from, b_to = group[0][1], group[-1][2], group[0][3], group[-1][4]
    out = [f"@@ -{_range(a_from, a_to)} +{_range(b_from, b_to)} @@\n"]
    for tag, i1, i2, j1, j2 in group:
        if tag == "equal":
            out.extend(_marked(" ", line) for line in before[i1:i2])
            continue
        out.extend(_marked("-", line) for line in before[i1:i2])
        out.extend(_marked("+", line) for line in after[j1:j2])
    return "".join(out)


def _range(start: int, stop: int) -> str:
    length = stop - start
    first = start + 1 if length else start
    return str(first) if length == 1 else f"{first},{length}"


def _marked(mark: str, line: str) -> str:
    return mark + line if line.endswith("\n") else f"{mark}{line}\n{NO_NEWLINE}\n"


def _quoted(path: str) -> str:
    """Git's C style where a name has control characters, quotes or backslashes (core.quotePath=false)."""
    if not re.search(r'[\x00-\x1f\x7f"\\]', path):
        return path
    table = {v: "\\" + k for k, v in _ESCAPES.items()}
    return (
        '"'
        + "".join(table.get(c) or (f"\\{ord(c):03o}" if ord(c) < 32 or ord(c) == 127 else c) for c in path)
        + '"'
    )


def _unquoted(name: str) -> str:
    if not name.startswith('"'):
        return name[:-1] if name.endswith("\t") else name
    body = name.rstrip("\t")
    if len(body) < 2 or not body.endswith('"'):
        raise PatchRefused(f"bad file name {name!r}")
    out = re.sub(rb"\\([0-7]{3}|.)", _unescape, body[1:-1].encode())
    try:
        return out.decode()
    except UnicodeDecodeError as e:
        raise PatchRefused(f"bad file name {name!r}") from e


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match.group(1).decode()
    if len(code) == 3:
        return bytes([int(code, 8) & 255])
    if code not in _ESCAPES:
        raise PatchRefused(f"bad escape \\{code} in a file name")
    return _ESCAPES[code].encode()


def apply_patch(base: dict[str, bytes], patch: str) -> dict[str, bytes]:
    """The tree after the patch. A patch without a final newline is given one; everything else must match exactly.

    Raises:
        PatchRefused: malformed, binary, a rename or a symbolic link, a context that differs from the base, or a
            path outside the tree.
    """
    tree = dict(base)
    if not patch.strip():
        return tree
    lines = patch.rstrip("\n").split("\n")
    i, seen = 0, set()
    while i < len(lines):
        if not lines[i].startswith("diff --git "):
            raise PatchRefused(f"line {i + 1}: expected a 'diff --git' line, found {lines[i][:60]!r}")
        i = _apply_file(tree, lines, i, seen)
    return tree


def _apply_file(tree: dict[str, bytes], lines: list[str], i: int, seen: set[str]) -> int:
    header, created, deleted = lines[i], False, False
    old_name = new_name = None
    i += 1
    while i < len(lines) and not lines[i].startswith(("@@ ", "diff --git ")):
        line = lines[i]
        created |= line.startswith("new file mode ")
        deleted |= line.startswith("deleted file mode ")
        if line.startswith("--- "):
            old_name = line[4:]
        elif line.startswith("+++ "):
            new_name = line[4:]
        elif not line.startswith(
            ("index ", "new file mode 100", "deleted file mode 100", "old mode 100", "new mode 100")
        ):
            raise PatchRefused(f"line {i + 1}: {line[:60]!r} is not supported")
        i += 1
    path = _path_of(header, old_name, new_name)
    if path in seen:
        raise PatchRefused(f"{path} appears twice")
    seen.add(path)
    if created == (path in tree):
        raise PatchRefused(f"{path} {'exists already' if created else 'does not exist'}")
    before = _lines(_text(path, tree.get(path, b"")))
    after, i = _apply_hunks(path, before, lines, i)
    if deleted:
        if after:
            raise PatchRefused(f"{path} is deleted but lines remain")
        del tree[path]
    else:
        tree[path] = "".join(after).encode()
    return i


def _path_of(header: str, old_name: str | None, new_name: str | None) -> str:
    if (old_name is None) != (new_name is None):
        raise PatchRefused(f"half a file header after {header[:60]!r}")
    if old_name is None or new_name is None:
        middle = re.fullmatch(r'diff --git (?:a/(.*) b/\1|"a/(.*)" "b/\2")', header)
        if not middle:
            raise PatchRefused(f"cannot read the path of {header[:60]!r}")
        path = middle.group(1) if middle.group(1) is not None else _unquoted(f'"{middle.group(2)}"')
    else:
        names = {_unquoted(n)[2:] for n in (old_name, new_name) if n != "/dev/null"}
        prefixes = (_unquoted(old_name)[:2] in ("a/", "/d"), _unquoted(new_name)[:2] in ("b/", "/d"))
        if len(names) != 1 or not all(prefixes):
            raise PatchRefused(f"old and new name differ after {header[:60]!r}: renames are not supported")
        path = names.pop()
    _check_path(path)
    return path


def _apply_hunks(path: str, before: list[str], lines: list[str], i: int) -> tuple[list[str], int]:
    after: list[str] = []
    at = 0
    while i < len(lines) and lines[i].startswith("@@ "):
        match = _HUNK.match(lines[i])
        if not match:
            raise PatchRefused(f"line {i + 1}: bad hunk header")
        first, old_count, new_count = int(match[1]), int(match[2] or 1), int(match[4] or 1)
        start = first - 1 if old_count else first
        if start < at or start > len(before):
            raise PatchRefused(f"{path}: hunk at line {first} is out of order or past the end")
        old, new, i = _read_hunk(lines, i + 1, old_count, new_count)
        if before[start : start + old_count] != old:
            raise PatchRefused(f"{path}: the file differs from the patch near line {first}")
        after += before[at:start] + new
        at = start + old_count
        if int(match[3]) != len(after) - new_count + (1 if new_count else 0):
            raise PatchRefused(f"{path}: the hunk's new line number {match[3]} is wrong")
    if any(not line.endswith("\n") for line in (after + before[at:])[:-1]):
        raise PatchRefused(f"{path}: a line without newline is not the last")
    return after + before[at:], i


def _read_hunk(lines: list[str], i: int, old_count: int, new_count: int) -> tuple[list[str], list[str], int]:
    old: list[str] = []
    new: list[str] = []
    while len(old) < old_count or len(new) < new_count:
        if i >= len(lines):
            raise PatchRefused("the patch ends inside a hunk")
        mark, text = lines[i][:1] or " ", lines[i][1:] + "\n"  # git takes an empty line as empty context
        if mark not in (" ", "-", "+"):
            raise PatchRefused(f"line {i + 1}: a hunk line must start with ' ', '-' or '+'")
        i += 1
        if i < len(lines) and lines[i].startswith("\\"):
            text = text[:-1]
            i += 1
        if mark != "+":
            old.append(text)
        if mark != "-":
            new.append(text)
    if len(old) != old_count or len(new) != new_count:
        raise PatchRefused("a hunk has more lines than its header says")
    return old, new, i
