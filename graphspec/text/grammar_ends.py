"""Whether every part of a grammar has a text: where one has none, an output that comes to it has no next token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\])|(?P<rule>^[\w.-]+(?=\ ::=))"""
    r"""|(?P<function>[A-Za-z]\w*\()|(?P<name>[A-Za-z_][\w.-]*)"""
    r"""|(?P<counts>\{\s*\d+\s*(?:,\s*-?\d*\s*)?\})|(?P<look>\(=)|(?P<mark>[()|*+?])""",
    re.MULTILINE | re.DOTALL,
)


@dataclass(slots=True)
class _Group:
    """Alternatives in parentheses, each a list of names and groups that all have to have a text."""

    kind: str
    branches: list[list[str | _Group]] = field(default_factory=lambda: [[]])


def endless_rule(grammar: str) -> str | None:
    """A rule that the first one may come to and that no text matches; None: there is none.

    Args:
        grammar: as xgrammar prints it, ``root`` included.
    """
    rules = dict(_rules(grammar))
    users: dict[str, list[str]] = {}
    for rule, group in rules.items():
        for name in _names(group):
            users.setdefault(name, []).append(rule)
    able: set[str] = set()
    left = list(rules)
    while left:
        rule = left.pop()
        if rule not in able and _able(rules[rule], able):
            able.add(rule)
            left += users.get(rule, ())
    reached, left = {"root"}, ["root"]
    while left:
        fresh = {name for name in _names(rules[left.pop()]) if name in rules} - reached
        reached |= fresh
        left += fresh
    return next((rule for rule in rules if rule in reached and rule not in able), None)


def _rules(grammar: str) -> Iterator[tuple[str, _Group]]:
    rule, stack = "", [_Group("rule")]
    for token in _TOKEN.finditer(grammar):
        text = token.group()
        match token.lastgroup:
            case "rule":
                if rule:
                    yield rule, stack[0]
                rule, stack = text, [_Group("rule")]
            case "name":
                stack[-1].branches[-1].append(text)
            case "function" | "look":
                stack.append(_Group(token.lastgroup))
            case "counts" | "mark" if text in ("*", "?") or text.startswith("{0"):
                _make_optional(stack[-1].branches[-1])
            case "mark" if text == "(":
                stack.append(_Group("group"))
            case "mark" if text == ")":
                closed = stack.pop()
                stack[-1].branches[-1].append(closed)
            case "mark" if text == "|":
                stack[-1].branches.append([])
            case "text":
                stack[-1].branches[-1].append(_Group("text"))
            case _:
                pass
    if rule:
        yield rule, stack[0]


def _make_optional(branch: list[str | _Group]) -> None:
    branch[-1] = _Group("group", [[], [branch[-1]]])


def _names(group: _Group) -> Iterator[str]:
    left: list[str | _Group] = [group]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
        elif part.kind != "look":
            left += [inner for branch in part.branches for inner in branch]


def _able(part: str | _Group, able: set[str]) -> bool:
    """Whether a part has a text, as far as the rules are known that have one."""
    if isinstance(part, str):
        return part in able
    # Text between dispatched tags may be all there is.
    return part.kind in ("text", "function", "look") or any(all(_able(inner, able) for inner in branch) for branch in part.branches)
