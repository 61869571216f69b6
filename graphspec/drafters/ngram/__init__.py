"""Prompt lookup: continuations of earlier occurrences in the row's own tokens."""

from __future__ import annotations

from ...config.catalog import Variant
from ...shapes import CycleShape

VARIANT = Variant(
    name="ngram",
    summary="no network: continuations of earlier occurrences in the row's own tokens, matched on the device",
    drafter="history",
    copies_repeats=True,
    shares_prefix=True,
    stages="graphspec.drafters.ngram.stages:stages",
    auto_shape=CycleShape(6, 4, 12, "paths"),
)
