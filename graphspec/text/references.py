"""References inside a JSON schema, and the spelling that xgrammar has for them.

xgrammar takes any reference but ``#`` and plain pointers for the schema that everything fits. So each is resolved here.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from ..config.checks import brief
from ..errors import RequestError

EXPECTED = "a reference to a part of the same schema: #, #/..., or # and the name of an $anchor"
MAX_PARTS = 1000
"""Far above real use; xgrammar goes from one to the next by recursion."""
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_DATA = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords whose values are no schemas."""


class References:
    """The references of one schema.

    Args:
        root: the whole schema, parsed.

    Attributes:
        targets: the parts that were referred to, with their new names.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._base = root.get("$id") if isinstance(root, dict) and isinstance(root.get("$id"), str) else None
        self._anchors: dict[str, Any] | None = None
        self._names: dict[int, str] = {}
        self._ends: dict[int, Any] = {}
        """Where references lead, by the identity of the schemas that are references."""
        self.targets: list[tuple[str, Any]] = []

    def target(self, key: str, reference: Any) -> Any:
        """The schema that a reference leads to in the end: one that is no reference itself.

        Raises:
            RequestError: none, or one outside of this schema.
        """
        passed: dict[int, Any] = {}
        found = self._find(key, reference)
        while isinstance(found, dict) and "$ref" in found and id(found) not in self._ends:
            if id(found) in passed:
                raise RequestError(key, "a reference that leads to a schema", f"{brief(reference)}, which leads back to itself")
            passed[id(found)] = found
            found = self._find(key, found["$ref"])
        found = self._ends.get(id(found), found)
        self._ends.update(dict.fromkeys(passed, found))
        return found

    def spelled(self, key: str, reference: Any) -> Any:
        """A schema that is a reference, as xgrammar takes it; what it refers to is among the ``targets``.

        Raises:
            RequestError: see :meth:`target`.
        """
        if not isinstance(end := self.target(key, reference), dict):
            return end
        found = self._find(key, reference)
        if found is self._root:
            return {"$ref": "#"}
        if id(found) not in self._names:
            if len(self._names) == MAX_PARTS:
                raise RequestError(key, f"at most {MAX_PARTS} parts that are referred to", "more")
            self._names[id(found)] = name = f"part{len(self._names)}"
            self.targets.append((name, found))
        return {"$ref": f"#/$defs/{self._names[id(found)]}"}

    def _find(self, key: str, reference: Any) -> Any:
        if not isinstance(reference, str):
            raise RequestError(key, EXPECTED, brief(reference))
        base, hash_, fragment = reference.partition("#")
        if base and base != (self._base or "").partition("#")[0]:
            raise RequestError(key, EXPECTED, brief(reference))
        fragment = unquote(fragment)
        if not fragment:
            found = self._root
        elif fragment.startswith("/"):
            found = self._pointed(key, reference, fragment)
        else:
            if self._anchors is None:
                self._anchors = _anchors(self._root)
            found = self._anchors.get(fragment)
        if not isinstance(found, dict | bool) or not (hash_ or base):
            raise RequestError(key, EXPECTED, brief(reference))
        return found

    def _pointed(self, key: str, reference: str, pointer: str) -> Any:
        found = self._root
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and step in found:
                found = found[step]
            elif isinstance(found, list) and _INDEX.fullmatch(step) and int(step) < len(found):
                found = found[int(step)]
            else:
                raise RequestError(key, EXPECTED, f"{brief(reference)}, which leads nowhere")
            if isinstance(found, dict) and is_resource(found):
                raise RequestError(key, "a reference to a schema without an $id of its own", brief(reference))
        return found


def is_resource(schema: dict[str, Any]) -> bool:
    """Whether a schema inside another has a name of its own, by which references in it are resolved."""
    return isinstance(schema.get("$id"), str) and not schema["$id"].startswith("#")


def _anchors(root: Any) -> dict[str, Any]:
    """All named places, the first of each name."""
    found: dict[str, Any] = {}
    left = [root]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += reversed(value)
        elif isinstance(value, dict):
            if value is not root and is_resource(value):
                continue
            for name in (value.get("$anchor"), value.get("$dynamicAnchor"), str(value.get("$id", ""))[1:]):
                if isinstance(name, str) and name:
                    found.setdefault(name, value)
            left += reversed([inner for name, inner in value.items() if name not in _DATA])
    return found
