"""Pairs for drafters that can't be trained here and draft for targets of one family alone: what the conformance tests run them over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.checkpoints import write_hf
from tests.support.gemma4 import CLUSTERS, assisted_sizes, build_assisted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _gemma4(vocab_size: int) -> tuple[Any, Any]:
    return build_assisted("inputs", assisted_sizes(vocab_size), {}, CLUSTERS)


PAIRS: dict[str, Callable[[int], tuple[Any, Any]]] = {"assistant": _gemma4}
"""By variant: target and draft of that many tokens."""


def write_pair(variant: str, vocab_size: int, path: Path) -> tuple[Path, Path]:
    """Folders of a new pair."""
    target, draft = PAIRS[variant](vocab_size)
    return write_hf(target, path / "target"), write_hf(draft, path / "draft")
