"""One draft tree, drawn for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from ..errors import ResourceError

if TYPE_CHECKING:
    from ..api.outputs import TreeSnapshot


def draw_tree(snapshot: TreeSnapshot) -> Tree:
    """One speculated tree: the root on top, ``+`` and green where the target agreed. Nodes that hold no draft are left out.

    Raises:
        ResourceError: a node's parent does not come before it.
    """
    branches: dict[int, Tree] = {}
    for node, parent in enumerate(snapshot.parent_N):
        text, accepted = snapshot.text_N[node], snapshot.accepted[node]
        label = Text(f"{'+' if accepted or node == 0 else '-'} {text!r}", style="bold green" if accepted or node == 0 else "dim")
        if node == 0:
            branches[0] = Tree(label, guide_style="dim")
        elif snapshot.token_N[node] >= 0:
            if parent not in branches:
                raise ResourceError(f"parent_N[{node}]", "a node before it", parent)
            branches[node] = branches[parent].add(label)
    return branches[0]
