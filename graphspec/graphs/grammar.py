"""What a row's output has to follow, as the host stages of a cycle see it. Requests know it before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Grammar(Protocol):
    """What one row's output has to follow, as far as the tokens known of it (:mod:`graphspec.api.grammar`)."""

    def fill(self, token_N: Sequence[int], parent_N: Sequence[int], mask_NVw: Tensor) -> None:
        """Write for every node the tokens that may follow it.

        Args:
            token_N: of the nodes, the root, which is known, first; -1 is no node.
            parent_N: a node's parent, which comes before it.
            mask_NVw: int32 on the CPU, a bit for every token, all of them set. Rows of nodes that the grammar refuses, and below them, say
                nothing: acceptance does not get there.
        """
        ...

    def forced(self, maximum: int) -> Sequence[int]:
        """Tokens that spell what must follow the root, as far as something must: a draft, since other tokens may spell it too."""
        ...
